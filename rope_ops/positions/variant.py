"""Which kind of positions a model has, and what it must offer for them: the one place that tells the variants apart."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from rope_ops.positions.state import RopeState


class PositionVariant(enum.Enum):
    """How a model numbers its tokens. The variants exclude each other."""

    PLAIN = "plain"
    MROPE = "mrope"
    XDROPE = "xdrope"

    @property
    def has_delta(self) -> bool:
        """Whether tokens after the prefill are shifted against their index."""
        return self is PositionVariant.MROPE


@runtime_checkable
class SupportsMRoPE(Protocol):
    """A model that makes M-RoPE positions."""

    def get_mrope_input_positions(self, prefill_token_ids: Any, mm_features: Any) -> tuple[Any, int]:
        """Positions ``[num_dims, tokens]`` (tensor, array or segments) of a prefill, and the delta after it."""
        ...


@runtime_checkable
class SupportsXDRoPE(Protocol):
    """A model that makes XD-RoPE positions."""

    def get_xdrope_input_positions(self, prefill_token_ids: Any, mm_features: Any) -> Any:
        """Positions ``[num_dims, tokens]`` (tensor, array or segments) of a prefill."""
        ...


_INTERFACE = {
    PositionVariant.MROPE: (SupportsMRoPE, "get_mrope_input_positions"),
    PositionVariant.XDROPE: (SupportsXDRoPE, "get_xdrope_input_positions"),
}


def position_variant(config: Any) -> tuple[PositionVariant, int]:
    """The variant of a model and its number of axes, from its config.

    XD-RoPE is what names itself so: an ``xdrope_section``, the type ``xdrope``, or what newer transformers write for
    it, the type ``dynamic`` with ``alpha`` and an ``mrope_section``. Any other ``mrope_section`` is M-RoPE. A config
    that speaks of neither is plain, whatever its model type, as serving engines take it.

    Args:
        config: a Hugging Face config (4.x or 5.x, outer or text), an engine's config that holds one as
            ``hf_text_config`` or ``hf_config``, the content of a ``config.json``, or the rope parameters alone.

    Raises:
        ValueError: sections that are not positive integers, or a variant without sections.
    """
    parameters = _rope_parameters(config)
    kind = parameters.get("rope_type") or parameters.get("type")
    sections = parameters.get("xdrope_section") or parameters.get("mrope_section")
    names_xdrope = "xdrope_section" in parameters or kind == "xdrope"
    if sections is None:
        if names_xdrope or kind == "mrope" or parameters.get("mrope_interleaved"):
            raise ValueError(
                f"get_rope_state: rope type {kind!r} needs mrope_section or xdrope_section to tell its axes, "
                f"got {dict(parameters)}"
            )
        return PositionVariant.PLAIN, 1
    if not all(isinstance(size, int) and size >= 0 for size in sections) or sum(sections) < 1:
        raise ValueError(f"get_rope_state: sections must be frequencies an axis, got {list(sections)}")
    if names_xdrope or (kind == "dynamic" and "alpha" in parameters):
        return PositionVariant.XDROPE, len(sections)
    # Positions of M-RoPE have three rows whatever the sections say.
    return PositionVariant.MROPE, max(3, len(sections))


def get_rope_state(
    config: Any,
    model: Any,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    device: torch.device | str,
    **options: Any,
) -> RopeState | None:
    """The request state that a model needs, or None where one position a token is enough.

    Args:
        config: as for :func:`position_variant`.
        model: asked for positions later; must implement the interface of its variant.
        max_num_reqs, max_num_tokens, max_model_len, device: as for :class:`RopeState`.
        options: further keywords of :class:`RopeState`, such as ``store``.

    Raises:
        TypeError: the model lacks the method of its variant.
        ValueError: a config whose sections make no sense.
    """
    variant, num_dims = position_variant(config)
    if variant is PositionVariant.PLAIN:
        return None
    protocol, method = _INTERFACE[variant]
    if not isinstance(model, protocol):
        raise TypeError(
            f"get_rope_state: a model with {variant.value} positions must implement {protocol.__name__}, "
            f"got {type(model).__qualname__} without {method}()"
        )
    return RopeState(
        num_dims, max_num_reqs, max_num_tokens, max_model_len, device, has_delta=variant.has_delta, **options
    )


def _rope_parameters(config: Any) -> Mapping[str, Any]:
    """The rope parameters of a config, wherever its version keeps them; empty where it has none."""

    def get(name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    # From the outside in: engine config, outer model config, text config.
    for name in ("hf_text_config", "hf_config", "thinker_config", "text_config"):
        inner = get(name)
        if inner is not None:
            return _rope_parameters(inner)
    for name in ("rope_parameters", "rope_scaling"):
        parameters = get(name)
        if isinstance(parameters, Mapping):
            # Some configs keep a set of parameters for each type of layer: the one with sections tells the axes.
            layered = [p for p in parameters.values() if isinstance(p, Mapping)]
            return next((p for p in layered if "mrope_section" in p or "xdrope_section" in p), parameters)
    return config if isinstance(config, Mapping) else {}
