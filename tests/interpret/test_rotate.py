"""The rotation kernel in Triton's interpreter.

The interpreter truncates where a GPU rounds to bfloat16, so float16 and float32 are compared bit by bit. Its cos and
sin are not ATen's, so computed rows are compared with those of the table kernel, which shares them.
"""

import importlib
import itertools

import pytest
import torch

from rope_ops import reference
from rope_ops.axes import axis_map
from rope_ops.kernels.cache import build_cos_sin_cache
from rope_ops.kernels.rotate import rotate


def table_rows(inv_freq, positions, attention_factor=1.0, dtype=torch.float32):
    """cos and sin at positions, ``[num_positions, half]``, from a table of every row; negative ones by symmetry."""
    table = build_cos_sin_cache(inv_freq, int(positions.abs().max()) + 1, attention_factor, dtype)
    cos, sin = table[positions.abs()].chunk(2, dim=-1)
    return cos, sin * torch.where(positions < 0, -1, 1)[:, None]


def launch(query, key, positions, inv_freq, cache, axes, **options):
    out = [None if x is None else torch.full(x.shape, float("nan"), dtype=x.dtype) for x in (query, key)]
    defaults = dict(
        axis_map=axes, is_neox_style=True, attention_factor=1.0, cache_dtype=torch.float32,
        round_dtype=query.dtype, inverse=False, rows_computed=None,
    )  # fmt: skip
    rotate(query, key, *out, positions, inv_freq, cache, **(defaults | options))
    return out


@pytest.mark.parametrize(
    "dtype, is_neox_style, interleaved, rounding",
    list(itertools.product((torch.float16, torch.float32), (True, False), (True, False), ("cache", "float32"))),
)
def test_table_rows(dtype, is_neox_style, interleaved, rounding):
    torch.manual_seed(0)
    inv_freq = 1.0 / 10000 ** (torch.arange(0, 22, 2).float() / 22)
    axes = axis_map([4, 4, 3], interleaved)
    cache = reference.build_cos_sin_cache(inv_freq, 50, 1.25, dtype)
    qkv = torch.randn(5, 9 * 30).to(dtype)
    query, key = qkv[:, : 7 * 30].unflatten(-1, (7, 30)), qkv[:, 7 * 30 : 8 * 30].unflatten(-1, (1, 30))
    positions = torch.randint(0, 50, (3, 5))
    out = launch(
        query, key, positions, inv_freq, cache, axes, is_neox_style=is_neox_style, cache_dtype=dtype,
        round_dtype=dtype if rounding == "cache" else torch.float32,
    )  # fmt: skip
    cos, sin = reference.gather_cos_sin(cache, positions, axes)
    for x, o in zip((query, key), out, strict=True):
        assert torch.equal(o, reference.rotate(x, cos, sin, is_neox_style, rounding))


def test_computed_rows_and_the_count():
    """Positions outside a bounded table, negative ones included, and no table at all (R38: nothing past the row)."""
    inv_freq = 1.0 / 10000 ** (torch.arange(0, 12, 2).float() / 12)
    axes = (0, 1, 2, 2, 1, 0)
    positions = torch.tensor([[3, 4, 3_000, -3, 0], [3, 0, 1, 2, 3], [0, 3, 2, 3, 9]])
    cos, sin = (
        torch.stack([of_axis[a] for of_axis, a in zip(rows.unbind(-1), axes, strict=True)], -1)
        for rows in ([r.unflatten(0, (3, 5)) for r in table_rows(inv_freq, positions.flatten(), 1.25)])
    )
    query = torch.randn(5, 3, 12)
    expected = reference.rotate(query, cos, sin)
    cache = torch.cat(table_rows(inv_freq, torch.arange(4), 1.25), -1)
    # A table with guard rows around it: one that is read shows.
    guarded = torch.full((8, 12), float("nan"))
    guarded[2:6] = cache
    count = torch.zeros(1, dtype=torch.int64)
    table = launch(query, None, positions, inv_freq, guarded[2:6], axes, attention_factor=1.25, rows_computed=count)[0]
    virtual = launch(query, None, positions, inv_freq, None, axes, attention_factor=1.25)[0]
    assert torch.equal(table, expected) and torch.equal(virtual, expected)
    assert count.item() == 4


