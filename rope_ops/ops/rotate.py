"""``rope_ops::rotate`` and ``rope_ops::rotate_``: turn query and key, with a table or with none.

On CUDA one Triton kernel reads positions, takes each token's row from the table or computes it from ``inv_freq``, and
reads and writes query and key once. On CPU blocks of tokens go through scratch buffers that stay in cache. Both give
the bits of :mod:`rope_ops.reference`.

A row that lies outside the table is computed, never read: the bits are those of a table long enough to hold it.
:func:`rows_computed` counts the tokens for which that happened.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from rope_ops.axes import MAX_AXES
from rope_ops.ops._library import define, kernels
from rope_ops.ops.cache import TABLE_DTYPES, _proofs, _proved_exact

ROTATED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROUNDINGS = ("cache", "float32")
_AXES = "".join(map(str, range(MAX_AXES)))

# Lanes turned at a time on CPU: temporaries of that size stay in cache, and there are few enough blocks that threads
# waiting for each other at the end of every operation does not show.
_BLOCK_LANES = 1 << 19


class _Form(NamedTuple):
    """The arguments that are not tensors, in the order of the schema.

    ``axis_map`` is a digit for each frequency: a list of so many numbers would cost more to pass through the
    dispatcher than all other arguments together.
    """

    head_size: int
    axis_map: str
    is_neox_style: bool
    attention_factor: float
    cache_dtype: torch.dtype | None
    rounding: str
    inverse: bool
    check_positions: bool


_ARGUMENTS = (
    "Tensor positions, Tensor inv_freq, Tensor? cos_sin_cache, SymInt head_size, str axis_map, bool is_neox_style, "
    "float attention_factor, ScalarType? cache_dtype, str rounding, bool inverse, bool check_positions"
)


def _heads(x: torch.Tensor, head_size: int) -> torch.Tensor:
    """``[*tokens, heads, head_size]``, a view."""
    return x.unflatten(-1, (x.shape[-1] // head_size, head_size)) if x.dim() == 2 else x


def _out_like(x: torch.Tensor) -> torch.Tensor:
    """The result's metadata, for every implementation: contiguous, whatever the strides of ``x``."""
    return x.new_empty(x.shape)


def _no_key(query: torch.Tensor) -> torch.Tensor:
    return query.new_empty((0,))


def _on_axes(positions: torch.Tensor, token_dims: int) -> torch.Tensor:
    """``[num_dims, *tokens]``, a view."""
    return positions if positions.dim() > token_dims else positions.unsqueeze(0)


def _require(holds: bool | torch.SymBool, message: Callable[[], str]) -> None:
    if holds is not True:
        torch._check_value(holds, message)


