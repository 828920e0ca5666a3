"""Rotary cos/sin tables of the rows a multimodal model can read, and not one more."""

import importlib

from rope_ops._version import __version__
from rope_ops.certify import bind, sequence_bounded_mrope, supports_sequence_bounded_mrope
from rope_ops.config import ModelConfig
from rope_ops.embedding import MRotaryEmbedding, RotaryEmbedding, get_rope
from rope_ops.frequencies import rope_frequencies
from rope_ops.ops import build_cos_sin_cache, prepare_positions, rotate, rotate_, rows_computed

# Imported when they are first asked for: what they bring along costs more than the rest of the package.
_LAZY = {
    "RopeState": "rope_ops.positions",
    "bound_buffers": "rope_ops.construct",
    "check_sequence_bounded": "rope_ops.positions",
    "explain": "rope_ops.passes",
    "get_rope_state": "rope_ops.positions",
    "inspect_model_cls": "rope_ops.inspection",
    "sequence_bound": "rope_ops.construct",
}

__all__ = [
    "MRotaryEmbedding",
    "ModelConfig",
    "RopeState",
    "RotaryEmbedding",
    "__version__",
    "bind",
    "bound_buffers",
    "build_cos_sin_cache",
    "check_sequence_bounded",
    "explain",
    "get_rope",
    "get_rope_state",
    "inspect_model_cls",
    "prepare_positions",
    "rope_frequencies",
    "rotate",
    "rotate_",
    "rows_computed",
    "sequence_bound",
    "sequence_bounded_mrope",
    "supports_sequence_bounded_mrope",
]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
