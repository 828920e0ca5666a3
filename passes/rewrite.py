"""Stage 2, on functional ATen: what replaces a table, and when one is left exactly as it was.

Safety: a table is rewritten only if *every* reader of its range can be served without it, each in a way that gives
the reader the very rows it read before:

- a gather gets the rows at its positions, computed from the positions (``form="bounded"``: it reads a table of the
  bound's rows, with negative positions still counted from the end of the whole table, so that none can reach a row it
  did not reach before);
- a slice within the bound gets the rows of the slice;
- an opaque reader that was vouched for gets a table of the bound's rows.

Otherwise the range goes back to what ``torch.arange`` would have been in this graph, with a reason in the report.
The pass reads operators and their arguments, never how a node came to be: what it does is a function of the graph's
text, as compile caches assume.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import fx

from rope_ops.passes import _private
from rope_ops.passes.cost import rule
from rope_ops.passes.replay import Gather, Replay, Take
from rope_ops.passes.report import Outcome, Reason, Report, Table, location
from rope_ops.passes.rows import Analysis, Edge, Read, analyse, joins_rows, op_name, slice_arguments, value_of

aten, prims = torch.ops.aten, torch.ops.prims

# Custom operators that read rows at the positions they are given, and nothing else of the table.
_ROW_READERS = frozenset(("rope_ops::rotate", "rope_ops::rotate_"))


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user may choose; part of every cache key."""

    form: str = "auto"
    opaque_readers: bool = False
    # Whether rows may be stored by an operator of this package, where that is faster.
    rows_once: bool = True


def rewrite(graph: fx.Graph, options: Options, report: Report, decomposed: bool = True) -> int:
    """Rewrite the tables of every ``rope_ops.position_range`` in a graph, and remove that operator.

    Args:
        graph: functional ATen with fake tensors in ``meta["val"]``.
        options: form and readers.
        report: gets a record for each table.
        decomposed: the graph is past Inductor's decompositions, where ``arange`` is ``prims.iota``.

    Returns:
        The number of tables rewritten.
    """
    ranges = {node: node.args[3] for node in graph.nodes if node.target is torch.ops.rope_ops.position_range.default}
    if not ranges:
        return 0
    analysis = analyse(graph, ranges)
    left = _Planner(graph, analysis, options).left()
    todo = [edge for edge in analysis.edges if not left.keys() & analysis.sources[edge.table]]
    served = _Emitter(graph, analysis, options, decomposed).serve(todo)
    report.add(_record(source, analysis, left.get(source), served) for source in ranges)
    if served:
        _erase([*analysis.rows, *(one.edge.user for one in served)], ranges)
    for node in ranges:
        _restore(node, decomposed)
    if served:
        graph.eliminate_dead_code()
    graph.lint()
    return len(ranges) - len(left)


# Which tables must be left