class _Like(NamedTuple):
    """What is checked of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def dim(self) -> int:
        return len(self.shape)


def _check_tensors(name: str, *tensors_and_form) -> None:
    """Check the arguments of a real call; the same shapes again cost a look-up."""
    *tensors, form = tensors_and_form
    _check_once(name, *(None if x is None else _Like(x.shape, x.dtype, x.device) for x in tensors), form)


def _check(
    name: str,
    query: torch.Tensor | _Like,
    key: torch.Tensor | _Like | None,
    positions: torch.Tensor | _Like,
    inv_freq: torch.Tensor | _Like,
    cos_sin_cache: torch.Tensor | _Like | None,
    form: _Form,
) -> None:
    head_size = form.head_size
    if form.rounding not in ROUNDINGS:
        raise ValueError(f"{name}: rounding must be one of {', '.join(map(repr, ROUNDINGS))}, got {form.rounding!r}")
    if not math.isfinite(form.attention_factor):
        raise ValueError(f"{name}: attention_factor must be finite, got {form.attention_factor}")
    if query.dtype not in ROTATED_DTYPES:
        raise TypeError(f"{name}: query must have one of {', '.join(map(str, ROTATED_DTYPES))}, got {query.dtype}")
    if form.rounding == "float32" and query.dtype == torch.float64:
        raise TypeError(f'{name}: rounding="float32" would lose bits of a torch.float64 query')

    # What rows are made of.
    if inv_freq.dim() != 1 or inv_freq.shape[0] == 0:
        raise ValueError(f"{name}: inv_freq must be 1-D [rotary_dim // 2], got shape {list(inv_freq.shape)}")
    if inv_freq.dtype != torch.float32:
        raise TypeError(f"{name}: inv_freq must be torch.float32, got {inv_freq.dtype}")
    half = inv_freq.shape[0]
    _require(
        2 * half <= head_size,
        lambda: f"{name}: rotary_dim = 2 * len(inv_freq) must be at most head_size {head_size}, got {2 * half}",
    )
    if cos_sin_cache is not None:
        if cos_sin_cache.dtype not in TABLE_DTYPES:
            raise TypeError(
                f"{name}: cos_sin_cache must have one of {', '.join(map(str, TABLE_DTYPES))}, got {cos_sin_cache.dtype}"
            )
        if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] != 2 * half:
            raise ValueError(
                f"{name}: cos_sin_cache must be [rows, rotary_dim] with rotary_dim = 2 * len(inv_freq) = {2 * half}, "
                f"got shape {list(cos_sin_cache.shape)}"
            )
        if form.cache_dtype not in (None, cos_sin_cache.dtype):
            raise TypeError(
                f"{name}: cache_dtype must be None or the dtype of cos_sin_cache, {cos_sin_cache.dtype}, "
                f"got {form.cache_dtype}"
            )
    elif form.cache_dtype not in (None, *TABLE_DTYPES):
        raise TypeError(
            f"{name}: cache_dtype must be one of {', '.join(map(str, TABLE_DTYPES))}, got {form.cache_dtype}"
        )

    # Query and key.
    for which, x in (("query", query), ("key", key)):
        if x is None:
            continue
        if x.dtype != query.dtype:
            raise TypeError(f"{name}: query and key must have one dtype, got {query.dtype} and {x.dtype}")
        if x.dim() < 2:
            raise ValueError(
                f"{name}: {which} must be [num_tokens, heads * head_size] or [..., heads, head_size], "
                f"got shape {list(x.shape)}"
            )
        if x.dim() == 2:
            _require(
                x.shape[1] % head_size == 0,
                lambda which=which, x=x: (  # type: ignore[misc]
                    f"{name}: the last size of a 2-D {which} must be heads * head_size with head_size {head_size}, "
                    f"got shape {list(x.shape)}"
                ),
            )
        else:
            _require(
                x.shape[-1] == head_size,
                lambda which=which, x=x: (  # type: ignore[misc]
                    f"{name}: the last size of {which} must be head_size {head_size}, got shape {list(x.shape)}"
                ),
            )
    tokens = query.shape[:1] if query.dim() == 2 else query.shape[:-2]
    if key is not None:
        key_tokens = key.shape[:1] if key.dim() == 2 else key.shape[:-2]
        _check_sizes(name, "query and key must have the same tokens", query, tokens, key, key_tokens)

    # Positions.
    if positions.dtype not in (torch.int64, torch.int32) and not (
        positions.dtype == torch.float32 and cos_sin_cache is None
    ):
        raise TypeError(
            f"{name}: positions must be torch.int64 or torch.int32 (or, without a table, torch.float32), "
            f"got {positions.dtype}"
        )
    if positions.dim() not in (len(tokens), len(tokens) + 1):
        raise ValueError(
            f"{name}: positions must be [num_tokens] or [num_dims, num_tokens] for query of shape "
            f"{list(query.shape)}, got shape {list(positions.shape)}"
        )
    axes = form.axis_map
    if len(axes) > 0 and len(axes) != half:
        raise ValueError(f"{name}: axis_map must be empty or have len(inv_freq) = {half} entries, got {len(axes)}")
    if axes.strip(_AXES):
        raise ValueError(f"{name}: axis_map must name axes 0 to {MAX_AXES - 1}, got {axes!r}")
    if positions.dim() > len(tokens):
        num_dims, needed = positions.shape[0], int(max(axes, default="0")) + 1
        if num_dims != 1 and not (needed <= num_dims <= MAX_AXES and len(axes) > 0):
            raise ValueError(
                f"{name}: axis_map turns with {needed} {'axis' if needed == 1 else 'axes'}, so positions must be "
                f"[num_tokens], [1, num_tokens] or {'have that many rows' if needed > 1 else 'no more'} "
                f"(at most {MAX_AXES}); got shape {list(positions.shape)} for query of shape {list(query.shape)}"
            )
    position_tokens = positions.shape[positions.dim() - len(tokens) :]
    _check_sizes(name, "positions must have the tokens of query", query, tokens, positions, position_tokens)

    # One device for everything: nothing is moved behind the caller's back.
    for which, x in (("key", key), ("positions", positions), ("inv_freq", inv_freq), ("cos_sin_cache", cos_sin_cache)):
        if x is not None and x.device != query.device:
            raise ValueError(
                f"{name}: every tensor must be on query's device, {query.device}; {which} is on {x.device}"
            )


_check_once = functools.lru_cache(maxsize=4096)(_check)


def _check_sizes(name: str, rule: str, query, tokens, other, other_tokens) -> None:
    def message() -> str:
        return f"{name}: {rule}, got shapes {list(query.shape)} and {list(other.shape)}"

    if len(tokens) != len(other_tokens):
        raise ValueError(message())
    for size, other_size in zip(tokens, other_tokens, strict=True):
        _require(size == other_size, message)


def _check_in_place(query: torch.Tensor, key: torch.Tensor | None) -> None:
    for which, x in (("query", query), ("key", key)):
        if x is not None and any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
            raise ValueError(
                f"rotate_: {which} must not be expanded (several elements share memory), got shape {list(x.shape)} "
                f"with strides {list(x.stride())}; use rotate"
            )
    if key is not None and key.numel() > 0 and key.data_ptr() == query.data_ptr():
        raise ValueError("rotate_: query and key must not be the same memory: it would be turned twice")


def _check_range(name: str, positions: torch.Tensor, cos_sin_cache: torch.Tensor | None, axis_map) -> None:
    """The checked mode: reads the extreme positions back, so it waits for the device."""
    if positions.numel() == 0:
        return
    used = sorted(map(int, set(axis_map))) if positions.shape[0] > 1 else [0]
    low, high = (bound.item() for bound in torch.stack([positions[axis] for axis in used]).aminmax())
    if low < 0:
        raise ValueError(f"{name}: positions must not be negative, got {low}")
    if cos_sin_cache is not None and high >= cos_sin_cache.shape[0]:
        raise ValueError(
            f"{name}: positions must be below the {cos_sin_cache.shape[0]} rows of cos_sin_cache, got {high}"
        )


# Counting rows computed although there is a table.

_counters: dict[torch.device, torch.Tensor] = {}


def _counter(device: torch.device) -> torch.Tensor | None:
    counter = _counters.get(device)
    if counter is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Memory made during a capture belongs to the graph: this graph goes uncounted.
            return None
        counter = _counters[device] = torch.zeros(1, dtype=torch.int64, device=device)
    return counter


def rows_computed(device: torch.device | str | None = None, reset: bool = False) -> int:
    """How many tokens were turned with a row that their table does not hold, since the start or the last reset.

    Such a row is computed from ``inv_freq``, so results are right; that it happens means a bound was too small. The
    count is kept on the device and costs nothing until it is read here, which waits for the device. A CUDA graph is
    counted at each replay, if an op ran on its device before the capture.

    Args:
        device: one device, or None for all of them.
        reset: set the count to 0 after reading it.
    """
    total = 0
    for of_device, counter in _counters.items():
        if device is None or torch.device(device) in (of_device, torch.device(of_device.type)):
            total += int(counter.item())
            if reset:
                counter.zero_()
    return total


# Rows with ATen, on any device.


class _Lanes(NamedTuple):
    """What to put in each lane of a tensor of rows: the axis of its position, its column in a table, its sign.

    ``pair_axes`` is the axis map.
    """

    pair_axes: torch.Tensor
    axes: torch.Tensor
    columns: torch.Tensor
    signs: torch.Tensor | None


@functools.lru_cache(maxsize=256)
def _table_lanes(axis_map: str, device: torch.device) -> _Lanes:
    """The lanes of a table's row, cos then sin."""
    axes = torch.tensor([int(axis) for axis in axis_map], device=device)
    return _Lanes(axes, torch.cat((axes, axes)), torch.arange(2 * len(axis_map), device=device), None)


