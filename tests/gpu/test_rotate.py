"""The rotation kernel against eager PyTorch on the same GPU, bit by bit."""

import importlib
import itertools

import pytest
import torch

from rope_ops import get_rope, reference
from rope_ops.axes import axis_map, spatial_first_axis_map
from rope_ops.ops import rotate, rotate_, rows_computed

DEVICE = torch.device("cuda")
FAMILIES = {
    "Qwen2-VL": (128, 64, axis_map([16, 24, 24]), True),
    "Qwen3.5": (256, 32, axis_map([11, 11, 10], True), True),
    "GLM-4V": (128, 32, axis_map([8, 12, 12]), False),
    "Ernie": (128, 64, spatial_first_axis_map([22, 22, 20]), False),
    "XD-RoPE": (128, 64, axis_map([16, 16, 16, 16]), True),
    "odd": (22, 7, (3, 0, 2, 2, 1, 0, 3), True),
    "odd pairs": (15, 7, (0, 0, 2, 2, 1, 0, 1), False),
    "wide": (256, 128, tuple(i % 3 for i in range(128)), True),
}


def make(family, num_tokens, heads=(3, 1), dtype=torch.bfloat16, rows=5000):
    head_size, half, axes, style = FAMILIES[family]
    inv_freq = 1.0 / 1e6 ** (torch.arange(half, device=DEVICE).float() / half)
    query, key = (torch.randn(num_tokens, n, head_size, device=DEVICE).to(dtype) for n in heads)
    positions = torch.randint(0, rows, (max(axes) + 1, num_tokens), device=DEVICE)
    return query, key, positions, inv_freq, dict(axis_map=axes, is_neox_style=style)


def assert_bits(got, expected):
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype and g.shape == e.shape
        assert torch.equal(g, e), f"{int((g != e).sum())} of {e.numel()} differ"


@pytest.fixture(autouse=True)
def poison():
    """Memory that a kernel forgets to write holds NaN, not the last right result."""
    torch.full((1 << 24,), float("nan"), device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_of_the_reference(family, dtype):
    """Whole table, bounded table, no table; in place and not; both roundings, both directions."""
    query, key, positions, inv_freq, layout = make(family, 301, dtype=dtype)
    cache = reference.build_cos_sin_cache(inv_freq, 5000, 1.1386, dtype)
    cos, sin = reference.gather_cos_sin(cache, positions, layout["axis_map"])
    for rounding, inverse in itertools.product(("cache", "float32"), (False, True)):
        form = dict(layout, rounding=rounding, inverse=inverse, attention_factor=1.1386)
        expected = [
            reference.rotate(x, cos, -sin if inverse else sin, layout["is_neox_style"], rounding) for x in (query, key)
        ]
        for table in (cache, cache[:100], None):
            assert_bits(rotate(query, key, positions, inv_freq, table, **form), expected)
            written = query.clone(), key.clone()
            rotate_(*written, positions, inv_freq, table, **form)
            assert_bits(written, expected)


@pytest.mark.parametrize("theta", [1e4, 1e6, 1e7])
def test_computed_rows_at_large_positions(theta):
    """Through every range reduction of cos and sin: up to and past 105,615 and 2**24, and negative."""
    inv_freq = 1.0 / theta ** (torch.arange(64, device=DEVICE).float() / 64)
    edges = torch.tensor([0, 1, 105614, 105615, 105616, 2**24 - 1, 2**24, 2**24 + 1, 2**31 - 1], device=DEVICE)
    positions = torch.cat((edges, -edges, torch.randint(0, 1 << 21, (20000,), device=DEVICE)))
    query = torch.randn(len(positions), 1, 128, device=DEVICE)
    angle = positions.float()[:, None] * inv_freq
    expected = [reference.rotate(query, angle.cos(), angle.sin())]
    table = reference.build_cos_sin_cache(inv_freq, 64)
    assert_bits(rotate(query, None, positions, inv_freq)[:1], expected)
    assert_bits(rotate(query, None, positions, inv_freq, table)[:1], expected)
    assert_bits(rotate(query, None, positions.int(), inv_freq)[:1], [reference.rotate(query, angle.cos(), angle.sin())])


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 17, 256, 1000, 70_000])
@pytest.mark.parametrize("heads", [(1, 1), (32, 8), (5, 3), (24, 0)])
def test_every_cut_of_the_launch(num_tokens, heads):
    """R48: from one token to more than a grid's second axis holds, with odd head counts and no key."""
    if num_tokens * sum(heads) > 1_000_000:
        heads = (3, heads[1])
    query, key, positions, inv_freq, layout = make("Qwen3.5", num_tokens, heads)
    key = key if heads[1] else None
    cache = reference.build_cos_sin_cache(inv_freq, 5000, 1.0, torch.bfloat16)
    cos, sin = reference.gather_cos_sin(cache, positions, layout["axis_map"])
    tensors = [x for x in (query, key) if x is not None]
    expected = [reference.rotate(x, cos, sin) for x in tensors]
    for table in (cache, None):
        assert_bits(rotate(query, key, positions, inv_freq, table, **layout)[: len(tensors)], expected)


