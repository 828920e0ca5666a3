"""One spelling for what configs spell in several ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Names that say only that there are sections, which the sections say themselves.
_SECTIONS_ONLY = {"mrope", "xdrope", "ernie_3d"}

# Vendors' names for a type that exists under another.
_ALIASES = {
    "su": "longrope",
    "deepseek_yarn": "yarn",
    "deepseek_llama_scaling": "yarn",
}


def normalize_rope_parameters(rope_parameters: Mapping[str, Any]) -> dict[str, Any]:
    """One spelling: a new dict with ``rope_type`` and, where there are sections, ``mrope_section``.

    ``type`` is read as ``rope_type`` where that is missing; beside it, it may repeat it or be a leftover that says
    nothing (``mrope``, ``default``). ``xdrope_section`` is read as ``mrope_section``, vendors' aliases as the type
    they name, ``xdrope`` with an ``alpha`` as ``dynamic`` with one. ``interleaved`` may repeat
    ``mrope_interleaved``. Keys set to None are as good as absent.

    Raises:
        ValueError: two spellings of one thing that disagree, or a ``rope_type`` that is not a name.
    """
    parameters = {key: value for key, value in rope_parameters.items() if value is not None}
    spelled = [_type(parameters.pop(key), parameters) for key in ("rope_type", "type") if key in parameters]
    rope_type = spelled[0] if spelled else "default"
    if len(spelled) == 2 and spelled[1] not in (rope_type, "default"):
        raise ValueError(
            f"normalize_rope_parameters: rope_type and type must name one rope type, got {rope_type!r} and "
            f"{spelled[1]!r}"
        )
    _merge(parameters, "xdrope_section", "mrope_section", keep=True)
    _merge(parameters, "interleaved", "mrope_interleaved", keep=False)
    return {"rope_type": rope_type, **parameters}


def _type(name: Any, parameters: Mapping[str, Any]) -> str:
    if not isinstance(name, str):
        raise ValueError(f"normalize_rope_parameters: rope_type must be a string, got {name!r}")
    if name == "xdrope" and "alpha" in parameters:
        return "dynamic"
    return "default" if name in _SECTIONS_ONLY or not name else _ALIASES.get(name, name)


def _merge(parameters: dict[str, Any], other: str, name: str, *, keep: bool) -> None:
    """Fold the spelling ``other`` into ``name``; alone, it is renamed with ``keep`` and left to warn without."""
    if other not in parameters or not (keep or name in parameters):
        return
    value = parameters.pop(other)
    if parameters.setdefault(name, value) != value:
        raise ValueError(
            f"normalize_rope_parameters: {name} and {other} must agree, got {parameters[name]!r} and {value!r}"
        )
