"""The peer of the position benchmark: one program a request, from a dense table. It is no part of the package."""

import triton
import triton.language as tl


@triton.jit
def _one_program_a_request_kernel(
    positions_ptr,
    positions_stride,
    prefill_positions_ptr,
    prefill_positions_stride,
    prefill_delta_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    prefill_lens_ptr,
    num_computed_tokens_ptr,
    NUM_DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(idx_mapping_ptr + request).to(tl.int64)
    start = tl.load(query_start_loc_ptr + request)
    length = tl.load(query_start_loc_ptr + request + 1) - start
    computed = tl.load(num_computed_tokens_ptr + slot)
    is_prefill = computed < tl.load(prefill_lens_ptr + slot)
    delta = tl.load(prefill_delta_ptr + slot)
    for block in range(0, length, BLOCK):
        offset = block + tl.arange(0, BLOCK)
        mask = offset < length
        index = computed + offset
        for dim in tl.static_range(NUM_DIMS):
            if is_prefill:
                row = prefill_positions_ptr + (slot * NUM_DIMS + dim) * prefill_positions_stride
                value = tl.load(row + index, mask=mask, other=0)
            else:
                value = index + delta
            tl.store(positions_ptr + dim * positions_stride + start + offset, value.to(tl.int64), mask=mask)


def launch(positions, table, delta, idx_mapping, query_start_loc, prefill_lens, num_computed_tokens):
    """Launch the peer; tensors as for `rope_ops.prepare_positions` with a dense table, columns contiguous."""
    _one_program_a_request_kernel[(idx_mapping.shape[0],)](
        positions,
        positions.stride(0),
        table,
        table.stride(0),
        delta,
        idx_mapping,
        query_start_loc,
        prefill_lens,
        num_computed_tokens,
        NUM_DIMS=positions.shape[0],
        BLOCK=1024,
    )
