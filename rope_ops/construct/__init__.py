"""Bounded construction: tables that a constructor builds are born with the rows that can be read.

``standin.py`` records what a constructor computes from long position ranges, ``settle.py`` decides and builds,
``holders.py`` finds who holds a table, ``constructor.py`` joins them around one ``__init__`` and ``lazy.py`` around a
first forward, ``existing.py`` bounds the tables of a model that is there already, ``measure.py`` has the figures.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from rope_ops.passes.report import Report

_bound: contextvars.ContextVar[tuple[int, Report] | None] = contextvars.ContextVar("rope_ops_bound", default=None)


@contextlib.contextmanager
def sequence_bound(max_model_len: int) -> Iterator[Report]:
    """Build certified models with bounded tables.

    ::

        with rope_ops.sequence_bound(32768) as report:
            model = Model(config)
        print(report)

    While a certified class's own constructor runs inside this context, its long position ranges and what it computes
    from them are deferred. When the outermost certified constructor ends, each table that is proven row-wise is built
    with ``max_model_len`` rows, bit for bit those of the legacy table, and no larger table is allocated on the way.
    Everything else is exactly as it was, and the report says why. The instance keeps the bound, as after
    :func:`rope_ops.bind`. Other classes, and the submodules that a certificate leaves out, are not touched.

    Args:
        max_model_len: no position of a sequence reaches it; tokens drafted ahead of the sequence count.

    Yields:
        The report: a record for each table, and notes.

    Raises:
        ValueError: ``max_model_len`` is not a positive integer.
    """
    from rope_ops.certify import checked_bound
    from rope_ops.passes.report import Report

    checked_bound("sequence_bound", "max_model_len", max_model_len)
    report = Report()
    token = _bound.set((max_model_len, report))
    try:
        yield report
    finally:
        _bound.reset(token)


def bound_buffers(model: nn.Module, max_model_len: int) -> Report:
    """Bind a built model and cut its proven tables: see :func:`rope_ops.construct.existing.bound_buffers`."""
    from rope_ops.construct.existing import bound_buffers

    return bound_buffers(model, max_model_len)


def report_of(model: nn.Module) -> Report:
    """What became of the tables that the certified modules inside a model built, in constructors and lazily."""
    from rope_ops.construct.constructor import REPORT
    from rope_ops.passes.report import Report

    report = Report()
    for module in model.modules():
        own = vars(module).get(REPORT)
        if own is not None:
            report.tables += own.tables
            report.notes += own.notes
    return report


def active_bound() -> int | None:
    """The bound of the innermost :func:`sequence_bound` that this thread is in."""
    found = _bound.get()
    return None if found is None else found[0]


def first_forward(root: nn.Module):
    """The context of an eager forward of an instance that was built under a bound.

    The first one defers as the constructor did: tables that are built when they are first needed and kept on the
    model start at the bounded size. Later ones watch whether the model itself has replaced such a table by a longer.
    """
    from rope_ops.construct.lazy import FirstForward, watching

    return FirstForward.of(root) or watching(root)


def deferred(root: nn.Module):
    """The context in which the constructor of a certified instance runs under a bound."""
    import torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    from rope_ops.construct.constructor import Construction, nested

    bound, report = _bound.get()
    if nested() or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    if _get_current_dispatch_mode() is not None:
        report.note(f"{type(root).__name__} was built under another dispatch mode: its tables are left as they were")
        return contextlib.nullcontext()
    return Construction(root, lambda: _bound.get()[0] if _bound.get() else bound, report)
