"""LongRoPE (arXiv 2402.13753): one divisor a lane, from a short or a long list."""

from __future__ import annotations

import math

import torch

from rope_ops.frequencies._read import numbers, positive
from rope_ops.frequencies.plain import wavelengths

KEYS = (
    "short_factor long_factor original_max_position_embeddings factor attention_factor short_mscale long_mscale"
).split()


def longrope(parameters, rotary_dim, max_position, max_model_len, device):
    """The long list where the length served passes the original length, else the short one.

    Chosen once, as serving engines do: a switch in the middle of a sequence would not fit its cached keys.
    """
    original = positive(parameters, "original_max_position_embeddings", max_position)
    which = "long" if max_model_len > original else "short"
    divisors = torch.tensor(numbers(parameters, f"{which}_factor", rotary_dim // 2), dtype=torch.float32, device=device)
    numbers(parameters, "short_factor" if which == "long" else "long_factor", rotary_dim // 2)
    inv_freq = 1.0 / (divisors * wavelengths(positive(parameters, "rope_theta"), rotary_dim // 2, rotary_dim, device))
    return inv_freq, _attention_factor(parameters, which, original, max_position)


def _attention_factor(parameters, which: str, original: float, max_position: int) -> float:
    for key in (f"{which}_mscale", "attention_factor"):
        if key in parameters:
            return float(positive(parameters, key))
    factor = positive(parameters, "factor", max_position / original)
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
