"""Stage 1, on Dynamo's graph: put the bound of a certified class's position ranges into the graph.

Safety: the pass replaces ``torch.arange`` by an operator of the same value, so a graph that no later stage rewrites
computes what it did. It replaces only a range that a certified class traced (the class marked the node while it was
traced; no name, path or position in the graph is taken as evidence), whose length is a constant past the bound. The
bound becomes an argument of that operator: from here on the decision is text of the graph, which every compile cache
hashes, and nothing later reads a node's metadata to decide.

    before                                  after
    t = arange(1048576, dtype=float32)      t = rope_ops.position_range(0, 1048576, 1, 32768, float32, cpu)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import fx

from rope_ops.certify import MARK, MARK_BOUND, MARK_EXCLUDED, checked_bound, model_class
from rope_ops.passes.report import Outcome, Reason, Report, Table, location

# A range becomes positions by arithmetic that is linear in it; what goes through one of these is a frequency or a mask.
_NOT_LINEAR = frozenset(
    "pow exp exp2 expm1 log log2 log10 reciprocal sqrt rsqrt float_power ipow rpow "
    "lt le gt ge eq ne and_ or_ where".split()
)
_READERS = frozenset("getitem index_select embedding gather index take".split())
_TRIGONOMETRIC = frozenset("cos sin polar cos_ sin_".split())


@dataclasses.dataclass(frozen=True)
class _Range:
    node: fx.Node
    start: float
    end: float
    step: float
    length: int | None  # None: symbolic


def mark(
    gm: fx.GraphModule,
    max_model_len: int | None = None,
    *,
    multimodal_pruning: bool = False,
    report: Report | None = None,
) -> fx.GraphModule:
    """Replace the marked position ranges of a graph from Dynamo, nested graphs included, in place.

    Args:
        gm: the graph module that a backend gets from Dynamo, or that of a strict ``torch.export``.
        max_model_len: the bound; None takes the bound of the instance that traced the range.
        multimodal_pruning: replace nothing: with pruning on, positions are not bounded by the tokens that are left.
        report: gets one record for each table that is left here.

    Returns:
        ``gm``. Without a marked range it is unchanged.

    Raises:
        ValueError: ``max_model_len`` is not a positive integer, or a marked range has no bound at all.
    """
    if max_model_len is not None:
        checked_bound("mark", "max_model_len", max_model_len)
    report = Report() if report is None else report
    shared = _shared_bodies(gm)
    marked = found_any = False
    known = len(report.tables)
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        changed = False
        angles: set[fx.Node] = set()
        for node in list(module.graph.nodes):
            marked = marked or _mark_of(node)[0] is not None
            found = _range(node)
            reached = _angles(node) if found else None
            if not reached:
                continue
            angles |= reached
            found_any = True
            reason, bound = _decide(found, max_model_len, multimodal_pruning, module in shared)
            if reason is None:
                _replace(found, bound)
                changed = True
            else:
                report.add([_left(node, reason, found.length)])
        report.add(_without_range(module.graph, angles))
        if changed:
            module.graph.lint()
            module.recompile()
    if not marked:
        report.note("no certified class traced this graph: nothing is rewritten")
    elif len(report.tables) == known and not found_any:
        report.note("a certified class traced this graph and builds no table in it: one made before is an input here")
    return gm


def _range(node: fx.Node) -> _Range | None:
    """The arguments of a ``torch.arange`` that only makes numbers: no ``out=``, gradient, pinning or layout."""
    if node.op != "call_function" or node.target not in _ARANGE:
        return None
    values = dict(node.kwargs)
    if any(
        values.pop(name, None) not in (None, False, torch.strided)
        for name in ("out", "requires_grad", "pin_memory", "layout")
    ):
        return None
    value = _value(node)
    if not isinstance(value, torch.Tensor) or value.dim() != 1:
        return None
    names = ("end",) if len(node.args) == 1 else ("start", "end", "step")
    values = {"start": 0, "step": 1, **values, **dict(zip(names, node.args, strict=False))}
    numbers = [values.get(name) for name in ("start", "end", "step")]
    constant = all(isinstance(number, (int, float)) for number in numbers) and isinstance(value.shape[0], int)
    return _Range(node, *numbers, value.shape[0] if constant else None)


_ARANGE = frozenset(
    (torch.arange, *(getattr(torch.ops.aten.arange, name) for name in ("default", "start", "start_step")))
)


def _decide(found: _Range, max_model_len, multimodal_pruning: bool, shared: bool) -> tuple[Reason | None, int]:
    owner, bound = _mark_of(found.node)
    if owner is None:
        return Reason.UNMARKED, 0
    if owner == "" or _opted_out(found.node):
        return Reason.EXCLUDED, 0
    if multimodal_pruning:
        return Reason.MULTIMODAL_PRUNING, 0
    if shared:
        return Reason.SHARED_BODY, 0
    if found.length is None:
        return Reason.SYMBOLIC_LENGTH, 0
    bound = max_model_len or bound
    if not bound:
        raise ValueError(
            f"rope_bounded: {owner} is certified but nothing says how long its sequences are: pass "
            'options={"max_model_len": ...} to torch.compile, or call rope_ops.bind(model, max_model_len)'
        )
    return (Reason.WITHIN_BOUND, 0) if found.length <= bound else (None, bound)


def _mark_of(node: fx.Node) -> tuple[str | None, int]:
    custom = node.meta.get("custom") or {}
    return custom.get(MARK), custom.get(MARK_BOUND, 0)


def _opted_out(node: fx.Node) -> bool:
    """Whether the module stack shows an excluded submodule: a second line behind the marks.

    An entry of the stack is good evidence that a module was on the way; the lack of one proves nothing.
    """
    excluded = [name for name in (node.meta.get("custom") or {}).get(MARK_EXCLUDED, "").split(",") if name]
    for path, cls in (node.meta.get("nn_module_stack") or {}).values():
        if isinstance(cls, type) and model_class(cls).__dict__.get("supports_sequence_bounded_mrope") is False:
            return True
        if any(path.endswith(f".{name}") for name in excluded):
            return True
    return False


def _replace(found: _Range, bound: int) -> None:
    node, value = found.node, _value(found.node)
    arguments = (found.start, found.end, found.step, bound, value.dtype, value.device)
    with node.graph.inserting_after(node):
        new = node.graph.call_function(torch.ops.rope_ops.position_range.default, arguments)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _angles(node: fx.Node) -> set[fx.Node]:
    """What is computed linearly from a range, if that reads like a table: angles, the cos and sin of them included.

    Empty for a range of frequencies or channels. Decides what is reported and tried, never what is safe.
    """
    reached, todo, table = {node}, [node], False
    while todo:
        current = todo.pop()
        for user in current.users:
            name = _name(user)
            divisor = name in ("truediv", "div", "true_divide", "rtruediv") and current in user.args[1:2]
            index = name in _READERS and user.args[:1] != (current,)
            if user in reached or name in _NOT_LINEAR or divisor or index or user.op == "output":
                continue
            table = table or name in _TRIGONOMETRIC or _is_outer(user, current)
            reached.add(user)
            todo.append(user)
    return reached if table else set()


def _is_outer(user: fx.Node, operand: fx.Node) -> bool:
    """A range becomes a matrix by meeting frequencies: an angle table, whose cos may be taken much later."""
    value, before = _value(user), _value(operand)
    if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor):
        return False
    return value.is_floating_point() and value.numel() > before.numel() and len(user.all_input_nodes) > 1


def _without_range(graph: fx.Graph, angles: set[fx.Node]) -> Iterator[Table]:
    """Marked cos and sin whose angles no range of this graph reaches: of a linspace, a buffer, the positions."""
    seen = set()
    for node in graph.nodes:
        value = _value(node)
        if _name(node) not in _TRIGONOMETRIC or node in angles or not _mark_of(node)[0]:
            continue
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            continue
        where = location(node.meta.get("stack_trace"))
        if where not in seen:
            seen.add(where)
            yield _left(node, Reason.NO_RANGE, 0)


def _left(node: fx.Node, reason: Reason, length: int | None) -> Table:
    rows = "symbolic" if length is None else length
    where = location(node.meta.get("stack_trace"))
    return Table(Outcome.LEFT, reason, rows, rows, None, None, where, _name(node))


def _shared_bodies(gm: fx.GraphModule) -> set[fx.GraphModule]:
    """Nested graphs with more than one caller: Dynamo may have traced one module's and found another's to be equal."""
    callers: dict[fx.GraphModule, int] = {}
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if node.op == "get_attr" and isinstance(body := getattr(module, node.target, None), fx.GraphModule):
                callers[body] = callers.get(body, 0) + len(node.users)
    shared = {body for body, count in callers.items() if count > 1}
    return shared | {inner for body in shared for inner in body.modules() if isinstance(inner, fx.GraphModule)}


def _name(node: fx.Node) -> str:
    if node.op == "call_method":
        return node.target
    if node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.partition("::")[2]
    return getattr(node.target, "__name__", str(node.target))


def _value(node: fx.Node):
    return node.meta.get("val", node.meta.get("example_value"))
