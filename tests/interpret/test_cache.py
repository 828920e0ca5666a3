"""The builder kernel's indexing, in Triton's interpreter: float32 only, since it truncates bf16 stores."""

import numpy as np
import pytest
import torch

import rope_ops.reference
from rope_ops.kernels import cache


@pytest.mark.parametrize("attention_factor", [1.0, 1.25])
@pytest.mark.parametrize(("rows", "half"), [(0, 4), (1, 1), (5, 3), (300, 8), (7, 200), (70, 32)])
def test_every_element_is_written_once_and_right(rows, half, attention_factor, monkeypatch):
    inv_freq = torch.rand(half)
    # Poison what torch.empty returns: an element that is not written stays NaN.
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    table = cache.build_cos_sin_cache(inv_freq, rows, attention_factor, torch.float32)
    angle = torch.arange(rows, dtype=torch.float32)[:, None] * inv_freq
    expected = np.concatenate([np.cos(angle.numpy()), np.sin(angle.numpy())], axis=1) * np.float32(attention_factor)
    assert table.shape == (rows, 2 * half)
    torch.testing.assert_close(table, torch.from_numpy(expected), atol=2e-7, rtol=0)


def test_bf16_is_right_but_for_the_interpreters_truncation():
    """R46: the interpreter cuts bf16 stores off, so a value may be one step below the rounded one."""
    inv_freq = torch.rand(5)
    table = cache.build_cos_sin_cache(inv_freq, 50, 1.0, torch.bfloat16)
    exact = cache.build_cos_sin_cache(inv_freq, 50, 1.0, torch.float32)
    assert ((table.float() - exact).abs() <= 2**-7 * exact.abs()).all()


def test_the_operator_on_cpu_tensors_never_launches_triton(monkeypatch):
    """R46: even in a process where kernels could run on a CPU, the operator takes the exact ATen path."""

    def launched(*_):
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(cache, "build_cos_sin_cache", launched)
    inv_freq = torch.rand(5)
    table = rope_ops.build_cos_sin_cache(inv_freq, 50, 1.25, torch.bfloat16)
    assert torch.equal(table, rope_ops.reference.build_cos_sin_cache(inv_freq, 50, 1.25, torch.bfloat16))
