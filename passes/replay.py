"""Computing a selection of rows alone: the operators of the row-wise region again, at the size of the selection.

Safety: a selection of rows is applied to the leaves of the region (the ranges and the tensors that hold a row for each
position) and everything above is recomputed from them. By the claim of ``rows.py`` that is the selection of the
result, bit for bit. A gather stays a gather, of the one-dimensional range: a negative index counts from the same end
and an index past it fails as it did.

    index(cat([cos(f), sin(f)], -1), [p])       with f = mul(view(t, [R, 1]), inv)

    t' = index(t, [p])
    f' = mul(view(t', [-1, 1]), inv)
    cat([cos(f'), sin(f')], -1)
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Callable

import torch
from torch import fx

from rope_ops.passes.rows import Analysis, is_uniform, joins_rows, op_name, slice_arguments, value_of

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Take:
    """The rows ``start:stop:step``; static, or symbolic nodes."""

    start: int | fx.Node
    stop: int | fx.Node
    step: int = 1


@dataclasses.dataclass(frozen=True)
class Gather:
    """The rows that a 1-D index node names."""

    index: fx.Node


# Applied in order: the first to the leaf, the next to what it gave.
Selection = tuple[Take | Gather, ...]


class Replay:
    """Emits the rows of nodes into the graph of an analysis.

    One instance for a graph: a node that would compute what an emitted one computes is not emitted again, so layers
    that build the same table share its rows. Emit in graph order (``at`` never moves back).

    Args:
        analysis: of the graph to emit into.
        shorten: emits the rows of a static ``Take`` of a range node from scratch, given this object, the node and the
            ``Take``; where it is None or returns None, the whole range is sliced.
    """

    def __init__(self, analysis: Analysis, shorten: Callable[[Replay, fx.Node, Take], fx.Node | None] | None = None):
        self._analysis = analysis
        self._shorten = shorten
        self._emitted: dict = {}
        # The first node of the graph that computes what a later one computes again.
        self._canonical: dict[fx.Node, fx.Node] = {}
        first: dict = {}
        for node in next(iter(analysis.bounds)).graph.nodes:
            if node.op == "call_function" and _is_pure(node):
                key = self._key(node.target, node.args, node.kwargs)
                self._canonical[node] = first.setdefault(key, node)

    def rows(self, node: fx.Node, selection: Selection) -> fx.Node:
        """``node``, a row-wise node of the analysis, with only the selected rows; emitted at the insertion point."""
        if node in self._analysis.bounds:
            return self._leaf(node, selection)
        if node.target is operator.getitem:
            return self.emit(node, operator.getitem, (self.rows(node.args[0], selection), node.args[1]))
        name = op_name(node)
        place = self._analysis.rows[node]
        if name == "slice":
            arguments = slice_arguments(node)
            if arguments.dim == self._analysis.rows[node.args[0]].dim:
                return self.rows(node.args[0], (Take(arguments.start, arguments.stop, arguments.step), *selection))
        if joins_rows(node, self._analysis.rows):
            return self._joined(node, place.dim, selection)
        args, kwargs = self._operands(node, place, selection)
        target = node.target
        if name in ("view", "_unsafe_view", "reshape"):
            args = (args[0], [-1 if dim == place.dim else size for dim, size in enumerate(value_of(node).shape)])
        elif name == "expand":
            args = (args[0], [-1 if dim == place.dim else size for dim, size in enumerate(value_of(node).shape)])
        elif name.startswith("squeeze"):
            # A selection of one row must keep its dimension.
            source = value_of(node.args[0])
            named = range(source.dim()) if len(node.args) == 1 else node.args[1]
            named = [named] if isinstance(named, int) else named
            kept = self._analysis.rows[node.args[0]].dim
            target, args = aten.squeeze.dims, (args[0], [d for d in named if d % source.dim() != kept])
        return self.emit(node, target, args, kwargs)

    def size(self, selection: Selection, count: int) -> int | fx.Node | None:
        """How many of ``count`` rows a selection takes; None where a moving slice does not say."""
        for step in selection:
            if isinstance(step, Gather):
                length = value_of(step.index).shape[0]
                if isinstance(length, int):
                    count = length
                else:
                    count = self.emit(step.index, aten.sym_size.int, (step.index, 0))
            elif isinstance(step.start, int) and isinstance(step.stop, int) and isinstance(count, int):
                count = len(range(count)[step.start : step.stop : step.step])
            else:
                return None
        return count

    def from_start(self, index: fx.Node, count: int) -> fx.Node:
        """An index as indexing reads it, counted from the start; one before the start becomes one past the end."""
        negative = self.emit(index, aten.lt.Scalar, (index, 0))
        index = self.emit(index, aten.where.self, (negative, self.emit(index, aten.add.Tensor, (index, count)), index))
        before = self.emit(index, aten.lt.Scalar, (index, 0))
        return self.emit(index, aten.where.ScalarSelf, (before, count, index))

    def emit(self, like: fx.Node, target, args: tuple, kwargs: dict | None = None) -> fx.Node:
        """One node with ``like``'s metadata and its own fake value, or the equal node that is there already."""
        kwargs = kwargs or {}
        key = self._key(target, args, kwargs)
        if key in self._emitted:
            return self._emitted[key]
        graph = like.graph
        node = graph.call_function(target, args, kwargs)
        stale = ("val", "tensor_meta", "example_value", "eager_input_vals")
        node.meta = {name: value for name, value in like.meta.items() if name not in stale}
        node.meta["val"] = fake_result(node)
        self._emitted[key] = node
        return node

    def _key(self, target, args, kwargs):
        return target, _frozen(self._canonically(args)), _frozen(self._canonically(kwargs))

    def _canonically(self, tree):
        return fx.node.map_arg(tree, lambda node: self._canonical.get(node, node))

    def _leaf(self, node: fx.Node, selection: Selection) -> fx.Node:
        first = selection[0] if selection else None
        if self._shorten and isinstance(first, Take) and isinstance(first.start, int) and isinstance(first.stop, int):
            shorter = self._shorten(self, node, first)
            if shorter is not None:
                return self._apply(shorter, 0, selection[1:])
        return self._apply(node, 0, selection)

    def _apply(self, node: fx.Node, dim: int, selection: Selection) -> fx.Node:
        if is_uniform(node, dim) and (size := self.size(selection, value_of(node).shape[dim])) is not None:
            return self._uniform(node, dim, size)
        for step in selection:
            if isinstance(step, Take):
                node = self.emit(node, aten.slice.Tensor, (node, dim, step.start, step.stop, step.step))
            else:
                node = self.emit(node, aten.index.Tensor, (node, [*[None] * dim, step.index]))
        return node

    def _uniform(self, node: fx.Node, dim: int, size: int | fx.Node) -> fx.Node:
        shape = [size if d == dim else s for d, s in enumerate(value_of(node).shape)]
        if op_name(node) == "expand":
            return self.emit(node, aten.expand.default, (node.args[0], shape))
        return self.emit(node, node.target, (shape, *node.args[1:]), dict(node.kwargs))

    def _joined(self, node: fx.Node, dim: int, selection: Selection) -> fx.Node:
        """Rows of tables that stand one below another: those of each table, and a choice by row number."""
        pieces: list[tuple[fx.Node, Selection, int]] = []
        for operand in node.args[0]:
            pieces.append((operand, (), value_of(operand).shape[dim]))
        for step in selection:
            if isinstance(step, Gather):
                return self._chosen(node, dim, pieces, step.index)
            pieces = list(_taken(pieces, step))
        parts = [self._rows_or_pull(operand, dim, taken) for operand, taken, _ in pieces]
        return parts[0] if len(parts) == 1 else self.emit(node, aten.cat.default, (parts, dim))

    def _chosen(self, node: fx.Node, dim: int, pieces, index: fx.Node) -> fx.Node:
        count = sum(size for _, _, size in pieces)
        emit = self.emit
        # Only the last table sees an index past its end, and fails.
        index = self.from_start(index, count)
        shape = [-1 if d == dim else 1 for d in range(value_of(node).dim())]
        result, start = None, 0
        for operand, taken, size in pieces:
            inside = emit(index, aten.sub.Tensor, (index, start)) if start else index
            if start + size == count:
                inside = emit(index, aten.clamp_min.default, (inside, 0)) if start else inside
            else:
                inside = emit(index, aten.clamp_min.default, (inside, 0)) if start else inside
                inside = emit(index, aten.clamp_max.default, (inside, size - 1))
            part = self._rows_or_pull(operand, dim, (*taken, Gather(inside)))
            if result is None:
                result = part
            else:
                later = emit(index, aten.ge.Scalar, (index, start))
                later = emit(index, aten.view.default, (later, shape))
                result = emit(node, aten.where.self, (later, part, result))
            start += size
        return result

    def _rows_or_pull(self, operand: fx.Node, dim: int, selection: Selection) -> fx.Node:
        if operand in self._analysis.rows:
            return self.rows(operand, selection)
        return self._apply(operand, dim, selection)

    def _operands(self, node: fx.Node, place, selection: Selection):
        """The operator's own operands, each with the selected rows where it has rows."""
        rows = self._analysis.rows
        out = value_of(node)
        ndim = out.dim() if isinstance(out, torch.Tensor) else None
        lists = op_name(node) == "cat"
        selects = op_name(node) == "select_scatter"

        def selected(operand: fx.Node) -> fx.Node:
            if operand in rows:
                return self.rows(operand, selection)
            value = value_of(operand)
            if not isinstance(value, torch.Tensor) or ndim is None or op_name(node) in ("index", "index_select"):
                return operand
            if selects and operand is node.args[1]:
                written = (node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)) % ndim
                dim = place.dim - (written < place.dim)
            else:
                dim = place.dim - (ndim - value.dim()) if not lists else place.dim
            if dim < 0 or value.shape[dim] == 1 or value.dim() == 0:
                return operand
            return self._apply(operand, dim, selection)

        return fx.node.map_arg(node.args, selected), fx.node.map_arg(node.kwargs, selected)


