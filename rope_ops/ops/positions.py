"""``rope_ops::prepare_positions``: the rotary positions of a batch of requests, for any number of axes.

Each token decides by itself where its position comes from: a token below the end of its request's stored prefill
reads it there, any other takes its index in the sequence plus the request's delta. A chunk may cross that end.

The stored prefill has two forms, evaluated by the same code:

- a dense table ``[num_slots * num_dims, width]``, the layout of serving engines (``prefill_index`` is None);
- one flat store shared by all slots, with a row of ``prefill_index`` a slot: ``offset``, ``num_segments``,
  ``row_stride``, ``stored_len``. With ``num_segments`` 0 the slot's prefill is dense, axis ``d`` at
  ``offset + d * row_stride``. Otherwise it is ``3 + 4 * num_dims`` columns of ``num_segments`` values (see
  :class:`rope_ops.positions.Segments`).
"""

from __future__ import annotations

import torch

from rope_ops.ops._library import define, kernels

MAX_NUM_DIMS = 8
INDEX_COLUMNS = ("offset", "num_segments", "row_stride", "stored_len")


def _check(
    positions,
    prefill_positions,
    prefill_delta,
    idx_mapping,
    query_start_loc,
    prefill_lens,
    num_computed_tokens,
    prefill_index=None,
    num_tokens_padded=None,
) -> None:
    """What shapes, dtypes and devices alone can tell; the values of device tensors are not looked at."""
    name = "prepare_positions"
    if positions.dim() != 2:
        raise ValueError(
            f"{name}: positions must be 2-D [num_dims, columns], got shape {list(positions.shape)}; "
            "a single axis is [1, columns]"
        )
    num_dims, columns = positions.shape
    if not 1 <= num_dims <= MAX_NUM_DIMS:
        raise ValueError(f"{name}: positions must have 1 to {MAX_NUM_DIMS} axes, got {num_dims}")

    per_slot = {
        "prefill_delta": prefill_delta,
        "prefill_lens": prefill_lens,
        "num_computed_tokens": num_computed_tokens,
    }
    batch = per_slot | {"idx_mapping": idx_mapping, "query_start_loc": query_start_loc}
    dtypes: dict[str, tuple[torch.Tensor, tuple[torch.dtype, ...]]] = {
        "positions": (positions, (torch.int64,)),
        "prefill_positions": (prefill_positions, (torch.int32,)),
    }
    dtypes |= {label: (tensor, (torch.int32, torch.int64)) for label, tensor in batch.items()}
    if prefill_index is not None:
        dtypes["prefill_index"] = (prefill_index, (torch.int64,))
    for label, (tensor, allowed) in dtypes.items():
        if tensor.dtype not in allowed:
            raise TypeError(f"{name}: {label} must be {' or '.join(map(str, allowed))}, got {tensor.dtype}")
        if tensor.device != positions.device:
            raise ValueError(
                f"{name}: all tensors must be on the device of positions, {positions.device}, "
                f"got {label} on {tensor.device}"
            )
    for label, tensor in batch.items():
        if tensor.dim() != 1:
            raise ValueError(f"{name}: {label} must be 1-D, got shape {list(tensor.shape)}")

    # Sizes may be symbolic from here on: checks, not branches.
    num_slots, num_reqs = prefill_delta.shape[0], idx_mapping.shape[0]
    for label, tensor in per_slot.items():
        torch._check_value(
            tensor.shape[0] == num_slots,
            lambda label=label, tensor=tensor: (
                f"{name}: {label} must have one value a request slot, as prefill_delta "
                f"[{num_slots}] has, got [{tensor.shape[0]}]"
            ),
        )
    torch._check_value(
        query_start_loc.shape[0] == num_reqs + 1,
        lambda: (
            f"{name}: query_start_loc must have one value more than idx_mapping [{num_reqs}], "
            f"got [{query_start_loc.shape[0]}]"
        ),
    )
    if prefill_index is None:
        torch._check_value(
            prefill_positions.dim() == 2 and prefill_positions.shape[0] == num_slots * num_dims,
            lambda: (
                f"{name}: prefill_positions must be [num_slots * num_dims, width] = "
                f"[{num_slots} * {num_dims}, width], got shape {list(prefill_positions.shape)}"
            ),
        )
    else:
        torch._check_value(
            prefill_positions.dim() == 1,
            lambda: (
                f"{name}: prefill_positions must be the flat 1-D store where prefill_index is given, "
                f"got shape {list(prefill_positions.shape)}"
            ),
        )
        torch._check_value(
            prefill_index.dim() == 2
            and prefill_index.shape[0] == num_slots
            and prefill_index.shape[1] == len(INDEX_COLUMNS),
            lambda: (
                f"{name}: prefill_index must be [num_slots, {len(INDEX_COLUMNS)}] = [{num_slots}, "
                f"{len(INDEX_COLUMNS)}] ({', '.join(INDEX_COLUMNS)}), got shape {list(prefill_index.shape)}"
            ),
        )
    if num_tokens_padded is not None:
        torch._check_value(
            num_tokens_padded >= 0,
            lambda: f"{name}: num_tokens_padded must not be negative, got {num_tokens_padded}",
        )
        torch._check_value(
            num_tokens_padded <= columns,
            lambda: (
                f"{name}: num_tokens_padded must be at most the columns of positions, {columns}, "
                f"got {num_tokens_padded}"
            ),
        )


