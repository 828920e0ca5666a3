"""Positions of a batch in one launch, parallel over requests and over blocks of a long request.

The grid is one program a request, then one a tile of ``BLOCK`` columns. A request's own program writes its first
``BLOCK`` tokens and needs no search, so a decode batch costs what one program a request costs. A tile writes those of
its columns that lie ``BLOCK`` or more into their request: that can only be the request that holds the tile's first
column, since one that starts inside the tile ends its first ``BLOCK`` tokens at or past the tile's end. One search a
tile is therefore enough, and every token is written exactly once. Tiles also write the zeros of the padding.

The grid is made of sizes that the host knows (requests, columns), never of lengths that live on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Tokens of one program. Small enough that a long chunk spreads over the device, large enough that the tiles of an
# ordinary token budget are few beside the requests.
BLOCK = 256


@triton.jit
def _count_at_or_below(values_ptr, size, x, FANOUT: tl.constexpr):
    """How many of the ``size`` ascending values are at or below ``x``; each round divides the range by FANOUT."""
    lanes = tl.arange(0, FANOUT)
    count = size * 0
    while size > 0:
        step = (size + FANOUT - 1) // FANOUT
        index = lanes * step
        inside = index < size
        values = tl.load(values_ptr + count + index, mask=inside, other=0)
        pivots = tl.sum((inside & (values <= x)).to(tl.int32), axis=0).to(size.dtype)
        # The answer lies between the last pivot at or below x and the next one.
        skipped = (pivots - 1) * step + 1
        remaining = tl.minimum(step - 1, size - skipped)
        size = tl.where(pivots == 0, 0, remaining)
        count += tl.where(pivots == 0, 0, skipped)
    return count


# These change from step to step or between engines: a variant for multiples of 16 would be compiled while serving.
_SIZES = (
    "positions_stride_dim",
    "prefill_positions_stride_row",
    "prefill_positions_width",
    "num_reqs",
    "num_slots",
    "limit",
)


@triton.jit(do_not_specialize=_SIZES)
def _prepare_positions_kernel(
    # output [NUM_DIMS, limit or more]
    positions_ptr,
    positions_stride_dim,
    positions_stride_token,
    # stored prefill: a dense table, or the flat store and its index [num_slots, 4]
    prefill_positions_ptr,
    prefill_positions_stride_row,
    prefill_positions_stride_token,
    prefill_positions_width,
    prefill_index_ptr,
    prefill_delta_ptr,
    # batch
    idx_mapping_ptr,
    query_start_loc_ptr,
    prefill_lens_ptr,
    num_computed_tokens_ptr,
    # sizes
    num_reqs,
    num_slots,
    limit,
    # constexprs
    NUM_DIMS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    ZERO_PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    num_reqs = tl.cast(num_reqs, tl.int64)
    positions_stride_dim = tl.cast(positions_stride_dim, tl.int64)

    # Which request, and which of its columns: [begin, stop).
    request = program
    tile = (program - num_reqs) * BLOCK
    if program >= num_reqs:
        request = _count_at_or_below(query_start_loc_ptr, num_reqs, tile, BLOCK) - 1
        if ZERO_PADDING:
            num_tokens = tl.load(query_start_loc_ptr + num_reqs).to(tl.int64)
            column = tile + lanes
            padding = (column >= num_tokens) & (column < limit)
            zero = tl.zeros([BLOCK], tl.int64)
            for dim in tl.static_range(NUM_DIMS):
                out_ptrs = positions_ptr + dim * positions_stride_dim + column * positions_stride_token
                tl.store(out_ptrs, zero, mask=padding)

    # These three loads depend on nothing: their latencies overlap. A batch row of 0 tokens may hold any slot, so the
    # slot is used further down only. Without a request (an empty batch) all three are 0 and nothing is written.
    found = request >= 0
    start = tl.load(query_start_loc_ptr + request, mask=found, other=0).to(tl.int64)
    end = tl.load(query_start_loc_ptr + request + 1, mask=found, other=0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + request, mask=found, other=0).to(tl.int64)
    begin = start
    stop = tl.minimum(end, start + BLOCK)
    if program >= num_reqs:
        begin = tl.maximum(tile, start + BLOCK)
        stop = tl.minimum(end, tile + BLOCK)
    stop = tl.minimum(stop, limit)

    if begin < stop:
        # A slot that does not exist is not looked up: it stores nothing, and its tokens get -1.
        known = (slot >= 0) & (slot < num_slots)
        computed = tl.load(num_computed_tokens_ptr + slot, mask=known, other=0).to(tl.int64)
        stored_len = tl.load(prefill_lens_ptr + slot, mask=known, other=0).to(tl.int64)
        delta = tl.load(prefill_delta_ptr + slot, mask=known, other=0).to(tl.int64)
        if HAS_INDEX:
            index_ptr = prefill_index_ptr + slot * 4
            prefill_ptr = prefill_positions_ptr + tl.load(index_ptr, mask=known, other=0)
            num_segments = tl.load(index_ptr + 1, mask=known, other=0)
            stride_row = tl.load(index_ptr + 2, mask=known, other=0)
            stride_token = 1
            stored_len = tl.minimum(stored_len, tl.load(index_ptr + 3, mask=known, other=0))
        else:
            stride_row = tl.cast(prefill_positions_stride_row, tl.int64)
            stride_token = prefill_positions_stride_token
            prefill_ptr = prefill_positions_ptr + slot * NUM_DIMS * stride_row
            num_segments = tl.zeros([], tl.int64)
            stored_len = tl.minimum(stored_len, prefill_positions_width)

        column = begin + lanes
        mask = column < stop
        position = computed + (column - start)
        is_stored = mask & (position >= 0) & (position < stored_len)
        out_ptrs = positions_ptr + column * positions_stride_token
        first = computed + (begin - start)

        if first >= stored_len:
            value = tl.where(known, position + delta, -1)
            for dim in tl.static_range(NUM_DIMS):
                tl.store(out_ptrs + dim * positions_stride_dim, value, mask=mask)
        elif num_segments == 0:
            for dim in tl.static_range(NUM_DIMS):
                prefill_ptrs = prefill_ptr + dim * stride_row + position * stride_token
                stored = tl.load(prefill_ptrs, mask=is_stored, other=0).to(tl.int64)
                value = tl.where(is_stored, stored, position + delta)
                tl.store(out_ptrs + dim * positions_stride_dim, value, mask=mask)
        else:
            # The segments that this block meets: a segment has a token at least, so they are BLOCK at most.
            # (A negative count of computed tokens is the caller's mistake, but reads nothing before the first one.)
            segment = _count_at_or_below(prefill_ptr, num_segments, tl.maximum(first, 0), BLOCK) - 1
            last = tl.minimum(computed + (stop - 1 - start), stored_len - 1)
            ahead = segment + lanes < num_segments
            starts = tl.load(prefill_ptr + segment + lanes, mask=ahead, other=0)
            span = tl.sum((ahead & (starts <= last)).to(tl.int32), axis=0)
            # Each lane finds its own among them, in as many steps as their number asks for.
            segments = segment + tl.zeros([BLOCK], tl.int64)
            while span > 1:
                half = span // 2
                probe = tl.load(prefill_ptr + segments + half, mask=is_stored, other=0)
                segments = tl.where(probe <= position, segments + half, segments)
                span -= half
            field_ptrs = prefill_ptr + segments
            o = (position - tl.load(field_ptrs, mask=is_stored, other=0)).to(tl.int32)
            n1 = tl.load(field_ptrs + num_segments, mask=is_stored, other=1)
            n2 = tl.load(field_ptrs + 2 * num_segments, mask=is_stored, other=1)
            i1 = o % n1
            i2 = o // n1 % n2
            i3 = o // n1 // n2
            for dim in tl.static_range(NUM_DIMS):
                base = tl.load(field_ptrs + (3 + dim) * num_segments, mask=is_stored, other=0)
                a1 = tl.load(field_ptrs + (3 + NUM_DIMS + dim) * num_segments, mask=is_stored, other=0)
                a2 = tl.load(field_ptrs + (3 + 2 * NUM_DIMS + dim) * num_segments, mask=is_stored, other=0)
                a3 = tl.load(field_ptrs + (3 + 3 * NUM_DIMS + dim) * num_segments, mask=is_stored, other=0)
                stored = (base + a1 * i1 + a2 * i2 + a3 * i3).to(tl.int64)
                value = tl.where(is_stored, stored, position + delta)
                tl.store(out_ptrs + dim * positions_stride_dim, value, mask=mask)


def prepare_positions(positions: torch.Tensor, *args) -> None:
    """Launch the kernel on the device of ``positions``; arguments as for :func:`launch`."""
    with torch.cuda.device(positions.device):
        launch(positions, *args)


def launch(
    positions: torch.Tensor,
    prefill_positions: torch.Tensor,
    prefill_delta: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    prefill_lens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    prefill_index: torch.Tensor | None = None,
    num_tokens_padded: int | None = None,
    *,
    block: int = BLOCK,
) -> None:
    """Launch the kernel on the current device; arguments as for :func:`rope_ops.prepare_positions`, checked there."""
    num_dims, columns = positions.shape
    limit = columns if num_tokens_padded is None else num_tokens_padded
    num_reqs = idx_mapping.shape[0]
    grid = num_reqs + triton.cdiv(limit, block)
    if grid == 0:
        return
    if prefill_index is None:
        stride_row, stride_token = prefill_positions.stride()
        width = prefill_positions.shape[1]
        # Not read: any pointer will do.
        index = prefill_delta
    else:
        prefill_positions = prefill_positions.contiguous()
        stride_row, stride_token, width = 0, 1, 0
        index = prefill_index.contiguous()
    _prepare_positions_kernel[(grid,)](
        positions,
        positions.stride(0),
        positions.stride(1),
        prefill_positions,
        stride_row,
        stride_token,
        width,
        index,
        prefill_delta.contiguous(),
        idx_mapping.contiguous(),
        query_start_loc.contiguous(),
        prefill_lens.contiguous(),
        num_computed_tokens.contiguous(),
        num_reqs,
        prefill_delta.shape[0],
        limit,
        NUM_DIMS=num_dims,
        HAS_INDEX=prefill_index is not None,
        ZERO_PADDING=num_tokens_padded is not None,
        BLOCK=block,
        num_warps=4,
    )
