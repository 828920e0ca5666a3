"""The rotation of query and key in one launch: each program turns some heads of one token.

A program reads its lanes, finds the token's row (in the table, or computed from ``inv_freq``) and writes. A row serves
a block of heads, so computing it costs little, and a table that is read costs its bytes.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl

from rope_ops.kernels.sincos import sin_cos

# Pairs of lanes to a program, and to a thread of it: eight 16-bit lanes are one 16-byte load.
PAIRS_PER_PROGRAM = 1024
PAIRS_PER_THREAD = 8

_TRITON_DTYPE = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


@triton.jit
def _load_pairs(
    ptr, head, head_stride, lane_stride,
    HEADS: tl.constexpr, HALF: tl.constexpr, IS_NEOX_STYLE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """The first and the second lane of each pair, ``[BLOCK_HEADS, BLOCK_PAIRS]``."""
    ptrs = ptr + head[:, None] * head_stride
    if IS_NEOX_STYLE:
        pair = tl.arange(0, BLOCK_PAIRS)[None, :]
        mask = (head[:, None] < HEADS) & (pair < HALF)
        ptrs += pair.to(tl.int64) * lane_stride
        x1 = tl.load(ptrs, mask=mask, other=0.0)
        x2 = tl.load(ptrs + tl.cast(lane_stride, tl.int64) * HALF, mask=mask, other=0.0)
    else:
        # Read the lanes as they lie and part them in registers: two strided loads would fetch every sector twice.
        lane = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
        mask = (head[:, None] < HEADS) & (lane < 2 * HALF)
        x = tl.load(ptrs + lane.to(tl.int64) * lane_stride, mask=mask, other=0.0)
        x1, x2 = tl.split(tl.reshape(x, [BLOCK_HEADS, BLOCK_PAIRS, 2]))
    return x1, x2


@triton.jit
def _store_pairs(
    ptr, o1, o2, head, head_stride, lane_stride,
    HEADS: tl.constexpr, HALF: tl.constexpr, IS_NEOX_STYLE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    ptrs = ptr + head[:, None] * head_stride
    if IS_NEOX_STYLE:
        pair = tl.arange(0, BLOCK_PAIRS)[None, :]
        mask = (head[:, None] < HEADS) & (pair < HALF)
        ptrs += pair.to(tl.int64) * lane_stride
        tl.store(ptrs, o1, mask=mask)
        tl.store(ptrs + tl.cast(lane_stride, tl.int64) * HALF, o2, mask=mask)
    else:
        lane = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
        mask = (head[:, None] < HEADS) & (lane < 2 * HALF)
        x = tl.reshape(tl.join(o1, o2), [BLOCK_HEADS, 2 * BLOCK_PAIRS])
        tl.store(ptrs + lane.to(tl.int64) * lane_stride, x, mask=mask)


@triton.jit
def _copy_rest(
    in_ptr, out_ptr, head, head_stride, lane_stride, out_head_stride, out_lane_stride,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Copy the lanes from ``rotary_dim`` on, which do not turn."""
    rest = tl.arange(0, BLOCK_REST)[None, :]
    mask = (head[:, None] < HEADS) & (rest < REST)
    lane = (rest + 2 * HALF).to(tl.int64)
    x = tl.load(in_ptr + head[:, None] * head_stride + lane * lane_stride, mask=mask, other=0.0)
    tl.store(out_ptr + head[:, None] * out_head_stride + lane * out_lane_stride, x, mask=mask)


