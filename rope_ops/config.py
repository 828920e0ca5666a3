"""A model's rope fields, read from a Hugging Face config, and the table bound that follows from its certificate."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rope_ops.certify import supports_sequence_bounded_mrope
from rope_ops.embedding import RotaryEmbedding, check_bound, get_rope
from rope_ops.families import family_axis_map
from rope_ops.frequencies import get_rope_type, legacy_rows, rotary_dim_of, semantic_frequencies
from rope_ops.hf_config import read_rope_fields
from rope_ops.inspection import ModelClassInfo, class_name, inspect_model_cls

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
        axis_order: what the sections count, see :class:`rope_ops.families.Family`.
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
    axis_order: str
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
        model_cls: type | str | ModelClassInfo | None = None,
        max_model_len: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        multimodal_pruning: bool = False,
        is_neox_style: bool | None = None,
        mrope_positions_factor: int = 1,
        layer_type: str | None = None,
    ) -> ModelConfig:
        """Read a ``config.json`` (a path to it or to its folder) or the mapping that it holds.

        Rope fields may be at top level or under a nested text config (Omni models: ``thinker_config.text_config``),
        spelled ``rope_parameters`` or ``rope_scaling`` with ``rope_theta`` beside it. What the family decides and
        the config leaves out comes from :mod:`rope_ops.families`; a default that is filled in warns.

        Args:
            path_or_mapping: the config.
            model_cls: the class that will be served; or its name ``pkg.mod:Class``, which is looked up without an
                import where it can be; or what :func:`rope_ops.inspection.inspect_model_cls` says of it. Without one
                nothing is certified.
            max_model_len: longest sequence that is served, draft tokens included; the longest that the rope type is
                defined for if None.
            dtype: of the table.
            multimodal_pruning: whether the engine prunes multimodal tokens; the bound is then not used.
            is_neox_style: the model's pairing of lanes; the family's if None.
            mrope_positions_factor: which YaRN semantics, see the class; no effect on other rope types.
            layer_type: whose rope to read, for a config with one for each layer type.

        Raises:
            FileNotFoundError: no such file.
            ValueError: no JSON object, no rope fields, fields that disagree or that the rope type cannot use, no
                ``layer_type`` where there are several ropes, or a bound that is not a positive integer.
            ImportError, AttributeError, TypeError: ``model_cls`` names no class.
        """
        check_bound("ModelConfig", "max_model_len", max_model_len)
        check_bound("ModelConfig", "mrope_positions_factor", mrope_positions_factor)
        fields = read_rope_fields(path_or_mapping, layer_type)
        longest = legacy_rows(fields.rope_parameters, fields.max_position_embeddings)
        if isinstance(model_cls, str):
            model_cls = inspect_model_cls(model_cls)
        name: str | None
        if isinstance(model_cls, ModelClassInfo):
            name, certified = model_cls.model_class, model_cls.supports_sequence_bounded_mrope
        else:
            name = None if model_cls is None else class_name(model_cls)
            certified = supports_sequence_bounded_mrope(model_cls)
        config = cls(
            model_type=fields.model_type,
            head_size=fields.head_size,
            max_position_embeddings=fields.max_position_embeddings,
            rope_parameters=fields.rope_parameters,
            is_neox_style=fields.family.is_neox_style if is_neox_style is None else is_neox_style,
            axis_order=fields.family.axis_order,
            dtype=dtype,
            max_model_len=longest if max_model_len is None else max_model_len,
            model_class=name,
            supports_sequence_bounded_mrope=certified,
            multimodal_pruning=multimodal_pruning,
            mrope_positions_factor=mrope_positions_factor,
        )
        config._check()
        return config

    def _check(self) -> None:
        """Parameters that make no table are an error of the config, not of whoever first builds one."""
        self.rope_frequencies("cpu")
        axis_map = self.axis_map
        if axis_map is not None and len(axis_map) != self.rotary_dim // 2:
            raise ValueError(
                f"ModelConfig: mrope_section must sum to rotary_dim // 2 = {self.rotary_dim // 2}, got "
                f"{list(self.rope_parameters['mrope_section'])}"
            )

    @property
    def rotary_dim(self) -> int:
        """Lanes of a head that rotate."""
        return rotary_dim_of(self.rope_parameters, self.head_size)

    @property
    def num_dims(self) -> int:
        """Position axes: 1 without sections."""
        return len(self.rope_parameters.get("mrope_section", (1,)))

    @property
    def axis_map(self) -> tuple[int, ...] | None:
        """The axis of each of the ``rotary_dim // 2`` frequencies; None for one axis."""
        return family_axis_map(self.axis_order, self.rope_parameters)

    @property
    def legacy_positions_factor(self) -> int:
        """What serving engines multiply this model's positions by when they allocate: 4, or 1 (one axis, XD-RoPE)."""
        return self.legacy_rows // legacy_rows(self.rope_parameters, self.max_position_embeddings)

    @property
    def legacy_rows(self) -> int:
        """Rows that serving engines allocate by default: 4 times the positions where there are several axes."""
        factor = LEGACY_POSITIONS_FACTOR if self.num_dims > 1 else 1
        return legacy_rows(self.rope_parameters, self.max_position_embeddings, factor)

    @property
    def no_bound_reason(self) -> str | None:
        """Why the legacy rows are kept, in words; None where there is a bound."""
        if self.model_class is None:
            return "no model class given"
        if not self.supports_sequence_bounded_mrope:
            return f"{self.model_class} is not certified"
        if self.multimodal_pruning:
            return "multimodal pruning drops tokens after positions are assigned"
        if get_rope_type(self.rope_parameters).chooses_by_length:
            return f"rope_type {self.rope_parameters['rope_type']!r} chooses its values by the length served"
        return None

    @property
    def mrope_cache_max_position(self) -> int | None:
        """Rows that are enough: ``max_model_len`` for a certified class, else None (legacy).

        None as well under multimodal pruning, and for the rope types whose values depend on the length served
        (:mod:`rope_ops.frequencies`); :attr:`no_bound_reason` says which.
        """
        return self.max_model_len if self.no_bound_reason is None else None

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
            max_model_len=self.max_model_len,
            axis_map=None if self.axis_order == "thw" else self.axis_map,
            device=device,
        )

    def rope_frequencies(self, device: torch.device | str | None = None) -> tuple[torch.Tensor, float]:
        """``inv_freq`` and attention factor of this model's table, see :func:`rope_ops.rope_frequencies`."""
        factor = self.mrope_positions_factor if self.num_dims > 1 else 1
        return semantic_frequencies(
            self.rope_parameters,
            self.rotary_dim,
            self.max_position_embeddings,
            factor,
            max_model_len=self.max_model_len,
            device=device,
        )

    def compute_hash(self) -> str:
        """A hex digest of everything that decides the table, the resolved bound included.

        Equal in every process and Python version for equal fields.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["mrope_cache_max_position"] = self.mrope_cache_max_position
        text = json.dumps(fields, sort_keys=True, default=str, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
