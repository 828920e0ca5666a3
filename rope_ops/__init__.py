"""Rotary cos/sin tables of the rows a multimodal model can read, and not one more."""

from rope_ops._version import __version__
from rope_ops.certify import sequence_bounded_mrope, supports_sequence_bounded_mrope
from rope_ops.config import ModelConfig
from rope_ops.embedding import MRotaryEmbedding, RotaryEmbedding, get_rope
from rope_ops.frequencies import rope_frequencies
from rope_ops.ops import build_cos_sin_cache

__all__ = [
    "MRotaryEmbedding",
    "ModelConfig",
    "RotaryEmbedding",
    "__version__",
    "build_cos_sin_cache",
    "get_rope",
    "rope_frequencies",
    "sequence_bounded_mrope",
    "supports_sequence_bounded_mrope",
]
