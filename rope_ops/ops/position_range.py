"""``rope_ops::position_range``: ``torch.arange`` with a note of the largest position that its reader can reach.

The graph pass puts it in place of the range of a certified class. Its value is the range's, whole; the bound is an
argument so that the decision is part of the graph's text, which is what compile caches hash. Nothing else reads it.
"""

from __future__ import annotations

import torch

from rope_ops.ops._library import define


def _range(start, end, step, bound, dtype, device):
    return torch.arange(start, end, step, dtype=dtype, device=device)


define(
    "position_range(Scalar start, Scalar end, Scalar step, int bound, ScalarType dtype, Device device) -> Tensor",
    anywhere=_range,
    fake=_range,
)
