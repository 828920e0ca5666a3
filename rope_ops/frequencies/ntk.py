"""NTK-aware types: a larger base keeps short wavelengths and stretches long ones."""

from __future__ import annotations

import math

import torch

from rope_ops.frequencies._read import number, positive
from rope_ops.frequencies.plain import inverse_frequencies


def ntk(parameters, rotary_dim, max_position, max_model_len, device):
    """Fixed NTK, or mixed with ``mixed_b`` (https://kexue.fm/archives/9706).

    Fixed: ``1 / ((k theta) ** (2i / d) * k ** (2 / d))``. Mixed: the plain frequency of lane ``i`` divided by
    ``exp(a (i + 1) ** b)`` with ``a = ln(k) / (d / 2) ** b``, so that the last lane is divided by ``k``.
    """
    base, factor = positive(parameters, "rope_theta"), positive(parameters, "factor")
    if "mixed_b" not in parameters:
        return inverse_frequencies(base * factor, rotary_dim, device) / factor ** (2 / rotary_dim), 1.0
    power = number(parameters, "mixed_b")
    slope = math.log(factor) / (rotary_dim / 2) ** power
    lanes = torch.arange(1, rotary_dim // 2 + 1, dtype=torch.float32, device=device)
    return inverse_frequencies(base, rotary_dim, device) / (slope * lanes**power).exp(), 1.0


def alpha(parameters, rotary_dim, max_position, max_model_len, device):
    """Hunyuan's NTK with a constant: base ``theta * alpha ** (d / (d - 2))``, whatever length is served."""
    stretch = positive(parameters, "alpha") ** _exponent(rotary_dim)
    return inverse_frequencies(positive(parameters, "rope_theta") * stretch, rotary_dim, device), 1.0


def dynamic(parameters, rotary_dim, max_position, max_model_len, device):
    """Dynamic NTK: plain up to the trained length, then base ``theta * (k n / t - (k - 1)) ** (d / (d - 2))``.

    ``n`` is the length served, ``t`` the trained length (``max_position``), ``k`` the factor: transformers' formula,
    taken once for the length served, since a table cannot follow each sequence.
    """
    base, factor = positive(parameters, "rope_theta"), positive(parameters, "factor")
    # Below the trained length the formula's inner term falls under 1, and then under 0.
    if max_model_len > max_position:
        base *= (factor * max_model_len / max_position - (factor - 1)) ** _exponent(rotary_dim)
    return inverse_frequencies(base, rotary_dim, device), 1.0


def _exponent(rotary_dim: int) -> float:
    if rotary_dim == 2:
        raise ValueError("rope_frequencies: NTK scaling must have a rotary_dim above 2, got 2")
    return rotary_dim / (rotary_dim - 2)
