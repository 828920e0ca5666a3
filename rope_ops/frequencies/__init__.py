"""Rope parameters to inverse frequencies: a registry with one entry a rope type.

Three numbers are kept apart everywhere:

- The **semantic maximum** (``max_position``) is the length that enters a formula, such as YaRN's correction range. It
  never changes with the table.
- The **rows** (``cache_max_position``) are what is allocated, and enter no formula.
- The **length served** (``max_model_len``) is read by two types alone, ``dynamic`` and ``longrope``: beyond the
  trained length they have other values for each length, or for long ones. They choose once for the length served,
  as serving engines do: ``max_model_len`` where it is given, else the rows asked for, else the longest length that
  the type is defined for. A longer one is an error. A table for one length is no prefix of a table for another, so
  :class:`rope_ops.ModelConfig` bounds none of theirs.

The longest length a type is defined for, which is also the rows that serving engines read: ``factor`` times the
trained length for ``linear``, ``ntk`` and ``dynamic``, ``factor`` times the *original* length for ``yarn``,
``max_position`` for the rest, whose configs declare the extended length.
"""

from __future__ import annotations

import warnings

import torch

from rope_ops.frequencies.plain import has_several_factors, split_factors
from rope_ops.frequencies.registry import LAYOUT_KEYS, ROPE_TYPES, RopeParameters, RopeType, get_rope_type
from rope_ops.frequencies.spelling import normalize_rope_parameters

__all__ = [
    "ROPE_TYPES",
    "RopeType",
    "get_rope_type",
    "has_several_factors",
    "legacy_rows",
    "normalize_rope_parameters",
    "rope_frequencies",
    "rotary_dim_of",
    "semantic_frequencies",
    "split_factors",
]


def rope_frequencies(
    rope_parameters: RopeParameters,
    rotary_dim: int,
    max_position: int,
    *,
    max_model_len: int | None = None,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, float]:
    """Inverse frequencies and attention factor of a model.

    Args:
        rope_parameters: ``rope_theta``, ``rope_type`` (or ``type``) and the type's own keys, as in a Hugging Face
            config. Unknown keys warn by name.
        rotary_dim: lanes of a head that the table has; even. See :func:`rotary_dim_of`.
        max_position: the semantic maximum, for types that have no ``original_max_position_embeddings`` of their own.
        max_model_len: the length served, for ``dynamic`` and ``longrope``; the longest that the type is defined for
            if None. No other type reads it.
        device: where the powers are computed, which decides their last bits; the default device if None.

    Returns:
        ``inv_freq``, float32 ``[rotary_dim // 2]`` in radians a position, and the ``attention_factor`` that
        multiplies cos and sin.

    Raises:
        ValueError: no ``rope_theta``, an unknown rope type, a missing or unusable key of the type, an odd
            ``rotary_dim``, a length that the type is not defined for.
    """
    parameters = normalize_rope_parameters(rope_parameters)
    rope_type = get_rope_type(parameters)
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rope_frequencies: rotary_dim must be positive and even, got {rotary_dim}")
    unknown = sorted(parameters.keys() - LAYOUT_KEYS - rope_type.keys)
    if unknown:
        warnings.warn(
            f"rope_frequencies: rope_type {parameters['rope_type']!r} does not read the rope parameter(s) "
            f"{', '.join(map(repr, unknown))}; it reads {', '.join(sorted(LAYOUT_KEYS | rope_type.keys))}",
            UserWarning,
            stacklevel=2,
        )
    length = _length_served(parameters, max_position, max_model_len) if rope_type.chooses_by_length else None
    resolved = None if device is None else torch.device(device)
    return rope_type.frequencies(parameters, rotary_dim, max_position, length, resolved)


def semantic_frequencies(
    rope_parameters: RopeParameters,
    rotary_dim: int,
    max_position: int,
    positions_factor: int,
    *,
    max_model_len: int | None = None,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, float]:
    """:func:`rope_frequencies` with the lengths that serving engines put into YaRN for a multi-axis model.

    They multiply the positions of such a model by ``positions_factor`` (4) before YaRN takes its correction range
    from them; transformers does not (factor 1). The values differ, so both exist. No other type is multiplied:
    engines have no multi-axis class for one.
    """
    parameters = normalize_rope_parameters(rope_parameters)
    if get_rope_type(parameters).factor_in_range:
        if "original_max_position_embeddings" in parameters:
            parameters["original_max_position_embeddings"] *= positions_factor
        max_position *= positions_factor
    return rope_frequencies(parameters, rotary_dim, max_position, max_model_len=max_model_len, device=device)


def legacy_rows(parameters: RopeParameters, max_position: int, positions_factor: int = 1) -> int:
    """Rows that serving engines read of a table, for normalized parameters.

    ``positions_factor`` multiplies them where engines multiply: not for XD-RoPE (``dynamic`` with ``alpha``), whose
    class allocates one row a position. For ``longrope`` engines stack the short table, never read when the long one
    is, in front of these rows.
    """
    rope_type = get_rope_type(parameters)
    return rope_type.legacy_rows(parameters, max_position) * (positions_factor if rope_type.factor_in_rows else 1)


def rotary_dim_of(parameters: RopeParameters, head_size: int) -> int:
    """Lanes of a head that the table has, for normalized parameters: ``head_size * partial_rotary_factor``.

    ``proportional`` turns the whole head, some lanes at frequency zero.
    """
    fraction = parameters.get("partial_rotary_factor", 1.0)
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise ValueError(f"get_rope: partial_rotary_factor must be in (0, 1], got {fraction!r}")
    return head_size if get_rope_type(parameters).rotates_whole_head else int(head_size * fraction)


def _length_served(parameters: RopeParameters, max_position: int, max_model_len: int | None) -> int:
    longest = legacy_rows(parameters, max_position)
    if max_model_len is None:
        return longest
    if max_model_len > longest:
        raise ValueError(
            f"rope_frequencies: rope_type {parameters['rope_type']!r} is defined for at most {longest} positions, "
            f"and its values depend on the length served; got a length of {max_model_len}"
        )
    return max_model_len
