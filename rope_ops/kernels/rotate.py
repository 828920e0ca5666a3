"""The rotation of query and key in one launch: each program turns some heads of a block of tokens.

A program finds the rows of its tokens (in the table, or computed from ``inv_freq``), keeps them in registers, and
turns one head after the other with them. So a row is read or computed once for several heads, by the very threads
that need it, and computing it costs no more than reading it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rope_ops.kernels.sincos import sin_cos

_TRITON_DTYPE = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


@triton.jit
def _load_pairs(
    ptrs, lane_stride, mask,
    HALF: tl.constexpr, IS_NEOX_STYLE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """The first and the second lane of each pair, ``[BLOCK_TOKENS, BLOCK_PAIRS]``, of the heads at ptrs."""
    if IS_NEOX_STYLE:
        pair = tl.arange(0, BLOCK_PAIRS)[None, :]
        mask = mask & (pair < HALF)
        x1 = tl.load(ptrs + pair.to(tl.int64) * lane_stride, mask=mask, other=0.0)
        x2 = tl.load(ptrs + (pair + HALF).to(tl.int64) * lane_stride, mask=mask, other=0.0)
    else:
        # Read the lanes as they lie and part them in registers: two strided loads would fetch every sector twice.
        lane = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
        x = tl.load(ptrs + lane.to(tl.int64) * lane_stride, mask=mask & (lane < 2 * HALF), other=0.0)
        x1, x2 = tl.split(tl.reshape(x, [BLOCK_TOKENS, BLOCK_PAIRS, 2]))
    return x1, x2


@triton.jit
def _store_pairs(
    ptrs, lane_stride, mask, o1, o2,
    HALF: tl.constexpr, IS_NEOX_STYLE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    if IS_NEOX_STYLE:
        pair = tl.arange(0, BLOCK_PAIRS)[None, :]
        mask = mask & (pair < HALF)
        tl.store(ptrs + pair.to(tl.int64) * lane_stride, o1, mask=mask)
        tl.store(ptrs + (pair + HALF).to(tl.int64) * lane_stride, o2, mask=mask)
    else:
        lane = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
        x = tl.reshape(tl.join(o1, o2), [BLOCK_TOKENS, 2 * BLOCK_PAIRS])
        tl.store(ptrs + lane.to(tl.int64) * lane_stride, x, mask=mask & (lane < 2 * HALF))


@triton.jit
def _has_bit(MASK: tl.constexpr, pair, BLOCK_PAIRS: tl.constexpr):
    """Whether each pair's bit is set in MASK, a constant of any width, taken 32 bits at a time."""
    bit = tl.zeros_like(pair)
    for word in tl.static_range((BLOCK_PAIRS + 31) // 32):
        bits = tl.full(pair.shape, (MASK >> (32 * word)) & 0xFFFFFFFF, tl.int64) >> (pair % 32).to(tl.int64)
        bit = tl.where(pair // 32 == word, (bits & 1).to(tl.int32), bit)
    return bit != 0


@triton.jit
def _take_axis(
    position, outside, positions_ptrs, axis_stride, token_mask, cache_rows,
    AXIS: tl.constexpr, AXIS_MASK: tl.constexpr, ALL_AXES: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Give the pairs of one axis its positions, ``[BLOCK_TOKENS, 1]``; an axis without pairs is not read."""
    if AXIS_MASK != 0:
        on_axis = tl.load(positions_ptrs + AXIS * tl.cast(axis_stride, tl.int64), mask=token_mask, other=0)
        if AXIS_MASK == ALL_AXES:
            position += on_axis
        else:
            pair = tl.arange(0, BLOCK_PAIRS)[None, :]
            position = tl.where(_has_bit(AXIS_MASK, pair, BLOCK_PAIRS), on_axis, position)
        outside = outside | (token_mask & ((on_axis < 0) | (on_axis >= cache_rows)))
    return position, outside


@triton.jit
def _computed_rows(position, inv_freq, attention_factor, SCALED: tl.constexpr, CACHE_DTYPE: tl.constexpr):
    """cos and sin in the table's dtype: what a table of every row would hold."""
    angle = position.to(tl.float32) * inv_freq
    sin, cos = sin_cos(angle, tl.max(tl.abs(angle)))
    if SCALED:
        cos *= attention_factor
        sin *= attention_factor
    return cos.to(CACHE_DTYPE), sin.to(CACHE_DTYPE)


@triton.jit
def _rotate_kernel(
    # query and key: read, and written (in place: the same pointers)
    query_ptr,
    key_ptr,
    query_out_ptr,
    key_out_ptr,
    # where rows come from, and how many tokens had one computed although there is a table
    positions_ptr,
    inv_freq_ptr,
    cos_sin_cache_ptr,
    rows_computed_ptr,
    # sizes and scalars
    num_tokens,
    all_tokens,
    cache_rows,
    attention_factor,
    # strides in elements: sequence, token, head
    query_sequence_stride,
    query_token_stride,
    query_head_stride,
    key_sequence_stride,
    key_token_stride,
    key_head_stride,
    query_out_sequence_stride,
    query_out_token_stride,
    query_out_head_stride,
    key_out_sequence_stride,
    key_out_token_stride,
    key_out_head_stride,
    # strides in elements: lane, the same in query and key
    lane_stride,
    out_lane_stride,
    # strides in elements: rows
    positions_axis_stride,
    positions_sequence_stride,
    positions_token_stride,
    cache_row_stride,
    # constexprs: shape
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HAS_SEQUENCES: tl.constexpr,
    # constexprs: bit i of AXIS_d is set where pair i turns with axis d
    AXIS_0: tl.constexpr,
    AXIS_1: tl.constexpr,
    AXIS_2: tl.constexpr,
    AXIS_3: tl.constexpr,
    # constexprs: form of the rotation
    IS_NEOX_STYLE: tl.constexpr,
    INVERSE: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    COUNT_COMPUTED: tl.constexpr,
    SCALED: tl.constexpr,
    CACHE_DTYPE: tl.constexpr,
    ROUND_DTYPE: tl.constexpr,
    WORK_DTYPE: tl.constexpr,
    # constexprs: blocks
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    QUERY_BLOCKS: tl.constexpr = (QUERY_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KEY_BLOCKS: tl.constexpr = (KEY_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    pid = tl.program_id(0).to(tl.int64)
    block = (pid % (QUERY_BLOCKS + KEY_BLOCKS)).to(tl.int32)
    token = (pid // (QUERY_BLOCKS + KEY_BLOCKS)) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None]
    token_mask = token < all_tokens
    sequence = tl.zeros_like(token)
    if HAS_SEQUENCES:
        sequence = token // num_tokens
        token = token % num_tokens

    # This program's heads, all of query or all of key.
    is_query = block < QUERY_BLOCKS
    first_head = tl.where(is_query, block, block - QUERY_BLOCKS).to(tl.int64) * BLOCK_HEADS
    num_heads = tl.minimum(tl.where(is_query, QUERY_HEADS, KEY_HEADS) - first_head, BLOCK_HEADS).to(tl.int32)
    head_stride = tl.where(is_query, query_head_stride, key_head_stride).to(tl.int64)
    in_ptrs = (
        tl.where(is_query, query_ptr, key_ptr)
        + first_head * head_stride
        + token * tl.where(is_query, query_token_stride, key_token_stride)
        + sequence * tl.where(is_query, query_sequence_stride, key_sequence_stride)
    )
    out_head_stride = tl.where(is_query, query_out_head_stride, key_out_head_stride).to(tl.int64)
    out_ptrs = (
        tl.where(is_query, query_out_ptr, key_out_ptr)
        + first_head * out_head_stride
        + token * tl.where(is_query, query_out_token_stride, key_out_token_stride)
        + sequence * tl.where(is_query, query_out_sequence_stride, key_out_sequence_stride)
    )

    # The first head's loads are under way while the rows are found.
    x1, x2 = _load_pairs(in_ptrs, lane_stride, token_mask, HALF, IS_NEOX_STYLE, BLOCK_TOKENS, BLOCK_PAIRS)

    # Each pair's position, and which tokens have one outside the table.
    ALL_AXES: tl.constexpr = AXIS_0 + AXIS_1 + AXIS_2 + AXIS_3
    positions_ptrs = positions_ptr + token * positions_token_stride + sequence * positions_sequence_stride
    position = tl.full([BLOCK_TOKENS, BLOCK_PAIRS], 0, positions_ptr.dtype.element_ty)
    outside = tl.full([BLOCK_TOKENS, 1], 0, tl.int1)
    position, outside = _take_axis(
        position, outside, positions_ptrs, positions_axis_stride, token_mask, cache_rows,
        0, AXIS_0, ALL_AXES, BLOCK_PAIRS,
    )  # fmt: skip
    position, outside = _take_axis(
        position, outside, positions_ptrs, positions_axis_stride, token_mask, cache_rows,
        1, AXIS_1, ALL_AXES, BLOCK_PAIRS,
    )  # fmt: skip
    position, outside = _take_axis(
        position, outside, positions_ptrs, positions_axis_stride, token_mask, cache_rows,
        2, AXIS_2, ALL_AXES, BLOCK_PAIRS,
    )  # fmt: skip
    position, outside = _take_axis(
        position, outside, positions_ptrs, positions_axis_stride, token_mask, cache_rows,
        3, AXIS_3, ALL_AXES, BLOCK_PAIRS,
    )  # fmt: skip

    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    inv_freq_ptrs = inv_freq_ptr + pair
    if HAS_CACHE:
        is_read = (pair < HALF) & (position >= 0) & (position < cache_rows)
        row_ptrs = cos_sin_cache_ptr + position.to(tl.int64) * cache_row_stride + pair
        cos = tl.load(row_ptrs, mask=is_read, other=0.0)
        sin = tl.load(row_ptrs + HALF, mask=is_read, other=0.0)
        num_outside = tl.sum(outside.to(tl.int32))
        if num_outside > 0:
            inv_freq = tl.load(inv_freq_ptrs, mask=pair < HALF, other=0.0)
            computed_cos, computed_sin = _computed_rows(position, inv_freq, attention_factor, SCALED, CACHE_DTYPE)
            cos = tl.where(is_read, cos, computed_cos)
            sin = tl.where(is_read, sin, computed_sin)
            if COUNT_COMPUTED:
                tl.atomic_add(rows_computed_ptr, num_outside.to(tl.int64), mask=block == 0, sem="relaxed")
    else:
        inv_freq = tl.load(inv_freq_ptrs, mask=pair < HALF, other=0.0)
        cos, sin = _computed_rows(position, inv_freq, attention_factor, SCALED, CACHE_DTYPE)
    cos = cos.to(ROUND_DTYPE).to(WORK_DTYPE)
    sin = sin.to(ROUND_DTYPE).to(WORK_DTYPE)
    if INVERSE:
        sin = -sin

    for head in range(num_heads):
        # The next head's lanes are read before this one's are written, so that the two overlap.
        next_ptrs = in_ptrs + head_stride
        next_mask = token_mask & (tl.full([BLOCK_TOKENS, 1], head + 1, tl.int32) < num_heads)
        next_x1, next_x2 = _load_pairs(
            next_ptrs, lane_stride, next_mask, HALF, IS_NEOX_STYLE, BLOCK_TOKENS, BLOCK_PAIRS
        )

        # The roundings of the reference: the result of every operation goes through ROUND_DTYPE.
        x1 = x1.to(WORK_DTYPE)
        x2 = x2.to(WORK_DTYPE)
        o1 = (x1 * cos).to(ROUND_DTYPE).to(WORK_DTYPE) - (x2 * sin).to(ROUND_DTYPE).to(WORK_DTYPE)
        o2 = (x2 * cos).to(ROUND_DTYPE).to(WORK_DTYPE) + (x1 * sin).to(ROUND_DTYPE).to(WORK_DTYPE)
        o1 = o1.to(query_ptr.dtype.element_ty)
        o2 = o2.to(query_ptr.dtype.element_ty)
        _store_pairs(out_ptrs, out_lane_stride, token_mask, o1, o2, HALF, IS_NEOX_STYLE, BLOCK_TOKENS, BLOCK_PAIRS)
        if REST > 0:
            # Out of place, the lanes that do not turn are copied.
            rest = tl.arange(0, BLOCK_REST)[None, :]
            lane = (rest + 2 * HALF).to(tl.int64)
            kept = tl.load(in_ptrs + lane * lane_stride, mask=token_mask & (rest < REST), other=0.0)
            tl.store(out_ptrs + lane * out_lane_stride, kept, mask=token_mask & (rest < REST))

        x1 = next_x1
        x2 = next_x2
        in_ptrs = next_ptrs
        out_ptrs += out_head_stride


class Blocks(NamedTuple):
    """How a launch is cut: tokens and heads to a program, and its warps."""

    tokens: int
    heads: int
    num_warps: int


# Eight 16-bit lanes are one 16-byte load of a thread.
_PAIRS_PER_THREAD = 8
# One warp's worth: on an H200 larger blocks of tokens were slower at 8,192 tokens, by up to a third.
_MOST_PAIRS = 256
_MOST_HEADS = 8
_PROGRAMS_PER_PROCESSOR = 8


@functools.lru_cache(maxsize=1024)
def plan(num_tokens: int, query_heads: int, key_heads: int, half: int, processors: int) -> Blocks:
    """Blocks large enough to use a row often and to load widely, small enough to occupy every processor.

    Args:
        num_tokens: of all sequences.
        half: ``rotary_dim // 2``.
        processors: of the device.
    """
    block_pairs = triton.next_power_of_2(half)
    tokens = max(1, _MOST_PAIRS // block_pairs)
    heads = min(_MOST_HEADS, triton.next_power_of_2(max(query_heads, key_heads)))
    while tokens > 1 and tokens >= 2 * num_tokens:
        tokens //= 2
    shrink_heads = True
    while tokens * heads > 1:
        programs = triton.cdiv(num_tokens, tokens) * (triton.cdiv(query_heads, heads) + triton.cdiv(key_heads, heads))
        if programs >= _PROGRAMS_PER_PROCESSOR * processors:
            break
        if heads > 1 and (shrink_heads or tokens == 1):
            heads //= 2
        else:
            tokens //= 2
        shrink_heads = not shrink_heads
    return Blocks(tokens, heads, min(8, max(1, tokens * block_pairs // (32 * _PAIRS_PER_THREAD))))


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def rotate(
    query: torch.Tensor,
    key: torch.Tensor | None,
    query_out: torch.Tensor,
    key_out: torch.Tensor | None,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    cos_sin_cache: torch.Tensor | None,
    *,
    axis_map: tuple[int, ...],
    is_neox_style: bool,
    attention_factor: float,
    cache_dtype: torch.dtype,
    round_dtype: torch.dtype,
    inverse: bool,
    rows_computed: torch.Tensor | None,
    blocks: Blocks | None = None,
) -> None:
    """Launch the kernel: once, unless there are more than two dimensions of tokens or strides that it cannot share.

    Args:
        query, key, query_out, key_out: ``[*tokens, heads, head_size]`` with any strides; ``query_out is query`` in
            place. Lanes from ``rotary_dim`` on are copied, unless in place.
        positions: ``[num_dims, *tokens]``.
        inv_freq: contiguous float32 ``[rotary_dim // 2]``.
        cos_sin_cache: ``[rows, rotary_dim]`` with lanes one element apart, or None: every row is computed.
        axis_map: for each frequency the row of ``positions`` that it turns with.
        cache_dtype: that of the table, or that it would have.
        round_dtype: what every operation's result is rounded to.
        rows_computed: int64 ``[1]``, counts tokens with a position outside the table; or None.
        blocks: how to cut the launch; None for :func:`plan`.
    """
    form = dict(
        axis_map=axis_map, is_neox_style=is_neox_style, attention_factor=attention_factor, cache_dtype=cache_dtype,
        round_dtype=round_dtype, inverse=inverse, blocks=blocks,
    )  # fmt: skip
    rows = (inv_freq, cos_sin_cache)
    if query.dim() > 4:
        for index in itertools.product(*map(range, query.shape[:-4])):
            one = [None if x is None else x[index] for x in (query, key, query_out, key_out)]
            rotate(*one, positions[(slice(None), *index)], *rows, rows_computed=rows_computed, **form)
        return
    if key is not None and (query.stride(-1) != key.stride(-1) or query_out.stride(-1) != key_out.stride(-1)):
        rotate(query, None, query_out, None, positions, *rows, rows_computed=rows_computed, **form)
        rotate(key, None, key_out, None, positions, *rows, rows_computed=None, **form)
        return
    if query.dim() == 3:
        query, query_out, positions = query[None], query_out[None], positions[:, None]
        key, key_out = (None, None) if key is None else (key[None], key_out[None])
    sequences, num_tokens, query_heads, head_size = query.shape
    key_heads = 0 if key is None else key.shape[2]
    if sequences * num_tokens == 0 or query_heads + key_heads == 0:
        return
    half = inv_freq.shape[0]
    rest = 0 if query_out.data_ptr() == query.data_ptr() else head_size - 2 * half
    if key is None:
        key, key_out = query, query_out
    cache = inv_freq if cos_sin_cache is None else cos_sin_cache
    axes = [sum(1 << i for i, of_pair in enumerate(axis_map) if of_pair == axis) for axis in range(4)]
    if blocks is None:
        blocks = plan(sequences * num_tokens, query_heads, key_heads, half, _processors(query.device))
    head_blocks = triton.cdiv(query_heads, blocks.heads) + triton.cdiv(key_heads, blocks.heads)
    grid = (triton.cdiv(sequences * num_tokens, blocks.tokens) * head_blocks,)
    with torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext():
        _rotate_kernel[grid](
            query, key, query_out, key_out,
            positions, inv_freq, cache, inv_freq if rows_computed is None else rows_computed,
            num_tokens, sequences * num_tokens, cache.shape[0], attention_factor,
            *query.stride()[:3], *key.stride()[:3], *query_out.stride()[:3], *key_out.stride()[:3],
            query.stride(3), query_out.stride(3),
            *positions.stride(), cache.stride(0),
            QUERY_HEADS=query_heads, KEY_HEADS=key_heads, HALF=half, REST=rest, HAS_SEQUENCES=sequences > 1,
            AXIS_0=axes[0], AXIS_1=axes[1], AXIS_2=axes[2], AXIS_3=axes[3],
            IS_NEOX_STYLE=is_neox_style, INVERSE=inverse, HAS_CACHE=cos_sin_cache is not None,
            COUNT_COMPUTED=rows_computed is not None, SCALED=attention_factor != 1.0,
            CACHE_DTYPE=_TRITON_DTYPE[cache_dtype], ROUND_DTYPE=_TRITON_DTYPE[round_dtype],
            WORK_DTYPE=tl.float64 if query.dtype == torch.float64 else tl.float32,
            BLOCK_TOKENS=blocks.tokens, BLOCK_HEADS=blocks.heads,
            BLOCK_PAIRS=triton.next_power_of_2(half), BLOCK_REST=triton.next_power_of_2(max(rest, 1)),
            num_warps=blocks.num_warps,
            # A product that is rounded must not be contracted with the sum that follows.
            enable_fp_fusion=False,
        )  # fmt: skip