@pytest.mark.parametrize("blocks", [(1, 1, 1), (1, 8, 2), (4, 4, 1), (32, 2, 8), (16, 32, 4)])
def test_block_sizes_do_not_change_results(blocks, monkeypatch):
    """R49: other settings in one process rebuild the kernel."""
    kernels = importlib.import_module("rope_ops.kernels.rotate")
    query, key, positions, inv_freq, layout = make("GLM-4V", 77, (5, 2))
    expected = rotate(query, key, positions, inv_freq, **layout)
    monkeypatch.setattr(kernels, "plan", lambda *sizes: kernels.Blocks(*blocks))
    assert_bits(rotate(query, key, positions, inv_freq, **layout), expected)


def test_in_place_on_slices_of_one_projection():
    """R39: strides of a projection, odd offsets; nothing but query and key changes."""
    projection = torch.randn(50, 5 * 22 + 3, device=DEVICE).bfloat16()
    before = projection.clone()
    query, key = projection[:, 1 : 1 + 3 * 22], projection[:, 1 + 3 * 22 : 1 + 4 * 22]
    _, _, positions, inv_freq, layout = make("odd", 50)
    rotate_(query, key, positions, inv_freq, head_size=22, **layout)
    cache = reference.build_cos_sin_cache(inv_freq, 5000, 1.0, torch.bfloat16)
    cos, sin = reference.gather_cos_sin(cache, positions, layout["axis_map"])
    expected = reference.rotate(before[:, 1 : 1 + 4 * 22].unflatten(-1, (4, 22)), cos, sin).flatten(1)
    assert_bits((projection[:, 1 : 1 + 4 * 22],), (expected,))
    assert_bits((projection[:, :1], projection[:, 1 + 4 * 22 :]), (before[:, :1], before[:, 1 + 4 * 22 :]))


@pytest.mark.parametrize("lead", [(2, 33), (3, 2, 5)])
def test_batches_transposed_and_lanes_apart(lead):
    _, _, _, inv_freq, layout = make("Qwen2-VL", 1)
    positions = torch.randint(0, 5000, (3, *lead), device=DEVICE)
    query = torch.randn(*lead[:-1], 4, lead[-1], 128, device=DEVICE).bfloat16().transpose(-2, -3)
    key = torch.randn(*lead, 128, 2, device=DEVICE).bfloat16().transpose(-1, -2)
    cache = reference.build_cos_sin_cache(inv_freq, 5000, 1.0, torch.bfloat16)
    cos, sin = reference.gather_cos_sin(cache, positions.flatten(1), layout["axis_map"])
    expected = [reference.rotate(x.reshape(-1, *x.shape[-2:]), cos, sin).reshape(x.shape) for x in (query, key)]
    for table in (cache, cache[:9], None):
        assert_bits(rotate(query, key, positions, inv_freq, table, **layout), expected)
    rotate_(query, key, positions, inv_freq, **layout)
    assert_bits((query, key), expected)


def test_strides_past_int32():
    """An index of more than 2**31 elements: the second head lies 4 GiB further on."""
    if torch.cuda.get_device_properties(DEVICE).total_memory < 16 << 30:
        pytest.skip("needs 16 GiB")
    apart = (1 << 31) + 64
    storage = torch.zeros(apart + 64, dtype=torch.bfloat16, device=DEVICE)
    query = storage.as_strided((1, 2, 64), (64, apart, 1))
    query.copy_(torch.randn(1, 2, 64, device=DEVICE))
    inv_freq = torch.rand(32, device=DEVICE)
    expected = rotate(query.contiguous(), None, torch.tensor([7], device=DEVICE), inv_freq)[:1]
    assert_bits(rotate(query, None, torch.tensor([7], device=DEVICE), inv_freq)[:1], expected)
    rotate_(query, None, torch.tensor([7], device=DEVICE), inv_freq)
    assert_bits((query,), expected)


