"""Rotary embedding modules over a bounded table, and the registry that shares them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rope_ops.axes import axis_map
from rope_ops.certify import checked_bound
from rope_ops.frequencies import (
    get_rope_type,
    has_several_factors,
    legacy_rows,
    normalize_rope_parameters,
    rope_frequencies,
    rotary_dim_of,
    semantic_frequencies,
)
from rope_ops.ops import build_cos_sin_cache, rotate, rotate_

CACHES = ("bounded", "virtual", "legacy")


class RotaryEmbedding(nn.Module):
    """Rotary embedding of one position axis.

    Args:
        head_size: lanes of a head.
        rotary_dim: leading lanes that rotate; even, at most ``head_size``.
        max_position: the semantic maximum: enters frequencies, never the number of rows that are allocated when
            ``cache_max_position`` is given.
        is_neox_style: True pairs lane ``i`` with ``i + rotary_dim // 2``; False pairs lanes ``2i`` and ``2i + 1``.
        rope_parameters: ``rope_theta``, ``rope_type`` and the type's own keys.
        dtype: of the table; the default dtype if None.
        cache_max_position: rows to allocate; None allocates the legacy rows.
        cache: "bounded" allocates ``cache_max_position`` rows and "legacy" the legacy rows; None is the one of them
            that ``cache_max_position`` says. "virtual" allocates nothing: each call computes the rows it needs, with
            the same bits.
        max_model_len: the length served, for the types that choose their values by it (see
            :mod:`rope_ops.frequencies`); ``cache_max_position`` if None.
        device: of the table; the default device if None.

    Attributes:
        inv_freq: float32 ``[rotary_dim // 2]``, a non-persistent buffer.
        cos_sin_cache: ``[rows, rotary_dim]``, a non-persistent buffer; None if virtual. Both keep their dtype through
            ``.to(dtype)`` and are computed anew when the module leaves the meta device.
        cache_max_position: rows allocated, 0 if virtual.
        legacy_rows: rows that serving engines allocate for these parameters.

    Raises:
        ValueError: a bound that is not a positive integer, or that is missing for "bounded" or given for another
            ``cache``; sizes that do not fit; parameters that :func:`rope_frequencies` refuses.
    """

    inv_freq: torch.Tensor
    cos_sin_cache: torch.Tensor | None
    # For each frequency the row of positions it turns with; empty for one axis.
    axis_map: tuple[int, ...] = ()

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position: int,
        is_neox_style: bool = True,
        rope_parameters: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        *,
        cache_max_position: int | None = None,
        cache: str | None = None,
        max_model_len: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not 0 < rotary_dim <= head_size or rotary_dim % 2:
            raise ValueError(
                f"{type(self).__name__}: rotary_dim must be even and within head_size, got rotary_dim {rotary_dim} "
                f"and head_size {head_size}"
            )
        check_bound(type(self).__name__, "cache_max_position", cache_max_position)
        check_bound(type(self).__name__, "max_model_len", max_model_len)
        self.cache = resolve_cache(cache, cache_max_position, type(self).__name__)
        self.head_size = head_size
        self.rotary_dim = rotary_dim
        self.max_position = max_position
        self.is_neox_style = is_neox_style
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.rope_parameters = normalize_rope_parameters(rope_parameters or {})
        self.legacy_rows = self._legacy_rows()
        rows = {"bounded": cache_max_position, "legacy": self.legacy_rows, "virtual": 0}[self.cache]
        assert rows is not None  # resolve_cache has seen to it
        self.cache_max_position = rows
        self._axis_digits = "".join(map(str, self.axis_map))
        self.max_model_len = cache_max_position if max_model_len is None else max_model_len
        # Built outside inference mode: an inference tensor could not be used in a later training step.
        with torch.inference_mode(False):
            self._build(torch.get_default_device() if device is None else torch.device(device))

    def _legacy_rows(self) -> int:
        return legacy_rows(self.rope_parameters, self.max_position)

    def _frequencies(self, device: torch.device) -> tuple[torch.Tensor, float]:
        return rope_frequencies(
            self.rope_parameters,
            self.rotary_dim,
            self.max_position,
            max_model_len=self.max_model_len,
            device=device,
        )

    def _build(self, device: torch.device) -> None:
        with torch.no_grad():
            inv_freq, self.attention_factor = self._frequencies(device)
            cache = None if self.cache == "virtual" else self._cache(inv_freq)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("cos_sin_cache", cache, persistent=False)

    def _cache(self, inv_freq: torch.Tensor) -> torch.Tensor:
        return build_cos_sin_cache(inv_freq, self.cache_max_position, self.attention_factor, self.dtype)

    def _apply(self, fn, recurse=True):
        """Follow the module to another device; never to another dtype, and never as uninitialised memory."""
        old = self.inv_freq.device
        new = fn(torch.empty(0, dtype=self.inv_freq.dtype, device=old)).device
        if new != old:
            if old.type == "meta":
                self._build(new)
            else:
                self.inv_freq = self.inv_freq.to(new)
                self.cos_sin_cache = None if self.cos_sin_cache is None else self.cos_sin_cache.to(new)
        return self

    def forward(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        *,
        rounding: str = "cache",
        check_positions: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate query and key to their positions.

        Args:
            positions: integers ``[num_tokens]``. A position past the table is computed, see
                :func:`rope_ops.ops.rows_computed`.
            query: ``[num_tokens, heads * head_size]`` or ``[num_tokens, heads, head_size]``.
            key: like query with its own number of heads, or None.
            rounding, check_positions: as for :func:`rope_ops.ops.rotate`.

        Returns:
            New tensors of the shapes and dtypes of query and key. The module is not changed: a table of another
            dtype is rounded for this call only.
        """
        self._check_positions(positions)
        return rotate(query, key, positions, **self._form(rounding, check_positions))

    def rotate_(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        *,
        rounding: str = "cache",
        check_positions: bool = False,
    ) -> None:
        """As :meth:`forward`, written over query and key. Has no gradient, and refuses to lose one."""
        self._check_positions(positions)
        rotate_(query, key, positions, **self._form(rounding, check_positions))

    def _check_positions(self, positions: torch.Tensor) -> None:
        pass

    def _form(self, rounding: str, check_positions: bool) -> dict[str, Any]:
        return dict(
            inv_freq=self.inv_freq,
            cos_sin_cache=self.cos_sin_cache,
            head_size=self.head_size,
            axis_map=self._axis_digits,
            is_neox_style=self.is_neox_style,
            attention_factor=self.attention_factor,
            cache_dtype=self.dtype,
            rounding=rounding,
            check_positions=check_positions,
        )

    def extra_repr(self) -> str:
        rows = f"cache={self.cache}, rows={self.cache_max_position} of {self.legacy_rows}"
        return f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, {rows}, {self.rope_parameters}"


class MRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding of several position axes: M-RoPE (3) and XD-RoPE (3 or 4).

    Arguments as for :class:`RotaryEmbedding`; ``rope_parameters`` holds ``mrope_section`` and, where the axes are
    dealt out lane by lane, ``mrope_interleaved``.

    Args:
        mrope_positions_factor: what serving engines multiply the semantic maximum by, since video positions may pass
            the token count: both the legacy rows and, for YaRN, the correction range. 1 computes what transformers
            computes.
        axis_map: the axis of each of the ``rotary_dim // 2`` frequencies, for a family whose layout the sections do
            not name; what :func:`rope_ops.axes.axis_map` makes of the sections if None.

    Raises:
        ValueError: sections that do not sum to ``rotary_dim // 2``, and what :class:`RotaryEmbedding` refuses.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position: int,
        is_neox_style: bool = True,
        rope_parameters: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        *,
        cache_max_position: int | None = None,
        cache: str | None = None,
        max_model_len: int | None = None,
        mrope_positions_factor: int = 4,
        axis_map: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_bound("MRotaryEmbedding", "mrope_positions_factor", mrope_positions_factor)
        parameters = normalize_rope_parameters(rope_parameters or {})
        section = parameters.get("mrope_section")
        if not section or sum(section) != rotary_dim // 2:
            raise ValueError(
                f"MRotaryEmbedding: mrope_section must sum to rotary_dim // 2 = {rotary_dim // 2}, got {section}"
            )
        self.mrope_positions_factor = mrope_positions_factor
        self.mrope_section = tuple(section)
        self.mrope_interleaved = bool(parameters.get("mrope_interleaved", False))
        self.axis_map = _checked_axis_map(axis_map, self.mrope_section, self.mrope_interleaved)
        super().__init__(
            head_size,
            rotary_dim,
            max_position,
            is_neox_style,
            parameters,
            dtype,
            cache_max_position=cache_max_position,
            cache=cache,
            max_model_len=max_model_len,
            device=device,
        )

    def _legacy_rows(self) -> int:
        return legacy_rows(self.rope_parameters, self.max_position, self.mrope_positions_factor)

    def _frequencies(self, device: torch.device) -> tuple[torch.Tensor, float]:
        return semantic_frequencies(
            self.rope_parameters,
            self.rotary_dim,
            self.max_position,
            self.mrope_positions_factor,
            max_model_len=self.max_model_len,
            device=device,
        )

    def _check_positions(self, positions: torch.Tensor) -> None:
        """One axis is the same as equal axes: positions of text."""
        num_dims = len(self.mrope_section)
        if positions.dim() == 2 and positions.shape[0] != num_dims:
            raise ValueError(
                f"MRotaryEmbedding: positions must be [{num_dims}, num_tokens] or [num_tokens] for mrope_section "
                f"{list(self.mrope_section)}, got {list(positions.shape)}"
            )


def resolve_cache(cache: str | None, cache_max_position: int | None, function: str) -> str:
    """The kind of cache that ``cache`` and ``cache_max_position`` ask for together; ValueError if they disagree."""
    if cache is None:
        return "legacy" if cache_max_position is None else "bounded"
    if cache not in CACHES:
        raise ValueError(f"{function}: cache must be one of {', '.join(map(repr, CACHES))} or None, got {cache!r}")
    if (cache == "bounded") != (cache_max_position is not None):
        needs = "needs" if cache == "bounded" else "takes no"
        raise ValueError(f"{function}: cache={cache!r} {needs} cache_max_position, got {cache_max_position}")
    return cache


def _checked_axis_map(given, section: tuple[int, ...], interleaved: bool) -> tuple[int, ...]:
    if given is None:
        return axis_map(section, interleaved)
    counts = sorted(given.count(axis) for axis in range(len(section)))
    if len(given) != sum(section) or counts != sorted(section):
        raise ValueError(
            f"MRotaryEmbedding: axis_map must give each frequency one of {len(section)} axes in the numbers of "
            f"mrope_section {list(section)}, got {list(given)}"
        )
    return tuple(given)


def check_bound(function: str, name: str, bound: object) -> None:
    """As :func:`checked_bound`, but None passes: there is no bound."""
    if bound is not None:
        checked_bound(function, name, bound)


# Modules are held weakly: when the last model that uses a table goes, so does its memory.
_registry: weakref.WeakValueDictionary[tuple, RotaryEmbedding] = weakref.WeakValueDictionary()
_registry_lock = threading.Lock()


def get_rope(
    head_size: int,
    max_position: int,
    is_neox_style: bool = True,
    rope_parameters: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    *,
    cache_max_position: int | None = None,
    cache: str | None = None,
    mrope_positions_factor: int = 4,
    max_model_len: int | None = None,
    axis_map: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> RotaryEmbedding:
    """The shared rotary module for these parameters, built on first request and kept while somebody holds it.

    Args:
        head_size: lanes of a head; ``rotary_dim`` is ``head_size * partial_rotary_factor``.
        max_position: the model's ``max_position_embeddings``, the semantic maximum.
        is_neox_style: True pairs lane ``i`` with ``i + rotary_dim // 2``; False pairs lanes ``2i`` and ``2i + 1``.
        rope_parameters: ``rope_theta``, ``rope_type``, ``partial_rotary_factor``, ``mrope_section``,
            ``mrope_interleaved`` and the type's own keys. With sections the result is an :class:`MRotaryEmbedding`.
        dtype: of the table; the default dtype if None.
        cache_max_position: rows to allocate: exactly these, whatever the legacy rows are. It must cover every
            position that is read, speculative (draft) tokens included. None allocates the legacy rows.
        cache: "bounded", "legacy" or "virtual", see :class:`RotaryEmbedding`.
        mrope_positions_factor: see :class:`MRotaryEmbedding`. No effect without sections.
        max_model_len: the length served, for the two types that choose their values by it (``dynamic``,
            ``longrope``; see :mod:`rope_ops.frequencies`); ``cache_max_position`` if None. No effect on other types.
        axis_map: see :class:`MRotaryEmbedding`. An error without sections.
        device: of the table; the default device if None.

    Returns:
        One module for equal parameters. Everything that changes the table is part of equality, the bound included.

    Raises:
        ValueError: as the modules raise; also a ``partial_rotary_factor`` outside (0, 1].
    """
    check_bound("get_rope", "cache_max_position", cache_max_position)
    check_bound("get_rope", "max_model_len", max_model_len)
    cache = resolve_cache(cache, cache_max_position, "get_rope")
    parameters = _thawed(normalize_rope_parameters(rope_parameters or {}))
    rotary_dim = rotary_dim_of(parameters, head_size)
    if not get_rope_type(parameters).chooses_by_length:
        max_model_len = None
    dtype = torch.get_default_dtype() if dtype is None else dtype
    # A tensor tells which device a name such as "cuda" means now, and whether a mode answers with a subclass.
    probe = torch.empty(0, device=device)
    device = probe.device
    multi_axis = "mrope_section" in parameters
    if axis_map is not None and not multi_axis:
        raise ValueError("get_rope: axis_map must come with an mrope_section in rope_parameters, got none")
    key = (
        head_size,
        max_position,
        bool(is_neox_style),
        _frozen(parameters),
        dtype,
        cache,
        cache_max_position,
        mrope_positions_factor if multi_axis else None,
        max_model_len,
        _frozen(axis_map),
        device,
    )

    def build() -> RotaryEmbedding:
        module: type[RotaryEmbedding] = MRotaryEmbedding if multi_axis else RotaryEmbedding
        extra = {"mrope_positions_factor": mrope_positions_factor, "axis_map": axis_map} if multi_axis else {}
        if not multi_axis and has_several_factors(parameters):
            from rope_ops.linear_scaling import LinearScalingRotaryEmbedding as module
        return module(
            head_size,
            rotary_dim,
            max_position,
            is_neox_style,
            parameters,
            dtype,
            cache_max_position=cache_max_position,
            cache=cache,
            max_model_len=max_model_len,
            device=device,
            **extra,
        )

    # Under FakeTensorMode, or any mode that answers a factory call with a subclass, the module is only good inside it.
    if type(probe) is not torch.Tensor:
        return build()
    with _registry_lock:
        rope = _registry.get(key)
        # A module that its user has moved elsewhere is no longer what this key names.
        if rope is None or rope.inv_freq.device != device:
            rope = _registry[key] = build()
        return rope


def _frozen(value: Any) -> Any:
    """A hashable copy in which equal parameters are equal: any order of keys, lists as tuples, 4 as 4.0."""
    if isinstance(value, Mapping):
        return tuple(sorted((key, _frozen(item)) for key, item in value.items()))
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _thawed(value: Any) -> Any:
    """A deep copy, so that the caller may change its dictionary afterwards."""
    if isinstance(value, Mapping):
        return {key: _thawed(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(map(_thawed, value)) if isinstance(value, list | tuple) else value