class _Planner:
    def __init__(self, graph: fx.Graph, analysis: Analysis, options: Options):
        self._analysis, self._options = analysis, options
        self._backward = _after(node for node in graph.nodes if node.op == "placeholder" and "tangents" in node.name)

    def left(self) -> dict[fx.Node, tuple[Reason, str]]:
        """The ranges that stay, with the reason of each: the first reader that needs the whole table."""
        analysis = self._analysis
        left: dict[fx.Node, tuple[Reason, str]] = {}
        for edge in analysis.edges:
            reason = self._reason(edge)
            if reason is not None:
                for source in analysis.sources[edge.table]:
                    left.setdefault(source, reason)
        for source in analysis.bounds:
            edges = [edge for edge in analysis.edges if source in analysis.sources[edge.table]]
            if not edges:
                left.setdefault(source, (Reason.NOT_READ, ""))
            elif source not in left and self._plain_is_as_fast(edges):
                left[source] = (Reason.COST, "")
        # A table that is read together with one that stays is needed whole as well.
        changed = True
        while changed:
            changed = False
            for edge in analysis.edges:
                sources = analysis.sources[edge.table]
                if left.keys() & sources and not sources <= left.keys():
                    left |= {source: (Reason.SHARED, "") for source in sources - left.keys()}
                    changed = True
        return left

    def _reason(self, edge: Edge) -> tuple[Reason, str] | None:
        if edge.read is Read.OTHER:
            trains = edge.user in self._backward and edge.user.op != "output"
            return (Reason.TRAINABLE, "") if trains else (edge.reason, edge.detail)
        if edge.read is Read.OPAQUE:
            return self._opaque(edge)
        if edge.read is Read.MOVING_SLICE and op_name(edge.user) != "slice":
            return Reason.UNKNOWN_OP, "one row selected by a symbol"
        if edge.read is Read.GATHER and op_name(edge.user) == "gather" and _whole_rows(edge.user) is None:
            return Reason.UNKNOWN_OP, "gather of other rows in other columns"
        if self._steps_over_joined(edge):
            return Reason.ROWS_JOINED, "and then sliced with a step or a moving start"
        if any(user.target is aten.as_strided.default for user in edge.user.users):
            return Reason.UNKNOWN_OP, "as_strided of the rows read"
        if edge.read is not Read.GATHER and any(user.op == "output" for user in edge.user.users):
            # A slice that is returned has the strides of its table, which the caller may see.
            if _significant(value_of(edge.user)) != _significant(_compact(value_of(edge.user))):
                return Reason.ESCAPES, "a slice is returned"
        return None

    def _opaque(self, edge: Edge) -> tuple[Reason, str] | None:
        name = str(edge.user.target)
        target = edge.user.target
        functionalized = name.startswith("auto_functionalized")
        if functionalized:
            target = edge.user.args[0]
            written = edge.user.kwargs.get("_all_bases", ())
            arguments = {argument.name for argument in target._schema.arguments if argument.alias_info is not None}
            if edge.table in written or any(edge.user.kwargs.get(argument) is edge.table for argument in arguments):
                return Reason.OPAQUE_READER, f"{target} writes the table"
        if not isinstance(target, torch._ops.OpOverload):
            return Reason.OPAQUE_READER, name
        if not self._options.opaque_readers and target._schema.name not in _ROW_READERS:
            return Reason.OPAQUE_READER, target._schema.name
        if self._analysis.rows[edge.table].inner != 1:
            return Reason.ROWS_MERGED, target._schema.name
        rows = self._analysis.rows[edge.table]
        shorter = _compact(value_of(edge.table).narrow(rows.dim, 0, self._analysis.bound(edge.table)))
        args, kwargs = fx.node.map_arg(
            (edge.user.args, edge.user.kwargs), lambda node: shorter if node is edge.table else value_of(node)
        )
        with shorter.fake_mode:
            result = edge.user.target(*args, **kwargs)
        if _shapes(result) != _shapes(value_of(edge.user)) and not functionalized:
            return Reason.READER_SHAPE, target._schema.name
        return None

    def _steps_over_joined(self, edge: Edge) -> bool:
        """Slices of joined tables are taken apart only where their rows are known and follow each other."""
        region = list(self._region(edge.table))
        if not any(joins_rows(node, self._analysis.rows) for node in region):
            return False
        slices = [slice_arguments(node) for node in (*region, edge.user) if op_name(node) == "slice"]
        return any(not (isinstance(one.start, int) and isinstance(one.stop, int) and one.step == 1) for one in slices)

    def _plain_is_as_fast(self, edges: list[Edge]) -> bool:
        if self._options.form != "auto" or any(edge.read is not Read.GATHER for edge in edges):
            return False
        places = {edge: self._analysis.rows[edge.table] for edge in edges}
        indices = {_index_of(edge, rows.dim) for edge, rows in places.items()}
        counts = [_private.size_hint(value_of(index).numel()) for index in indices]
        if None in counts:
            return False
        rows, longest = sum(counts), max(rows.count for rows in places.values())
        device = value_of(edges[0].table).device.type
        inlined = all(_inlines(node) for edge in edges for node in self._region(edge.table))
        return rows > longest or (inlined and rows < rule(device).plain_below)

    def _region(self, table: fx.Node):
        seen, todo = {table}, [table]
        while todo:
            node = todo.pop()
            yield node
            for operand in node.all_input_nodes:
                if operand in self._analysis.rows and operand not in seen:
                    seen.add(operand)
                    todo.append(operand)


def _inlines(node: fx.Node) -> bool:
    """Whether plain Inductor on an accelerator inlines this operator into a gather of its result."""
    value = value_of(node)
    stored = isinstance(value, torch.Tensor) and value.is_complex()
    return not stored and op_name(node) not in ("polar", "view_as_real", "slice_scatter", "select_scatter")


