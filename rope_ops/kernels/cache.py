"""The bounded table in one pass: each program computes a tile of angles once and stores their cos and sin."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rope_ops.kernels.sincos import sin_cos


@triton.jit
def _build_cos_sin_cache_kernel(
    # pointers
    out_ptr,
    inv_freq_ptr,
    # sizes and scalars
    rows,
    attention_factor,
    # constexprs
    HALF: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    lane = tl.program_id(1) * BLOCK_LANES + tl.arange(0, BLOCK_LANES)
    mask = (row < rows)[:, None] & (lane < HALF)[None, :]
    inv_freq = tl.load(inv_freq_ptr + lane, mask=lane < HALF, other=0.0)
    # Rounding is monotonic, so the last row's largest angle bounds the tile exactly.
    largest = tl.max(row).to(tl.float32) * tl.max(tl.abs(inv_freq))
    sin, cos = sin_cos(row.to(tl.float32)[:, None] * inv_freq[None, :], largest)
    if SCALED:
        cos *= attention_factor
        sin *= attention_factor
    out_ptrs = out_ptr + row[:, None] * (2 * HALF) + lane[None, :]
    tl.store(out_ptrs, cos.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptrs + HALF, sin.to(out_ptr.dtype.element_ty), mask=mask)


def build_cos_sin_cache(inv_freq: torch.Tensor, rows: int, attention_factor: float, dtype: torch.dtype) -> torch.Tensor:
    """Launch the kernel: ``[rows, 2 * len(inv_freq)]`` of ``dtype``; ``inv_freq`` contiguous float32."""
    half = inv_freq.shape[0]
    out = torch.empty((rows, 2 * half), dtype=dtype, device=inv_freq.device)
    if out.numel() == 0:
        return out
    BLOCK_LANES = min(triton.next_power_of_2(half), 32)
    BLOCK_ROWS = 1024 // BLOCK_LANES
    with torch.cuda.device_of(inv_freq):
        _build_cos_sin_cache_kernel[(triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(half, BLOCK_LANES))](
            out,
            inv_freq,
            rows,
            attention_factor,
            HALF=half,
            SCALED=attention_factor != 1.0,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_LANES=BLOCK_LANES,
            num_warps=2,
            # sin_cos needs its multiplications and additions rounded apart.
            enable_fp_fusion=False,
        )
    return out
