"""The row analysis: which values of a graph are, row by row, a function of a position range, and how they are read.

A value is *row-wise along a dimension* if its slice at row ``i`` is a function of slices at single rows of the ranges
and of other tensors. The claim is kept by induction over the graph: each operator either is known here to keep it,
for the exact arguments it has, or ends it. Nothing is known about rotary formulas.

What a row-wise value is good for: any selection of rows commutes with its whole computation, exactly. So
:class:`rope_ops.passes.replay.Replay` computes the rows of a selection alone, by applying the selection to the leaves
(the ranges, and tensors that hold a row for each position) and running the same operators at the smaller size. Exactly
means bit for bit: operators whose last bits depend on the size of their operands are not on the list of
``bit_stable.py`` and end the region.

Input: an FX graph of functional ATen operators with fake tensors in ``meta["val"]``, the range nodes, and for each its
bound. It needs neither Inductor nor a hook, and the graph may come from anywhere.

    t = arange(R)                      row-wise, [R]
    f = mul(view(t, [R, 1]), inv)      row-wise along 0, [R, K]
    c = cat([cos(f), sin(f)], -1)      row-wise along 0, [R, 2K]
    index(c, [p])                      an edge: GATHER
"""

from __future__ import annotations

import dataclasses
import enum
import math
import operator
from collections.abc import Callable, Mapping

import torch
from torch import fx