def _after(nodes) -> set[fx.Node]:
    reached, todo = set(), list(nodes)
    while todo:
        for user in todo.pop().users:
            if user not in reached:
                reached.add(user)
                todo.append(user)
    return reached


def _index_of(edge: Edge, dim: int) -> fx.Node:
    args = edge.user.args
    name = op_name(edge.user)
    if name == "index":
        return args[1][dim]
    return args[1] if name == "embedding" else args[2]


def _whole_rows(gather: fx.Node) -> fx.Node | None:
    """The index before it was expanded over the columns, if a ``gather`` reads whole rows with it."""
    index, dim = gather.args[2], gather.args[1] % value_of(gather).dim()
    while op_name(index) in ("clone", "convert_element_type", "_to_copy", "alias"):
        index = index.args[0]
    if op_name(index) not in ("expand", "repeat"):
        return None
    source = value_of(index.args[0])
    if source.dim() != value_of(gather).dim():
        return None
    batch = value_of(gather.args[0]).shape
    columns = all(source.shape[d] == 1 for d in range(source.dim()) if d > dim)
    return index.args[0] if columns and all(size == 1 for size in batch[:dim]) else None


def _compact(value: torch.Tensor) -> torch.Tensor:
    """The same value in memory of its own, with the strides that a fresh result has."""
    with value.fake_mode:
        return value.clone(memory_format=torch.preserve_format)


def _significant(value: torch.Tensor) -> list[str]:
    """Strides as text, without those of dimensions of one element; comparing symbols as text adds no guard."""
    return [str(stride) for size, stride in zip(value.shape, value.stride(), strict=True) if str(size) != "1"]


def _shapes(tree) -> list:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [(str(leaf.shape), leaf.dtype, str(leaf.stride())) for leaf in leaves if isinstance(leaf, torch.Tensor)]


# What takes their place


@dataclasses.dataclass(frozen=True)
class _Served:
    """What one reader got: the tensor that was computed for it and its number of rows."""

    edge: Edge
    outcome: Outcome
    result: fx.Node
    rows: int | torch.SymInt


