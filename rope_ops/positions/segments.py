"""Prefill positions as affine pieces: exact, and some hundred times smaller than a value a token and axis.

Text is a run in which all axes grow by one; an image is an ``h x w`` grid; a video a ``t x h x w`` grid. Each is one
segment: with ``o`` the index of a token in its segment,

    i1 = o % n1        i2 = o // n1 % n2        i3 = o // (n1 * n2)
    position[d] = base[d] + a1[d] * i1 + a2[d] * i2 + a3[d] * i3

Segments are built straight from the grids (:class:`SegmentBuilder`) or found in dense positions
(:meth:`Segments.from_dense`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

# Columns before the coefficients: start, n1, n2.
_HEADER = 3
_MAX_POSITION = np.iinfo(np.int32).max


class Segments:
    """The positions of one prefill, ``[num_dims, length]``, as a table of segments.

    Attributes:
        table: int32 ``[3 + 4 * num_dims, num_segments]``, contiguous: rows ``start``, ``n1``, ``n2``, then ``num_dims``
            rows each of ``base``, ``a1``, ``a2``, ``a3``. ``start`` rises from 0.
        length: tokens.
    """

    def __init__(self, table: np.ndarray, length: int):
        self.table = np.ascontiguousarray(table, dtype=np.int32)
        self.length = length
        start = self.table[0]
        if (self.table.shape[0] - _HEADER) % 4 or self.table.shape[0] <= _HEADER:
            raise ValueError(f"Segments: table must have 3 + 4 * num_dims rows, got {self.table.shape[0]}")
        if length and (not len(start) or start[0] != 0 or (np.diff(start) <= 0).any() or start[-1] >= length):
            raise ValueError(f"Segments: starts must rise from 0 and stay below the length {length}, got {start[:8]}")
        if (self.table[1:3] < 1).any():
            raise ValueError("Segments: n1 and n2 must be 1 or more")
        if (np.diff(start, append=length) % (self.table[1].astype(np.int64) * self.table[2])).any():
            raise ValueError("Segments: each segment must hold a whole number of n1 x n2 planes")

    @property
    def num_dims(self) -> int:
        return (self.table.shape[0] - _HEADER) // 4

    @property
    def num_segments(self) -> int:
        return self.table.shape[1]

    @property
    def nbytes(self) -> int:
        return self.table.nbytes

    @functools.cached_property
    def max_position(self) -> int:
        """The largest position on any axis; -1 without tokens."""
        return int(self._extremes()[1].max(initial=-1))

    @property
    def delta(self) -> int:
        """What a token after the prefill adds to its index: ``max_position + 1 - length``, as every family has it."""
        return self.max_position + 1 - self.length

    def _extremes(self) -> tuple[np.ndarray, np.ndarray]:
        """Smallest and largest position of each segment and axis: an affine function takes them at the corners."""
        table = self.table.astype(np.int64)
        start, n1, n2 = table[:_HEADER]
        low, *slopes = table[_HEADER:].reshape(4, self.num_dims, -1)
        high = low.copy()
        n3 = np.diff(start, append=self.length) // (n1 * n2)
        for slope, count in zip(slopes, (n1, n2, n3), strict=True):
            reach = slope * (count - 1)
            low = low + np.minimum(reach, 0)
            high += np.maximum(reach, 0)
        return low, high

    def to_dense(self) -> np.ndarray:
        """The positions, int64 ``[num_dims, length]``."""
        start, n1, n2 = (row.astype(np.int64) for row in self.table[:_HEADER])
        segment = np.repeat(np.arange(self.num_segments), np.diff(start, append=self.length))
        o = np.arange(self.length) - start[segment]
        n1, n2 = n1[segment], n2[segment]
        base, a1, a2, a3 = self.table[_HEADER:].astype(np.int64).reshape(4, self.num_dims, -1)[:, :, segment]
        return base + a1 * (o % n1) + a2 * (o // n1 % n2) + a3 * (o // (n1 * n2))

    @classmethod
    def from_dense(cls, positions: np.ndarray) -> Segments:
        """Find the segments of dense positions.

        Args:
            positions: integers ``[num_dims, length]``, from 0 to 2**31 - 1.

        Raises:
            TypeError: positions that are not integers.
            ValueError: another shape, a negative position, or one past int32.
        """
        positions = check_dense(positions)
        tokens = _Pieces(np.arange(positions.shape[1]), np.empty((0, positions.shape[1]), np.int64), positions)
        rows = tokens.merge()
        rows.return_first_of_row(positions)
        blocks = rows.merge().merge()
        # keys hold (a1, n1), (a2, n2), (a3, n3), one level after another; n3 follows from the next start.
        levels = blocks.keys.reshape(3, positions.shape[0] + 1, len(blocks.start))
        slopes, counts = levels[:, :-1], levels[:, -1]
        table = np.concatenate(
            (blocks.start[None], counts[:2], blocks.base, slopes.reshape(3 * len(positions), len(blocks.start)))
        )
        return cls(table, positions.shape[1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segments) and self.length == other.length and np.array_equal(self.table, other.table)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"Segments(num_dims={self.num_dims}, length={self.length}, num_segments={self.num_segments}, "
            f"{self.nbytes} bytes)"
        )


class SegmentBuilder:
    """Collect the blocks of a prompt, in order, as segments.

    Example::

        builder = SegmentBuilder(num_dims=3)
        builder.text(2, at=0)
        builder.grid((2, 2), base=(2, 2, 2), slopes=((0, 0, 1), (0, 1, 0)))
        segments = builder.build()
    """

    def __init__(self, num_dims: int):
        self.num_dims = num_dims
        self.length = 0
        self._columns: list[tuple[int, ...]] = []
        self._zero = (0,) * num_dims
        self._one = (1,) * num_dims

    def text(self, num_tokens: int, at: int) -> None:
        """``num_tokens`` tokens with the positions ``at``, ``at + 1``, ... on every axis."""
        self.grid((num_tokens,), (at,) * self.num_dims, (self._one,))

    def grid(self, counts: Sequence[int], base: Sequence[int], slopes: Sequence[Sequence[int]]) -> None:
        """A grid of tokens in memory order.

        Args:
            counts: tokens along the fastest axis, then along the slower ones: one to three numbers.
            base: position of the first token, a number an axis.
            slopes: for each of ``counts``, what one step along it adds to the position.
        """
        sizes: list[int] = [1, 1, 1]
        steps: list[Sequence[int]] = [self._zero] * 3
        for i, (count, slope) in enumerate(zip(counts, slopes, strict=True)):
            # A step that is never taken is written as 0, so that equal positions have equal tables.
            if count > 1:
                sizes[i], steps[i] = count, slope
            elif count < 1:
                return
        self._columns.append((self.length, sizes[0], sizes[1], *base, *steps[0], *steps[1], *steps[2]))
        self.length += sizes[0] * sizes[1] * sizes[2]

    def build(self) -> Segments:
        """The segments of everything added so far.

        Raises:
            ValueError: a position below 0 or past int32.
        """
        rows = _HEADER + 4 * self.num_dims
        table = np.array(self._columns, dtype=np.int64).reshape(-1, rows).T
        if np.abs(table).max(initial=0) > _MAX_POSITION:
            raise ValueError(f"SegmentBuilder: positions must stay below 2**31, got {np.abs(table).max()}")
        segments = Segments(table, self.length)
        low, high = segments._extremes()
        lowest, segments.max_position = int(low.min(initial=0)), int(high.max(initial=-1))
        if lowest < 0 or segments.max_position > _MAX_POSITION:
            raise ValueError(
                f"SegmentBuilder: positions must be from 0 to 2**31 - 1, got {lowest} to {segments.max_position}"
            )
        return segments


def check_dense(positions: np.ndarray) -> np.ndarray:
    """Dense positions as int64 ``[num_dims, length]``, or an error that says what is wrong with them."""
    positions = np.asarray(positions)
    if positions.ndim != 2 or positions.shape[0] < 1:
        raise ValueError(f"positions must be 2-D [num_dims, length], got shape {list(positions.shape)}")
    if positions.dtype.kind not in "iu":
        raise TypeError(f"positions must be integers, got {positions.dtype}")
    if positions.size:
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high > _MAX_POSITION:
            raise ValueError(f"positions must be from 0 to 2**31 - 1, got {low} to {high}")
    return positions.astype(np.int64)


class _Pieces:
    """Consecutive pieces of a prompt that may be merged: equal keys, and bases that rise by a constant step.

    Attributes:
        start: ``[n]``, first token of each piece.
        keys: ``[k, n]``, the shape of each piece; only pieces with the same key merge.
        base: ``[num_dims, n]``, position of the first token.
    """

    def __init__(self, start: np.ndarray, keys: np.ndarray, base: np.ndarray):
        self.start, self.keys, self.base = start, keys, base

    def merge(self) -> _Pieces:
        """Merge from left to right, each time as far as the step stays the same; a merged piece appends its step and
        count to the key.

        A sequential greedy walk in whole-array operations. Between two pieces lies a step. Steps that are equal form a
        run of ``run_length``; steps between pieces of different keys are barriers, each a run of its own. A merged
        piece that ends where its run of steps ends has consumed the next step too (the jump to the next piece), so the
        only state of the walk is whether the first step of a run is consumed already.
        """
        num_dims, n = self.base.shape
        if n < 2:
            return self._grouped(np.arange(n), np.ones(n, np.int64), np.zeros((num_dims, n), np.int64))
        step = np.diff(self.base, axis=1)
        barrier = (self.keys[:, 1:] != self.keys[:, :-1]).any(axis=0)
        new_run = np.ones(n - 1, bool)
        new_run[1:] = (step[:, 1:] != step[:, :-1]).any(axis=0) | barrier[1:] | barrier[:-1]
        run_start = np.flatnonzero(new_run)
        run_length = np.diff(run_start, append=n - 1)
        run_barrier = barrier[run_start]

        # consumed_after: after a barrier never; after a run of two steps or more always; a single step toggles.
        runs = len(run_start)
        fixed = run_barrier | (run_length >= 2)
        last_fixed = np.maximum.accumulate(np.where(fixed, np.arange(runs), -1))
        settled = np.where(last_fixed >= 0, ~run_barrier[last_fixed], False)
        consumed_after = settled ^ ((np.arange(runs) - last_fixed) % 2 == 1)
        consumed = np.concatenate(([False], consumed_after[:-1]))

        left = run_length - consumed
        grouped = ~run_barrier & (left > 0)
        single = run_barrier & ~consumed
        first = run_start + consumed
        count = np.where(grouped, left + 1, 1)
        keep = grouped | single
        first, count = first[keep], count[keep]
        step = np.where(count > 1, step[:, np.minimum(first, n - 2)], 0)
        if not consumed_after[-1]:
            first, count = np.append(first, n - 1), np.append(count, 1)
            step = np.concatenate((step, np.zeros((num_dims, 1), np.int64)), axis=1)
        return self._grouped(first, count, step)

    def _grouped(self, first: np.ndarray, count: np.ndarray, step: np.ndarray) -> _Pieces:
        keys = np.concatenate((self.keys[:, first], step, count[None]))
        return _Pieces(self.start[first], keys, self.base[:, first])

    def return_first_of_row(self, positions: np.ndarray) -> None:
        """Give the first token of a grid back to its first row, in place.

        The first token of an image continues the text before it, so the walk gives it to the text and leaves a first
        row that is one token short. It is short against the row that follows, and the token fits its step: move it.
        """
        step, count = self.keys[:-1], self.keys[-1]
        if len(count) < 2:
            return
        before = self.start[1:] - 1
        # A row is compared with the one after it; the last piece has none.
        short = np.zeros(len(count), bool)
        short[:-1] = (count[1:] == count[:-1] + 1) & (step[:, 1:] == step[:, :-1]).all(axis=0)
        fits = (positions[:, self.start[1:]] - positions[:, before] == step[:, 1:]).all(axis=0)
        fits &= (count[:-1] > 1) & (count[1:] > 1)
        moved = np.flatnonzero(short[1:] & fits) + 1
        self.start[moved] -= 1
        self.base[:, moved] = positions[:, self.start[moved]]
        count[moved] += 1
        count[moved - 1] -= 1
        step[:, moved - 1] = np.where(count[moved - 1] > 1, step[:, moved - 1], 0)
