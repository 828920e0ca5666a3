"""The rope types: one entry each, which says what it reads and by what rules its table is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rope_ops.frequencies import llama3, longrope, ntk, plain, yarn

RopeParameters = Mapping[str, Any]

# Keys that describe the model's layout, legal with every rope type.
LAYOUT_KEYS = frozenset({"rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"})


@dataclass(frozen=True)
class RopeType:
    """One way to make frequencies.

    Attributes:
        keys: the parameters it reads, beside those that every type has.
        frequencies: ``(parameters, rotary_dim, max_position, max_model_len, device) -> (inv_freq,
            attention_factor)``; ``max_model_len`` is None unless ``chooses_by_length``.
        legacy_rows: ``(parameters, max_position) -> rows`` that serving engines read of one axis: the longest length
            that the type is defined for.
        chooses_by_length: the values depend on the length served, so that a table for one length is no prefix of a
            table for another.
        rotates_whole_head: ``partial_rotary_factor`` is part of the formula and does not shorten the table's rows.
        factor_in_range: serving engines multiply the lengths in its formula by the positions factor of a multi-axis
            model (see :func:`rope_ops.frequencies.semantic_frequencies`).
        factor_in_rows: serving engines multiply its rows by that factor.
    """

    keys: frozenset[str]
    frequencies: Callable[[RopeParameters, int, int, int | None, torch.device | None], tuple[torch.Tensor, float]]
    legacy_rows: Callable[[RopeParameters, int], int]
    chooses_by_length: bool = False
    rotates_whole_head: bool = False
    factor_in_range: bool = False
    factor_in_rows: bool = True


ROPE_TYPES: dict[str, RopeType] = {
    "default": RopeType(frozenset(), plain.default, plain.max_position_rows),
    "linear": RopeType(frozenset({"factor"}), plain.linear, plain.linear_rows),
    "ntk": RopeType(frozenset({"factor", "mixed_b"}), ntk.ntk, plain.extended_rows),
    "dynamic": RopeType(frozenset({"factor"}), ntk.dynamic, plain.extended_rows, chooses_by_length=True),
    "yarn": RopeType(frozenset(yarn.KEYS), yarn.yarn, yarn.yarn_rows, factor_in_range=True),
    "llama3": RopeType(frozenset(llama3.KEYS), llama3.llama3, plain.max_position_rows),
    "longrope": RopeType(frozenset(longrope.KEYS), longrope.longrope, plain.max_position_rows, chooses_by_length=True),
    "proportional": RopeType(
        frozenset({"factor"}), plain.proportional, plain.max_position_rows, rotates_whole_head=True
    ),
}

# Configs write "dynamic" for this one too; an alpha tells them apart. Engines allocate one row a position for it.
_ALPHA = RopeType(frozenset({"alpha"}), ntk.alpha, plain.max_position_rows, factor_in_rows=False)


def get_rope_type(parameters: RopeParameters) -> RopeType:
    """The registry's entry for normalized parameters; ValueError for a type it does not have."""
    name = parameters["rope_type"]
    if name not in ROPE_TYPES:
        raise ValueError(f"rope_frequencies: rope_type must be one of {', '.join(sorted(ROPE_TYPES))}, got {name!r}")
    return _ALPHA if name == "dynamic" and "alpha" in parameters else ROPE_TYPES[name]
