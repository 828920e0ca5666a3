"""Who holds a tensor: where in the model, whether the certificate covers that place, and whether anybody else does.

A table that a module-level cache or registry holds as well must stay whole: the next model that takes it from there
may have no bound, or another one.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rope_ops import certify
from rope_ops.construct.standin import StandIn


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """One place: ``container[key]``, of a module's attributes, a list or a dictionary; ``chain`` leads there."""

    path: str
    covered: bool
    container: Any
    key: Any
    chain: tuple


@dataclasses.dataclass(slots=True)
class Count:
    """An integer of the model, at ``container[key]``."""

    path: str
    value: int
    container: Any
    key: Any


_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.dtype, torch.device)
_REFERENCES = (types.MethodType, types.FunctionType, functools.partial)
# What refers to an object while Python runs it, or on behalf of a container that is looked at by itself.
_PASSING = (types.FrameType, types.TracebackType, types.GeneratorType)


class Holders:
    """Everything that is reached from ``root`` through attributes, lists, tuples, sets and dictionaries.

    Args:
        root: the model.
        wanted: the tensors to find the places of.
    """

    def __init__(self, root: nn.Module, wanted: Callable[[torch.Tensor], bool] = lambda t: isinstance(t, StandIn)):
        self.root = root
        self._wanted = wanted
        self._found: dict[int, torch.Tensor] = {}
        self.counts: list[Count] = []
        # Tensors of covered places that are no parameters: path, shape, bytes.
        self.others: list[tuple[str, tuple[int, ...], int]] = []
        # Filled by the settlement: the places of what was bounded.
        self.bounded: list[Holder] = []
        self._places: dict[int, list[Holder]] = {}
        self._inside: set[int] = {id(root), id(vars(root))}
        self._covered = _coverage(root)
        self._walk(root)

    def of(self, tensor: torch.Tensor) -> list[Holder]:
        return self._places.get(id(tensor), [])

    def found(self) -> list[torch.Tensor]:
        """The wanted tensors, in the order in which they were reached; handed over, so ask once."""
        found, self._found = list(self._found.values()), {}
        return found

    def held_outside(self, tensors: Sequence[torch.Tensor]) -> dict[int, str]:
        """By ``id``, the tensors that something outside the model refers to, with the kind of what does.

        Args:
            tensors: a list that the caller holds; no other list of the caller may hold them.
        """
        links = {id(link): link for one in tensors for holder in self.of(one) for link in holder.chain}
        known = self._inside | {id(tensors), id(links)}
        known |= {id(thing) for one in tensors for holder in self.of(one) for thing in (holder, holder.chain)}
        wanted = links.keys() | {id(one) for one in tensors}
        outside: dict[int, str] = {}
        for referrer in gc.get_referrers(*tensors, *links.values()):
            if id(referrer) in known or isinstance(referrer, (*_PASSING, *_REFERENCES)):
                continue
            for target in gc.get_referents(referrer):
                if id(target) in wanted:
                    outside.setdefault(id(target), _kind(referrer))
        for link in links.values():
            # A registry that does not keep its modules alive. (Other weak references, as Dynamo's, hand nothing out.)
            if isinstance(link, nn.Module) and any(isinstance(r, weakref.KeyedRef) for r in weakref.getweakrefs(link)):
                outside.setdefault(id(link), "a WeakValueDictionary")
        found = {}
        for one in tensors:
            for key in (id(one), *(id(link) for holder in self.of(one) for link in holder.chain)):
                if key in outside:
                    found[id(one)] = outside[key]
        return found

    def _walk(self, root: nn.Module) -> None:
        seen: set[tuple[int, bool]] = set()
        todo: list[tuple[Any, str, bool, tuple]] = [(root, type(root).__name__, True, ())]
        while todo:
            obj, path, covered, chain = todo.pop()
            if isinstance(obj, nn.Module):
                covered = self._covered.get(id(obj), covered and not _opted_out(obj))
            if (id(obj), covered) in seen:
                continue
            seen.add((id(obj), covered))
            self._inside.add(id(obj))
            inner = chain if obj is root else (*chain, obj)
            for container, key, name, value in self._items(obj, path):
                if isinstance(value, torch.Tensor) and self._wanted(value):
                    if not isinstance(value, StandIn):
                        self._found[id(value)] = value
                    self._places.setdefault(id(value), []).append(Holder(name, covered, container, key, inner))
                elif isinstance(value, torch.Tensor):
                    number = value.is_floating_point() or value.is_complex()
                    if covered and number and not isinstance(value, nn.Parameter) and not value.is_sparse:
                        self.others.append((name, tuple(value.shape), value.nbytes))
                elif type(value) is int:
                    self.counts.append(Count(name, value, container, key))
                elif isinstance(value, _REFERENCES):
                    self._inside.add(id(value))
                elif not isinstance(value, (*_LEAVES, torch.Tensor)):
                    todo.append((value, name, covered, inner))

    def _items(self, obj, path):
        if isinstance(obj, dict):
            yield from ((obj, key, f"{path}[{key!r}]", value) for key, value in list(obj.items()))
        elif isinstance(obj, (list, tuple, set, frozenset)):
            yield from ((obj, i, f"{path}[{i}]", value) for i, value in enumerate(list(obj)))
        elif isinstance(getattr(obj, "__dict__", None), dict):
            attributes = vars(obj)
            self._inside.add(id(attributes))
            own = ("_buffers", "_parameters", "_modules") if isinstance(obj, nn.Module) else ()
            for name, value in list(attributes.items()):
                if name not in own:
                    yield attributes, name, f"{path}.{name}", value
                    continue
                self._inside.add(id(value))
                yield from ((value, key, f"{path}.{key}", inner) for key, inner in list(value.items()))


def _coverage(root: nn.Module) -> dict[int, bool]:
    """By ``id``, whether a certificate covers a registered submodule."""
    covered: dict[int, bool] = {}
    for module in root.modules():
        if module is root or certify.supports_sequence_bounded_mrope(certify.model_class(type(module))):
            covered[id(module)] = True
            for _, (inner, inside) in certify._scope(module):
                covered[id(inner)] = covered.get(id(inner), True) and inside
    return covered


def _opted_out(module: nn.Module) -> bool:
    return certify._own(certify.model_class(type(module))).get(certify._CAPABILITY) is False


def _kind(referrer: object) -> str:
    name = type(referrer).__name__
    return "an lru_cache" if "lru_cache" in name else f"a {name}"
