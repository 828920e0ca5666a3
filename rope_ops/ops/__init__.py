"""The custom operators, one file an operator. Importing this registers them; it imports torch only."""

from rope_ops.ops import position_range, rows_once  # noqa: F401  (registered for the graph pass, not called by users)
from rope_ops.ops.cache import build_cos_sin_cache
from rope_ops.ops.positions import prepare_positions
from rope_ops.ops.rotate import rotate, rotate_, rows_computed

__all__ = ["build_cos_sin_cache", "prepare_positions", "rotate", "rotate_", "rows_computed"]
