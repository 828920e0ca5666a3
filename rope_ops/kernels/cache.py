"""The bounded table in one pass: each program computes a block of angles and stores their cos and sin."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _build_cos_sin_cache_kernel(
    # pointers
    out_ptr,
    inv_freq_ptr,
    # sizes and scalars
    num_angles,
    attention_factor,
    # constexprs
    HALF: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_angles
    row = index // HALF
    lane = index % HALF
    angle = row.to(tl.float32) * tl.load(inv_freq_ptr + lane, mask=mask, other=0.0)
    cos = tl.cos(angle)
    sin = tl.sin(angle)
    if SCALED:
        cos *= attention_factor
        sin *= attention_factor
    out_ptrs = out_ptr + row * (2 * HALF) + lane
    tl.store(out_ptrs, cos.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptrs + HALF, sin.to(out_ptr.dtype.element_ty), mask=mask)


def build_cos_sin_cache(inv_freq: torch.Tensor, rows: int, attention_factor: float, dtype: torch.dtype) -> torch.Tensor:
    """Launch the kernel: ``[rows, 2 * len(inv_freq)]`` of ``dtype``; ``inv_freq`` contiguous float32."""
    half = inv_freq.shape[0]
    out = torch.empty((rows, 2 * half), dtype=dtype, device=inv_freq.device)
    num_angles = rows * half
    if num_angles == 0:
        return out
    BLOCK = 1024
    with torch.cuda.device(inv_freq.device):
        _build_cos_sin_cache_kernel[(triton.cdiv(num_angles, BLOCK),)](
            out,
            inv_freq,
            num_angles,
            attention_factor,
            HALF=half,
            SCALED=attention_factor != 1.0,
            BLOCK=BLOCK,
        )
    return out
