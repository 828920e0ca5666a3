"""The builder kernel's indexing, in Triton's interpreter: float32 only, since it truncates bf16 stores."""

import numpy as np
import pytest
import torch

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