@triton.jit
def _turns_with(AXIS_MASK: tl.constexpr, pair, BLOCK_PAIRS: tl.constexpr):
    """Whether each pair's bit is set in AXIS_MASK, a constant of any width, taken 32 bits at a time."""
    bit = tl.zeros_like(pair)
    for word in tl.static_range((BLOCK_PAIRS + 31) // 32):
        bits = tl.full(pair.shape, (AXIS_MASK >> (32 * word)) & 0xFFFFFFFF, tl.int64) >> (pair % 32).to(tl.int64)
        bit = tl.where(pair // 32 == word, (bits & 1).to(tl.int32), bit)
    return bit != 0


@triton.jit
def _computed_row(position, inv_freq, attention_factor, SCALED: tl.constexpr, CACHE_DTYPE: tl.constexpr):
    """cos and sin of one row, in the table's dtype: what a table of every row would hold."""
    sin, cos = sin_cos(position.to(tl.float32) * inv_freq)
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
    # where a row comes from, and how many tokens had one computed although there is a table
    positions_ptr,
    inv_freq_ptr,
    cos_sin_cache_ptr,
    rows_computed_ptr,
    # sizes and scalars
    num_tokens,
    cache_rows,
    attention_factor,
    # strides in elements: sequence, token, head, lane
    query_sequence_stride,
    query_token_stride,
    query_head_stride,
    query_lane_stride,
    key_sequence_stride,
    key_token_stride,
    key_head_stride,
    key_lane_stride,
    query_out_sequence_stride,
    query_out_token_stride,
    query_out_head_stride,
    query_out_lane_stride,
    key_out_sequence_stride,
    key_out_token_stride,
    key_out_head_stride,
    key_out_lane_stride,
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
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    QUERY_BLOCKS: tl.constexpr = (QUERY_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KEY_BLOCKS: tl.constexpr = (KEY_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    pid = tl.program_id(0).to(tl.int64)
    token = pid // (QUERY_BLOCKS + KEY_BLOCKS)
    block = (pid % (QUERY_BLOCKS + KEY_BLOCKS)).to(tl.int32)
    positions_ptr += token * positions_token_stride
    query_ptr += token * query_token_stride
    key_ptr += token * key_token_stride
    query_out_ptr += token * query_out_token_stride
    key_out_ptr += token * key_out_token_stride
    if HAS_SEQUENCES:
        # The token index so far counts through all sequences: take the whole ones out again.
        sequence = token // num_tokens
        positions_ptr += sequence * (positions_sequence_stride - num_tokens.to(tl.int64) * positions_token_stride)
        query_ptr += sequence * (query_sequence_stride - num_tokens.to(tl.int64) * query_token_stride)
        key_ptr += sequence * (key_sequence_stride - num_tokens.to(tl.int64) * key_token_stride)
        query_out_ptr += sequence * (query_out_sequence_stride - num_tokens.to(tl.int64) * query_out_token_stride)
        key_out_ptr += sequence * (key_out_sequence_stride - num_tokens.to(tl.int64) * key_out_token_stride)
    is_query = block < QUERY_BLOCKS
    head = ((block if is_query else block - QUERY_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)

    # The lanes first: their loads are under way while the row is found.
    if is_query:
        x1, x2 = _load_pairs(
            query_ptr, head, query_head_stride, query_lane_stride,
            QUERY_HEADS, HALF, IS_NEOX_STYLE, BLOCK_HEADS, BLOCK_PAIRS,
        )  # fmt: skip
    else:
        x1, x2 = _load_pairs(
            key_ptr, head, key_head_stride, key_lane_stride,
            KEY_HEADS, HALF, IS_NEOX_STYLE, BLOCK_HEADS, BLOCK_PAIRS,
        )  # fmt: skip

    # Each pair's position, and whether any lies outside the table.
    pair = tl.arange(0, BLOCK_PAIRS)
    pair_mask = pair < HALF
    position = tl.full([BLOCK_PAIRS], 0, positions_ptr.dtype.element_ty)
    outside = False
    for axis in tl.static_range(4):
        AXIS: tl.constexpr = AXIS_0 if axis == 0 else AXIS_1 if axis == 1 else AXIS_2 if axis == 2 else AXIS_3
        if AXIS != 0:
            on_axis = tl.load(positions_ptr + axis * tl.cast(positions_axis_stride, tl.int64))
            if AXIS_0 + AXIS_1 + AXIS_2 + AXIS_3 == AXIS:
                position += on_axis
            else:
                position = tl.where(_turns_with(AXIS, pair, BLOCK_PAIRS), on_axis, position)
            if HAS_CACHE:
                outside = outside | (on_axis < 0) | (on_axis >= cache_rows)

    inv_freq_ptrs = inv_freq_ptr + pair
    if HAS_CACHE:
        is_read = pair_mask & (position >= 0) & (position < cache_rows)
        row_ptrs = cos_sin_cache_ptr + position.to(tl.int64) * cache_row_stride + pair
        cos = tl.load(row_ptrs, mask=is_read, other=0.0)
        sin = tl.load(row_ptrs + HALF, mask=is_read, other=0.0)
        if outside:
            inv_freq = tl.load(inv_freq_ptrs, mask=pair_mask, other=0.0)
            computed_cos, computed_sin = _computed_row(position, inv_freq, attention_factor, SCALED, CACHE_DTYPE)
            cos = tl.where(is_read, cos, computed_cos)
            sin = tl.where(is_read, sin, computed_sin)
            if COUNT_COMPUTED:
                tl.atomic_add(rows_computed_ptr, 1, mask=block == 0, sem="relaxed")
    else:
        inv_freq = tl.load(inv_freq_ptrs, mask=pair_mask, other=0.0)
        cos, sin = _computed_row(position, inv_freq, attention_factor, SCALED, CACHE_DTYPE)

    # The rotation, with the roundings of the reference: every operation's result goes through ROUND_DTYPE.
    cos = cos.to(ROUND_DTYPE).to(WORK_DTYPE)[None, :]
    sin = sin.to(ROUND_DTYPE).to(WORK_DTYPE)[None, :]
    if INVERSE:
        sin = -sin
    x1 = x1.to(WORK_DTYPE)
    x2 = x2.to(WORK_DTYPE)
    o1 = (x1 * cos).to(ROUND_DTYPE).to(WORK_DTYPE) - (x2 * sin).to(ROUND_DTYPE).to(WORK_DTYPE)
    o2 = (x2 * cos).to(ROUND_DTYPE).to(WORK_DTYPE) + (x1 * sin).to(ROUND_DTYPE).to(WORK_DTYPE)
    o1 = o1.to(query_ptr.dtype.element_ty)
    o2 = o2.to(query_ptr.dtype.element_ty)

    if is_query:
        _store_pairs(
            query_out_ptr, o1, o2, head, query_out_head_stride, query_out_lane_stride,
            QUERY_HEADS, HALF, IS_NEOX_STYLE, BLOCK_HEADS, BLOCK_PAIRS,
        )  # fmt: skip
        if REST > 0:
            _copy_rest(
                query_ptr, query_out_ptr, head, query_head_stride, query_lane_stride,
                query_out_head_stride, query_out_lane_stride, QUERY_HEADS, HALF, REST, BLOCK_REST,
            )  # fmt: skip
    else:
        _store_pairs(
            key_out_ptr, o1, o2, head, key_out_head_stride, key_out_lane_stride,
            KEY_HEADS, HALF, IS_NEOX_STYLE, BLOCK_HEADS, BLOCK_PAIRS,
        )  # fmt: skip
        if REST > 0:
            _copy_rest(
                key_ptr, key_out_ptr, head, key_head_stride, key_lane_stride,
                key_out_head_stride, key_out_lane_stride, KEY_HEADS, HALF, REST, BLOCK_REST,
            )  # fmt: skip


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
) -> None:
    """Launch the kernel, once for each index of the dimensions before the last two of the tokens'.

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
    """
    if query.numel() == 0 and (key is None or key.numel() == 0):
        return
    if query.dim() > 4:
        for index in itertools.product(*map(range, query.shape[:-4])):
            rotate(
                query[index], None if key is None else key[index],
                query_out[index], None if key_out is None else key_out[index],
                positions[(slice(None), *index)], inv_freq, cos_sin_cache,
                axis_map=axis_map, is_neox_style=is_neox_style, attention_factor=attention_factor,
                cache_dtype=cache_dtype, round_dtype=round_dtype, inverse=inverse, rows_computed=rows_computed,
            )  # fmt: skip
        return
    if query.dim() == 3:
        query, query_out, positions = query[None], query_out[None], positions[:, None]
        key, key_out = (None, None) if key is None else (key[None], key_out[None])
    sequences, num_tokens, query_heads, head_size = query.shape
    key_heads = 0 if key is None else key.shape[2]
    half = inv_freq.shape[0]
    in_place = query_out.data_ptr() == query.data_ptr()
    if key is None:
        key, key_out = query, query_out
    masks = [sum(1 << i for i, of_pair in enumerate(axis_map) if of_pair == axis) for axis in range(4)]
    block_pairs = triton.next_power_of_2(half)
    block_heads = min(triton.next_power_of_2(max(query_heads, key_heads)), max(1, PAIRS_PER_PROGRAM // block_pairs))
    head_blocks = triton.cdiv(query_heads, block_heads) + triton.cdiv(key_heads, block_heads)
    num_warps = min(8, max(1, block_heads * block_pairs // (32 * PAIRS_PER_THREAD)))
    rest = 0 if in_place else head_size - 2 * half
    cache = inv_freq if cos_sin_cache is None else cos_sin_cache
    with torch.cuda.device(query.device) if query.is_cuda else torch.no_grad():
        _rotate_kernel[(sequences * num_tokens * head_blocks,)](
            query, key, query_out, key_out, positions, inv_freq, cache,
            inv_freq if rows_computed is None else rows_computed,
            num_tokens, cache.shape[0], attention_factor,
            *query.stride(), *key.stride(), *query_out.stride(), *key_out.stride(), *positions.stride(),
            cache.stride(0),
            QUERY_HEADS=query_heads, KEY_HEADS=key_heads, HALF=half, REST=rest, HAS_SEQUENCES=sequences > 1,
            AXIS_0=masks[0], AXIS_1=masks[1], AXIS_2=masks[2], AXIS_3=masks[3],
            IS_NEOX_STYLE=is_neox_style, INVERSE=inverse, HAS_CACHE=cos_sin_cache is not None,
            COUNT_COMPUTED=rows_computed is not None, SCALED=attention_factor != 1.0,
            CACHE_DTYPE=_TRITON_DTYPE[cache_dtype], ROUND_DTYPE=_TRITON_DTYPE[round_dtype],
            WORK_DTYPE=tl.float64 if query.dtype == torch.float64 else tl.float32,
            BLOCK_HEADS=block_heads, BLOCK_PAIRS=block_pairs, BLOCK_REST=triton.next_power_of_2(max(rest, 1)),
            num_warps=num_warps,
            # A product that is rounded must not be contracted with the sum that follows.
            enable_fp_fusion=False,
        )  # fmt: skip