@functools.lru_cache(maxsize=256)
def _factor_lanes(axis_map: str, is_neox_style: bool, inverse: bool, dtype: torch.dtype) -> _Lanes:
    """The lanes of ``C`` then ``S``, with ``x * C + swapped(x) * S`` the rotation of ``x``."""
    half = len(axis_map)
    pairs = [*range(half)] * 2 if is_neox_style else [i for i in range(half) for _ in range(2)]
    signs = [-1] * half + [1] * half if is_neox_style else [-1, 1] * half
    return _Lanes(
        torch.tensor([int(axis) for axis in axis_map], device="cpu"),
        torch.tensor([int(axis_map[i]) for i in pairs] * 2, device="cpu"),
        torch.tensor(pairs + [half + i for i in pairs], device="cpu"),
        torch.tensor([1] * (2 * half) + [-sign if inverse else sign for sign in signs], dtype=dtype, device="cpu"),
    )


def _rows(
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    cos_sin_cache: torch.Tensor | None,
    attention_factor: float,
    dtype: torch.dtype,
    lanes: _Lanes,
    all_inside: bool,
) -> torch.Tensor:
    """The rows of each token, ``[*tokens, len(lanes)]``, in the table's dtype and before signs.

    Args:
        positions: ``[num_dims, *tokens]``.
        dtype: that of the table, or that it would have.
        all_inside: no position is outside the table.
    """
    rotary_dim = 2 * inv_freq.shape[0]
    positions = positions.movedim(0, -1)
    if cos_sin_cache is not None:
        of_lane = positions.index_select(-1, lanes.axes)
        if all_inside:
            return cos_sin_cache.take(torch.add(lanes.columns, of_lane, alpha=rotary_dim))
        inside = (of_lane >= 0) & (of_lane < cos_sin_cache.shape[0])
        counter = _counter(positions.device)
        if counter is not None:
            counter.add_((~inside).any(-1).sum())
    # A new, contiguous tensor: ATen's cos takes another code path, with other last bits, on a strided one.
    angle = positions.to(torch.float32).index_select(-1, lanes.pair_axes).mul_(inv_freq)
    rows = torch.cat((angle.cos(), angle.sin()), dim=-1)
    if attention_factor != 1.0:
        rows.mul_(attention_factor)
    rows = rows.to(dtype).index_select(-1, lanes.columns)
    if cos_sin_cache is not None and cos_sin_cache.shape[0] > 0:
        index = torch.add(lanes.columns, torch.where(inside, of_lane, 0), alpha=rotary_dim)
        rows = torch.where(inside, cos_sin_cache.take(index), rows)
    return rows


