"""YaRN (arXiv 2309.00071): interpolate long wavelengths by ``factor``, keep short ones, blend between."""

from __future__ import annotations

import math
import warnings

import torch

from rope_ops.frequencies._read import flag, number, positive
from rope_ops.frequencies.plain import wavelengths

KEYS = (
    "factor original_max_position_embeddings beta_fast beta_slow truncate extrapolation_factor "
    "attention_factor attn_factor mscale mscale_all_dim apply_yarn_scaling"
).split()


def yarn(parameters, rotary_dim, max_position, max_model_len, device):
    """The blend runs over the lanes that turn ``beta_fast`` to ``beta_slow`` times within the *original* length."""
    factor = _factor(parameters, max_position)
    base = positive(parameters, "rope_theta")
    original = positive(parameters, "original_max_position_embeddings", max_position)
    low, high = _correction_range(parameters, rotary_dim, base, original)
    waves = wavelengths(base, rotary_dim // 2, rotary_dim, device)
    lanes = torch.arange(rotary_dim // 2, dtype=torch.float32, device=device)
    ramp = ((lanes - low) / (high - low)).clamp(0, 1)
    keep = (1 - ramp) * number(parameters, "extrapolation_factor", 1.0)
    inv_freq = 1.0 / (factor * waves) * (1 - keep) + 1.0 / waves * keep
    return inv_freq, _attention_factor(parameters, factor)


def yarn_rows(parameters, max_position: int) -> int:
    """``factor`` times the *original* length: a config's maximum may be the extended one already."""
    original = positive(parameters, "original_max_position_embeddings", max_position)
    return math.ceil(original * _factor(parameters, max_position))


def _factor(parameters, max_position: int) -> float:
    """``factor``; where only the original length is given, the ratio of the two lengths, as in transformers."""
    if "factor" not in parameters and "original_max_position_embeddings" in parameters:
        return float(max_position / positive(parameters, "original_max_position_embeddings"))
    return float(positive(parameters, "factor"))


def _correction_range(parameters, rotary_dim, base, original) -> tuple[float, float]:
    def lane(rotations: float) -> float:
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = lane(positive(parameters, "beta_fast", 32)), lane(positive(parameters, "beta_slow", 1))
    if flag(parameters, "truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    return low, high if high != low else high + 0.001


def _attention_factor(parameters, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, all_dim = number(parameters, "mscale", 0.0), number(parameters, "mscale_all_dim", 0.0)
    if "attention_factor" in parameters:
        attention_factor = number(parameters, "attention_factor")
    elif not flag(parameters, "apply_yarn_scaling", True):
        attention_factor = 1.0
    elif mscale and all_dim:
        attention_factor = magnitude(mscale) / magnitude(all_dim)
    else:
        if mscale or all_dim:
            warnings.warn(
                "rope_frequencies: YaRN reads mscale and mscale_all_dim only where both are given and not zero, got "
                f"mscale {mscale} and mscale_all_dim {all_dim}; the attention factor comes from factor alone",
                UserWarning,
                stacklevel=4,
            )
        attention_factor = magnitude(1.0)
    return float(attention_factor * number(parameters, "attn_factor", 1.0))
