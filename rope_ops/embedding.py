"""Rotary embedding modules over a bounded table, and the registry that shares them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rope_ops import reference
from rope_ops.axes import axis_map
from rope_ops.frequencies import (
    get_rope_type,
    normalize_rope_parameters,
    rope_frequencies,
    semantic_frequencies,
)
from rope_ops.ops import build_cos_sin_cache


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
        device: of the table; the default device if None.

    Attributes:
        inv_freq: float32 ``[rotary_dim // 2]``, a non-persistent buffer.
        cos_sin_cache: ``[rows, rotary_dim]``, a non-persistent buffer. Both keep their dtype through ``.to(dtype)``
            and are computed anew when the module leaves the meta device.
        legacy_rows: rows that serving engines allocate for these parameters.

    Raises:
        ValueError: a bound that is not a positive integer, sizes that do not fit, parameters that
            :func:`rope_frequencies` refuses.
    """

    inv_freq: torch.Tensor
    cos_sin_cache: torch.Tensor

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
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not 0 < rotary_dim <= head_size or rotary_dim % 2:
            raise ValueError(
                f"{type(self).__name__}: rotary_dim must be even and within head_size, got rotary_dim {rotary_dim} "
                f"and head_size {head_size}"
            )
        check_bound(cache_max_position, f"{type(self).__name__}: cache_max_position")
        self.head_size = head_size
        self.rotary_dim = rotary_dim
        self.max_position = max_position
        self.is_neox_style = is_neox_style
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.rope_parameters = normalize_rope_parameters(rope_parameters or {})
        self.legacy_rows = self._legacy_rows()
        self.cache_max_position = self.legacy_rows if cache_max_position is None else cache_max_position
        # Built outside inference mode: an inference tensor could not be used in a later training step.
        with torch.inference_mode(False):
            self._build(torch.get_default_device() if device is None else torch.device(device))

    def _legacy_rows(self) -> int:
        return get_rope_type(self.rope_parameters).legacy_rows(self.rope_parameters, self.max_position)

    def _frequencies(self, device: torch.device) -> tuple[torch.Tensor, float]:
        return rope_frequencies(self.rope_parameters, self.rotary_dim, self.max_position, device=device)

    def _build(self, device: torch.device) -> None:
        with torch.no_grad():
            inv_freq, self.attention_factor = self._frequencies(device)
            cache = build_cos_sin_cache(inv_freq, self.cache_max_position, self.attention_factor, self.dtype)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("cos_sin_cache", cache, persistent=False)

    def _apply(self, fn, recurse=True):
        """Follow the module to another device; never to another dtype, and never as uninitialised memory."""
        old = self.inv_freq.device
        new = fn(torch.empty(0, dtype=self.inv_freq.dtype, device=old)).device
        if new != old:
            if old.type == "meta":
                self._build(new)
            else:
                self.inv_freq = self.inv_freq.to(new)
                self.cos_sin_cache = self.cos_sin_cache.to(new)
        return self

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate query and key to their positions.

        Args:
            positions: integers ``[num_tokens]``.
            query: ``[num_tokens, heads * head_size]`` or ``[num_tokens, heads, head_size]``.
            key: like query with its own number of heads, or None.

        Returns:
            New tensors of the shapes and dtypes of query and key. The module is not changed: a table of another
            dtype is rounded for this call only.
        """
        cos, sin = reference.gather_cos_sin(self.cos_sin_cache, positions, self._axis_map())
        return self._rotate(query, cos, sin), None if key is None else self._rotate(key, cos, sin)

    def _axis_map(self) -> tuple[int, ...] | None:
        return None

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = x.reshape(cos.shape[0], -1, self.head_size)
        return reference.rotate(heads, cos, sin, self.is_neox_style).reshape(x.shape)

    def extra_repr(self) -> str:
        rows = f"rows={self.cache_max_position} of {self.legacy_rows}"
        return f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, {rows}, {self.rope_parameters}"


class MRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding of several position axes: M-RoPE (3) and XD-RoPE (3 or 4).

    Arguments as for :class:`RotaryEmbedding`; ``rope_parameters`` holds ``mrope_section`` and, where the axes are
    dealt out lane by lane, ``mrope_interleaved``.

    Args:
        mrope_positions_factor: what serving engines multiply the semantic maximum by, since video positions may pass
            the token count: both the legacy rows and, for YaRN, the correction range. 1 computes what transformers
            computes.

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
        mrope_positions_factor: int = 4,
        device: torch.device | str | None = None,
    ) -> None:
        check_bound(mrope_positions_factor, "MRotaryEmbedding: mrope_positions_factor")
        parameters = normalize_rope_parameters(rope_parameters or {})
        section = parameters.get("mrope_section")
        if not section or sum(section) != rotary_dim // 2:
            raise ValueError(
                f"MRotaryEmbedding: mrope_section must sum to rotary_dim // 2 = {rotary_dim // 2}, got {section}"
            )
        self.mrope_positions_factor = mrope_positions_factor
        self.mrope_section = tuple(section)
        self.mrope_interleaved = bool(parameters.get("mrope_interleaved", False))
        self.axis_map = axis_map(self.mrope_section, self.mrope_interleaved)
        super().__init__(
            head_size,
            rotary_dim,
            max_position,
            is_neox_style,
            parameters,
            dtype,
            cache_max_position=cache_max_position,
            device=device,
        )

    def _legacy_rows(self) -> int:
        return super()._legacy_rows() * self.mrope_positions_factor

    def _frequencies(self, device: torch.device) -> tuple[torch.Tensor, float]:
        return semantic_frequencies(
            self.rope_parameters, self.rotary_dim, self.max_position, self.mrope_positions_factor, device=device
        )

    def _axis_map(self) -> tuple[int, ...] | None:
        return self.axis_map

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As :meth:`RotaryEmbedding.forward`, with positions ``[num_dims, num_tokens]`` or ``[num_tokens]``.

        One axis is the same as equal axes: positions of text.
        """
        num_dims = len(self.mrope_section)
        if positions.dim() == 2 and positions.shape[0] != num_dims:
            raise ValueError(
                f"MRotaryEmbedding: positions must be [{num_dims}, num_tokens] or [num_tokens] for mrope_section "
                f"{list(self.mrope_section)}, got {list(positions.shape)}"
            )
        return super().forward(positions, query, key)


