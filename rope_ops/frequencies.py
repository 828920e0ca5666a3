"""Rope parameters to inverse frequencies: a registry with one entry a rope type.

Two numbers are kept apart everywhere. The **semantic maximum** is the length that enters a formula (YaRN's correction
range); it never changes with the table. The **rows** are what is allocated, and enter no formula.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Keys that describe the model's layout, legal with every rope type.
_LAYOUT_KEYS = {"rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}

_RopeParameters = Mapping[str, Any]


@dataclass(frozen=True)
class RopeType:
    """One way to make frequencies.

    Attributes:
        keys: the parameters it reads, beside those that every type has.
        frequencies: ``(parameters, rotary_dim, max_position, device) -> (inv_freq, attention_factor)``.
        legacy_rows: ``(parameters, max_position) -> rows`` that serving engines allocate for one axis.
    """

    keys: frozenset[str]
    frequencies: Callable[[_RopeParameters, int, int, torch.device | None], tuple[torch.Tensor, float]]
    legacy_rows: Callable[[_RopeParameters, int], int]


def normalize_rope_parameters(rope_parameters: _RopeParameters) -> dict[str, Any]:
    """One spelling for what configs spell in several ways: a new dict with ``rope_type`` and ``mrope_section``.

    ``type`` is read as ``rope_type`` (a leftover ``type`` beside it is dropped), ``xdrope_section`` as
    ``mrope_section``; the types ``mrope`` and ``xdrope`` say only that there are sections, which the sections say
    themselves. Keys set to None are as good as absent.
    """
    parameters = {key: value for key, value in rope_parameters.items() if value is not None}
    spelled = parameters.pop("type", None)
    rope_type = parameters.pop("rope_type", spelled) or "default"
    if "xdrope_section" in parameters:
        parameters.setdefault("mrope_section", parameters["xdrope_section"])
        del parameters["xdrope_section"]
    if rope_type in ("mrope", "xdrope"):
        rope_type = "default"
    return {"rope_type": rope_type, **parameters}


def rope_frequencies(
    rope_parameters: _RopeParameters,
    rotary_dim: int,
    max_position: int,
    *,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, float]:
    """Inverse frequencies and attention factor of a model.

    Args:
        rope_parameters: ``rope_theta``, ``rope_type`` (or ``type``) and the type's own keys, as in a Hugging Face
            config. Unknown keys warn by name.
        rotary_dim: lanes of a head that rotate; even.
        max_position: the semantic maximum, for types that have no ``original_max_position_embeddings`` of their own.
        device: where the powers are computed, which decides their last bits; the default device if None.

    Returns:
        ``inv_freq``, float32 ``[rotary_dim // 2]`` in radians a position, and the ``attention_factor`` that
        multiplies cos and sin.

    Raises:
        ValueError: no ``rope_theta``, an unknown rope type, a missing key of the type, an odd ``rotary_dim``.
    """
    parameters = normalize_rope_parameters(rope_parameters)
    rope_type = get_rope_type(parameters)
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rope_frequencies: rotary_dim must be positive and even, got {rotary_dim}")
    unknown = sorted(parameters.keys() - _LAYOUT_KEYS - rope_type.keys)
    if unknown:
        warnings.warn(
            f"rope_frequencies: rope_type {parameters['rope_type']!r} does not read the rope parameter(s) "
            f"{', '.join(map(repr, unknown))}; it reads {', '.join(sorted(_LAYOUT_KEYS | rope_type.keys))}",
            UserWarning,
            stacklevel=2,
        )
    resolved = None if device is None else torch.device(device)
    return rope_type.frequencies(parameters, rotary_dim, max_position, resolved)


def semantic_frequencies(
    rope_parameters: _RopeParameters,
    rotary_dim: int,
    max_position: int,
    positions_factor: int,
    *,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, float]:
    """:func:`rope_frequencies` over ``positions_factor`` times the semantic maximum.

    Serving engines multiply the positions of a multi-axis model by 4 before YaRN takes its correction range from
    them; transformers does not (factor 1). The values differ, so both exist.
    """
    parameters = normalize_rope_parameters(rope_parameters)
    if "original_max_position_embeddings" in parameters:
        parameters["original_max_position_embeddings"] *= positions_factor
    return rope_frequencies(parameters, rotary_dim, max_position * positions_factor, device=device)


def get_rope_type(parameters: _RopeParameters) -> RopeType:
    """The registry's entry for normalized parameters; ValueError for a type it does not have."""
    name = parameters["rope_type"]
    if name not in ROPE_TYPES:
        raise ValueError(f"rope_frequencies: rope_type must be one of {', '.join(sorted(ROPE_TYPES))}, got {name!r}")
    return ROPE_TYPES[name]


def _required(parameters: _RopeParameters, key: str) -> Any:
    if key not in parameters:
        raise ValueError(
            f"rope_frequencies: rope_type {parameters['rope_type']!r} needs {key!r} in rope_parameters, "
            f"got only {', '.join(sorted(parameters))}"
        )
    return parameters[key]


def _wavelengths(base: float, rotary_dim: int, device: torch.device | None) -> torch.Tensor:
    """``base ** (2i / rotary_dim)``: positions a radian, float32 ``[rotary_dim // 2]``."""
    return base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim)