# The rotation on CPU.


def _token_blocks(tokens: Sequence[int], limit: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices that cut ``[*tokens]`` into blocks of about ``limit`` tokens."""
    inner = math.prod(tokens[1:])
    if len(tokens) == 0 or tokens[0] * inner <= limit:
        yield ()
    elif inner >= limit:
        for i in range(tokens[0]):
            for rest in _token_blocks(tokens[1:], limit):
                yield (i, *rest)
    else:
        step = max(1, limit // inner)
        for start in range(0, tokens[0], step):
            yield (slice(start, start + step),)


def _turn(x: torch.Tensor, out: torch.Tensor, c: torch.Tensor, s: torch.Tensor, is_neox_style: bool) -> None:
    """Turn ``x`` into ``out``, which may be ``x``, rounding every result to the dtype of ``c`` and ``s``.

    Full-width operations: ``x1 * cos + x2 * (-sin)`` has the bits of ``x1 * cos - x2 * sin``, and a head takes four
    operations on contiguous lanes where the two halves, or every other lane, would take seven on shorter ones.
    """
    rotary_dim = c.shape[-1]
    if rotary_dim < x.shape[-1]:
        if out is not x:
            # The whole head: one copy of contiguous memory is quicker than three operations on part of it.
            out.copy_(x)
        x, out = x[..., :rotary_dim], out[..., :rotary_dim]
    if is_neox_style:
        swapped = x.roll(rotary_dim // 2, -1)
    else:
        swapped = torch.stack((x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    torch.add(x * c, swapped * s, out=out)


def _all_inside(positions: torch.Tensor, rows: int) -> bool:
    if positions.numel() == 0:
        return True
    if positions.numel() <= 16:
        # A list is the quicker way to look at a few numbers.
        values = positions.reshape(-1).tolist()
        return min(values) >= 0 and max(values) < rows
    low, high = positions.aminmax()
    return bool(low >= 0) and bool(high < rows)


def _cpu_into(name, query, key, query_out, key_out, positions, inv_freq, cos_sin_cache, form: _Form) -> None:
    heads = [(_heads(query, form.head_size), query_out)]
    if key is not None:
        heads.append((_heads(key, form.head_size), key_out))
    # In place, _turn is told by identity.
    heads = [
        (x, x if out is whole else _heads(out, form.head_size))
        for (x, out), whole in zip(heads, (query, key), strict=False)
    ]
    tokens = heads[0][0].shape[:-2]
    positions = _on_axes(positions, len(tokens))
    if form.check_positions:
        _check_range(name, positions, cos_sin_cache, form.axis_map)
    all_inside = cos_sin_cache is None or _all_inside(positions, cos_sin_cache.shape[0])
    cache_dtype = cos_sin_cache.dtype if cos_sin_cache is not None else form.cache_dtype or query.dtype
    round_dtype = query.dtype if form.rounding == "cache" else torch.float32
    rotary_dim = 2 * inv_freq.shape[0]
    axis_map = form.axis_map if positions.shape[0] > 1 else "0" * inv_freq.shape[0]
    lanes = _factor_lanes(axis_map, form.is_neox_style, form.inverse, round_dtype)
    assert lanes.signs is not None
    lanes_of_token = rotary_dim * max(1, *(x.shape[-2] for x, _ in heads), 1)
    for block in _token_blocks(tokens, max(1, _BLOCK_LANES // lanes_of_token)):
        index = (slice(None), *block)
        of_block = positions[index] if block else positions
        rows = _rows(of_block, inv_freq, cos_sin_cache, form.attention_factor, cache_dtype, lanes, all_inside)
        rows = rows.to(round_dtype).mul_(lanes.signs)
        c, s = rows.view(*rows.shape[:-1], 2, 1, rotary_dim).unbind(-3)
        for x, out in heads:
            if block:
                x, out = (x[block],) * 2 if out is x else (x[block], out[block])
            _turn(x, out, c, s, form.is_neox_style)


# The rotation on CUDA.


def _cuda_into(name, query, key, query_out, key_out, positions, inv_freq, cos_sin_cache, form: _Form) -> None:
    launcher = kernels("rotate", name)
    query, query_out = _heads(query, form.head_size), _heads(query_out, form.head_size)
    if key is not None:
        key, key_out = _heads(key, form.head_size), _heads(key_out, form.head_size)
    tokens = query.shape[:-2]
    positions = _on_axes(positions, len(tokens))
    if form.check_positions:
        _check_range(name, positions, cos_sin_cache, form.axis_map)
    half = inv_freq.shape[0]
    axis_map = form.axis_map if positions.shape[0] > 1 else "0" * half
    cache_dtype = cos_sin_cache.dtype if cos_sin_cache is not None else form.cache_dtype or query.dtype
    inv_freq = inv_freq.contiguous()
    if cos_sin_cache is not None and cos_sin_cache.stride(1) != 1:
        cos_sin_cache = cos_sin_cache.contiguous()
    if not _proved_exact(query.device.index):
        if query.is_cuda and query.device.index not in _proofs:
            raise RuntimeError(
                f"{name}: the first call on {query.device} must come before a CUDA graph capture: it compares the "
                "kernel's cos and sin with ATen's"
            )
        # Where the kernel's cos and sin are not known to be ATen's, ATen makes the rows: a table of one row a token.
        lanes = _table_lanes(axis_map, query.device)
        cos_sin_cache = _rows(
            positions, inv_freq, cos_sin_cache, form.attention_factor, cache_dtype, lanes, all_inside=False
        ).reshape(-1, 2 * half)
        positions = torch.arange(cos_sin_cache.shape[0], device=query.device).view(1, *tokens)
        axis_map = "0" * half
    launcher.rotate(
        query,
        key,
        query_out,
        key_out,
        positions,
        inv_freq,
        cos_sin_cache,
        axis_map=tuple(map(int, axis_map)),
        is_neox_style=form.is_neox_style,
        attention_factor=form.attention_factor,
        cache_dtype=cache_dtype,
        round_dtype=query.dtype if form.rounding == "cache" else torch.float32,
        inverse=form.inverse,
        rows_computed=None if cos_sin_cache is None else _counter(query.device),
    )


# The operators.


def _implementations(into):
    def rotate_(query, key, positions, inv_freq, cos_sin_cache, *form) -> None:
        form = _Form(*form)
        _check_tensors("rotate_", query, key, positions, inv_freq, cos_sin_cache, form)
        _check_in_place(query, key)
        into("rotate_", query, key, query, key, positions, inv_freq, cos_sin_cache, form)

    def rotate(query, key, positions, inv_freq, cos_sin_cache, *form) -> tuple[torch.Tensor, torch.Tensor]:
        form = _Form(*form)
        _check_tensors("rotate", query, key, positions, inv_freq, cos_sin_cache, form)
        query_out = _out_like(query)
        key_out = None if key is None else _out_like(key)
        into("rotate", query, key, query_out, key_out, positions, inv_freq, cos_sin_cache, form)
        return query_out, _no_key(query) if key_out is None else key_out

    return rotate, rotate_


_rotate_cpu, _rotate_cpu_ = _implementations(_cpu_into)
_rotate_cuda, _rotate_cuda_ = _implementations(_cuda_into)


def _fake(query, key, positions, inv_freq, cos_sin_cache, *form) -> tuple[torch.Tensor, torch.Tensor]:
    _check("rotate", query, key, positions, inv_freq, cos_sin_cache, _Form(*form))
    return _out_like(query), _no_key(query) if key is None else _out_like(key)


def _fake_(query, key, positions, inv_freq, cos_sin_cache, *form) -> None:
    _check("rotate_", query, key, positions, inv_freq, cos_sin_cache, _Form(*form))


def _setup_context(ctx, inputs, output) -> None:
    query, key, positions, inv_freq, cos_sin_cache, *form = inputs
    if ctx.needs_input_grad[3] or ctx.needs_input_grad[4]:
        raise RuntimeError(
            "rotate: inv_freq and cos_sin_cache have no gradient, got one that requires grad: detach it, or write the "
            "rotation with PyTorch operators"
        )
    ctx.save_for_backward(positions, inv_freq, cos_sin_cache)
    ctx.form = _Form(*form)


def _backward(ctx, grad_query: torch.Tensor, grad_key: torch.Tensor):
    """A rotation's transpose is its inverse: the same operator, so that it can be differentiated again."""
    needs_query, needs_key = ctx.needs_input_grad[:2]
    form = ctx.form._replace(inverse=not ctx.form.inverse, check_positions=False)
    if needs_query:
        grads = torch.ops.rope_ops.rotate(grad_query, grad_key if needs_key else None, *ctx.saved_tensors, *form)
    else:
        grads = (None, torch.ops.rope_ops.rotate(grad_key, None, *ctx.saved_tensors, *form)[0])
    return grads[0] if needs_query else None, grads[1] if needs_key else None, *(None,) * (3 + len(form))


def _vmap(info, in_dims, query, key, positions, inv_freq, cos_sin_cache, *form):
    """A batch is one more dimension of tokens; where rows differ too, one call for each element."""
    if in_dims[3] is not None or in_dims[4] is not None:
        tensors = (query, key, positions, inv_freq, cos_sin_cache)
        results = [torch.ops.rope_ops.rotate(*_element(tensors, in_dims, i), *form) for i in range(info.batch_size)]
        return tuple(torch.stack(of_one) for of_one in zip(*results, strict=True)), (0, 0)
    head_size = _Form(*form).head_size

    def batched(x: torch.Tensor | None, dim: int | None, at: int = 0) -> torch.Tensor | None:
        if x is None:
            return None
        if dim is not None:
            return x.movedim(dim, at)
        return x.unsqueeze(at).expand(*x.shape[:at], info.batch_size, *x.shape[at:])

    flat = [x is not None and x.dim() - (dim is not None) == 2 for x, dim in zip((query, key), in_dims, strict=False)]
    query, key = (batched(x, dim) for x, dim in zip((query, key), in_dims, strict=False))
    query, key = (
        x.unflatten(-1, (x.shape[-1] // head_size, head_size)) if is_flat else x
        for x, is_flat in zip((query, key), flat, strict=True)
    )
    positions_dim = positions.dim() - (in_dims[2] is not None)
    positions = batched(positions, in_dims[2], at=0 if positions_dim == query.dim() - 3 else 1)
    results = torch.ops.rope_ops.rotate(query, key, positions, inv_freq, cos_sin_cache, *form)
    turned = tuple(x.flatten(-2) if is_flat else x for x, is_flat in zip(results, flat, strict=True))
    return turned, (0, None if key is None else 0)


def _vmap_(info, in_dims, query, key, positions, inv_freq, cos_sin_cache, *form):
    for which, x, dim in (("query", query, in_dims[0]), ("key", key, in_dims[1])):
        if x is not None and dim is None:
            raise ValueError(f"rotate_: under vmap {which} must be batched, since it is written to; use rotate")
    tensors = (query, key, positions, inv_freq, cos_sin_cache)
    for i in range(info.batch_size):
        torch.ops.rope_ops.rotate_(*_element(tensors, in_dims, i), *form)
    return None, None


def _element(tensors, in_dims, i: int) -> list[torch.Tensor | None]:
    return [x if dim is None else x.select(dim, i) for x, dim in zip(tensors, in_dims, strict=False)]


# Any strides will do: the compiler need not copy an argument to make them what eager had.
_TAGS = tuple(getattr(torch.Tag, tag) for tag in ("pt2_compliant_tag", "flexible_layout") if hasattr(torch.Tag, tag))

define(
    f"rotate(Tensor query, Tensor? key, {_ARGUMENTS}) -> (Tensor, Tensor)",
    cpu=_rotate_cpu,
    cuda=_rotate_cuda,
    fake=_fake,
    tags=_TAGS,
    setup_context=_setup_context,
    backward=_backward,
    vmap=_vmap,
)
define(
    f"rotate_(Tensor(a!) query, Tensor(b!)? key, {_ARGUMENTS}) -> ()",
    cpu=_rotate_cpu_,
    cuda=_rotate_cuda_,
    fake=_fake_,
    tags=_TAGS,
    vmap=_vmap_,
)

_rotate_op = torch.ops.rope_ops.rotate.default
_rotate_op_ = torch.ops.rope_ops.rotate_.default


def rotate(
    query: torch.Tensor,
    key: torch.Tensor | None,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    cos_sin_cache: torch.Tensor | None = None,
    *,
    head_size: int | None = None,
    axis_map: Sequence[int] | str = (),
    is_neox_style: bool = True,
    attention_factor: float = 1.0,
    cache_dtype: torch.dtype | None = None,
    rounding: str = "cache",
    inverse: bool = False,
    check_positions: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Turn query and key by their positions, from a table of cos and sin or, without one, straight from ``inv_freq``.

    The first ``rotary_dim = 2 * len(inv_freq)`` lanes of each head turn, the others are copied. Differentiable in
    query and key, any number of times. The bits are those of :mod:`rope_ops.reference` in eager PyTorch on the same
    device, for either rounding, and with a table or without.

    Args:
        query: ``[num_tokens, heads * head_size]`` or ``[..., heads, head_size]``, any strides; float32, bfloat16,
            float16 or float64. ``...`` is one or more dimensions of tokens.
        key: the same with its own number of heads, or None.
        positions: ``[num_tokens]`` or ``[num_dims, num_tokens]`` (``...`` for ``num_tokens`` with the second form of
            query), int64 or int32; without a table also float32, for positions that are fractions. One row stands for
            equal rows. A negative position turns backwards: its row is computed, in either form.
        inv_freq: float32 ``[rotary_dim // 2]``, radians a position.
        cos_sin_cache: ``[rows, rotary_dim]``, cos in the first half of a row and sin in the second. A row outside it
            is computed: see :func:`rows_computed`. None computes every row.
        head_size: needed with the first form of query.
        axis_map: for each frequency the row of ``positions`` it turns with, as :func:`rope_ops.axes.axis_map` makes
            it, or the same as a string of digits (quicker); empty for one axis.
        is_neox_style: True pairs lane ``i`` with ``i + rotary_dim // 2``; False pairs lanes ``2i`` and ``2i + 1``.
        attention_factor: multiplies computed cos and sin in float32, before the cast; a table holds it already.
        cache_dtype: without a table, the dtype it would have (float32, bfloat16 or float16), which rows are rounded
            to; None for query's.
        rounding: "cache": rows are cast to query's dtype, and each product and sum is rounded to it, as serving
            engines do. "float32": products and sums in float32, one rounding at the end; with
            ``cache_dtype=torch.float32`` that is the rotation of Ernie-4.5-VL.
        inverse: turn the other way.
        check_positions: raise for a negative position and for one that the table does not hold. Waits for the device,
            so not for use in a CUDA graph.

    Returns:
        Contiguous results in the shapes of query and key; None for a key that is None.

    Raises:
        ValueError: shapes that do not fit together, tensors on different devices, an unknown rounding, an axis map
            that names an axis positions do not have; with ``check_positions``, a position out of range.
        TypeError: a dtype that is not listed above.
        RuntimeError: a table or frequencies that require grad; a CUDA tensor without Triton.
    """
    _register_sharding()
    query_out, key_out = _rotate_op(
        query,
        key,
        positions,
        inv_freq,
        cos_sin_cache,
        _head_size("rotate", query, head_size),
        _digits(axis_map),
        is_neox_style,
        attention_factor,
        cache_dtype,
        rounding,
        inverse,
        check_positions,
    )
    return query_out, None if key is None else key_out


def rotate_(
    query: torch.Tensor,
    key: torch.Tensor | None,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    cos_sin_cache: torch.Tensor | None = None,
    *,
    head_size: int | None = None,
    axis_map: Sequence[int] | str = (),
    is_neox_style: bool = True,
    attention_factor: float = 1.0,
    cache_dtype: torch.dtype | None = None,
    rounding: str = "cache",
    inverse: bool = False,
    check_positions: bool = False,
) -> None:
    """:func:`rotate` in place: the memory of query and key is written, whatever their strides, and nothing around it.

    Has no gradient: raises ``RuntimeError`` where a tensor requires grad and grad mode is on. Raises ``ValueError``
    for an expanded query or key, and where the two are the same memory.
    """
    _register_sharding()
    _rotate_op_(
        query,
        key,
        positions,
        inv_freq,
        cos_sin_cache,
        _head_size("rotate_", query, head_size),
        _digits(axis_map),
        is_neox_style,
        attention_factor,
        cache_dtype,
        rounding,
        inverse,
        check_positions,
    )


def _register_sharding() -> bool:
    """DTensor's rules, where DTensor is in use: it is not imported for the sake of knowing them."""
    if "torch.distributed.tensor" in sys.modules:
        from rope_ops import distributed

        distributed.register()
    return True


# Called while torch.compile traces, not traced: what torch.compiler.assume_constant_result does, which would import
# torch._dynamo.
setattr(_register_sharding, "_dynamo_marked_constant", True)  # noqa: B010


def _head_size(name: str, query: torch.Tensor, head_size: int | None) -> int:
    if head_size is not None:
        if head_size <= 0:
            raise ValueError(f"{name}: head_size must be positive, got {head_size}")
        return head_size
    if query.dim() < 3:
        raise ValueError(
            f"{name}: head_size must be given for query of shape {list(query.shape)}; only "
            "[..., heads, head_size] tells it"
        )
    return query.shape[-1]


def _digits(axis_map: Sequence[int] | str) -> str:
    return axis_map if isinstance(axis_map, str) else "".join(map(str, axis_map))
