"""Every rope type's table on CUDA: bitwise what eager PyTorch builds there, bounded and not."""

from __future__ import annotations

import pytest
import torch

from rope_ops import get_rope, reference

HEAD, MAX_POSITION = 128, 4096
LANES = HEAD // 2
TYPES = {
    "default": {},
    "linear": {"factor": 3.0},
    "ntk": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "dynamic alpha": {"alpha": 1000.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "longrope": {
        "short_factor": [1 + i / LANES for i in range(LANES)],
        "long_factor": [1.0 + i for i in range(LANES)],
        "original_max_position_embeddings": 1024,
    },
    "proportional": {"partial_rotary_factor": 0.25},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", TYPES)
def test_a_bounded_table_is_a_bitwise_prefix_on_the_device(case, dtype):
    given = {"rope_type": case.split()[0], "rope_theta": 500000.0, **TYPES[case]}
    legacy = get_rope(HEAD, MAX_POSITION, rope_parameters=given, dtype=dtype, device="cuda")
    rows = legacy.legacy_rows
    expected = reference.build_cos_sin_cache(legacy.inv_freq, rows, legacy.attention_factor, dtype)
    assert legacy.cos_sin_cache.is_cuda and torch.equal(legacy.cos_sin_cache, expected)
    for bound in (1, 1023, rows - 1):
        bounded = get_rope(
            HEAD,
            MAX_POSITION,
            rope_parameters=given,
            dtype=dtype,
            device="cuda",
            cache_max_position=bound,
            max_model_len=rows,
        )
        assert torch.equal(bounded.cos_sin_cache, expected[:bound])


@pytest.mark.parametrize("case", TYPES)
def test_frequencies_of_the_two_devices_are_one_formula(case):
    given = {"rope_type": case.split()[0], "rope_theta": 500000.0, **TYPES[case]}
    cuda, cpu = (get_rope(HEAD, MAX_POSITION, rope_parameters=given, device=device) for device in ("cuda", "cpu"))
    assert cuda.attention_factor == cpu.attention_factor
    torch.testing.assert_close(cuda.inv_freq.cpu(), cpu.inv_freq, rtol=1e-6, atol=0)


def test_several_linear_factors_stack_on_the_device():
    given = {"rope_type": "linear", "rope_theta": 500000.0, "factor": [1.0, 2.5]}
    rope = get_rope(HEAD, MAX_POSITION, rope_parameters=given, dtype=torch.bfloat16, device="cuda")
    parts = [
        reference.build_cos_sin_cache(inv_freq, rows, 1.0, torch.bfloat16)
        for inv_freq, rows in zip(rope.inv_freq, (MAX_POSITION, int(2.5 * MAX_POSITION)), strict=True)
    ]
    assert torch.equal(rope.cos_sin_cache, torch.cat(parts))
