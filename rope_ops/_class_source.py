"""The source of a class, found and read without importing anything."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

# Statements of a module that cannot set the certificate of a class beside them.
_SETS_NOTHING = (ast.ClassDef, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class ClassSource:
    """Where a class is written down, and what its own text says about the certificate.

    Attributes:
        path: the module's file.
        line: first line of the class, its decorators included.
        sha256: of the text of the class, decorators included; of all of them where a module defines it in branches,
            and of the module's statements beside its classes that name the certificate, since they may set it.
        declares: the capability that the text states with the decorator or in the class body; None where it states
            nothing, or different things.
        declared_line: the line that states it.
    """

    path: str
    line: int
    sha256: str
    declares: bool | None
    declared_line: int | None


def find_class_source(module: str, qualname: str) -> ClassSource | None:
    """The source of ``module:qualname``; None where it cannot be found without an import.

    So it is for a class that its module takes from another one, has no Python file, or makes by a call.
    """
    try:
        path = _module_file(module)
        if path is None or not path.endswith(".py"):
            return None
        text = Path(path).read_text(encoding="utf-8")
        body = ast.parse(text).body
        classes = _definitions(body, qualname.split("."))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
    if not classes:
        return None
    lines = text.splitlines(keepends=True)
    spans = [(min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno) for node in classes]
    others = [(node.lineno, node.end_lineno) for node in body if not isinstance(node, _SETS_NOTHING)]
    digest = hashlib.sha256()
    for first, last in spans + others:
        segment = "".join(lines[first - 1 : last]).encode()
        if (first, last) in others and b"sequence_bounded_mrope" not in segment:
            continue
        # The length first, so that no two lists of texts are one.
        digest.update(b"%d:" % len(segment) + segment)
    stated = [_statement(node) for node in classes]
    declares, line = stated[0] if len({value for value, _ in stated}) == 1 else (None, None)
    return ClassSource(path, spans[0][0], digest.hexdigest(), declares, line)


def _module_file(module: str) -> str | None:
    """The file of a module, by the finders that an import would ask, parents included but not imported."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        return getattr(loaded, "__file__", None)
    search: list[str] | None = None
    spec = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        parent = sys.modules.get(name)
        if parent is not None and hasattr(parent, "__path__"):
            search = list(parent.__path__)
            continue
        try:
            spec = next(filter(None, (_spec(finder, name, search) for finder in sys.meta_path)), None)
        except KeyError:
            # A namespace package inside a namespace package asks for its parent among the imported modules.
            spec = None
            search = [os.path.join(entry, part) for entry in search or () if os.path.isdir(os.path.join(entry, part))]
            continue
        if spec is None:
            return None
        # The list of a namespace package would ask in the same way when it is read.
        search = list(getattr(spec.submodule_search_locations, "_path", spec.submodule_search_locations) or ())
    return None if spec is None or not spec.has_location else spec.origin


def _spec(finder, name: str, search: list[str] | None):
    find = getattr(finder, "find_spec", None)
    return None if find is None else find(name, search)


def _definitions(body: list[ast.stmt], names: list[str]) -> list[ast.ClassDef]:
    """Every definition of a dotted name in a body, those in branches of ``if`` and ``try`` included."""
    found = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            if node.name == names[0]:
                found += [node] if len(names) == 1 else _definitions(node.body, names[1:])
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            branches = [getattr(node, field, []) for field in ("body", "orelse", "finalbody")]
            branches += [handler.body for handler in getattr(node, "handlers", [])]
            found += [one for branch in branches for one in _definitions(branch, names)]
    return found


def _statement(node: ast.ClassDef) -> tuple[bool | None, int | None]:
    """What the class's text says: the decorator is applied after the body, so it has the last word."""
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", None)
        if name == "sequence_bounded_mrope":
            return True, decorator.lineno
    said: tuple[bool | None, int | None] = (None, None)
    for statement in node.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(getattr(target, "id", None) == "supports_sequence_bounded_mrope" for target in targets):
            value = getattr(statement, "value", None)
            if isinstance(value, ast.Constant) and isinstance(value.value, bool):
                said = value.value, statement.lineno
            else:
                said = None, None
    return said
