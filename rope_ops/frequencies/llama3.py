"""Llama 3.1's scaling: long wavelengths divided by ``factor``, short ones kept, a linear blend between."""

from __future__ import annotations

import math

import torch

from rope_ops.frequencies._read import positive
from rope_ops.frequencies.plain import inverse_frequencies

KEYS = "factor low_freq_factor high_freq_factor original_max_position_embeddings".split()


def llama3(parameters, rotary_dim, max_position, max_model_len, device):
    """Short is below ``original / high_freq_factor`` positions a turn, long above ``original / low_freq_factor``."""
    factor = positive(parameters, "factor")
    low, high = positive(parameters, "low_freq_factor"), positive(parameters, "high_freq_factor")
    if high < low:
        raise ValueError(
            f"rope_frequencies: high_freq_factor must not be below low_freq_factor, got {high} and {low} (llama3)"
        )
    original = positive(parameters, "original_max_position_embeddings", max_position)
    inv_freq = inverse_frequencies(positive(parameters, "rope_theta"), rotary_dim, device)
    turn = 2 * math.pi / inv_freq
    smooth = (original / turn - low) / (high - low) if high > low else 0.0
    blend = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    long, short = turn > original / low, turn < original / high
    return torch.where(long, inv_freq / factor, torch.where(short, inv_freq, blend)), 1.0
