"""What belongs to a model family and not to its config: the one table keyed by ``model_type``.

Sources: the classes of transformers 5.23 (section and layout defaults), vLLM 0.33 for families that transformers does
not have. A config's own keys win over the defaults here; a layout is the family's alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rope_ops import axes


@dataclass(frozen=True)
class Family:
    """The layout of a family.

    Attributes:
        mrope_section: what its classes fall back on where a config has no sections; None where they do not.
        mrope_interleaved: whether the axes are dealt out lane by lane; None leaves it to the config.
        axis_order: what the numbers of ``mrope_section`` count, in order; positions are always t, h, w.
        is_neox_style: see :class:`rope_ops.RotaryEmbedding`.
        partial_rotary_factor: what its classes fall back on where a config has none.
    """

    mrope_section: tuple[int, ...] | None = None
    mrope_interleaved: bool | None = None
    axis_order: str = "thw"
    is_neox_style: bool = True
    partial_rotary_factor: float = 1.0


_QWEN2 = Family((16, 24, 24), False)
_QWEN3 = Family((24, 20, 20), True)
_GLM = Family((8, 12, 12), False, is_neox_style=False)
_ERNIE = Family((22, 22, 20), False, axis_order="hwt", is_neox_style=False)

FAMILIES: dict[str, Family] = {
    "cohere_compass": _QWEN3,
    "cosmos3_edge": _QWEN3,
    "ernie4_5_moe_vl": _ERNIE,
    "ernie4_5_vl": _ERNIE,
    "ernie4_5_vl_moe": _ERNIE,
    "glm46v": _GLM,
    "glm4v": _GLM,
    "glm4v_moe": Family((8, 12, 12), False, partial_rotary_factor=0.5),
    "glm_image": Family((8, 12, 12), False),
    "glm_ocr": _GLM,
    "hunyuan_vl": Family(None, False),
    "keye": _QWEN2,
    "keye_vl1_5": _QWEN2,
    "keyevl1_5": _QWEN2,
    "paddleocr_vl": _QWEN2,
    "qwen2_5_omni": _QWEN2,
    "qwen2_5_omni_thinker": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen3_5": Family((11, 11, 10), True, partial_rotary_factor=0.25),
    "qwen3_5_moe": Family((11, 11, 10), True, partial_rotary_factor=0.25),
    "qwen3_omni_moe": _QWEN3,
    "qwen3_omni_moe_thinker": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen4_exp": Family((11, 11, 10), True),
}

# Any other model: nothing is filled in.
_UNKNOWN = Family()


def family_of(*model_types: Any) -> Family:
    """The family of the first known name; a text config's ``_text`` is the same family."""
    for name in model_types:
        if isinstance(name, str) and name.lower().removesuffix("_text") in FAMILIES:
            return FAMILIES[name.lower().removesuffix("_text")]
    return _UNKNOWN


def family_axis_map(axis_order: str, parameters: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The axis of each frequency for normalized parameters; None without sections."""
    section: Sequence[int] | None = parameters.get("mrope_section")
    if section is None:
        return None
    if axis_order == "hwt":
        return axes.spatial_first_axis_map(section)
    return axes.axis_map(section, parameters.get("mrope_interleaved", False))
