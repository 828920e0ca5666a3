"""A model's rope fields, read from a Hugging Face config, and the table bound that follows from its certificate."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rope_ops.certify import supports_sequence_bounded_mrope
from rope_ops.embedding import RotaryEmbedding, check_bound, get_rope
from rope_ops.frequencies import get_rope_type, normalize_rope_parameters, semantic_frequencies

# What serving engines multiply the positions of a multi-axis model by when they allocate.
LEGACY_POSITIONS_FACTOR = 4


@dataclass(frozen=True)
class ModelConfig:
    """What decides a model's rotary table. Made by :meth:`from_hf`.

    Attributes:
        model_type: the config's own word for its architecture; shown, never branched on.
        head_size: lanes of a head.
        max_position_embeddings: as the config declares; the semantic maximum.
        rope_parameters: normalized, see :func:`rope_ops.frequencies.normalize_rope_parameters`.
        is_neox_style: see :class:`rope_ops.RotaryEmbedding`.
        dtype: of the table.
        max_model_len: longest sequence that is served, speculative (draft) tokens included.
        model_class: qualified name of the model class, or None.
        supports_sequence_bounded_mrope: whether that very class is certified.
        multimodal_pruning: whether tokens are dropped after positions are assigned, which breaks the bound.
        mrope_positions_factor: 1 computes what transformers computes; 4 the frequencies that serving engines
            compute, whose YaRN correction range runs over 4 times the original length.
    """

    model_type: str
    head_size: int
    max_position_embeddings: int
    rope_parameters: Mapping[str, Any]
    is_neox_style: bool
    dtype: torch.dtype
    max_model_len: int
    model_class: str | None
    supports_sequence_bounded_mrope: bool
    multimodal_pruning: bool
    mrope_positions_factor: int

    @classmethod
    def from_hf(
        cls,
        path_or_mapping: str | os.PathLike[str] | Mapping[str, Any],
        *,
        model_cls: type | None = None,
        max_model_len: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        multimodal_pruning: bool = False,
        is_neox_style: bool = True,
        mrope_positions_factor: int = 1,
    ) -> ModelConfig:
        """Read a ``config.json`` (a path to it or to its folder) or the mapping that it holds.

        Args:
            path_or_mapping: the config; rope fields may be at top level or under a nested text config.
            model_cls: the class that will be served. Without one nothing is certified.
            max_model_len: longest sequence that is served, draft tokens included; the config's length if None.
            dtype: of the table.
            multimodal_pruning: whether the engine prunes multimodal tokens; the bound is then not used.
            is_neox_style: the model's pairing of lanes.
            mrope_positions_factor: which YaRN semantics, see the class; no effect on other rope types.

        Raises:
            FileNotFoundError: no such file.
            ValueError: no JSON object, no rope fields, or a bound that is not a positive integer.
        """
        check_bound(max_model_len, "ModelConfig: max_model_len")
        check_bound(mrope_positions_factor, "ModelConfig: mrope_positions_factor")
        config = _text_config(_load(path_or_mapping))
        parameters = _rope_parameters(config)
        head_size = config.get("head_dim") or _field(config, "hidden_size") // _field(config, "num_attention_heads")
        max_position_embeddings = _field(config, "max_position_embeddings")
        if max_model_len is None:
            max_model_len = get_rope_type(parameters).legacy_rows(parameters, max_position_embeddings)
        return cls(
            model_type=str(config.get("model_type", "")),
            head_size=head_size,
            max_position_embeddings=max_position_embeddings,
            rope_parameters=parameters,
            is_neox_style=is_neox_style,
            dtype=dtype,
            max_model_len=max_model_len,
            model_class=None if model_cls is None else f"{model_cls.__module__}:{model_cls.__qualname__}",
            supports_sequence_bounded_mrope=supports_sequence_bounded_mrope(model_cls),
            multimodal_pruning=multimodal_pruning,
            mrope_positions_factor=mrope_positions_factor,
        )

    @property
    def rotary_dim(self) -> int:
        """Lanes of a head that rotate."""
        return int(self.head_size * self.rope_parameters.get("partial_rotary_factor", 1.0))

    @property
    def num_dims(self) -> int:
        """Position axes: 1 without sections."""
        return len(self.rope_parameters.get("mrope_section", (1,)))

    @property
    def legacy_rows(self) -> int:
        """Rows that serving engines allocate by default: 4 times the positions where there are several axes."""
        rows = get_rope_type(self.rope_parameters).legacy_rows(self.rope_parameters, self.max_position_embeddings)
        return rows * LEGACY_POSITIONS_FACTOR if self.num_dims > 1 else rows

    @property
    def mrope_cache_max_position(self) -> int | None:
        """Rows that are enough: ``max_model_len`` for a certified class without pruning, else None (legacy)."""
        if self.supports_sequence_bounded_mrope and not self.multimodal_pruning:
            return self.max_model_len
        return None

    def get_rope(self, device: torch.device | str | None = None) -> RotaryEmbedding:
        """The rotary module of this model, with the bounded rows, or the legacy ones where there is no bound."""
        return get_rope(
            self.head_size,
            self.max_position_embeddings,
            self.is_neox_style,
            self.rope_parameters,
            self.dtype,
            cache_max_position=self.mrope_cache_max_position or self.legacy_rows,
            mrope_positions_factor=self.mrope_positions_factor,
            device=device,
        )

    def rope_frequencies(self, device: torch.device | str | None = None) -> tuple[torch.Tensor, float]:
        """``inv_freq`` and attention factor of this model's table, see :func:`rope_ops.rope_frequencies`."""
        factor = self.mrope_positions_factor if self.num_dims > 1 else 1
        return semantic_frequencies(
            self.rope_parameters, self.rotary_dim, self.max_position_embeddings, factor, device=device
        )

    def compute_hash(self) -> str:
        """A hex digest of everything that decides the table, the resolved bound included.

        Equal in every process and Python version for equal fields.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["mrope_cache_max_position"] = self.mrope_cache_max_position
        text = json.dumps(fields, sort_keys=True, default=str, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _load(path_or_mapping) -> Mapping[str, Any]:
    if isinstance(path_or_mapping, Mapping):
        return path_or_mapping
    path = Path(path_or_mapping)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"ModelConfig: {path} must hold JSON, got {error}") from error
    if not isinstance(config, Mapping):
        raise ValueError(f"ModelConfig: {path} must hold a JSON object, got {type(config).__name__}")
    return config


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model, with the outer fields as a fall-back for what it leaves out."""
    for nested in ("thinker_config", "text_config"):
        if isinstance(config.get(nested), Mapping):
            config = {**config, **_text_config(config[nested])}
    return config


def _field(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"ModelConfig: the config's {key} must be a positive integer, got {value!r}")
    return value


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    spelled = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    for key in ("rope_theta", "partial_rotary_factor"):
        if config.get(key) is not None:
            spelled.setdefault(key, config[key])
    if "rope_theta" not in spelled:
        raise ValueError(
            "ModelConfig: the config must hold rope fields, rope_theta at least (at top level, under rope_parameters "
            f"or in a nested text_config); got the keys {', '.join(sorted(map(str, config))) or 'none'}"
        )
    return normalize_rope_parameters(spelled)
