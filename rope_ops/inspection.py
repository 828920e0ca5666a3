"""The capability of a model class, by name, without importing the class twice: a record on disk, one file a class.

A record is data: what an import of the class showed, under the hash of the class's own source. It is believed only
if it is whole (no field has a default), names this class and this source, and says what the text of the class says;
anything else, a record of an older form or of somebody else included, is inspected again once and rewritten. What the
text does not say, a certificate set by a call from outside for instance, is never recorded, since no hash covers it.
Nothing that goes wrong with the record is an error: the class is then inspected each time, and ``record`` says why.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_ops._class_source import ClassSource, find_class_source
from rope_ops.certify import supports_sequence_bounded_mrope

_FORMAT = 1
_CAPABILITY = "supports_sequence_bounded_mrope"
_MOST_BYTES = 1 << 16
_NOWHERE = "nowhere in the class itself (what a base class states does not count)"


@dataclass(frozen=True)
class ModelClassInfo:
    """What is known of a model class.

    Attributes:
        model_class: ``pkg.mod:Class``.
        supports_sequence_bounded_mrope: whether that very class is certified.
        declared: where it is certified or opted out, ``file:line`` or words.
        record: ``hit``, ``written``, ``rewritten (why)`` or ``not kept (why)``.
        record_path: the record's file; None where there can be none.
    """

    model_class: str
    supports_sequence_bounded_mrope: bool
    declared: str
    record: str
    record_path: str | None


def class_name(model_cls: type | str) -> str:
    """``pkg.mod:Class`` of a class; a name is its own."""
    return model_cls if isinstance(model_cls, str) else f"{model_cls.__module__}:{model_cls.__qualname__}"


def inspect_model_cls(model_cls: type | str, *, cache_dir: str | os.PathLike[str] | None = None) -> ModelClassInfo:
    """Whether a model class is certified, from its record on disk where there is one, else from the class.

    Args:
        model_cls: ``pkg.mod:Class``, or the class. A class that this process has imported always has the last word.
        cache_dir: folder of the records; by default ``$ROPE_OPS_CACHE_DIR``, or the user's cache folder.

    Returns:
        The capability and how it is known. With a record (``record == "hit"``) nothing was imported.

    Raises:
        ValueError: the name is not of the form ``pkg.mod:Class``.
        ImportError, AttributeError: no such module, no such class in it.
        TypeError: the name names no class.
    """
    name = class_name(model_cls)
    module, colon, qualname = name.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *qualname.split("."))):
        if isinstance(model_cls, type):
            return _info(name, model_cls, None, "not kept (the class has no importable name)", None)
        raise ValueError(f"inspect_model_cls: a model class must be named pkg.mod:Class, got {name!r}")
    live = model_cls if isinstance(model_cls, type) else _loaded(module, qualname)
    source = find_class_source(module, qualname)
    if source is None:
        live = live or _import(module, qualname)
        return _info(name, live, None, "not kept (the source of the class is not in its module's file)", None)
    path = _record_path(name, cache_dir)
    stored, problem = _read(path, name, source)
    if stored is not None and (live is None or supports_sequence_bounded_mrope(live) == stored):
        return ModelClassInfo(name, stored, _declared(source), "hit", str(path))
    live = live or _import(module, qualname)
    if live.__module__ != module or live.__qualname__ != qualname:
        return _info(name, live, None, f"not kept (the name means {class_name(live)})", None)
    if supports_sequence_bounded_mrope(live) != bool(source.declares):
        return _info(name, live, source, "not kept (set from outside the text of the class)", path)
    return _info(name, live, source, _write(path, name, live, source, problem), path)


def _loaded(module: str, qualname: str) -> type | None:
    """The class, if this process has imported it already."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None


def _import(module: str, qualname: str) -> type:
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise TypeError(f"inspect_model_cls: {module}:{qualname} must name a class, got {found!r}")
    return found


def _info(name: str, live: type, source: ClassSource | None, record: str, path: Path | None) -> ModelClassInfo:
    certified = supports_sequence_bounded_mrope(live)
    if source is not None and bool(source.declares) == certified:
        declared = _declared(source)
    elif certified:
        declared = "set from outside the text of the class"
    else:
        declared = _undeclared(live)
    return ModelClassInfo(name, certified, declared, record, None if path is None else str(path))


def _declared(source: ClassSource) -> str:
    if source.declares is None:
        return _NOWHERE
    return f"{source.path}:{source.declared_line}" + ("" if source.declares else ", opted out")


def _undeclared(live: type) -> str:
    if _CAPABILITY in vars(live):
        return "opted out, set from outside the text of the class"
    return _NOWHERE


def _record_path(name: str, cache_dir: str | os.PathLike[str] | None) -> Path | None:
    folder = cache_dir or os.environ.get("ROPE_OPS_CACHE_DIR")
    if not folder:
        try:
            import platformdirs

            folder = platformdirs.user_cache_dir("rope-ops", appauthor=False)
        except (ImportError, OSError, RuntimeError):
            return None
    return Path(folder) / "model_classes" / (name.replace(":", "-") + ".json")


def _read(path: Path | None, name: str, source: ClassSource) -> tuple[bool | None, str | None]:
    """The capability of a record to believe, or None and what is wrong with it (None where there is none)."""
    if path is None:
        return None, None
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            return None, "too long"
        stored = json.loads(text)
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, RecursionError) as error:
        return None, f"unreadable, {type(error).__name__}"
    if not isinstance(stored, dict) or stored.get("format") != _FORMAT or stored.get("model_class") != name:
        return None, "of another form or class"
    capability = stored.get(_CAPABILITY)
    if not isinstance(capability, bool) or "source_sha256" not in stored:
        return None, "incomplete"
    if stored["source_sha256"] != source.sha256:
        return None, "of another source"
    if capability != bool(source.declares):
        return None, "contradicted by the text of the class"
    return capability, None


def _write(path: Path | None, name: str, live: type, source: ClassSource, problem: str | None) -> str:
    """Write the record in one step, so that a reader sees the old one or the new one; returns what happened."""
    if path is None:
        return "not kept (no cache folder: platformdirs is not installed)"
    record = {
        "format": _FORMAT,
        "model_class": name,
        "source_sha256": source.sha256,
        _CAPABILITY: supports_sequence_bounded_mrope(live),
    }
    temporary = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return f"not kept ({error.strerror or error})"
    return "written" if problem is None else f"rewritten (the old one was {problem})"
