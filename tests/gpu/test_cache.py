"""The builder on a real GPU: every table bitwise eager's, every float32 proved, peak equal to resident."""

import itertools
import math
import warnings

import pytest
import torch

from rope_ops import ModelConfig, build_cos_sin_cache, get_rope, reference
from rope_ops.examples import EXAMPLES, ExampleModel
from rope_ops.measure import measure, peak_bytes

CUDA = torch.device("cuda")
MIB = 1 << 20


def frequencies(rotary_dim, theta):
    return 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=CUDA) / rotary_dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rotary_dim", [64, 80, 96, 128, 256])
def test_bounded_table_is_a_bitwise_prefix_of_eager_legacy(rotary_dim, dtype):
    for theta, attention_factor in itertools.product((1e4, 5e5, 1e6, 1e7), (1.0, 1.1386)):
        inv_freq = frequencies(rotary_dim, theta)
        legacy = reference.build_cos_sin_cache(inv_freq, 1048576, attention_factor, dtype)
        for rows in (1, 1000, 32768, 262144, 1048576):
            table = build_cos_sin_cache(inv_freq, rows, attention_factor, dtype)
            assert torch.equal(table, legacy[:rows]), (theta, attention_factor, rows)


def test_sin_and_cos_of_every_float32_up_to_two_to_the_24(capsys):
    """Exhaustive: all 1.27e9 non-negative float32 up to 2**24 against torch.sin and torch.cos, bit for bit."""
    from sincos_kernel import sin_cos_of

    last, chunk, compared, different = 0x4B800000, 1 << 26, 0, 0
    for start in range(0, last + 1, chunk):
        bits = torch.arange(start, min(start + chunk, last + 1), dtype=torch.int32, device=CUDA)
        angle = bits.view(torch.float32)
        sin, cos = sin_cos_of(angle)
        different += int((sin.view(torch.int32) != angle.sin().view(torch.int32)).sum())
        different += int((cos.view(torch.int32) != angle.cos().view(torch.int32)).sum())
        compared += angle.numel()
    with capsys.disabled():
        print(f"\nsin and cos of {compared:,} float32 compared with torch's, {different} differ")
    assert compared == last + 1 and different == 0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 3.7, 1e5, 1e9])
def test_negative_huge_and_special_frequencies(scale):
    inv_freq = torch.tensor([-1.0, 0.0, 1.0, -0.3, 1e-40, math.pi], device=CUDA) * scale
    for rows in (3, 70000):
        assert torch.equal(build_cos_sin_cache(inv_freq, rows), reference.build_cos_sin_cache(inv_freq, rows))


@pytest.mark.parametrize("half", [1, 3, 5, 31, 33, 100])
def test_odd_half_sizes_write_every_element(half):
    inv_freq = torch.rand(half, device=CUDA)
    for rows in (0, 1, 7, 1001):
        # Poison the block that the allocator hands out next.
        poison = torch.full((max(rows, 1), 2 * half), math.nan, device=CUDA)
        del poison
        assert torch.equal(build_cos_sin_cache(inv_freq, rows), reference.build_cos_sin_cache(inv_freq, rows))


def test_rows_above_two_to_the_24_and_offsets_above_two_to_the_31():
    """R48: positions round as float32 does; element offsets need 64 bits."""
    inv_freq = torch.tensor([1.0, 0.01], device=CUDA)
    rows = 2**24 + 3
    assert torch.equal(build_cos_sin_cache(inv_freq, rows), reference.build_cos_sin_cache(inv_freq, rows))
    rows, half = 2**22 + 5, 272
    table = build_cos_sin_cache(frequencies(2 * half, 1e6), rows, 1.0, torch.bfloat16)
    assert table.numel() > 2**31
    tail = torch.arange(rows - 5, rows, device=CUDA).float()[:, None] * frequencies(2 * half, 1e6)
    assert torch.equal(table[-5:], torch.cat((tail.cos(), tail.sin()), dim=-1).bfloat16())


def test_default_model_costs_32_mib_resident_and_at_the_peak(capsys):
    config = ModelConfig.from_hf(EXAMPLES["qwen3.5"], model_cls=ExampleModel)
    results = {result.name: result for result in measure(config, CUDA)}
    with capsys.disabled():
        print()
        for r in results.values():
            print(f"{r.name}: {r.resident_bytes / MIB:.1f} MiB, peak {r.peak_bytes / MIB:.1f}, {r.milliseconds:.3f} ms")
    assert results["rope_ops"].resident_bytes == results["rope_ops"].peak_bytes == 32 * MIB
    assert all(result.bitwise_prefix for result in results.values())


def test_peak_of_get_rope_is_its_table():
    parameters = EXAMPLES["qwen3.5"]["text_config"]["rope_parameters"]
    ropes = []

    def build():
        ropes.append(
            get_rope(
                256, 262144, rope_parameters=parameters, dtype=torch.bfloat16, cache_max_position=262144, device=CUDA
            )
        )
        return ropes[-1].cos_sin_cache

    assert peak_bytes(build, CUDA) <= 32 * MIB + 2 * MIB


def test_first_build_inside_a_graph_capture_is_exact():
    import rope_ops.ops.cache as cache

    inv_freq = frequencies(64, 1e6)
    expected = reference.build_cos_sin_cache(inv_freq, 5000)
    cache._proof.cache_clear()
    cache._proofs.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table = build_cos_sin_cache(inv_freq, 5000)
    graph.replay()
    assert torch.equal(table, expected)
    assert torch.equal(build_cos_sin_cache(inv_freq, 5000), expected)


def test_a_kernel_that_is_not_exact_is_noticed_and_not_used(monkeypatch):
    import rope_ops.ops.cache as cache

    kernels = cache._kernels()
    right = kernels.build_cos_sin_cache
    monkeypatch.setattr(kernels, "build_cos_sin_cache", lambda *a: right(*a) * 1.0001)
    cache._proof.cache_clear()
    try:
        inv_freq = frequencies(64, 1e6)
        with pytest.warns(RuntimeWarning, match="the Triton kernel and torch.cos/torch.sin differ on cuda:0"):
            table = build_cos_sin_cache(inv_freq, 5000)
        assert torch.equal(table, reference.build_cos_sin_cache(inv_freq, 5000))
    finally:
        cache._proof.cache_clear()


def test_proof_runs_once_and_holds_on_this_stack():
    import rope_ops.ops.cache as cache

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache._proof(0)


def test_opcheck_and_compile():
    inv_freq = frequencies(64, 1e6)
    torch.library.opcheck(torch.ops.rope_ops.build_cos_sin_cache, (inv_freq, 100, 1.25, torch.bfloat16))
    compiled = torch.compile(lambda f: build_cos_sin_cache(f, 1000), fullgraph=True)
    assert torch.equal(compiled(inv_freq), reference.build_cos_sin_cache(inv_freq, 1000))


def test_module_moved_to_the_gpu_keeps_its_bits_and_materialises_from_meta():
    rope = get_rope(64, 4096, rope_parameters={"rope_theta": 1e6}, device="meta")
    rope.to_empty(device=CUDA)
    expected = reference.build_cos_sin_cache(frequencies(64, 1e6), 4096)
    assert torch.equal(rope.cos_sin_cache, expected)