def test_rows_outside_the_table_are_counted_without_waiting():
    """R02, R29: also at each replay of a CUDA graph; guard rows around the table are never read."""
    query, key, positions, inv_freq, layout = make("Qwen2-VL", 64, rows=32)
    legacy = reference.build_cos_sin_cache(inv_freq, 5000, 1.0, torch.bfloat16)
    guarded = torch.full((96, 128), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    guarded[32:64] = legacy[:32]
    table = guarded[32:64]
    rows_computed(reset=True)
    rotate(query, key, positions, inv_freq, table, **layout)
    assert rows_computed() == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rotate(query, key, positions, inv_freq, table, **layout)
    positions[1, 5], positions[2, 6], positions[0, 6], positions[0, 7] = 32, 4999, 40, -1
    for _ in range(2):
        graph.replay()
    assert rows_computed(DEVICE, reset=True) == 6
    cos, sin = reference.gather_cos_sin(legacy, positions.clamp(min=0), layout["axis_map"])
    keep = torch.arange(64, device=DEVICE) != 7
    assert_bits([x[keep] for x in out], [reference.rotate(x[keep], cos[keep], sin[keep]) for x in (query, key)])
    assert not out[0].isnan().any()


def test_no_host_synchronisation():
    query, key, positions, inv_freq, layout = make("Qwen2-VL", 64)
    table = reference.build_cos_sin_cache(inv_freq, 32, 1.0, torch.bfloat16)
    rotate(query, key, positions, inv_freq, table, **layout)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for cache in (table, None):
            rotate(query, key, positions, inv_freq, cache, **layout)
            rotate_(query, key, positions, inv_freq, cache, **layout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_checked_positions_and_devices():
    query, key, positions, inv_freq, layout = make("Qwen2-VL", 4, rows=8)
    table = reference.build_cos_sin_cache(inv_freq, 8, 1.0, torch.bfloat16)
    positions[1, 2] = 60
    with pytest.raises(ValueError, match="below the 8 rows of cos_sin_cache, got 60"):
        rotate(query, key, positions, inv_freq, table, check_positions=True, **layout)
    with pytest.raises(ValueError, match="query's device, cuda:0; positions is on cpu"):
        rotate(query, key, positions.cpu(), inv_freq, table, **layout)
    with pytest.raises(ValueError, match="inv_freq is on cpu"):
        rotate_(query, key, positions, inv_freq.cpu(), table, **layout)


def test_rows_by_aten_where_the_kernel_is_not_proved(monkeypatch):
    """On a stack whose cos differs from the kernel's, ATen makes the rows and results stay exact."""
    module = importlib.import_module("rope_ops.ops.rotate")
    query, key, positions, inv_freq, layout = make("Qwen3.5", 40)
    table = reference.build_cos_sin_cache(inv_freq, 100, 1.0, torch.bfloat16)
    expected = rotate(query, key, positions, inv_freq, table, **layout)
    monkeypatch.setattr(module, "_proved_exact", lambda index: False)
    for cache in (table, None):
        assert_bits(rotate(query, key, positions, inv_freq, cache, **layout), expected)


def test_gradients():
    query, key, positions, inv_freq, layout = make("GLM-4V", 6, dtype=torch.float32)
    cache = reference.build_cos_sin_cache(inv_freq, 5000)
    cos, sin = reference.gather_cos_sin(cache, positions, layout["axis_map"])
    weight = torch.randn_like(query)
    grads = []
    for function in (
        lambda x: rotate(x, None, positions, inv_freq, **layout)[0],
        lambda x: reference.rotate(x, cos, sin, False),
    ):
        leaf = query.clone().requires_grad_()
        (first,) = torch.autograd.grad((function(leaf) ** 2 * weight).sum(), leaf, create_graph=True)
        grads.append((first, *torch.autograd.grad(first.square().sum(), leaf)))
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)
    with pytest.raises(RuntimeError, match="query requires grad"):
        rotate_(query.requires_grad_(), key, positions, inv_freq, **layout)


@pytest.mark.parametrize("cache", ["legacy", "bounded", "virtual"])
def test_module_under_inductor(cache):
    """One compile for every token count, and the bits of eager."""
    parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    bound = dict(cache_max_position=512) if cache == "bounded" else {}
    rope = get_rope(128, 1024, rope_parameters=parameters, dtype=torch.bfloat16, cache=cache, device="cuda", **bound)
    compiled = torch.compile(rope, fullgraph=True)
    buffer = torch.randint(0, 4096, (3, 300), device=DEVICE)
    torch._dynamo.utils.counters.clear()
    for num_tokens in (7, 260, 64, 33):
        query, key = (torch.randn(num_tokens, n * 128, device=DEVICE).bfloat16() for n in (4, 2))
        if num_tokens == 7:
            for x in (query, key):
                torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(positions := buffer[:, :7], 1)
        positions = buffer[:, :num_tokens] if num_tokens != 7 else positions
        assert_bits(compiled(positions, query, key), rope(positions, query, key))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("grad", [True, False])
def test_opcheck(grad):
    query, key, positions, inv_freq, layout = make("odd", 4, dtype=torch.float32)
    table = None if grad else reference.build_cos_sin_cache(inv_freq, 20)
    form = (22, "".join(map(str, layout["axis_map"])), True, 1.0, None, "cache", False, False)
    arguments = (positions, inv_freq, table, *form)
    torch.library.opcheck(
        torch.ops.rope_ops.rotate.default,
        (query.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(grad), key.requires_grad_(grad), *arguments),
    )
    torch.library.opcheck(torch.ops.rope_ops.rotate_.default, (query.detach(), key.detach(), *arguments))
