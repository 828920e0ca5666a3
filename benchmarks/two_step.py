"""The rotation in the two steps that serving engines take: gather whole rows for every axis, then one kernel.

Our own writing of that form, to compare with where no serving engine is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotate_rows_kernel(
    # pointers
    query_ptr,
    key_ptr,
    cos_ptr,
    sin_ptr,
    # strides
    query_token_stride,
    key_token_stride,
    axis_stride,
    # constexprs
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    SECTION_T: tl.constexpr,
    SECTION_H: tl.constexpr,
    SECTION_W: tl.constexpr,
    MROPE_INTERLEAVED: tl.constexpr,
    BLOCK_QUERY_HEADS: tl.constexpr,
    BLOCK_KEY_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_HALF)
    if MROPE_INTERLEAVED:
        is_h = (lane % 3 == 1) & (lane < 3 * SECTION_H)
        is_w = (lane % 3 == 2) & (lane < 3 * SECTION_W)
    else:
        is_h = (lane >= SECTION_T) & (lane < SECTION_T + SECTION_H)
        is_w = (lane >= SECTION_T + SECTION_H) & (lane < HALF)
    is_t = (lane < HALF) & ~is_h & ~is_w
    row = token * HALF + lane
    cos = (
        tl.load(cos_ptr + row, mask=is_t, other=0.0)
        + tl.load(cos_ptr + axis_stride + row, mask=is_h, other=0.0)
        + tl.load(cos_ptr + 2 * axis_stride + row, mask=is_w, other=0.0)
    )[None, :]
    sin = (
        tl.load(sin_ptr + row, mask=is_t, other=0.0)
        + tl.load(sin_ptr + axis_stride + row, mask=is_h, other=0.0)
        + tl.load(sin_ptr + 2 * axis_stride + row, mask=is_w, other=0.0)
    )[None, :]
    head = tl.arange(0, BLOCK_QUERY_HEADS)[:, None]
    mask = (head < QUERY_HEADS) & (lane[None, :] < HALF)
    _turn(query_ptr + token * query_token_stride + head * HEAD_SIZE + lane[None, :], cos, sin, mask, HALF)
    head = tl.arange(0, BLOCK_KEY_HEADS)[:, None]
    mask = (head < KEY_HEADS) & (lane[None, :] < HALF)
    _turn(key_ptr + token * key_token_stride + head * HEAD_SIZE + lane[None, :], cos, sin, mask, HALF)


@triton.jit
def _turn(ptrs, cos, sin, mask, HALF: tl.constexpr):
    x1 = tl.load(ptrs, mask=mask, other=0.0)
    x2 = tl.load(ptrs + HALF, mask=mask, other=0.0)
    tl.store(ptrs, x1 * cos - x2 * sin, mask=mask)
    tl.store(ptrs + HALF, x2 * cos + x1 * sin, mask=mask)


def rotate_(query, key, positions, cos_sin_cache, mrope_section, mrope_interleaved, head_size) -> None:
    """Turn contiguous ``[num_tokens, heads, head_size]`` in place; positions ``[3, num_tokens]``."""
    cos, sin = (half.contiguous() for half in cos_sin_cache[positions].chunk(2, dim=-1))
    num_tokens, query_heads, _ = query.shape
    key_heads = key.shape[1]
    section_t, section_h, section_w = mrope_section
    half = sum(mrope_section)
    _rotate_rows_kernel[(num_tokens,)](
        query,
        key,
        cos,
        sin,
        query.stride(0),
        key.stride(0),
        cos.stride(0),
        QUERY_HEADS=query_heads,
        KEY_HEADS=key_heads,
        HEAD_SIZE=head_size,
        HALF=half,
        SECTION_T=section_t,
        SECTION_H=section_h,
        SECTION_W=section_w,
        MROPE_INTERLEAVED=mrope_interleaved,
        BLOCK_QUERY_HEADS=triton.next_power_of_2(query_heads),
        BLOCK_KEY_HEADS=triton.next_power_of_2(key_heads),
        BLOCK_HALF=triton.next_power_of_2(half),
    )
