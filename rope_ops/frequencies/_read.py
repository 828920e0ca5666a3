"""Checked reads of rope parameters: a number where a number must be, and one clear error where it is not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def required(parameters: Mapping[str, Any], key: str) -> Any:
    """The value of a key that the type cannot do without."""
    if parameters.get(key) is None:
        raise ValueError(
            f"rope_frequencies: rope_type {parameters['rope_type']!r} needs {key!r} in rope_parameters, "
            f"got only {', '.join(sorted(parameters))}"
        )
    return parameters[key]


def number(parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A finite number, the default where the key is missing; an integer stays one."""
    value = required(parameters, key) if default is None else parameters.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"rope_frequencies: {key} must be a finite number, got {value!r}")
    return value


def positive(parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """As :func:`number`, above zero."""
    value = number(parameters, key, default)
    if value <= 0:
        raise ValueError(f"rope_frequencies: {key} must be positive, got {value!r}")
    return value


def flag(parameters: Mapping[str, Any], key: str, default: bool) -> bool:
    """True or False and nothing that is merely as good as one."""
    value = parameters.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"rope_frequencies: {key} must be true or false, got {value!r}")
    return value


def numbers(parameters: Mapping[str, Any], key: str, length: int) -> list[float]:
    """A list of ``length`` positive numbers."""
    values = required(parameters, key)
    if not isinstance(values, list | tuple) or len(values) != length:
        what = f"{len(values)} values" if isinstance(values, list | tuple) else repr(values)
        raise ValueError(f"rope_frequencies: {key} must be a list of rotary_dim // 2 = {length} numbers, got {what}")
    return [positive({key: value}, key) for value in values]