def _default(parameters, rotary_dim, max_position, device):
    """``1 / theta ** (2i / rotary_dim)`` (RoFormer, arXiv 2104.09864)."""
    return 1.0 / _wavelengths(_required(parameters, "rope_theta"), rotary_dim, device), 1.0


def _yarn(parameters, rotary_dim, max_position, device):
    """YaRN (arXiv 2309.00071): interpolate long wavelengths by ``factor``, keep short ones, blend between.

    The blend runs over the lanes that turn ``beta_fast`` to ``beta_slow`` times within the *original* length.
    """
    factor = float(_required(parameters, "factor"))
    base = _required(parameters, "rope_theta")
    original = parameters.get("original_max_position_embeddings", max_position)
    low, high = _yarn_correction_range(parameters, rotary_dim, base, original)
    wavelengths = _wavelengths(base, rotary_dim, device)
    lanes = torch.arange(rotary_dim // 2, dtype=torch.float32, device=device)
    ramp = ((lanes - low) / (high - low)).clamp(0, 1)
    keep = (1 - ramp) * parameters.get("extrapolation_factor", 1.0)
    inv_freq = 1.0 / (factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep
    return inv_freq, _yarn_attention_factor(parameters, factor)


def _yarn_correction_range(parameters, rotary_dim, base, original) -> tuple[float, float]:
    def lane(rotations: float) -> float:
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = lane(parameters.get("beta_fast", 32)), lane(parameters.get("beta_slow", 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    return low, high if high != low else high + 0.001


def _yarn_attention_factor(parameters, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "attention_factor" in parameters:
        attention_factor = parameters["attention_factor"]
    elif parameters.get("mscale") and parameters.get("mscale_all_dim"):
        attention_factor = mscale(parameters["mscale"]) / mscale(parameters["mscale_all_dim"])
    else:
        attention_factor = mscale(1.0)
    return float(attention_factor * parameters.get("attn_factor", 1.0))


def _yarn_rows(parameters, max_position: int) -> int:
    original = parameters.get("original_max_position_embeddings", max_position)
    return math.ceil(original * float(_required(parameters, "factor")))


ROPE_TYPES: dict[str, RopeType] = {
    "default": RopeType(frozenset(), _default, lambda parameters, max_position: max_position),
    "yarn": RopeType(
        frozenset(
            "factor original_max_position_embeddings beta_fast beta_slow truncate extrapolation_factor "
            "attention_factor attn_factor mscale mscale_all_dim".split()
        ),
        _yarn,
        _yarn_rows,
    ),
}