def check_bound(value: object, what: str) -> None:
    """Raise ValueError unless ``value`` is None or a positive integer (bool is not one)."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{what} must be a positive integer, got {value!r}")


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
    mrope_positions_factor: int = 4,
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
        mrope_positions_factor: see :class:`MRotaryEmbedding`. No effect without sections.
        device: of the table; the default device if None.

    Returns:
        One module for equal parameters. Everything that changes the table is part of equality, the bound included.

    Raises:
        ValueError: as the modules raise; also a ``partial_rotary_factor`` outside (0, 1].
    """
    check_bound(cache_max_position, "get_rope: cache_max_position")
    parameters = normalize_rope_parameters(rope_parameters or {})
    fraction = parameters.get("partial_rotary_factor", 1.0)
    if not 0 < fraction <= 1:
        raise ValueError(f"get_rope: partial_rotary_factor must be in (0, 1], got {fraction}")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    # A tensor tells which device a name such as "cuda" means now, and whether a mode answers with a subclass.
    probe = torch.empty(0, device=device)
    device = probe.device
    multi_axis = "mrope_section" in parameters
    key = (
        head_size,
        max_position,
        bool(is_neox_style),
        _frozen(parameters),
        dtype,
        cache_max_position,
        mrope_positions_factor if multi_axis else None,
        device,
    )

    def build() -> RotaryEmbedding:
        extra = {"mrope_positions_factor": mrope_positions_factor} if multi_axis else {}
        return (MRotaryEmbedding if multi_axis else RotaryEmbedding)(
            head_size,
            int(head_size * fraction),
            max_position,
            is_neox_style,
            _thawed(parameters),
            dtype,
            cache_max_position=cache_max_position,
            device=device,
            **extra,
        )

    # Under FakeTensorMode, or any mode that answers a factory call with a subclass, the module is only good inside it.
    if type(probe) is not torch.Tensor:
        return build()
    with _registry_lock:
        rope = _registry.get(key)
        # A module that its user has moved elsewhere is no longer what this key names.
        if rope is None or rope.cos_sin_cache.device != device:
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
