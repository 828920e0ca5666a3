"""The custom operators, one file an operator. Importing this registers them; it imports torch only."""

from rope_ops.ops.cache import build_cos_sin_cache
from rope_ops.ops.positions import prepare_positions

__all__ = ["build_cos_sin_cache", "prepare_positions"]
