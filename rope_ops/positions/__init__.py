"""Request positions: the state of a serving engine's batch, the compact store, and the families' rules."""

from rope_ops.ops.positions import prepare_positions
from rope_ops.positions.segments import SegmentBuilder, Segments
from rope_ops.positions.state import RopeState
from rope_ops.positions.variant import (
    PositionVariant,
    SupportsMRoPE,
    SupportsXDRoPE,
    get_rope_state,
    position_variant,
)

__all__ = [
    "PositionVariant",
    "RopeState",
    "SegmentBuilder",
    "Segments",
    "SupportsMRoPE",
    "SupportsXDRoPE",
    "get_rope_state",
    "position_variant",
    "prepare_positions",
]