class _Emitter:
    def __init__(self, graph: fx.Graph, analysis: Analysis, options: Options, decomposed: bool):
        self._graph, self._analysis, self._options = graph, analysis, options
        self._decomposed = decomposed
        self._replay = Replay(analysis, shorten=self._first_rows)

    def serve(self, edges: list[Edge]) -> list[_Served]:
        served = []
        for edge in edges:
            with self._graph.inserting_before(edge.user):
                served.append(self._SERVE[edge.read](self, edge))
        return served

    def _slice(self, edge: Edge) -> _Served:
        user, rows = edge.user, self._analysis.rows[edge.table]
        if op_name(user) == "select":
            index = user.args[2] % rows.count
            table = self._replay.rows(edge.table, (Take(index, index + 1),))
            result = self._replay.emit(user, aten.select.int, (table, rows.dim, 0))
        else:
            arguments = slice_arguments(user)
            take = Take(arguments.start, arguments.stop, arguments.step)
            if edge.read is Read.SLICE:
                reached = range(rows.count)[take.start : take.stop : take.step]
                take = Take(reached.start, reached.stop, reached.step)
            table = result = self._replay.rows(edge.table, (take,))
        user.replace_all_uses_with(result)
        outcome = Outcome.ROWS if edge.read is Read.MOVING_SLICE else Outcome.SHORTENED
        return _Served(edge, outcome, table, value_of(table).shape[rows.dim])

    def _opaque(self, edge: Edge) -> _Served:
        table = self._bounded(edge.table)
        edge.user.replace_input_with(edge.table, table)
        return _Served(edge, Outcome.BOUNDED, table, self._analysis.bound(edge.table))

    def _gather(self, edge: Edge) -> _Served:
        user, rows = edge.user, self._analysis.rows[edge.table]
        index = _index_of(edge, rows.dim)
        if self._options.form == "bounded" and op_name(user) == "index" and _is_given(index):
            return self._gather_bounded(edge, index)
        if op_name(user) == "gather":
            index = _whole_rows(user)
        flat = self._flat(user, index)
        found = self._replay.rows(edge.table, (Gather(flat),))
        if self._once(found):
            found = self._replay.emit(found, torch.ops.rope_ops.rows_once.default, (found,))
        user.replace_all_uses_with(self._shaped(edge, found, flat))
        return _Served(edge, Outcome.ROWS, found, value_of(flat).shape[0])

    def _gather_bounded(self, edge: Edge, index: fx.Node) -> _Served:
        """A position below zero counts from the end of the whole table: past the end of this one, an error."""
        user, rows = edge.user, self._analysis.rows[edge.table]
        table = self._bounded(edge.table)
        position = self._replay.from_start(index, rows.count)
        indices = [position if dim == rows.dim else other for dim, other in enumerate(user.args[1])]
        result = self._replay.emit(user, aten.index.Tensor, (table, indices))
        user.replace_all_uses_with(result)
        return _Served(edge, Outcome.BOUNDED, table, self._analysis.bound(edge.table))

    _SERVE = {
        Read.SLICE: _slice,
        Read.MOVING_SLICE: _slice,
        Read.OPAQUE: _opaque,
        Read.GATHER: _gather,
    }

    def _bounded(self, table: fx.Node) -> fx.Node:
        bound = self._analysis.bound(table)
        standard = _standard_formula(table, self._analysis)
        if standard is None:
            return self._replay.rows(table, (Take(0, bound),))
        inv_freq, attention_factor, dtype = standard
        if value_of(inv_freq).dim() != 1:
            inv_freq = self._replay.emit(inv_freq, aten.view.default, (inv_freq, [-1]))
        arguments = (inv_freq, bound, attention_factor, dtype)
        return self._replay.emit(table, torch.ops.rope_ops.build_cos_sin_cache.default, arguments)

    def _flat(self, user: fx.Node, index: fx.Node) -> fx.Node:
        """The positions in one dimension; of a slice of a larger buffer, by a copy."""
        value = value_of(index)
        if value.dim() == 1:
            return index
        order = _memory_order(value)
        if order is not None:
            index = self._replay.emit(index, aten.permute.default, (index, order))
        elif not value.is_contiguous():
            index = self._replay.emit(index, aten.clone.default, (index,), {"memory_format": torch.contiguous_format})
        return self._replay.emit(index, aten.view.default, (index, [-1]))

    def _once(self, found: fx.Node) -> bool:
        value = value_of(found)
        width = math.prod(size for size in value.shape[1:] if isinstance(size, int))
        elements = _private.size_hint(value.numel())
        enough = elements is None or elements >= rule(value.device.type).rows_once_from * width
        return self._options.rows_once and self._options.form == "auto" and enough

    def _shaped(self, edge: Edge, found: fx.Node, flat: fx.Node) -> fx.Node:
        """The rows found, in the shape and strides that the gather's result had."""
        user, dim = edge.user, self._analysis.rows[edge.table].dim
        index, before = value_of(_index_of(edge, dim)), value_of(user)
        name, shape = op_name(user), value_of(edge.table).shape
        if name == "gather":
            sizes = self._sizes(_whole_rows(user))[: dim + 1]
            return self._replay.emit(user, aten.view.default, (found, [*sizes, *shape[dim + 1 :]]))
        source = _index_of(edge, dim)
        others = name == "index" and any(other is not None for d, other in enumerate(user.args[1]) if d != dim)
        if not others:
            result = found
            if index.dim() != 1:
                sizes, order = self._sizes(source), _memory_order(index)
                if order is not None:
                    sizes = [sizes[d] for d in order]
                sizes = [*shape[:dim], *sizes, *shape[dim + 1 :]]
                result = self._replay.emit(user, aten.view.default, (found, sizes))
                if order is not None:
                    back = [dim + order.index(d) for d in range(len(order))]
                    back = [*range(dim), *back, *range(dim + len(order), len(sizes))]
                    result = self._replay.emit(user, aten.permute.default, (result, back))
            if _significant(value_of(result)) == _significant(before):
                return result
        # Read the small table by row number instead: the gather itself then lays out its result as it did.
        count = value_of(flat).shape[0]
        if not isinstance(count, int):
            count = self._replay.emit(flat, aten.sym_size.int, (flat, 0))
        number = self._iota(flat, count)
        if index.dim() != 1 and (order := _memory_order(index)) is not None:
            sizes = self._sizes(source)
            number = self._replay.emit(flat, aten.view.default, (number, [sizes[d] for d in order]))
            number = self._replay.emit(
                flat, aten.permute.default, (number, [order.index(d) for d in range(len(order))])
            )
        elif index.dim() != 1:
            number = self._replay.emit(flat, aten.view.default, (number, self._sizes(source)))
        if name != "index":
            arguments = (found, dim, number) if name == "index_select" else (found, number)
            return self._replay.emit(user, user.target, arguments)
        indices = [number if d == dim else other for d, other in enumerate(user.args[1])]
        return self._replay.emit(user, aten.index.Tensor, (found, indices))

    def _sizes(self, of: fx.Node) -> list:
        """The sizes of a node, with nodes for the symbolic ones."""
        return [
            size if isinstance(size, int) else self._replay.emit(of, aten.sym_size.int, (of, dim))
            for dim, size in enumerate(value_of(of).shape)
        ]

    def _iota(self, like: fx.Node, count) -> fx.Node:
        device = value_of(like).device
        kwargs = {"start": 0, "step": 1, "dtype": torch.int64, "device": device, "requires_grad": False}
        return self._replay.emit(like, prims.iota.default, (count,), kwargs)

    def _first_rows(self, replay: Replay, node: fx.Node, take: Take) -> fx.Node | None:
        """The range of a static slice made directly, where every value is a whole number that its dtype holds."""
        start, _, step, _, dtype, device = node.args
        taken = range(value_of(node).shape[0])[take.start : take.stop : take.step]
        exact = {torch.float32: 1 << 24, torch.float64: 1 << 53, torch.int64: 1 << 62, torch.int32: 1 << 31}.get(dtype)
        first, stride = start + step * taken.start, step * taken.step
        whole = all(float(number).is_integer() for number in (start, step))
        if exact is None or not whole or max(abs(first), abs(first + stride * len(taken))) >= exact:
            return None
        first, stride = int(first), int(stride)
        if not self._decomposed:
            arguments = (first, first + stride * len(taken), stride)
            kwargs = {"dtype": dtype, "device": device, "pin_memory": False}
            return replay.emit(node, aten.arange.start_step, arguments, kwargs)
        integer = torch.int64 if dtype.is_floating_point else dtype
        kwargs = {"start": first, "step": stride, "dtype": integer, "device": device, "requires_grad": False}
        result = replay.emit(node, prims.iota.default, (len(taken),), kwargs)
        return result if integer is dtype else replay.emit(node, prims.convert_element_type.default, (result, dtype))


