"""The deferral of one constructor, from its first line to the tensors it leaves behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import torch
from torch import nn

from rope_ops.construct.holders import Holder, Holders
from rope_ops.construct.settle import Settlement, Verdict
from rope_ops.construct.standin import OWN, Deferral, Recorder, StandIn, _memory, caller, plain
from rope_ops.passes.report import UNCHECKED_READS, Outcome, Reason, Report, Table, describe, log

# Plain attributes of modules, so that they survive deepcopy and pickle.
REPORT = "_rope_ops_report"  # of a certified instance: what became of its constructor's tables
BOUNDED = "_rope_ops_bounded"  # of any module: buffer name -> (dim, legacy rows, rows)

_state = threading.local()


def nested() -> bool:
    """Whether a certified constructor is running in this thread: its tables are settled when the outermost ends."""
    return getattr(_state, "construction", None) is not None


class Construction:
    """A context manager around the body of a constructor (or of anything else that builds tables on ``root``).

    Args:
        root: the instance under construction.
        bound: the bound in effect at the moment that a range is made.
        report: gets a record for each table.
    """

    def __init__(self, root: nn.Module, bound: Callable[[], int], report: Report):
        self._root, self._report = root, report
        self._recorder = Recorder(self._looked)
        self._bound = bound
        self._mode = Deferral(self._recorder, bound)
        self._tables: list[Table] = []
        self._looked_inside: dict[int, Table] = {}

    def __enter__(self):
        _state.construction = self
        self._mode.__enter__()
        return self

    def __exit__(self, kind, error, traceback):
        self._mode.__exit__(kind, error, traceback)
        _state.construction = None
        self._recorder.closed = True
        self._recorder.reclass()
        if kind is None:
            self._finish()
        else:
            self._abandon()
        return False

    # The two ends --------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        recorder = self._recorder
        stand_ins = recorder.alive()
        holders = Holders(self._root)
        if any(not holders.of(stand_in) for stand_in in stand_ins):
            del stand_ins
            gc.collect()  # a table in a reference cycle that nothing reaches any more is not worth building
            stand_ins = recorder.alive()
        recorder.forget(stand_ins)
        outside = holders.held_outside(stand_ins) if stand_ins else {}
        pending = [stand_in for stand_in in stand_ins if stand_in._real is None]
        if pending:
            self._settle(pending, holders, outside)
        for stand_in in stand_ins:
            if stand_in._real is not None:
                _become(stand_in, stand_in._real, holders)
        self._tables = [*self._looked_inside.values(), *self._tables]
        own = vars(self._root).setdefault(REPORT, Report())
        self._tables += self._unseen(holders, {table.location for table in (*own.tables, *self._tables)})
        for table in self._tables:
            log.info("%s", describe(table))
        self._settled(holders)
        notes = [*recorder.notes, *self._counts(holders)]
        for report in (own, self._report):
            report.tables += self._tables
            report.notes += notes

    def _settled(self, holders: Holders) -> None:
        """Called when every stand-in has become a tensor, before the notes are written."""

    def _abandon(self) -> None:
        """The constructor raised: what a cache outside holds gets its legacy values, all else dies with the frames."""
        stand_ins = self._recorder.alive()
        if not stand_ins:
            return
        holders = Holders(self._root)
        outside = holders.held_outside(stand_ins)
        for stand_in in stand_ins:
            if id(stand_in) in outside:
                self._recorder.materialise(stand_in, "a cache")
        real = [stand_in for stand_in in stand_ins if stand_in._real is not None]
        self._recorder.forget(real)
        for stand_in in real:
            _become(stand_in, stand_in._real, holders)

    # What becomes of each --------------------------------------------------------------------------------------------

    def _settle(self, pending: list[StandIn], holders: Holders, outside: dict[int, str]) -> None:
        settlement = Settlement(self._recorder, pending)
        groups: dict[int, list[int]] = {}
        for number, stand_in in enumerate(pending):
            groups.setdefault(_memory(stand_in._fake), []).append(number)
        left: dict[int, tuple[Reason, str]] = {}
        for memory, group in groups.items():
            reasons = [_why(pending[n], settlement.verdicts[n], holders, outside) for n in group]
            reason = next((reason for reason in reasons if reason is not None), None)
            if reason is not None:
                left[memory] = reason
        chosen = [number for memory, group in groups.items() if memory not in left for number in group]
        if chosen:
            tensors = dict(zip(chosen, settlement.bounded(chosen), strict=True))
            for memory in groups.keys() - left.keys():
                group = groups[memory]
                if settlement.keeps_sharing(group, [tensors[number] for number in group]):
                    for number in group:
                        pending[number]._real = tensors[number]
                else:
                    left[memory] = (Reason.SHARED, "views of one table that the bounded one does not have")
            del tensors
        for memory, group in groups.items():
            first = max(group, key=lambda number: pending[number]._fake.numel())
            verdict = settlement.verdicts[first]
            if memory in left:
                reals = self._recorder.replay([pending[number]._fake for number in group])
                for number, real in zip(group, reals, strict=True):
                    stand_in = pending[number]
                    trains = stand_in._trainable and (real.is_floating_point() or real.is_complex())
                    stand_in._real = real.requires_grad_() if trains else real
                del reals
            if verdict.table or left[memory][0] is Reason.NOT_A_TABLE:
                self._tables.append(_record(pending, group, first, verdict, left.get(memory), holders))
            if memory not in left and verdict.rows:
                for number in group:
                    bounded = settlement.verdicts[number]
                    for holder in holders.of(pending[number]):
                        holders.bounded.append(holder)
                        remember(holder, self._root, bounded.dim, bounded.rows, bounded.bound)

    def _looked(self, stand_in: StandIn, by: str) -> None:
        fake = stand_in._fake
        size = fake.untyped_storage().nbytes()
        rows = max(fake.shape, default=1)
        where = caller()
        reason = Reason.TRAINABLE if by == "a gradient" else Reason.LOOKED_INSIDE
        record = Table(Outcome.LEFT, reason, rows, rows, size, size, where, "table", by)
        self._looked_inside.setdefault(_memory(fake), record)

    def _unseen(self, holders: Holders, known: set[str]) -> list[Table]:
        """Tensors as long as a table that no deferred range led to: made from numpy, a linspace, a file."""
        if self._looked_inside:
            return []  # what was made of the values that were looked at is reported by that
        bound, seen = self._bound(), {path for location in known for path in location.split(", ")}
        found = [(path, shape, size) for path, shape, size in holders.others if len(shape) > 1 and max(shape) > bound]
        return [
            Table(Outcome.LEFT, Reason.NO_RANGE, max(shape), max(shape), size, size, path, "tensor")
            for path, shape, size in found
            if path not in seen
        ]

    def _counts(self, holders: Holders) -> list[str]:
        """Notes on what may still read a bounded table as if it were whole."""
        bounded = [table for table in self._tables if table.outcome is Outcome.BOUNDED]
        rows = {table.rows_before: table.rows_after for table in bounded}
        notes = [
            f"{count.path} = {count.value} is the row count of a table that now has {rows[count.value]} rows"
            for count in holders.counts
            if count.value in rows
        ]
        if bounded:
            notes.append(UNCHECKED_READS)
        return notes


def _why(stand_in: StandIn, verdict: Verdict, holders: Holders, outside) -> tuple[Reason, str] | None:
    """Why a stand-in becomes its legacy tensor; None where it is bounded."""
    places = holders.of(stand_in)
    if verdict.reason is not None:
        return verdict.reason, verdict.detail
    if stand_in._trainable:
        return Reason.TRAINABLE, ""
    if id(stand_in) in outside or not places:
        return Reason.HELD_OUTSIDE, outside.get(id(stand_in), "by nothing in the model")
    if not all(holder.covered for holder in places):
        return Reason.EXCLUDED, next(holder.path for holder in places if not holder.covered)
    if weakref.getweakrefs(stand_in):
        return Reason.NOT_SWAPPED, "a weak reference"
    with torch._C.DisableTorchFunctionSubclass():
        if stand_in._use_count() > 1:
            return Reason.NOT_SWAPPED, "a reference below Python"
    return None


def _become(stand_in: StandIn, real: torch.Tensor, holders: Holders) -> None:
    """Turn a stand-in into a plain tensor, for all who hold it; where that is refused, replace it in the model."""
    attributes = {name: value for name, value in vars(stand_in).items() if name not in OWN}
    parameter = vars(stand_in).get("_is_param", False)
    with plain(), torch._C.DisableTorchFunctionSubclass():
        # A tensor of our own: swapping exchanges the contents, and `real` may be in the constructor's hands.
        fresh = nn.Parameter(real.detach(), real.requires_grad) if parameter else real.detach()
        if real.requires_grad and not parameter:
            fresh.requires_grad_()
        vars(fresh).update(attributes)
        try:
            torch.utils.swap_tensors(stand_in, fresh)
            return
        except RuntimeError:
            pass
    for holder in holders.of(stand_in):
        if isinstance(holder.container, (dict, list)):
            holder.container[holder.key] = fresh


def _record(pending, group, first, verdict: Verdict, left, holders: Holders) -> Table:
    fake, real = pending[first]._fake, pending[first]._real
    before, after = fake.untyped_storage().nbytes(), real.untyped_storage().nbytes()
    paths = sorted({holder.path for number in group for holder in holders.of(pending[number])})
    where = ", ".join(paths) or "unknown place"
    if left is not None:
        rows = verdict.rows or max(fake.shape, default=1)
        return Table(Outcome.LEFT, left[0], rows, rows, before, before, where, verdict.formula or "range", left[1])
    if verdict.dim < fake.dim() and fake.shape[verdict.dim] == verdict.rows:
        return Table(
            Outcome.BOUNDED, None, verdict.rows, real.shape[verdict.dim], before, after, where, verdict.formula
        )
    return Table(Outcome.SHORTENED, None, verdict.rows, _first(real.shape), before, after, where, verdict.formula)


def _first(shape: torch.Size) -> int:
    return shape[0] if shape else 1


def remember(holder: Holder, root: nn.Module, dim: int, legacy: int, rows: int) -> None:
    """Let a module take the rows of a bounded buffer out of a state dict that holds the legacy ones."""
    module = holder.chain[-1] if holder.chain else root
    if isinstance(module, nn.Module) and holder.container is module._buffers:
        bounded = vars(module).setdefault(BOUNDED, {})
        if not bounded:
            module.register_load_state_dict_pre_hook(fit_rows)
        bounded[holder.key] = (dim, legacy, rows)


def fit_rows(module, state_dict, prefix, *_) -> None:
    """Before a state dict is loaded: of a legacy table the rows that the bounded buffer has."""
    for name, (dim, legacy, rows) in vars(module).get(BOUNDED, {}).items():
        table = state_dict.get(prefix + name)
        if isinstance(table, torch.Tensor) and table.dim() > dim and table.shape[dim] == legacy:
            state_dict[prefix + name] = table.narrow(dim, 0, rows)
