"""The builder op on CPU: bitwise eager's table at every size, without a table-size temporary."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rope_ops import build_cos_sin_cache, reference
from rope_ops.measure import peak_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def inverse_frequencies(rotary_dim, theta=1e7):
    return 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attention_factor", [1.0, 1.1386])
@pytest.mark.parametrize("rotary_dim", [2, 6, 64, 80, 130])
def test_equals_eager_at_odd_and_even_sizes(rotary_dim, attention_factor, dtype):
    inv_freq = inverse_frequencies(rotary_dim)
    for rows in (0, 1, 7, 4099):
        table = build_cos_sin_cache(inv_freq, rows, attention_factor, dtype)
        assert torch.equal(table, reference.build_cos_sin_cache(inv_freq, rows, attention_factor, dtype))


def test_equals_eager_across_block_borders(monkeypatch):
    from rope_ops.ops import cache

    inv_freq = inverse_frequencies(10)
    whole = reference.build_cos_sin_cache(inv_freq, 1000)
    for elements in (1, 5, 33, 250, 4999):
        monkeypatch.setattr(cache, "_BLOCK_ELEMENTS", elements)
        assert torch.equal(build_cos_sin_cache(inv_freq, 1000), whole), elements


@pytest.mark.parametrize("bound", [1, 1000, 65537])
def test_bounded_is_bitwise_prefix_of_legacy(bound):
    inv_freq = inverse_frequencies(64)
    legacy = reference.build_cos_sin_cache(inv_freq, 131072, 1.0, torch.bfloat16)
    assert torch.equal(build_cos_sin_cache(inv_freq, bound, 1.0, torch.bfloat16), legacy[:bound])


def test_positions_above_two_to_the_24_round_as_float32_does():
    """R48: from 2**24 on, float32 holds every second integer."""
    inv_freq, rows = torch.tensor([1.0]), 2**24 + 3
    table = build_cos_sin_cache(inv_freq, rows)
    assert torch.equal(table, reference.build_cos_sin_cache(inv_freq, rows))
    # 2**24 + 1 rounds to 2**24, so the two rows are the same.
    assert torch.equal(table[2**24 + 1], table[2**24])
    assert not torch.equal(table[2**24 + 2], table[2**24])


def test_peak_is_resident_plus_two_scratch_buffers():
    inv_freq = inverse_frequencies(64)
    build = lambda: build_cos_sin_cache(inv_freq, 262144, 1.0, torch.bfloat16)  # noqa: E731
    resident = build().nbytes
    assert resident == 32 << 20
    assert peak_bytes(build, torch.device("cpu")) <= resident + (8 << 20)


def test_strided_frequencies():
    wide = inverse_frequencies(64).repeat_interleave(3)
    assert torch.equal(build_cos_sin_cache(wide[::3], 100), build_cos_sin_cache(inverse_frequencies(64), 100))


def test_no_effect_of_autocast_default_dtype_or_default_device():
    inv_freq = inverse_frequencies(32)
    plain = build_cos_sin_cache(inv_freq, 100)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(build_cos_sin_cache(inv_freq, 100), plain)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(build_cos_sin_cache(inv_freq, 100), plain)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        table = build_cos_sin_cache(inv_freq, 100)
    assert table.device.type == "cpu" and torch.equal(table, plain)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("attention_factor", [1.0, 1.25])
@pytest.mark.parametrize("layout", ["contiguous", "strided", "expanded"])
def test_opcheck(layout, attention_factor, requires_grad):
    inv_freq = {
        "contiguous": torch.tensor([1.0, 0.5, 0.25]),
        "strided": torch.tensor([1.0, 9.0, 0.5, 9.0])[::2],
        "expanded": torch.tensor([0.5]).expand(3),
    }[layout].requires_grad_(requires_grad)
    torch.library.opcheck(torch.ops.rope_ops.build_cos_sin_cache, (inv_freq, 5, attention_factor, torch.float32))


def test_meta_and_fake_tensors():
    """R24, R36: shapes and dtypes without data."""
    table = build_cos_sin_cache(torch.empty(4, device="meta"), 10, 1.0, torch.bfloat16)
    assert table.shape == (10, 8) and table.dtype == torch.bfloat16 and table.device.type == "meta"
    with FakeTensorMode():
        table = build_cos_sin_cache(torch.empty(4), 10, 1.0, torch.float16)
        assert table.shape == (10, 8) and table.dtype == torch.float16 and table.stride() == (8, 1)


@pytest.mark.parametrize("in_dim", [0, 1])
def test_vmap_equals_a_loop(in_dim):
    """R36"""
    batch = torch.stack([inverse_frequencies(8), inverse_frequencies(8, 100.0)], dim=in_dim)
    together = torch.vmap(lambda f: build_cos_sin_cache(f, 9, 1.5), in_dims=in_dim)(batch)
    one_by_one = torch.stack([build_cos_sin_cache(f, 9, 1.5) for f in batch.unbind(in_dim)])
    assert torch.equal(together, one_by_one)


def test_gradient_of_frequencies_is_that_of_the_reference():
    inv_freq = torch.tensor([1.0, 0.3, 0.01], requires_grad=True)
    weight = torch.randn(11, 6, generator=torch.Generator().manual_seed(0))
    (build_cos_sin_cache(inv_freq, 11, 1.2) * weight).sum().backward()
    expected = torch.autograd.grad((reference.build_cos_sin_cache(inv_freq, 11, 1.2) * weight).sum(), inv_freq)[0]
    torch.testing.assert_close(inv_freq.grad, expected)


def test_one_compile_for_many_row_counts():
    """R33: the row count is symbolic."""
    inv_freq, graphs = inverse_frequencies(8), []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm

    @torch.compile(backend=backend, dynamic=True, fullgraph=True)
    def f(x):
        return build_cos_sin_cache(inv_freq, x.shape[0])

    for rows in (5, 7, 9, 1000):
        assert torch.equal(f(torch.empty(rows)), build_cos_sin_cache(inv_freq, rows))
    assert len(graphs) == 1


@pytest.mark.compiles
def test_inductor_returns_the_eager_bits():
    inv_freq = inverse_frequencies(8)
    compiled = torch.compile(lambda x: build_cos_sin_cache(x, 100, 1.0, torch.bfloat16), fullgraph=True)
    assert torch.equal(compiled(inv_freq), build_cos_sin_cache(inv_freq, 100, 1.0, torch.bfloat16))


GOOD = {"inv_freq": torch.ones(2), "rows": 3, "attention_factor": 1.0, "dtype": torch.float32}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"inv_freq": torch.ones(2, 2)}, ValueError, r"inv_freq must be 1-D \[rotary_dim // 2\], got shape \[2, 2\]"),
        ({"inv_freq": torch.ones(2).double()}, TypeError, "inv_freq must be torch.float32, got torch.float64"),
        ({"inv_freq": torch.ones(2).bfloat16()}, TypeError, "inv_freq must be torch.float32, got torch.bfloat16"),
        ({"rows": -1}, ValueError, "rows must not be negative, got -1"),
        ({"dtype": torch.float64}, TypeError, "dtype must be one of torch.float32.*, got torch.float64"),
        ({"dtype": torch.int32}, TypeError, "dtype must be one of torch.float32.*, got torch.int32"),
        ({"attention_factor": math.nan}, ValueError, "attention_factor must be finite, got nan"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bad_arguments_say_what_must_hold(change, error, message, device):
    arguments = {**GOOD, **change}
    arguments["inv_freq"] = arguments["inv_freq"].to(device)
    with pytest.raises(error, match=f"build_cos_sin_cache: {message}"):
        build_cos_sin_cache(**arguments)
