"""What a recording becomes: bounded tables where that is proven right, the legacy tables everywhere else.

Safety: the recording is functionalised into a graph of ATen operators, and the row analysis of
:mod:`rope_ops.passes.rows` decides. A table is bounded only if it is row-wise from a range that counts positions (from
0 or later, by 1), is not joined from several tables one below another (which readers index with an offset), and all
that shares its memory is bounded with it. Its rows are then computed by :class:`rope_ops.passes.replay.Replay`: the
same operators at the smaller size, bit for bit.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from rope_ops.construct.standin import Recorder, StandIn, Value, _memory, plain
from rope_ops.passes.replay import Replay, Take
from rope_ops.passes.report import Reason
from rope_ops.passes.rewrite import Options, _Emitter, _formula, _standard_formula
from rope_ops.passes.rows import Analysis, Edge, Read, analyse, ancestors, joins_rows, op_name, value_of

aten = torch.ops.aten


def _stack(tensors, dim=0):
    return torch.cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


_GATHERS = frozenset(("index", "index_select", "embedding"))

# Operators that the analysis does not know by themselves, as others that only move values: the bits cannot change.
_MOVES = {aten.stack.default: _stack}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What may become of one stand-in. ``reason`` is None where it can be bounded, or shortened to what is read."""

    reason: Reason | None
    detail: str = ""
    formula: str = ""
    rows: int = 0
    bound: int = 0
    dim: int = 0
    # Whether a position range enters it at all, as angles: otherwise it is no table and of no interest.
    table: bool = True


class Settlement:
    """The graph of some stand-ins, what may become of each, and the tensors they become."""

    def __init__(self, recorder: Recorder, stand_ins: Sequence[StandIn]):
        self._recorder = recorder
        self._fakes = [stand_in._fake for stand_in in stand_ins]
        self._gm, self._operands = _trace(recorder, self._fakes)
        self._graph = self._gm.graph
        self._output = next(node for node in reversed(self._graph.nodes) if node.op == "output")
        ranges = {
            node: node.args[3] for node in self._graph.nodes if node.target is torch.ops.rope_ops.position_range.default
        }
        self._analysis = analyse(self._graph, ranges)
        self._results = list(self._output.args[0])
        self.verdicts = [self._verdict(node) for node in self._results]

    def bounded(self, chosen: Sequence[int]) -> list[torch.Tensor]:
        """The bounded tensors of the stand-ins with these numbers; each verdict must allow it."""
        graph, analysis, output = self._graph, self._analysis, self._output
        results = [self._results[number] for number in chosen]
        if analysis.bounds:
            emitter = _Emitter(graph, analysis, Options(), decomposed=False)
            emitter._replay = replay = _Rows(analysis, shorten=emitter._first_rows)
            edges = [edge for edge in analysis.edges if any(self._reaches(edge, node) for node in results)]
            with plain(), self._recorder.fake_mode, graph.inserting_before(output):
                emitter.serve(edges)
                results = [output.args[0][number] for number in chosen]  # a served reader has been replaced
                for node in results:
                    if node in analysis.rows and _standard_formula(node, analysis):
                        replay.tables[node] = emitter._bounded(node)
                results = [emitter._bounded(node) if node in analysis.rows else node for node in results]
        output.args = (results,)
        graph.eliminate_dead_code()
        self._gm.recompile()
        with plain():
            # Intermediate results go as soon as their last reader has run.
            tensors = list(fx.Interpreter(self._gm, garbage_collect_values=True).run(*self._operands))
        # The graph computes equal tables once; what had memory of its own keeps it.
        owners: dict[int, int] = {}
        for place, number in enumerate(chosen):
            memory = tensors[place].untyped_storage()._cdata
            if owners.setdefault(memory, _memory(self._fakes[number])) != _memory(self._fakes[number]):
                with plain():
                    tensors[place] = tensors[place].clone()
        return tensors

    def keeps_sharing(self, chosen: Sequence[int], tensors: Sequence[torch.Tensor]) -> bool:
        """Whether tensors share memory exactly where the stand-ins did, and are laid out as they were."""
        before = [_memory(self._fakes[number]) for number in chosen]
        after = [tensor.untyped_storage()._cdata for tensor in tensors]
        pairs = len(set(zip(before, after, strict=True)))
        alike = all(
            tensor.is_contiguous() == self._fakes[number].is_contiguous()
            for number, tensor in zip(chosen, tensors, strict=True)
        )
        return alike and pairs == len(set(before)) == len(set(after))

    def _verdict(self, node: fx.Node) -> Verdict:
        analysis = self._analysis
        before = ancestors(node)
        ranges = [other for other in before if other in analysis.bounds]
        if not ranges:
            return Verdict(Reason.NO_RANGE, table=False)
        if not _makes_angles(before, ranges):
            return Verdict(Reason.NOT_A_TABLE, table=False)
        rows = max(int(value_of(other).shape[0]) for other in ranges)
        known = {"rows": rows, "bound": min(analysis.bounds[other] for other in ranges)}
        known["formula"] = _formula([other for other in before if other in analysis.rows], {node}, analysis)
        for other in ranges:
            start, _, step = other.args[:3]
            if start < 0 or step != 1:
                return Verdict(Reason.NOT_POSITIONS, f"range from {start} by {step}", **known)
        if any(other in analysis.rows and joins_rows(other, analysis.rows) for other in before):
            return Verdict(Reason.ROWS_JOINED, "readers add an offset", **known)
        if node in analysis.rows:
            if analysis.rows[node].inner != 1:
                return Verdict(Reason.ROWS_MERGED, **known)
            known |= {"rows": analysis.rows[node].count, "bound": analysis.bound(node)}
            return Verdict(None, dim=analysis.rows[node].dim, **known)
        for edge in analysis.edges:
            served = edge.read is Read.SLICE or (edge.read is Read.GATHER and op_name(edge.user) in _GATHERS)
            if self._reaches(edge, node) and not served:
                return Verdict(edge.reason or Reason.UNKNOWN_OP, edge.detail or edge.read.value, **known)
        return Verdict(None, **known)

    def _reaches(self, edge: Edge, node: fx.Node) -> bool:
        """Whether a node is computed from what a reader took out of a table (a row-wise node is not)."""
        return node not in self._analysis.rows and edge.user in ancestors(node)


