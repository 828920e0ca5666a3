"""One table a factor, stacked, for adapters of different context extension in one batch."""

from __future__ import annotations

from itertools import accumulate

import torch

from rope_ops import reference
from rope_ops.embedding import RotaryEmbedding, check_bound, resolve_cache
from rope_ops.frequencies import legacy_rows, normalize_rope_parameters, rope_frequencies, split_factors
from rope_ops.ops import build_cos_sin_cache


class LinearScalingRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding of one axis with several ``linear`` factors, as :func:`rope_ops.get_rope` makes for a list.

    A token of the adapter with factor ``f`` reads at its position plus ``scaling_factor_to_offset[f]``.

    Arguments as for :class:`RotaryEmbedding`, with a list of numbers under ``factor``. ``cache_max_position`` is the
    rows of *each* factor's table, which is a prefix of that factor's legacy table; the whole is no prefix of the whole.

    Attributes:
        inv_freq: float32 ``[len(factor), rotary_dim // 2]``.
        cos_sin_cache: ``[rows, rotary_dim]``, the tables one after the other.
        scaling_factor_to_offset: factor to the first row of its table.
    """

    def __init__(
        self,
        head_size,
        rotary_dim,
        max_position,
        is_neox_style=True,
        rope_parameters=None,
        dtype=None,
        *,
        cache_max_position=None,
        cache=None,
        max_model_len=None,
        device=None,
    ) -> None:
        check_bound("LinearScalingRotaryEmbedding", "cache_max_position", cache_max_position)
        kind = resolve_cache(cache, cache_max_position, "LinearScalingRotaryEmbedding")
        if kind == "virtual":
            # A position says which table it means by lying in it.
            raise ValueError("LinearScalingRotaryEmbedding: cache='virtual' needs one factor, got several")
        self._parts = split_factors(normalize_rope_parameters(rope_parameters or {}))
        self._rows = [
            legacy_rows(part, max_position) if cache_max_position is None else cache_max_position
            for part in self._parts
        ]
        self._offsets = list(accumulate(self._rows, initial=0))
        super().__init__(
            head_size,
            rotary_dim,
            max_position,
            is_neox_style,
            rope_parameters,
            dtype,
            cache_max_position=self._offsets[-1],
            device=device,
        )
        self.cache = kind

    def forward(self, positions, query, key=None, *, rounding="cache", check_positions=False):
        """As :meth:`RotaryEmbedding.forward`, by plain indexing: a position past the tables has no row to compute."""
        if (
            check_positions
            and positions.numel()
            and not 0 <= int(positions.min()) <= int(positions.max()) < self.cache_max_position
        ):
            raise ValueError(
                f"LinearScalingRotaryEmbedding: positions must be from 0 to below {self.cache_max_position}, the rows "
                f"of all tables, got {int(positions.min())} to {int(positions.max())}"
            )
        assert self.cos_sin_cache is not None  # there is no virtual form
        cos, sin = reference.gather_cos_sin(self.cos_sin_cache, positions)

        def turn(x):
            heads = x.reshape(cos.shape[0], -1, self.head_size)
            return reference.rotate(heads, cos, sin, self.is_neox_style, rounding).reshape(x.shape)

        return turn(query), None if key is None else turn(key)

    def rotate_(self, positions, query, key=None, **options):
        for x, turned in zip((query, key), self.forward(positions, query, key, **options), strict=True):
            if x is not None:
                x.copy_(turned)

    @property
    def scaling_factor_to_offset(self) -> dict[float, int]:
        return {float(part["factor"]): start for part, start in zip(self._parts, self._offsets, strict=False)}

    def _frequencies(self, device: torch.device) -> tuple[torch.Tensor, float]:
        rows = [rope_frequencies(part, self.rotary_dim, self.max_position, device=device)[0] for part in self._parts]
        return torch.stack(rows), 1.0

    def _cache(self, inv_freq: torch.Tensor) -> torch.Tensor:
        cache = torch.empty((self.cache_max_position, self.rotary_dim), dtype=self.dtype, device=inv_freq.device)
        for frequencies, start, rows in zip(inv_freq, self._offsets, self._rows, strict=False):
            cache[start : start + rows] = build_cos_sin_cache(frequencies, rows, 1.0, self.dtype)
        return cache