def _check_no_overlap(positions: torch.Tensor) -> None:
    if any(stride == 0 and size > 1 for size, stride in zip(positions.shape, positions.stride(), strict=True)):
        raise ValueError(
            "prepare_positions: positions must have an element of its own for each axis and column, "
            f"got an expanded tensor with strides {list(positions.stride())}"
        )


def _check_values(idx_mapping, starts, num_computed_tokens, num_slots: int, limit: int) -> None:
    """What only the values can tell: on CPU looking is free, on CUDA it would stop the stream."""
    name = "prepare_positions"
    lengths = starts.diff()
    if int(starts[0]) != 0 or bool((lengths < 0).any()):
        raise ValueError(f"{name}: query_start_loc must start at 0 and never fall, got {_shorten(starts)}")
    if int(starts[-1]) > limit:
        raise ValueError(
            f"{name}: query_start_loc ends at {int(starts[-1])} tokens, more than the {limit} columns to write "
            "(num_tokens_padded, or the columns of positions)"
        )
    slots = idx_mapping[lengths > 0]
    if bool(((slots < 0) | (slots >= num_slots)).any()):
        raise ValueError(f"{name}: idx_mapping must name slots from 0 to {num_slots - 1}, got {_shorten(slots)}")
    computed = num_computed_tokens[slots.long()]
    if bool((computed < 0).any()):
        raise ValueError(f"{name}: num_computed_tokens must not be negative, got {_shorten(computed)}")


def _shorten(values: torch.Tensor) -> str:
    shown = values[:8].tolist()
    return str(shown) if len(values) <= 8 else f"{str(shown)[:-1]}, ...]"


def _cpu(*args) -> None:
    _check(*args)
    _check_no_overlap(args[0])
    _write(*args)


def _write(
    positions,
    prefill_positions,
    prefill_delta,
    idx_mapping,
    query_start_loc,
    prefill_lens,
    num_computed_tokens,
    prefill_index=None,
    num_tokens_padded=None,
) -> None:
    """The whole batch in whole-tensor operations."""
    num_dims, columns = positions.shape
    starts = query_start_loc.long()
    limit = columns if num_tokens_padded is None else num_tokens_padded
    _check_values(idx_mapping, starts, num_computed_tokens, prefill_delta.shape[0], limit)

    num_tokens = int(starts[-1])
    request = torch.repeat_interleave(torch.arange(len(idx_mapping)), starts.diff(), output_size=num_tokens)
    slot = idx_mapping.long()[request]
    position = num_computed_tokens.long()[slot] + torch.arange(num_tokens) - starts[request]
    positions[:, :num_tokens] = position + prefill_delta.long()[slot]
    if num_tokens_padded is not None:
        positions[:, num_tokens:num_tokens_padded] = 0

    in_store = prefill_positions.shape[1] if prefill_index is None else prefill_index[:, 3][slot]
    is_stored = (position < prefill_lens[slot]) & (position < in_store)
    stored = is_stored.nonzero().squeeze(1)
    if prefill_index is None:
        rows = slot[stored] * num_dims + torch.arange(num_dims)[:, None]
        positions[:, stored] = prefill_positions[rows, position[stored]].long()
        return
    is_segmented = prefill_index[:, 1][slot[stored]] > 0
    for columns_of, evaluate in ((stored[~is_segmented], _dense), (stored[is_segmented], _segments)):
        if len(columns_of):
            index = prefill_index[slot[columns_of]]
            positions[:, columns_of] = evaluate(prefill_positions, index, position[columns_of], num_dims)