class _Rows(Replay):
    """Takes views of a table that is built by the operator from what the operator built."""

    def __init__(self, analysis: Analysis, shorten):
        super().__init__(analysis, shorten)
        self.tables: dict[fx.Node, fx.Node] = {}

    def rows(self, node, selection):
        if node in self.tables and selection == (Take(0, self._analysis.bound(node)),):
            return self.tables[node]
        return super().rows(node, selection)


def small_values(recorder: Recorder, stand_ins: Sequence[StandIn]) -> list[torch.Tensor]:
    """The values of stand-ins that hold less than a table: from the rows they were read from, if that is all."""
    settlement = Settlement(recorder, stand_ins)
    reason = next((verdict.reason for verdict in settlement.verdicts if verdict.reason is not None), None)
    if reason is not None:
        recorder.note(f"read whole by {recorder.tape[-1].func} ({reason})")
        return recorder.replay([stand_in._fake for stand_in in stand_ins])
    return settlement.bounded(range(len(stand_ins)))


def _trace(recorder: Recorder, fakes: Sequence[torch.Tensor]) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The recorded operators as a functional graph, with the position ranges as operators of ours."""
    calls = recorder.needed(fakes)
    read = {leaf.index for call in calls for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Value)}
    operands = sorted(read & recorder.operands.keys())
    wanted = [recorder._index_of(fake) for fake in fakes]

    def run(*inputs):
        values = dict(zip(operands, inputs, strict=True))

        def value(leaf):
            return values[leaf.index] if isinstance(leaf, Value) else leaf

        for call in calls:
            if call.bound:
                results = [_position_range(recorder, call)]
            else:
                args, kwargs = tree_map(value, (call.args, call.kwargs))
                result = call.func(*args, **kwargs)
                results = [r for r in tree_leaves(result) if isinstance(r, torch.Tensor)]
            values.update(zip(call.results, results, strict=True))
        return [values[index] for index in wanted]

    inputs = [recorder.values[index] for index in operands]
    tracer = _Tracer()
    for number, value in enumerate(inputs):
        tracer.placeholder(f"operand_{number}", value)
    with plain(), recorder.fake_mode, tracer:
        outputs = torch.func.functionalize(run, remove="mutations")(*inputs)
    return tracer.module(outputs), [recorder.operands[index] for index in operands]


class _Tracer(TorchDispatchMode):
    """Writes the operators that run under it into a graph.

    ``make_fx`` does the same, but patches ``nn.Module`` for the whole process while it runs.
    """

    def __init__(self):
        super().__init__()
        self._graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []

    def placeholder(self, name: str, value: torch.Tensor) -> None:
        self._note(self._graph.placeholder(name), value)

    def module(self, outputs: list[torch.Tensor]) -> fx.GraphModule:
        self._graph.output([self._nodes[id(value)] for value in outputs])
        return fx.GraphModule({}, self._graph)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _MOVES:
            with self:
                return _MOVES[func](*args, **kwargs)
        result = func(*args, **kwargs)
        nodes = tree_map(lambda leaf: self._nodes[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
        node = self._graph.call_function(func, *nodes)
        if isinstance(result, (list, tuple)):
            node.meta["val"] = result
            for place, value in enumerate(result):
                self._note(self._graph.call_function(operator.getitem, (node, place)), value)
        else:
            self._note(node, result)
        return result

    def _note(self, node: fx.Node, value: torch.Tensor) -> None:
        node.meta["val"] = value
        self._nodes[id(value)] = node
        self._alive.append(value)


def _position_range(recorder: Recorder, call) -> torch.Tensor:
    fake = recorder.values[call.results[0]]
    numbers = call.args if len(call.args) > 1 else (0, *call.args)
    start, end, step = (*numbers, 1)[:3]
    arguments = (start, end, step, call.bound, fake.dtype, fake.device)
    return torch.ops.rope_ops.position_range.default(*arguments)


def _makes_angles(nodes: set[fx.Node], ranges: list[fx.Node]) -> bool:
    """Whether, among these nodes, a range becomes cos or sin, or a matrix with frequencies."""
    reached, todo = set(ranges), list(ranges)
    while todo:
        current = todo.pop()
        for user in current.users.keys() & nodes - reached:
            out, size = value_of(user), value_of(current).numel()
            if op_name(user) in ("cos", "sin", "polar"):
                return True
            number = isinstance(out, torch.Tensor) and (out.is_floating_point() or out.is_complex())
            if number and out.numel() > size and len(user.all_input_nodes) > 1:
                return True
            if isinstance(out, torch.Tensor):
                reached.add(user)
                todo.append(user)
    return False
