"""Types that divide the plain frequencies by a constant, or leave some lanes out: default, linear, proportional."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rope_ops.frequencies._read import number, positive


def wavelengths(base: float, lanes: int, rotary_dim: int, device: torch.device | None) -> torch.Tensor:
    """``base ** (2i / rotary_dim)`` for the first lanes: positions a radian, float32 ``[lanes]``."""
    return base ** (torch.arange(0, 2 * lanes, 2, dtype=torch.float32, device=device) / rotary_dim)


def inverse_frequencies(base: float, rotary_dim: int, device: torch.device | None) -> torch.Tensor:
    """``1 / base ** (2i / rotary_dim)`` (RoFormer, arXiv 2104.09864)."""
    return 1.0 / wavelengths(base, rotary_dim // 2, rotary_dim, device)


def default(parameters, rotary_dim, max_position, max_model_len, device):
    return inverse_frequencies(positive(parameters, "rope_theta"), rotary_dim, device), 1.0


def linear(parameters, rotary_dim, max_position, max_model_len, device):
    """Position interpolation (arXiv 2306.15595): every frequency divided by ``factor``, as transformers divides.

    Serving engines divide the positions instead, which rounds elsewhere unless ``factor`` is a power of two.
    """
    if has_several_factors(parameters):
        raise ValueError(
            f"rope_frequencies: factor must be one number, got {parameters['factor']!r}; several factors make "
            "several tables, which get_rope stacks for a model of one axis"
        )
    inv_freq = inverse_frequencies(positive(parameters, "rope_theta"), rotary_dim, device)
    return inv_freq / positive(parameters, "factor"), 1.0


def has_several_factors(parameters: Mapping[str, Any]) -> bool:
    """Whether normalized parameters are a ``linear`` type with a list of factors."""
    return parameters["rope_type"] == "linear" and isinstance(parameters.get("factor"), list | tuple)


def split_factors(parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Normalized parameters of each table of a ``linear`` type with several factors; of the one table otherwise."""
    if not has_several_factors(parameters):
        return [dict(parameters)]
    if not parameters["factor"]:
        raise ValueError("rope_frequencies: factor must be a number or a list of at least one, got []")
    return [{**parameters, "factor": factor} for factor in parameters["factor"]]


def linear_rows(parameters, max_position: int) -> int:
    return sum(math.ceil(max_position * positive(one, "factor")) for one in split_factors(parameters))


def extended_rows(parameters, max_position: int) -> int:
    """``factor`` times the trained length."""
    return math.ceil(max_position * positive(parameters, "factor"))


def proportional(parameters, rotary_dim, max_position, max_model_len, device):
    """Gemma-4's partial rotation: the whole head turns, most lanes at frequency zero (cos 1, sin 0).

    ``partial_rotary_factor`` of the lanes have a frequency, whose exponent is taken over the whole head, unlike the
    partial rotation of every other type. A ``factor`` divides, as in ``linear``.
    """
    lanes = int(number(parameters, "partial_rotary_factor", 1.0) * rotary_dim // 2)
    turning = 1.0 / wavelengths(positive(parameters, "rope_theta"), lanes, rotary_dim, device)
    still = torch.zeros(rotary_dim // 2 - lanes, dtype=torch.float32, device=device)
    return torch.cat((turning, still)) / positive(parameters, "factor", 1.0), 1.0


def max_position_rows(parameters, max_position: int) -> int:
    """As many rows as the model declares positions."""
    return max_position
