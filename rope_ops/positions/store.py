"""The device memory that holds the prefill positions of all request slots, and what is staged for it.

One flat int32 store with a row of ``index`` a slot; the layout is in :mod:`rope_ops.ops.positions`. With
``segments`` a prefill takes the words it needs, found by first fit, and is dense only where segments would be larger.
With ``dense`` each slot owns ``num_dims * max_model_len`` words.
"""

from __future__ import annotations

import numpy as np
import torch

from rope_ops.ops.positions import INDEX_COLUMNS
from rope_ops.positions.segments import Segments

_OFFSET, _NUM_SEGMENTS, _ROW_STRIDE, _STORED_LEN = range(len(INDEX_COLUMNS))

# Words a slot of the first store: 16 KiB, some 270 segments of three axes. A prompt with 64 images takes half of it.
_WORDS_PER_SLOT = 4096

Prefill = Segments | np.ndarray


class PrefillStore:
    """Stored prefills, by slot.

    Attributes:
        words: int32, flat, on the device.
        index: int64 ``[num_slots, 4]`` on the device: offset, num_segments, row_stride, stored_len.
        delta: int32 ``[num_slots]`` on the device.
    """

    def __init__(
        self,
        num_dims: int,
        num_slots: int,
        max_model_len: int,
        device: torch.device,
        *,
        compact: bool,
        words: int | None,
    ):
        self.num_dims, self.num_slots, self.max_model_len = num_dims, num_slots, max_model_len
        self.compact = compact
        dense_words = num_dims * max_model_len
        if not compact:
            words = num_slots * dense_words
        elif words is None:
            words = num_slots * min(_WORDS_PER_SLOT, dense_words) + dense_words
        # Not cleared: `stored_len` is 0 until a slot is written, so nobody reads a word that nobody wrote.
        self.words = torch.empty(words, dtype=torch.int32, device=device)
        self.index = torch.zeros((num_slots, len(INDEX_COLUMNS)), dtype=torch.int64, device=device)
        self.delta = torch.zeros(num_slots, dtype=torch.int32, device=device)
        # Whether a CUDA graph may hold the address of `words`.
        self.captured = False
        self._space = _Space(words)
        self._taken: dict[int, tuple[int, int]] = {}
        self._staged: dict[int, tuple[Prefill | None, int]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes on the device, free words included."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.words, self.index, self.delta))

    def used_bytes(self, slot: int) -> int:
        """Bytes of one slot's prefill; 0 where nothing is stored."""
        staged = self._staged.get(slot)
        if staged is not None:
            return 0 if staged[0] is None else 4 * self._words_of(staged[0])
        return 4 * self._taken.get(slot, (0, 0))[1]

    @property
    def has_staged_writes(self) -> bool:
        return bool(self._staged)

    def stage(self, slot: int, prefill: Prefill | None, delta: int) -> None:
        """Stage a prefill for a slot, or None to clear it; the last one staged counts."""
        if isinstance(prefill, Segments) and (not self.compact or self._is_dense_smaller(prefill)):
            prefill = prefill.to_dense().astype(np.int32)
        elif isinstance(prefill, np.ndarray):
            segments = Segments.from_dense(prefill) if self.compact else None
            # A copy either way: the caller may overwrite the array before the step.
            prefill = prefill.astype(np.int32) if segments is None or self._is_dense_smaller(segments) else segments
        self._staged[slot] = (prefill, delta)

    def apply(self, *, with_delta: bool) -> None:
        """Copy everything staged to the device, on the current stream."""
        if not self._staged:
            return
        if self.words.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "RopeState: staged writes must be applied before a CUDA graph is captured, got a capture with "
                f"{len(self._staged)} staged requests (call apply_staged_writes() first)"
            )
        for slot in self._staged:
            taken = self._taken.pop(slot, (0, 0))
            if self.compact:
                self._space.give_back(*taken)
        written = [(slot, delta, *self._write(slot, prefill)) for slot, (prefill, delta) in self._staged.items()]
        rows = self._to_device(torch.tensor(written, dtype=torch.int64))
        slots = rows[:, 0]
        self.index.index_copy_(0, slots, rows[:, 2:])
        if with_delta:
            self.delta.index_copy_(0, slots, rows[:, 1].to(torch.int32))
        self._staged.clear()

    def read(self, slot: int) -> np.ndarray | None:
        """A slot's stored prefill, int64 ``[num_dims, length]``, staged or applied; waits for the device."""
        if slot in self._staged:
            prefill = self._staged[slot][0]
            return prefill.to_dense() if isinstance(prefill, Segments) else prefill
        offset, num_segments, row_stride, length = self.index[slot].tolist()
        if length == 0:
            return None
        if num_segments:
            table = self.words[offset : offset + (3 + 4 * self.num_dims) * num_segments].view(-1, num_segments)
            return Segments(table.cpu().numpy(), length).to_dense()
        return self._rows(offset, row_stride, length).cpu().numpy()

    def _words_of(self, prefill: Prefill) -> int:
        return prefill.table.size if isinstance(prefill, Segments) else prefill.size

    def _is_dense_smaller(self, segments: Segments) -> bool:
        return segments.table.size >= segments.num_dims * segments.length

    def _rows(self, offset: int, row_stride: int, length: int) -> torch.Tensor:
        return self.words.as_strided((self.num_dims, length), (row_stride, 1), offset)

    def _write(self, slot: int, prefill: Prefill | None) -> tuple[int, int, int, int]:
        """Copy one prefill to its words; its row of the index."""
        if prefill is None or self._words_of(prefill) == 0:
            return 0, 0, 0, 0
        size = self._words_of(prefill)
        if self.compact:
            offset = self._take(size)
            row_stride = 0 if isinstance(prefill, Segments) else prefill.shape[1]
        else:
            offset, row_stride = slot * self.num_dims * self.max_model_len, self.max_model_len
        self._taken[slot] = (offset, size)
        if isinstance(prefill, Segments):
            table = torch.from_numpy(prefill.table)
            self.words[offset : offset + table.numel()].copy_(self._pinned(table.view(-1)), non_blocking=True)
            return offset, prefill.num_segments, row_stride, prefill.length
        length = prefill.shape[1]
        self._rows(offset, row_stride, length).copy_(self._pinned(torch.from_numpy(prefill)), non_blocking=True)
        return offset, 0, row_stride, length

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if self.words.is_cuda else tensor

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._pinned(tensor).to(self.words.device, non_blocking=True)

    def _take(self, size: int) -> int:
        offset = self._space.take(size)
        if offset is None:
            self._grow(size)
            offset = self._space.take(size)
        assert offset is not None
        return offset

    def _grow(self, size: int) -> None:
        if self.captured:
            raise RuntimeError(
                f"RopeState: the prefill store of {self.words.numel()} words is full and cannot grow, since a captured "
                f"CUDA graph holds its address; {size} more words are needed. Give a larger store_words at creation"
            )
        old = self.words
        self.words = old.new_empty(max(2 * old.numel(), old.numel() + size))
        self.words[: old.numel()].copy_(old)
        self._space.give_back(old.numel(), self.words.numel() - old.numel())


class _Space:
    """Free ranges of the store, in order, neighbours joined; first fit."""

    def __init__(self, size: int):
        self._free: list[tuple[int, int]] = [(0, size)] if size else []

    def take(self, size: int) -> int | None:
        for i, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[i : i + 1] = [(offset + size, free - size)] if free > size else []
                return offset
        return None

    def give_back(self, offset: int, size: int) -> None:
        if size == 0:
            return
        joined: list[tuple[int, int]] = []
        for start, free in sorted([*self._free, (offset, size)]):
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + free)
            else:
                joined.append((start, free))
        self._free = joined
