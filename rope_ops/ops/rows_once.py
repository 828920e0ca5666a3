"""``rope_ops::rows_once``: a copy, which a compiler that knows it turns into "compute this once".

Inductor recomputes cos and sin in every kernel that reads them. The graph pass puts this operator on the rows of a
batch where computing them once is measured to be faster; its Inductor lowering stores the rows instead of copying.
"""

from __future__ import annotations

import torch

from rope_ops.ops._library import define


def _copy(rows: torch.Tensor) -> torch.Tensor:
    return rows.clone(memory_format=torch.preserve_format)


def _backward(ctx, grad: torch.Tensor) -> torch.Tensor:
    return grad


def _vmap(info, in_dims, rows: torch.Tensor):
    return torch.ops.rope_ops.rows_once(rows), in_dims[0]


define(
    "rows_once(Tensor rows) -> Tensor",
    anywhere=_copy,
    fake=torch.empty_like,
    setup_context=lambda ctx, inputs, output: None,
    backward=_backward,
    vmap=_vmap,
)
