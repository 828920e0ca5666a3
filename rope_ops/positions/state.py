"""Request state: the positions of a serving engine's batch, for every variant of multi-axis rotary positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rope_ops.ops.positions import prepare_positions
from rope_ops.positions.segments import Segments, check_dense
from rope_ops.positions.store import PrefillStore

_STORES = ("segments", "dense")


class RopeState:
    """Positions of up to ``max_num_reqs`` requests, ``num_dims`` numbers a token.

    Prefill positions are staged once a request, then each step fills one device buffer for the whole batch: stored
    positions for prefill tokens, index plus delta for the rest.

    Args:
        num_dims: axes; 3 for M-RoPE, 3 or 4 for XD-RoPE.
        max_num_reqs: request slots.
        max_num_tokens: most tokens of one step, padding included.
        max_model_len: most tokens of one request, speculative (draft) tokens included.
        device: of the buffers.
        has_delta: whether tokens after the prefill are shifted by a delta. Without, no delta is copied and one that is
            not 0 is refused.
        store: ``"segments"`` keeps a prefill as affine pieces (7,740 bytes for 262,144 tokens with 64 images), dense
            where that is smaller; ``"dense"`` keeps ``4 * num_dims * max_model_len`` bytes a slot. Same positions.
        store_words: size of the segment store in int32 words. It grows when it is full, but not once
            :meth:`prepare_positions` was captured in a CUDA graph, which holds its address: then it raises.
        cache_max_position: rows of the table that the positions index. A prefill that reaches past it, or whose delta
            would take a later token past it, is refused when it is staged: no check is left for the step.

    Raises:
        ValueError: a size below 1, or an unknown ``store``.
    """

    def __init__(
        self,
        num_dims: int,
        max_num_reqs: int,
        max_num_tokens: int,
        max_model_len: int,
        device: torch.device | str,
        *,
        has_delta: bool = True,
        store: str = "segments",
        store_words: int | None = None,
        cache_max_position: int | None = None,
    ):
        sizes = {
            "num_dims": num_dims,
            "max_num_reqs": max_num_reqs,
            "max_num_tokens": max_num_tokens,
            "max_model_len": max_model_len,
        }
        sizes |= {"store_words": store_words} if store_words is not None else {}
        sizes |= {"cache_max_position": cache_max_position} if cache_max_position is not None else {}
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"RopeState: {name} must be a positive integer, got {size!r}")
        if store not in _STORES:
            raise ValueError(f"RopeState: store must be one of {', '.join(map(repr, _STORES))}, got {store!r}")
        if store == "dense" and store_words is not None:
            raise ValueError("RopeState: store_words sizes the segment store, got it with store='dense'")
        self.num_dims = num_dims
        self.max_num_reqs = max_num_reqs
        self.max_num_tokens = max_num_tokens
        self.max_model_len = max_model_len
        self.has_delta = has_delta
        self.cache_max_position = cache_max_position
        self.device = torch.device(device)
        # One column more than a step can fill. The row stride of a view then never equals its length, so a graph
        # compiled for one length does not tie the two together. Cleared: padding is read before it is first written.
        self.positions = torch.zeros((num_dims, max_num_tokens + 1), dtype=torch.int64, device=self.device)
        self._store = PrefillStore(
            num_dims, max_num_reqs, max_model_len, self.device, compact=store == "segments", words=store_words
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._store.nbytes + self.positions.numel() * self.positions.element_size()

    def used_bytes(self, req_idx: int) -> int:
        """Bytes of the store that one request's prefill takes; 0 where nothing is stored."""
        self._check_slot("used_bytes", req_idx)
        return self._store.used_bytes(req_idx)

    def init_prefill_positions(self, req_idx: int, model: Any, prefill_token_ids: Any, mm_features: Any) -> None:
        """Ask the model for a request's positions and stage them.

        With a delta the model's ``get_mrope_input_positions`` is called, which returns positions and delta; without,
        ``get_xdrope_input_positions``, which returns positions. Either may return :class:`Segments`.
        """
        if self.has_delta:
            positions, delta = model.get_mrope_input_positions(prefill_token_ids, mm_features)
        else:
            positions, delta = model.get_xdrope_input_positions(prefill_token_ids, mm_features), 0
        self._stage("init_prefill_positions", req_idx, positions, delta)

    def set_prefill_positions(self, req_idx: int, positions: torch.Tensor | np.ndarray | Segments, delta: int) -> None:
        """Stage a request's positions for its slot; what the slot held before is gone.

        Args:
            req_idx: slot.
            positions: integers ``[num_dims, length]`` from 0 on, a tensor, an array, or segments. Copied: later
                changes to it do nothing.
            delta: what a token after the prefill adds to its index.

        Raises:
            ValueError: a slot that does not exist, another number of axes, more tokens than ``max_model_len``,
                positions below 0 or past int32, a delta without ``has_delta``, one that would make a position negative,
                or positions past ``cache_max_position``.
            TypeError: positions that are not integers.
        """
        self._stage("set_prefill_positions", req_idx, positions, delta)

    def update_prefill_positions(
        self, req_idx: int, positions: torch.Tensor | np.ndarray | Segments, delta: int
    ) -> None:
        """Replace the positions of a request that has some, as after pruning; arguments as when they were set.

        Raises:
            ValueError: the slot holds no positions, and whatever :meth:`set_prefill_positions` raises.
        """
        if self.used_bytes(req_idx) == 0:
            raise ValueError(f"RopeState.update_prefill_positions: slot {req_idx} must hold positions, it holds none")
        self._stage("update_prefill_positions", req_idx, positions, delta)

    def read_prefill_positions(self, req_idx: int, length: int) -> torch.Tensor:
        """The first ``length`` stored positions of a request: int64 ``[num_dims, length]`` on CPU.

        Waits for the device.

        Raises:
            ValueError: a slot that does not exist, or fewer stored tokens than ``length``.
        """
        self._check_slot("read_prefill_positions", req_idx)
        stored = self._store.read(req_idx)
        available = 0 if stored is None else stored.shape[1]
        if not 0 <= length <= available:
            raise ValueError(
                f"RopeState.read_prefill_positions: length must be from 0 to the {available} tokens stored for slot "
                f"{req_idx}, got {length}"
            )
        if stored is None:
            return torch.empty((self.num_dims, 0), dtype=torch.int64)
        return torch.from_numpy(stored[:, :length].astype(np.int64))

    def remove_request(self, req_idx: int) -> None:
        """Forget a request; its slot holds plain positions (index, delta 0) until something is staged for it."""
        self._check_slot("remove_request", req_idx)
        self._store.stage(req_idx, None, 0)

    def apply_staged_writes(self) -> None:
        """Copy what was staged to the device, on the current stream, without waiting for it."""
        self._store.apply(with_delta=self.has_delta)

    def prepare_positions(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        prefill_lens: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        num_tokens_padded: int | None = None,
    ) -> None:
        """Fill the buffer for one step; arguments as for :func:`rope_ops.prepare_positions`.

        Staged writes are applied first. On CPU a request that passes ``max_model_len`` is refused; on CUDA the lengths
        are the engine's promise.
        """
        self.apply_staged_writes()
        if num_tokens_padded is not None and num_tokens_padded > self.max_num_tokens:
            raise ValueError(
                f"RopeState.prepare_positions: num_tokens_padded must be at most max_num_tokens {self.max_num_tokens}, "
                f"got {num_tokens_padded}"
            )
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._store.captured = True
        prepare_positions(
            self.positions[:, : self.max_num_tokens],
            self._store.words,
            self._store.delta,
            idx_mapping,
            query_start_loc,
            prefill_lens,
            num_computed_tokens,
            self._store.index,
            num_tokens_padded,
        )
        if self.device.type == "cpu":
            self._check_lengths(idx_mapping, query_start_loc, num_computed_tokens)

    def get_positions(self, num_tokens: int) -> torch.Tensor:
        """The first ``num_tokens`` columns: int64 ``[num_dims, num_tokens]``, a view whose rows are further apart.

        Raises:
            ValueError: a number below 0 or above ``max_num_tokens``.
        """
        if not 0 <= num_tokens <= self.max_num_tokens:
            raise ValueError(
                f"RopeState.get_positions: num_tokens must be from 0 to max_num_tokens {self.max_num_tokens}, "
                f"got {num_tokens}"
            )
        return self.positions[:, :num_tokens]

    def _stage(self, method: str, req_idx: int, positions: Any, delta: int) -> None:
        self._check_slot(method, req_idx)
        name = f"RopeState.{method}"
        if isinstance(delta, torch.Tensor):
            delta = delta.item()
        if isinstance(delta, bool) or int(delta) != delta:
            raise ValueError(f"{name}: delta must be an integer, got {delta!r}")
        delta = int(delta)
        if isinstance(positions, torch.Tensor):
            positions = positions.detach().cpu().numpy()
        if isinstance(positions, Segments):
            num_dims, length, last = positions.num_dims, positions.length, positions.max_position
        else:
            positions = check_dense(positions)
            num_dims, length = positions.shape
            last = int(positions.max(initial=-1))
        if num_dims != self.num_dims:
            raise ValueError(f"{name}: positions must have {self.num_dims} axes [num_dims, length], got {num_dims}")
        if length > self.max_model_len:
            raise ValueError(f"{name}: positions must be at most max_model_len {self.max_model_len} long, got {length}")
        if delta and not self.has_delta:
            raise ValueError(f"{name}: delta must be 0 where the variant has none (has_delta=False), got {delta}")
        if length + delta < 0:
            raise ValueError(f"{name}: delta must leave later positions at 0 or above, got {delta} for {length} tokens")
        limit = self.cache_max_position
        if limit is not None and (
            last >= limit or (length < self.max_model_len and self.max_model_len + delta > limit)
        ):
            raise ValueError(
                f"{name}: positions must stay below cache_max_position {limit}, got position {last} in the prefill "
                f"and delta {delta}, which takes token {self.max_model_len - 1} to position "
                f"{self.max_model_len - 1 + delta}"
            )
        self._store.stage(req_idx, positions, delta)

    def _check_slot(self, method: str, req_idx: int) -> None:
        if not 0 <= req_idx < self.max_num_reqs:
            raise ValueError(
                f"RopeState.{method}: req_idx must be a slot from 0 to {self.max_num_reqs - 1}, got {req_idx}"
            )

    def _check_lengths(self, idx_mapping, query_start_loc, num_computed_tokens) -> None:
        lengths = query_start_loc.long().diff()
        rows = lengths > 0
        ends = num_computed_tokens.long()[idx_mapping[rows].long()] + lengths[rows]
        if len(ends) and int(ends.max()) > self.max_model_len:
            raise ValueError(
                f"RopeState.prepare_positions: a request must stay within max_model_len {self.max_model_len} tokens, "
                f"got one that reaches {int(ends.max())}"
            )