def _memory_order(value: torch.Tensor) -> list[int] | None:
    """The permutation that makes a permuted tensor contiguous; None if it is contiguous or no permutation does."""
    if value.is_contiguous() or not all(isinstance(number, int) for number in (*value.shape, *value.stride())):
        return None
    order = sorted(range(value.dim()), key=lambda dim: -value.stride(dim))
    return order if value.permute(order).is_contiguous() else None


def _is_given(index: fx.Node) -> bool:
    """Whether positions reach a gather as they came in: what is computed from them may pass the bound rightly."""
    while op_name(index) in (
        "view",
        "_to_copy",
        "convert_element_type",
        "clone",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
    ):
        index = index.args[0]
    return index.op == "placeholder"


def _standard_formula(table: fx.Node, analysis: Analysis) -> tuple[fx.Node, float, torch.dtype] | None:
    """``(inv_freq, attention_factor, dtype)`` if a table is what ``rope_ops.build_cos_sin_cache`` computes."""
    node, dtype = table, value_of(table).dtype
    if op_name(node) in ("convert_element_type", "_to_copy"):
        node = node.args[0]
    value = value_of(node)
    if op_name(node) != "cat" or value.dim() != 2 or value.dtype != torch.float32 or len(node.args[0]) != 2:
        return None
    if dtype not in (torch.float32, torch.bfloat16, torch.float16) or (node.args[1:] or (0,))[0] % 2 != 1:
        return None
    (cos, factor), (sin, same) = (_unscaled(half) for half in node.args[0])
    if (op_name(cos), op_name(sin)) != ("cos", "sin") or cos.args[0] is not sin.args[0] or factor != same:
        return None
    angle = cos.args[0]
    if op_name(angle) != "mul" or not all(isinstance(operand, fx.Node) for operand in angle.args):
        return None
    position = next((operand for operand in angle.args if operand in analysis.rows), None)
    inv_freq = next((operand for operand in angle.args if operand not in analysis.rows), None)
    if position is None or inv_freq is None:
        return None
    frequencies, half = value_of(inv_freq), value.shape[1] // 2
    row = frequencies.dtype == torch.float32 and frequencies.numel() == half and frequencies.shape[-1:] == (half,)
    while op_name(position) in ("view", "unsqueeze", "permute", "convert_element_type", "_to_copy", "reshape"):
        if value_of(position).dtype not in (torch.float32, torch.int64):
            return None
        position = position.args[0]
    from_zero = position in analysis.bounds and position.args[0] == 0 and position.args[2] == 1
    exact = from_zero and position.args[4] in (torch.float32, torch.int64) and analysis.rows[position].count <= 1 << 24
    return (inv_freq, factor, dtype) if row and exact else None