def _dense(store: torch.Tensor, index: torch.Tensor, position: torch.Tensor, num_dims: int) -> torch.Tensor:
    offset, _, row_stride, _ = index.unbind(1)
    return store[offset + position + torch.arange(num_dims)[:, None] * row_stride].long()


def _segments(store: torch.Tensor, index: torch.Tensor, position: torch.Tensor, num_dims: int) -> torch.Tensor:
    offset, num_segments, _, _ = index.unbind(1)
    # Binary search of all tokens at once: the last segment whose start is at or below the position.
    segment, span = torch.zeros_like(position), num_segments.clone()
    while int(span.max()) > 1:
        half = span // 2
        segment = torch.where(store[offset + segment + half] <= position, segment + half, segment)
        span -= half
    start, n1, n2, *coefficients = (
        store[offset + column * num_segments + segment].long() for column in range(3 + 4 * num_dims)
    )
    o = position - start
    base, a1, a2, a3 = torch.stack(coefficients).view(4, num_dims, -1)
    return base + a1 * (o % n1) + a2 * (o // n1 % n2) + a3 * (o // (n1 * n2))


def _cuda(*args) -> None:
    _check(*args)
    _check_no_overlap(args[0])
    kernels("positions", "prepare_positions").prepare_positions(*args)


def _vmap(info, in_dims, positions, *args):
    if in_dims[0] is None:
        raise ValueError(
            "prepare_positions: under vmap the positions it writes must be batched wherever another argument is, "
            "got one positions tensor for the whole batch"
        )
    for i in range(info.batch_size):
        one = [x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims[1:], strict=True)]
        torch.ops.rope_ops.prepare_positions(positions.select(in_dims[0], i), *one)
    return None, None


define(
    "prepare_positions(Tensor(a!) positions, Tensor prefill_positions, Tensor prefill_delta, Tensor idx_mapping, "
    "Tensor query_start_loc, Tensor prefill_lens, Tensor num_computed_tokens, Tensor? prefill_index=None, "
    "SymInt? num_tokens_padded=None) -> ()",
    cpu=_cpu,
    cuda=_cuda,
    fake=_check,
    vmap=_vmap,
)


def prepare_positions(
    positions: torch.Tensor,
    prefill_positions: torch.Tensor,
    prefill_delta: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    prefill_lens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    prefill_index: torch.Tensor | None = None,
    num_tokens_padded: int | None = None,
) -> None:
    """Write the positions of a batch of requests into ``positions``, one column a token.

    Token ``k`` of batch row ``r`` has index ``i = num_computed_tokens[slot] + k`` in its sequence, with
    ``slot = idx_mapping[r]``. Its position on axis ``d`` is the stored one where ``i`` is below both
    ``prefill_lens[slot]`` and the length in the store, else ``i + prefill_delta[slot]``.

    Nothing is read on the host, so a captured CUDA graph may be replayed with other values in the same tensors.

    Args:
        positions: int64 ``[num_dims, columns]``, any strides, 1 to 8 axes; written.
        prefill_positions: int32 ``[num_slots * num_dims, width]``, rows of a slot together; or the flat store that
            ``prefill_index`` describes.
        prefill_delta: ``[num_slots]``, tokens; 0 for variants without a delta.
        idx_mapping: ``[num_reqs]``, batch row to request slot, in any order. Rows of 0 tokens may hold anything.
        query_start_loc: ``[num_reqs + 1]``, first column of each batch row; starts at 0.
        prefill_lens: ``[num_slots]``, tokens of each request's prefill.
        num_computed_tokens: ``[num_slots]``, tokens computed before this step.
        prefill_index: int64 ``[num_slots, 4]``: offset, num_segments, row_stride, stored_len. None for a dense table.
        num_tokens_padded: columns from ``query_start_loc[-1]`` up to this number are written as 0. A host integer,
            at least the tokens of the batch; fixed when a CUDA graph is captured. Columns past it are left alone.

        Tensors without a dtype here are int32 or int64.

    Raises:
        ValueError: a shape, device or stride that does not fit; on CPU also values that do not fit (a falling
            ``query_start_loc``, more tokens than columns, a slot that does not exist, a negative count). On CUDA,
            where looking at values would stop the stream, no column outside ``positions`` is written, and the tokens
            of a slot that does not exist get -1.
        TypeError: a dtype that does not fit.
        RuntimeError: a CUDA tensor without Triton.
    """
    torch.ops.rope_ops.prepare_positions(
        positions,
        prefill_positions,
        prefill_delta,
        idx_mapping,
        query_start_loc,
        prefill_lens,
        num_computed_tokens,
        prefill_index,
        num_tokens_padded,
    )
