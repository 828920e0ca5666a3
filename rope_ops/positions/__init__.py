"""Request positions: the state of a serving engine's batch, its compact store, and the families' rules."""

from rope_ops.ops.positions import prepare_positions
from rope_ops.positions.check import BoundReport, check_sequence_bounded
from rope_ops.positions.pipeline import model_inputs
from rope_ops.positions.rules import Image, Text, Video
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
    "BoundReport",
    "Image",
    "PositionVariant",
    "RopeState",
    "SegmentBuilder",
    "Segments",
    "SupportsMRoPE",
    "SupportsXDRoPE",
    "Text",
    "Video",
    "check_sequence_bounded",
    "get_rope_state",
    "model_inputs",
    "position_variant",
    "prepare_positions",
]