def _taken(pieces, take: Take):
    """A static slice of step 1 of tables that stand one below another."""
    start, stop, _ = slice(take.start, take.stop).indices(sum(size for _, _, size in pieces))
    above = 0
    for operand, taken, size in pieces:
        first, last = max(start - above, 0), min(stop - above, size)
        if first < last:
            whole = (first, last) == (0, size)
            yield operand, taken if whole else (*taken, Take(first, last)), last - first
        above += size


def fake_result(node: fx.Node):
    """The fake value of a new node, from the fake values of its operands."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
    values = (value for other in node.graph.nodes for value in _leaves(value_of(other)))
    values = itertools.chain(_leaves((args, kwargs)), values)
    mode = next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)
    with mode or contextlib.nullcontext():
        return node.target(*args, **kwargs)


def _leaves(tree):
    return torch.utils._pytree.tree_leaves(tree)


def _is_pure(node: fx.Node) -> bool:
    """Whether two equal calls give equal values: a functional operator without randomness or effects."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    if node.target.namespace not in ("aten", "prims", "rope_ops"):
        return False
    impure = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return not any(tag in node.target.tags for tag in impure) and "empty" not in node.target._schema.name


def _frozen(tree):
    """A hashable form that tells 1 from 1.0 and from True."""
    if isinstance(tree, (list, tuple)):
        return tuple(_frozen(item) for item in tree)
    if isinstance(tree, dict):
        return tuple((name, _frozen(item)) for name, item in sorted(tree.items()))
    return type(tree), tree
