"""A kernel that applies ``sin_cos`` to a vector, for the exhaustive comparison."""

import torch
import triton
import triton.language as tl

from rope_ops.kernels.sincos import sin_cos


@triton.jit
def _sin_cos_kernel(
    # pointers
    sin_ptr,
    cos_ptr,
    angle_ptr,
    # sizes
    n,
    # constexprs
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    angle = tl.load(angle_ptr + index, mask=index < n, other=0.0)
    sin, cos = sin_cos(angle, tl.max(tl.abs(angle)))
    tl.store(sin_ptr + index, sin, mask=index < n)
    tl.store(cos_ptr + index, cos, mask=index < n)


def sin_cos_of(angle):
    sin, cos = torch.empty_like(angle), torch.empty_like(angle)
    grid = (triton.cdiv(angle.numel(), 1024),)
    _sin_cos_kernel[grid](sin, cos, angle, angle.numel(), BLOCK=1024, enable_fp_fusion=False)
    return sin, cos