from rope_ops.passes.bit_stable import is_bit_stable
from rope_ops.passes.report import Reason


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where the rows of a value are: dimension ``dim`` has size ``count * inner``, row ``i`` holds ``inner`` indices.

    ``inner`` is 1 but between two views that flatten rows together with later dimensions and take them apart again.
    """

    dim: int
    count: int
    inner: int = 1


class Read(enum.Enum):
    """How a reader takes rows out of a value."""

    GATHER = "gather"  # rows named by an index tensor
    SLICE = "slice"  # a fixed range of rows
    MOVING_SLICE = "moving slice"  # a range of rows with a symbolic start or end
    OPAQUE = "opaque"  # an operator that is not ATen gets the whole value
    OTHER = "other"  # anything else: Edge.reason says what


@dataclasses.dataclass(frozen=True)
class Edge:
    """A reader of a row-wise value that is not row-wise itself, or no longer has more rows than the bound."""

    user: fx.Node
    table: fx.Node
    read: Read
    reason: Reason | None = None
    detail: str = ""


@dataclasses.dataclass
class Analysis:
    """``rows``: each row-wise node that is longer than the bound; ``edges``: how they are read; in graph order.

    ``sources[node]`` are the ranges that a row-wise node depends on, ``bounds`` the bound of each range.
    """

    bounds: dict[fx.Node, int]
    rows: dict[fx.Node, Rows] = dataclasses.field(default_factory=dict)
    edges: list[Edge] = dataclasses.field(default_factory=list)
    sources: dict[fx.Node, frozenset[fx.Node]] = dataclasses.field(default_factory=dict)

    def bound(self, table: fx.Node) -> int:
        return min(self.bounds[source] for source in self.sources[table])


class _Ends(Exception):
    """The row-wise region ends at this operator."""

    def __init__(self, reason: Reason | None, detail: str = "", read: Read = Read.OTHER):
        self.read, self.reason, self.detail = read, reason, detail


def analyse(graph: fx.Graph, bounds: Mapping[fx.Node, int]) -> Analysis:
    """Follow the ranges forward until each path ends at an edge.

    Args:
        graph: functional ATen; every tensor node has its fake tensor in ``meta["val"]``.
        bounds: the 1-D range nodes, each with the number of rows that its readers can reach.
    """
    analysis = Analysis(dict(bounds))
    for node in graph.nodes:
        if node in bounds:
            analysis.rows[node] = Rows(0, int(value_of(node).shape[0]))
            analysis.sources[node] = frozenset((node,))
            continue
        longs = [operand for operand in node.all_input_nodes if operand in analysis.rows]
        if not longs:
            continue
        try:
            rows = _place(node, analysis)
        except _Ends as end:
            analysis.edges += [Edge(node, table, end.read, end.reason, end.detail) for table in longs]
            continue
        analysis.rows[node] = rows
        analysis.sources[node] = frozenset().union(*(analysis.sources[operand] for operand in longs))
    return analysis


def value_of(node: fx.Node):
    return node.meta.get("val", node.meta.get("example_value"))


def op_name(node: fx.Node) -> str:
    """``mul`` for ``aten.mul.Tensor`` and ``prims.mul.default``; empty for what is neither ATen nor prims."""
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        namespace, _, name = node.target._schema.name.partition("::")
        return name if namespace in ("aten", "prims") else ""
    return ""


# Placement


def _place(node: fx.Node, analysis: Analysis) -> Rows:
    if node.op == "output":
        raise _Ends(Reason.ESCAPES)
    if node.target is operator.getitem:
        return analysis.rows[node.args[0]]
    name = op_name(node)
    if not name:
        raise _Ends(None, str(node.target), Read.OPAQUE)
    if any(not isinstance(size, int) for size in getattr(value_of(node), "shape", ())) and name not in _SELECTS:
        raise _Ends(Reason.UNKNOWN_OP, f"{name} of a symbolic size")
    if name in _PLACES:
        return _PLACES[name](node, analysis)
    return _elementwise(node, analysis)


def _elementwise(node: fx.Node, analysis: Analysis) -> Rows:
    name = op_name(node)
    out = value_of(node)
    if not isinstance(out, torch.Tensor) or name not in _POINTWISE:
        raise _Ends(_reduction(node, analysis) or Reason.UNKNOWN_OP, name)
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        raise _Ends(Reason.UNKNOWN_OP, name)
    operands = [value_of(operand) for operand in node.all_input_nodes]
    dtypes = frozenset(value.dtype for value in operands if isinstance(value, torch.Tensor))
    if not is_bit_stable(name, dtypes):
        raise _Ends(Reason.NOT_BIT_STABLE, f"{name} in {_dtype_names(dtypes)}")
    return _aligned(node, analysis, out)


def _dtype_names(dtypes) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _aligned(node: fx.Node, analysis: Analysis, out: torch.Tensor) -> Rows:
    """The rows of a broadcasting operator; its other operands may be one row for all, or a row for each."""
    places = set()
    for operand in node.all_input_nodes:
        if operand in analysis.rows:
            rows = analysis.rows[operand]
            places.add(dataclasses.replace(rows, dim=rows.dim + out.dim() - value_of(operand).dim()))
    if len(places) != 1:
        raise _Ends(Reason.TWO_AXES, op_name(node))
    (rows,) = places
    for operand in node.all_input_nodes:
        value = value_of(operand)
        if operand in analysis.rows or not isinstance(value, torch.Tensor):
            continue
        _check_operand(operand, rows.dim - (out.dim() - value.dim()), rows)
    return rows


def _check_operand(operand: fx.Node, dim: int, rows: Rows) -> None:
    """An operand from outside the region: rows of its own are pulled with the selection, unless they are data."""
    value = value_of(operand)
    if dim < 0 or value.shape[dim] == 1 or is_uniform(operand, dim):
        return
    if _depends_on_input(operand):
        raise _Ends(Reason.WHOLE_TABLE, f"rows meet {operand.name}")
    if rows.inner != 1:
        raise _Ends(Reason.ROWS_MERGED, operand.name)


def is_uniform(node: fx.Node, dim: int) -> bool:
    """Whether every row of a value along ``dim`` is the same because of how it was made: filled, or expanded."""
    name = op_name(node)
    if name in ("full", "ones", "zeros"):
        return True
    if name == "expand":
        source = value_of(node.args[0])
        dim -= value_of(node).dim() - source.dim()
        return dim < 0 or source.shape[dim] == 1
    return False


def _depends_on_input(node: fx.Node) -> bool:
    return any(one.op == "placeholder" for one in ancestors(node))


def ancestors(node: fx.Node) -> set[fx.Node]:
    """A node and all that it is computed from."""
    seen, todo = {node}, [node]
    while todo:
        for operand in todo.pop().all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                todo.append(operand)
    return seen


def _reduction(node: fx.Node, analysis: Analysis) -> Reason | None:
    out = value_of(node)
    if op_name(node) in _REDUCTIONS:
        return Reason.ROWS_REDUCED
    if op_name(node) in ("mm", "bmm", "addmm", "baddbmm", "convolution", "dot", "mv"):
        return Reason.NOT_BIT_STABLE
    if op_name(node) in ("sort", "argsort", "topk", "roll"):
        return Reason.ROWS_REORDERED
    return None if isinstance(out, torch.Tensor) else Reason.UNKNOWN_OP


# Readers, whose own sizes say nothing about the table's.
_SELECTS = frozenset(("slice", "index", "index_select", "embedding", "gather"))
_REDUCTIONS = frozenset(
    "sum mean amax amin max min argmax argmin prod any all var std norm cumsum cumprod logsumexp var_mean "
    "cummax cummin linalg_vector_norm".split()
)
# Operators that work element by element on broadcast operands; bit_stable.py says which of them are safe.
_POINTWISE = frozenset(
    "add sub rsub neg mul div reciprocal abs floor ceil round trunc minimum maximum clamp clamp_min clamp_max "
    "remainder fmod floor_divide cos sin tan exp exp2 expm1 log log2 log10 log1p sqrt rsqrt pow sigmoid tanh erf "
    "polar complex eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not "
    "bitwise_xor where clone alias detach lift_fresh _to_copy convert_element_type device_put copy contiguous "
    "ones_like zeros_like full_like masked_fill fill square sgn sign _conj".split()
)


def _view(node: fx.Node, analysis: Analysis) -> Rows:
    """Any reshape: the rows are found again by how many elements lie before them and within them."""
    source, rows = value_of(node.args[0]), analysis.rows[node.args[0]]
    outer = math.prod(source.shape[: rows.dim])
    span = rows.inner * math.prod(source.shape[rows.dim + 1 :])
    out = value_of(node)
    for dim, size in enumerate(out.shape):
        if isinstance(size, int) and size % rows.count == 0 and math.prod(out.shape[:dim]) == outer:
            inner = size // rows.count
            if inner * math.prod(out.shape[dim + 1 :]) == span:
                return Rows(dim, rows.count, inner)
    raise _Ends(Reason.ROWS_MERGED, f"{list(source.shape)} viewed as {list(out.shape)}")


def _permuted(node: fx.Node, analysis: Analysis) -> Rows:
    rows, ndim = analysis.rows[node.args[0]], value_of(node.args[0]).dim()
    name = op_name(node)
    order = list(range(ndim))
    if name == "permute":
        order = [dim % ndim for dim in node.args[1]]
    elif ndim > 1:
        first, second = (0, 1) if name == "t" else (node.args[1] % ndim, node.args[2] % ndim)
        order[first], order[second] = order[second], order[first]
    return dataclasses.replace(rows, dim=order.index(rows.dim))


def _expand(node: fx.Node, analysis: Analysis) -> Rows:
    rows = analysis.rows[node.args[0]]
    return dataclasses.replace(rows, dim=rows.dim + value_of(node).dim() - value_of(node.args[0]).dim())


def _repeat(node: fx.Node, analysis: Analysis) -> Rows:
    rows = _expand(node, analysis)
    if node.args[1][rows.dim] != 1:
        raise _Ends(Reason.ROWS_JOINED, "rows repeated")
    return rows


def _slice(node: fx.Node, analysis: Analysis) -> Rows:
    source, rows = value_of(node.args[0]), analysis.rows[node.args[0]]
    arguments = slice_arguments(node)
    if arguments.dim != rows.dim:
        return rows
    if rows.inner != 1:
        raise _Ends(Reason.ROWS_MERGED, "sliced")
    if not all(isinstance(number, int) for number in (arguments.start, arguments.stop, arguments.step)):
        raise _Ends(None, "", Read.MOVING_SLICE)
    reached = range(source.shape[rows.dim])[arguments.start : arguments.stop : arguments.step]
    bound = analysis.bound(node.args[0])
    if len(reached) > bound:
        return dataclasses.replace(rows, count=len(reached))
    if len(reached) and reached[-1] >= bound:
        raise _Ends(Reason.PAST_BOUND, f"rows {reached[0]} to {reached[-1]} of {source.shape[rows.dim]}")
    raise _Ends(None, "", Read.SLICE)


@dataclasses.dataclass(frozen=True)
class _Slice:
    dim: int
    start: int | fx.Node
    stop: int | fx.Node
    step: int


def slice_arguments(node: fx.Node) -> _Slice:
    ndim = value_of(node.args[0]).dim()
    values = {"dim": 0, "start": None, "end": None, "step": 1, **node.kwargs}
    values |= zip(values, node.args[1:], strict=False)
    start, stop = values["start"], values["end"]
    stop = torch.iinfo(torch.int64).max if stop is None else stop
    return _Slice(values["dim"] % ndim, 0 if start is None else start, stop, values["step"])


def _select(node: fx.Node, analysis: Analysis) -> Rows:
    source, rows = value_of(node.args[0]), analysis.rows[node.args[0]]
    dim = node.args[1] % source.dim()
    if dim != rows.dim:
        return dataclasses.replace(rows, dim=rows.dim - (dim < rows.dim))
    index = node.args[2]
    if rows.inner != 1:
        raise _Ends(Reason.ROWS_MERGED, "one row selected")
    if not isinstance(index, int):
        raise _Ends(None, "", Read.MOVING_SLICE)
    if index % rows.count >= analysis.bound(node.args[0]):
        raise _Ends(Reason.PAST_BOUND, f"row {index} of {rows.count}")
    raise _Ends(None, "", Read.SLICE)


def _split(node: fx.Node, analysis: Analysis) -> Rows:
    rows = analysis.rows[node.args[0]]
    dim = (node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)) % value_of(node.args[0]).dim()
    if dim == rows.dim:
        raise _Ends(Reason.UNKNOWN_OP, "rows split")
    return rows


def _unbind(node: fx.Node, analysis: Analysis) -> Rows:
    rows = analysis.rows[node.args[0]]
    dim = (node.args[1] if len(node.args) > 1 else 0) % value_of(node.args[0]).dim()
    if dim == rows.dim:
        raise _Ends(Reason.UNKNOWN_OP, "rows unbound")
    return dataclasses.replace(rows, dim=rows.dim - (dim < rows.dim))


# A read of joined tables computes a row of each.
_MOST_JOINED = 4


def joins_rows(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> bool:
    """Whether a node of the region is a ``cat`` of tables one below another."""
    if op_name(node) != "cat":
        return False
    dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % value_of(node).dim()
    return dim == rows[node].dim


def _cat(node: fx.Node, analysis: Analysis) -> Rows:
    operands = node.args[0]
    out = value_of(node)
    dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % out.dim()
    places = {analysis.rows[operand] for operand in operands if operand in analysis.rows}
    if any(rows.dim == dim for rows in places):
        # Tables one below another: each row comes from one of them, which one is found from its number.
        if len(operands) > _MOST_JOINED or any(rows.dim != dim or rows.inner != 1 for rows in places):
            raise _Ends(Reason.ROWS_JOINED, f"{len(operands)} tables")
        if any(operand not in analysis.rows and _depends_on_input(operand) for operand in operands):
            raise _Ends(Reason.ROWS_JOINED, "rows that are data")
        return Rows(dim, out.shape[dim])
    if len(places) != 1:
        raise _Ends(Reason.TWO_AXES, "cat")
    (rows,) = places
    for operand in operands:
        if operand not in analysis.rows:
            _check_operand(operand, rows.dim, rows)
    return rows


def _pad(node: fx.Node, analysis: Analysis) -> Rows:
    rows, pad = analysis.rows[node.args[0]], node.args[1]
    place = 2 * (value_of(node).dim() - 1 - rows.dim)
    if any(pad[place : place + 2]):
        raise _Ends(Reason.ROWS_JOINED, "rows padded")
    return rows


def _scatter(node: fx.Node, analysis: Analysis) -> Rows:
    """``slice_scatter`` and ``select_scatter`` along another dimension write row ``i`` of one into row ``i``."""
    base, source = node.args[:2]
    ndim = value_of(base).dim()
    selects = op_name(node) == "select_scatter"
    dim = (node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)) % ndim

    def placed(operand):
        rows = analysis.rows[operand]
        lower = operand is source and selects and rows.dim >= dim
        return dataclasses.replace(rows, dim=rows.dim + 1) if lower else rows

    places = {placed(operand) for operand in (base, source) if operand in analysis.rows}
    if len(places) != 1 or any(rows.dim == dim for rows in places):
        raise _Ends(Reason.ROWS_JOINED, "written along rows")
    (rows,) = places
    for operand in (base, source):
        if operand not in analysis.rows:
            _check_operand(operand, rows.dim - (operand is source and selects and dim < rows.dim), rows)
    return rows


def _view_as_complex(node: fx.Node, analysis: Analysis) -> Rows:
    rows = analysis.rows[node.args[0]]
    if rows.dim == value_of(node.args[0]).dim() - 1:
        raise _Ends(Reason.ROWS_MERGED, "view_as_complex")
    return rows


def _same(node: fx.Node, analysis: Analysis) -> Rows:
    return analysis.rows[node.args[0]]


def _flip(node: fx.Node, analysis: Analysis) -> Rows:
    rows = analysis.rows[node.args[0]]
    if rows.dim in [dim % value_of(node).dim() for dim in node.args[1]]:
        raise _Ends(Reason.ROWS_REORDERED, "flip")
    return rows


def _index(node: fx.Node, analysis: Analysis) -> Rows:
    source, indices = node.args[0], node.args[1]
    if source not in analysis.rows or any(index in analysis.rows for index in indices if index is not None):
        raise _Ends(Reason.UNKNOWN_OP, "indexed by a range")
    rows = analysis.rows[source]
    if any(index is not None and value_of(index).dtype not in (torch.int64, torch.int32) for index in indices):
        raise _Ends(Reason.UNKNOWN_OP, "index of another dtype than int64 or int32")
    if rows.dim < len(indices) and indices[rows.dim] is not None:
        return _gathered(rows)
    used = [dim for dim, index in enumerate(indices) if index is not None]
    if len(used) != 1:
        raise _Ends(Reason.UNKNOWN_OP, "several indices beside the rows")
    index = value_of(indices[used[0]])
    return dataclasses.replace(rows, dim=rows.dim + (index.dim() - 1 if used[0] < rows.dim else 0))


def _index_select(node: fx.Node, analysis: Analysis) -> Rows:
    if node.args[0] not in analysis.rows or node.args[2] in analysis.rows:
        raise _Ends(Reason.UNKNOWN_OP, "indexed by a range")
    rows = analysis.rows[node.args[0]]
    return _gathered(rows) if node.args[1] % value_of(node.args[0]).dim() == rows.dim else rows


def _embedding(node: fx.Node, analysis: Analysis) -> Rows:
    if node.args[0] not in analysis.rows or node.args[1] in analysis.rows:
        raise _Ends(Reason.UNKNOWN_OP, "indexed by a range")
    rows = analysis.rows[node.args[0]]
    if rows.dim != 0:
        raise _Ends(Reason.UNKNOWN_OP, "embedding of a table whose rows are not first")
    return _gathered(rows)


def _gather(node: fx.Node, analysis: Analysis) -> Rows:
    """``gather`` along the rows by an index that is the same in every column reads whole rows."""
    source, dim, index = node.args[:3]
    if source not in analysis.rows or index in analysis.rows:
        raise _Ends(Reason.UNKNOWN_OP, "indexed by a range")
    if dim % value_of(source).dim() != analysis.rows[source].dim:
        raise _Ends(Reason.UNKNOWN_OP, "gather across the columns")
    return _gathered(analysis.rows[source])


def _gathered(rows: Rows) -> Rows:
    if rows.inner != 1:
        raise _Ends(Reason.ROWS_MERGED, "indexed")
    raise _Ends(None, "", Read.GATHER)


_PLACES: dict[str, Callable[[fx.Node, Analysis], Rows]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "squeeze_"), _view),
    **dict.fromkeys(("permute", "transpose", "t"), _permuted),
    "expand": _expand,
    "repeat": _repeat,
    "slice": _slice,
    "select": _select,
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    "unbind": _unbind,
    "cat": _cat,
    "constant_pad_nd": _pad,
    **dict.fromkeys(("slice_scatter", "select_scatter"), _scatter),
    "view_as_real": _same,
    "view_as_complex": _view_as_complex,
    **dict.fromkeys(("flip", "rev"), _flip),
    "index": _index,
    "index_select": _index_select,
    "embedding": _embedding,
    "gather": _gather,
}
