"""Reading the rope fields of a Hugging Face ``config.json``, in all of its spellings."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_ops.families import Family, family_of
from rope_ops.frequencies import get_rope_type, has_several_factors, normalize_rope_parameters, rotary_dim_of

# Where the language model's fields may be nested, outermost first.
_NESTED = ("thinker_config", "text_config", "llm_config", "language_config")


@dataclass(frozen=True)
class RopeFields:
    """What a config says about its language model's rope; the attributes are those of :class:`ModelConfig`."""

    model_type: str
    family: Family
    head_size: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any]


def read_rope_fields(
    path_or_mapping: str | os.PathLike[str] | Mapping[str, Any], layer_type: str | None = None
) -> RopeFields:
    """Read a config, see :meth:`rope_ops.ModelConfig.from_hf` for what it may look like and what it raises."""
    outer = _load(path_or_mapping)
    config = _text_config(outer)
    model_type = outer.get("model_type") or config.get("model_type") or ""
    # The text config's name first: one outer class may hold text models of two families.
    family = family_of(config.get("model_type"), model_type)
    spelled = _one_rope(config, layer_type)
    head_size = _head_size(config, layer_type)
    parameters = _fill(normalize_rope_parameters(spelled), config, family, head_size)
    return RopeFields(str(model_type), family, head_size, positive_field(config, "max_position_embeddings"), parameters)


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
    for nested in _NESTED:
        if isinstance(config.get(nested), Mapping):
            inner = {key: value for key, value in _text_config(config[nested]).items() if value is not None}
            config = {**config, **inner}
    return config


def positive_field(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"ModelConfig: the config's {key} must be a positive integer, got {value!r}")
    return value


def _head_size(config: Mapping[str, Any], layer_type: str | None) -> int:
    if layer_type == "full_attention" and config.get("global_head_dim") is not None:
        return positive_field(config, "global_head_dim")
    if config.get("head_dim") is not None:
        return positive_field(config, "head_dim")
    return positive_field(config, "hidden_size") // positive_field(config, "num_attention_heads")


def _one_rope(config: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    """The rope dictionary of the config, or of one of its layer types, with top-level fields folded in."""
    spelled = {**_mapping(config, "rope_scaling"), **_mapping(config, "rope_parameters")}
    ropes = _per_layer_type(config, spelled)
    if ropes:
        if layer_type not in ropes:
            raise ValueError(
                f"ModelConfig: the config has a rope for each layer type; layer_type must be one of "
                f"{', '.join(sorted(ropes))}, got {layer_type!r}"
            )
        spelled = dict(ropes[layer_type])
    elif layer_type is not None:
        raise ValueError(f"ModelConfig: the config has one rope for all layers, got layer_type {layer_type!r}")
    for key in ("rope_theta", "partial_rotary_factor"):
        # Beside several ropes the outer field is a default for those that leave it out.
        if not (ropes and key in spelled):
            _fold(spelled, key, config.get(key), outer_wins=False)
    if "rope_theta" not in spelled:
        raise ValueError(
            "ModelConfig: the config must hold rope fields, rope_theta at least (at top level, under rope_parameters "
            f"or in a nested text_config); got the keys {', '.join(sorted(map(str, config))) or 'none'}"
        )
    return spelled


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"ModelConfig: the config's {key} must be an object, got {value!r}")
    return {name: item for name, item in (value or {}).items() if item is not None}


def _per_layer_type(config: Mapping[str, Any], spelled: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Layer type to its rope, where the config has one for each; layers without rope (null) are left out."""
    ropes = {key: value for key, value in spelled.items() if isinstance(value, Mapping)}
    common = {key: value for key, value in spelled.items() if key not in ropes}
    if ropes:
        return {key: {**common, **value} for key, value in ropes.items()}
    local = config.get("rope_local_base_freq")
    if local is None:
        return {}
    # The spelling of transformers 4 for the same two ropes: the scaling is the full layers' alone.
    return {"full_attention": common, "sliding_attention": {"rope_type": "default", "rope_theta": local}}


def _fold(spelled: dict[str, Any], key: str, outer: Any, *, outer_wins: bool) -> None:
    """Take a field that is spelled outside of the rope dictionary; warn where the two disagree."""
    if outer is None:
        return
    inner = spelled.setdefault(key, outer)
    if inner == outer:
        return
    if outer_wins:
        spelled[key] = outer
    warnings.warn(
        f"ModelConfig: the config has {key} {outer!r} beside {key} {inner!r} in its rope parameters; "
        f"{spelled[key]!r} is used, as transformers does",
        UserWarning,
        stacklevel=5,
    )


def _fill(parameters: dict[str, Any], config: Mapping[str, Any], family: Family, head_size: int) -> dict[str, Any]:
    """Normalized parameters with what the family knows and the config leaves out."""
    if has_several_factors(parameters):
        raise ValueError(f"ModelConfig: factor must be one number, got {parameters['factor']!r}")
    if "original_max_position_embeddings" in get_rope_type(parameters).keys:
        _fold(
            parameters,
            "original_max_position_embeddings",
            config.get("original_max_position_embeddings"),
            outer_wins=True,
        )
    if "partial_rotary_factor" not in parameters and family.partial_rotary_factor != 1.0:
        parameters["partial_rotary_factor"] = family.partial_rotary_factor
        _warn_filled("partial_rotary_factor", family.partial_rotary_factor)
    allocation = parameters.pop("freq_allocation", None) or config.get("freq_allocation")
    if "mrope_section" not in parameters and family.axis_order == "hwt" and allocation is not None:
        # Ernie's own spelling: the frequencies of t; h and w share the rest.
        spatial = (rotary_dim_of(parameters, head_size) // 2 - allocation) // 2
        parameters["mrope_section"] = [spatial, spatial, allocation]
    elif "mrope_section" not in parameters and family.mrope_section is not None:
        parameters["mrope_section"] = list(family.mrope_section)
        _warn_filled("mrope_section", list(family.mrope_section))
    if "mrope_section" in parameters and family.mrope_interleaved is not None:
        said = parameters.setdefault("mrope_interleaved", family.mrope_interleaved)
        if said != family.mrope_interleaved:
            raise ValueError(
                f"ModelConfig: mrope_interleaved must be {family.mrope_interleaved} in this family, got {said!r}"
            )
    if parameters.get("mrope_interleaved") is False:
        # As good as absent, and one spelling makes one entry in the registry.
        del parameters["mrope_interleaved"]
    return parameters


def _warn_filled(key: str, value: Any) -> None:
    warnings.warn(
        f"ModelConfig: the config has no {key}; its family's default {value!r} is used",
        UserWarning,
        stacklevel=5,
    )