def test_in_place_leaves_the_gaps():
    """R39: slices of one projection, one key head; the original storage changes and nothing around it does."""
    inv_freq = torch.tensor([1.0, 0.1])
    qkv = torch.randn(5, 5, 6)
    before = qkv.clone()
    query, key = qkv[:, :3], qkv[:, 3:4]
    positions = torch.arange(5)[None]
    rotate(
        query, key, query, key, positions, inv_freq, None, axis_map=(0, 0), is_neox_style=True, attention_factor=1.0,
        cache_dtype=torch.float32, round_dtype=torch.float32, inverse=False, rows_computed=None,
    )  # fmt: skip
    cos, sin = table_rows(inv_freq, positions[0])
    assert torch.equal(qkv[:, :4], reference.rotate(before[:, :4], cos, sin))
    assert torch.equal(qkv[:, 4], before[:, 4])
    assert not torch.equal(key, before[:, 3:4])


@pytest.mark.parametrize("lead", [(2, 3), (2, 2, 3), (1, 1, 2, 3)])
def test_leading_dimensions_and_transposed_inputs(lead):
    inv_freq = torch.tensor([1.0, 0.1, 0.01])
    query = torch.randn(*lead[:-1], 2, lead[-1], 8).transpose(-2, -3)
    positions = torch.randint(0, 9, (3, *lead))
    out, _ = launch(query, None, positions, inv_freq, None, (2, 0, 1), inverse=True)
    rows = table_rows(inv_freq, positions.flatten())
    cos, sin = (torch.stack([r.view(3, -1, 3)[a, :, i] for i, a in enumerate((2, 0, 1))], -1) for r in rows)
    expected = reference.rotate(query.reshape(-1, 2, 8), cos, -sin)
    assert torch.equal(out.reshape(-1, 2, 8), expected)


def test_wide_axis_maps():
    """More than 32 and more than 64 frequencies: the map is a constant wider than a word."""
    torch.manual_seed(1)
    half = 70
    axes = tuple(torch.randint(0, 4, (half,)).tolist())
    inv_freq = torch.ones(half)
    cache = torch.arange(16).float()[:, None].expand(16, 2 * half).clone()
    cache[:, half:] = 0
    positions = torch.randint(0, 16, (4, 3))
    out, _ = launch(torch.ones(3, 1, 2 * half), None, positions, inv_freq, cache, axes)
    expected = torch.stack([positions[a] for a in axes], -1).float()
    assert torch.equal(out[:, 0, :half], expected) and torch.equal(out[:, 0, half:], expected)


def test_no_tokens():
    out, _ = launch(torch.empty(0, 2, 8), None, torch.empty(3, 0, dtype=torch.int64), torch.ones(4), None, (0, 1, 2, 0))
    assert out.shape == (0, 2, 8)


@pytest.mark.parametrize("proved", [True, False])
@pytest.mark.parametrize("rows", [None, 50, 20, 0])
@pytest.mark.parametrize("lead", [(5,), (2, 3)])
def test_what_the_operators_run_on_cuda(proved, rows, lead, monkeypatch):
    """The CUDA implementation on CPU tensors: what it makes of its arguments, and rows by ATen where not proved."""
    module = importlib.import_module("rope_ops.ops.rotate")
    monkeypatch.setattr(module, "_proved_exact", lambda index: proved)
    inv_freq = 1.0 / 10000 ** (torch.arange(0, 12, 2).float() / 12)
    table = build_cos_sin_cache if proved else reference.build_cos_sin_cache
    legacy = table(inv_freq, 50, 1.25, torch.float16)
    cache = None if rows is None else legacy[:rows]
    query, key = torch.randn(*lead, 3, 14).half(), torch.randn(*lead, 1, 14).half()
    positions = torch.randint(0, 50, (3, *lead))
    for axes, of_axes in (("012210", positions), ("222222", positions), ("012210", positions[:1]), ("", positions[0])):
        form = (14, axes, False, 1.25, torch.float16, "cache", False, True if rows in (None, 50) else False)
        axis_map = tuple(map(int, axes or "0" * 6))
        flat = of_axes.reshape(-1, query[..., 0, 0].numel()).expand(3, -1)
        cos, sin = reference.gather_cos_sin(legacy, flat, axis_map)
        expected = [reference.rotate(x.flatten(0, -3), cos, sin, False).view(x.shape) for x in (query, key)]
        module.rows_computed(reset=True)
        got = module._rotate_cuda(query, key, of_axes, inv_freq, cache, *form)
        assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
        used = flat[sorted(set(axis_map))]
        outside = 0 if rows is None else int((used >= rows).any(0).sum())
        assert module.rows_computed() == outside
        if len(lead) == 1:
            written = query.flatten(1).clone(), key.flatten(1).clone()
            module._rotate_cuda_(*written, of_axes, inv_freq, cache, *form)
            assert all(torch.equal(g.view(e.shape), e) for g, e in zip(written, expected, strict=True))