def _unscaled(node: fx.Node) -> tuple[fx.Node, float]:
    """A value and the number that it is multiplied by; a factor that is a tensor stays part of the value."""
    if op_name(node) == "mul" and isinstance(node.args[1], (int, float)) and math.isfinite(node.args[1]):
        return node.args[0], float(node.args[1])
    return node, 1.0


# The report and the rest


def _record(source: fx.Node, analysis: Analysis, left: tuple[Reason, str] | None, served: list[_Served]) -> Table:
    where = location(source.meta.get("stack_trace"))
    region = [node for node, sources in analysis.sources.items() if source in sources]
    count = value_of(source).shape[0]
    tables = {edge.table for edge in analysis.edges if source in analysis.sources[edge.table]} - {source}
    before = sum(_bytes(value_of(table)) or 0 for table in tables)
    formula = _formula(region, tables, analysis)
    if left is not None:
        return Table(Outcome.LEFT, left[0], count, count, before, before, where, formula, left[1])
    mine = [one for one in served if source in analysis.sources[one.edge.table]]
    results = {one.result: one for one in mine}
    per_table: dict[fx.Node, list] = {}
    for one in results.values():
        per_table.setdefault(one.edge.table, []).append(one.rows)
    rows = max((sum(counts) for counts in per_table.values()), key=lambda size: _private.size_hint(size) or 0)
    sizes = [_bytes(value_of(result)) for result in results]
    after = None if None in sizes else sum(sizes)
    outcome = max((one.outcome for one in mine), key=list(Outcome).index)
    return Table(outcome, None, count, rows if isinstance(rows, int) else str(rows), before, after, where, formula)


def _bytes(value: torch.Tensor) -> int | None:
    count = value.numel()
    return count * value.element_size() if isinstance(count, int) else None


def _formula(region: list[fx.Node], tables: set[fx.Node], analysis: Analysis) -> str:
    if any(_standard_formula(table, analysis) for table in tables):
        return "cos_sin_cache"
    made = [name for name in ("cos", "sin", "polar", "exp") if any(op_name(node) == name for node in region)]
    joined = [name for name in ("cat", "slice_scatter") if any(op_name(node) == name for node in region)]
    return " ".join(made + joined) or "angles"


def _erase(replaced: list[fx.Node], ranges) -> None:
    """Remove what nobody reads any more, readers first: a table left in the graph would still be built."""
    order = {node: place for place, node in enumerate(replaced[0].graph.nodes)}
    for node in sorted(set(replaced), key=order.__getitem__, reverse=True):
        if not node.users and node not in ranges and node.op != "output":
            node.graph.erase_node(node)


def _restore(node: fx.Node, decomposed: bool) -> None:
    """Put back the range as ``torch.arange`` is in this graph."""
    start, end, step, _, dtype, device = node.args
    graph = node.graph
    if node.users:
        with graph.inserting_before(node):
            new = _arange(node, start, end, step, dtype, device, decomposed)
        node.replace_all_uses_with(new)
    graph.erase_node(node)


def _arange(node: fx.Node, start, end, step, dtype, device, decomposed: bool) -> fx.Node:
    graph = node.graph
    if not decomposed:
        kwargs = {"dtype": dtype, "device": device, "pin_memory": False}
        new = graph.call_function(aten.arange.start_step, (start, end, step), kwargs)
        new.meta = dict(node.meta)
        return new
    traced = _private.trace(
        lambda: aten.arange.start_step(start, end, step, dtype=dtype, device=device, pin_memory=False),
        value_of(node).fake_mode,
    )
    copies: dict[fx.Node, fx.Node] = {}
    for inner in traced.graph.nodes:
        if inner.op == "output":
            return copies[inner.args[0]]
        copies[inner] = graph.node_copy(inner, copies.__getitem__)
        copies[inner].meta = {**node.meta, "val": inner.meta["val"]}
    raise AssertionError("a traced graph without output")
