"""Tables that a model builds in its first forward, keeps, and replaces by longer ones when it needs them.

The first eager forward of an instance that was built under a bound runs under the deferral of constructors: reads of
rows get those rows at once, and what the model keeps is settled when the forward ends. An integer of the model that
this forward set to the row count of a table is the model's note of how far its table reaches: it is set to the rows
that are there, so that a request past the bound makes the model build a longer table itself, with legacy values.
"""

from __future__ import annotations

import contextlib
import warnings

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rope_ops import certify
from rope_ops.construct.constructor import Construction, nested
from rope_ops.construct.holders import Holders
from rope_ops.passes.report import Outcome, Report


class FirstForward(Construction):
    """The deferral of one forward of ``root``."""

    @classmethod
    def of(cls, root: nn.Module) -> FirstForward | contextlib.AbstractContextManager | None:
        """None unless this is the first forward, and one that can be deferred."""
        if vars(root)[certify._LAZY] is not None:
            return None
        if nested():
            setattr(root, certify._LAZY, ())
            return contextlib.nullcontext()
        if _get_current_dispatch_mode() is not None or torch.jit.is_tracing():
            return contextlib.nullcontext()
        return cls(root)

    def __init__(self, root: nn.Module):
        bound = vars(root)[certify._BOUND]
        super().__init__(root, lambda: bound, Report())
        self._before = {count.path: count.value for count in Holders(root).counts}

    def __exit__(self, kind, error, traceback):
        setattr(self._root, certify._LAZY, ())
        return super().__exit__(kind, error, traceback)

    def _settled(self, holders: Holders) -> None:
        tables = [table for table in self._tables if table.outcome is Outcome.BOUNDED]
        rows = {table.rows_before: table.rows_after for table in tables}
        for count in holders.counts:
            new = rows.get(count.value)
            if new is None or self._before.get(count.path) == count.value or not isinstance(count.container, dict):
                continue
            count.container[count.key] = new
            count.value = new
        paths = {module: path for path, module in self._root.named_modules()}
        kept = {}
        for holder in holders.bounded:
            module = holder.chain[-1] if holder.chain else self._root
            if module in paths and any(holder.container is one for one in (vars(module), module._buffers)):
                kept[paths[module], holder.key] = _size(self._root, paths[module], holder.key)
        setattr(self._root, certify._LAZY, tuple((*place, size) for place, size in kept.items()))


def _size(root: nn.Module, path: str, name: str) -> int | None:
    try:
        value = getattr(root.get_submodule(path), name, None)
    except AttributeError:  # the model has dropped that module
        return None
    return value.numel() if isinstance(value, torch.Tensor) else None


@contextlib.contextmanager
def watching(root: nn.Module):
    """Say once, for each lazy table, that the model has grown it past the bound."""
    yield
    watched = vars(root)[certify._LAZY]
    grown = [entry for entry in watched if (size := _size(root, *entry[:2])) is not None and size > entry[2]]
    if grown:
        setattr(root, certify._LAZY, tuple(entry for entry in watched if entry not in grown))
        names = ", ".join(f"{path}.{name}".lstrip(".") for path, name, _ in grown)
        warnings.warn(
            f"{type(root).__name__}: a request past max_model_len = {vars(root)[certify._BOUND]} made the model grow "
            f"{names}: its values are the legacy ones, and it is no longer bounded",
            RuntimeWarning,
            stacklevel=3,
        )
