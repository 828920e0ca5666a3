"""The custom operators, one file an operator. Importing this registers them; it imports torch only."""

from rope_ops.ops import position_range, rows_once  # noqa: F401  (registered for the graph pass, not called by users)
from rope_ops.ops.cache import build_cos_sin_cache

__all__ = ["build_cos_sin_cache"]
