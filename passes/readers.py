"""Reads of a bounded buffer in a captured graph that are not safe by the certificate: by slice from or past its end.

A read at positions is safe: positions stay below the bound. A slice whose end is a constant past the rows came from the
legacy number of rows and is now short; one that counts from the end reads other rows. Both are found on Dynamo's graph
and reported; nothing is changed. ``table.shape[0]`` is a constant before there is a graph, and cannot be found in it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence

from torch import fx, nn

from rope_ops.passes.report import location

# Of a bounded buffer: its name, the dimension of its rows, how many there were, how many there are.
Bounded = tuple[str, int, int, int]

_SAME_ROWS = frozenset(("to", "float", "half", "bfloat16", "type", "type_as", "contiguous", "detach", "cuda", "cpu"))


def bounded_buffers(model: nn.Module) -> dict[int, Bounded]:
    """The bounded buffers of a model, by the identity of the tensor."""
    from rope_ops.construct.constructor import BOUNDED

    return {
        id(getattr(module, name)): (f"{path}.{name}".lstrip("."), *sizes)
        for path, module in model.named_modules()
        for name, sizes in vars(module).get(BOUNDED, {}).items()
    }


def unsafe_reads(gm: fx.GraphModule, example_inputs: Sequence, bounded: Mapping[int, Bounded]) -> Iterator[str]:
    """A line for each read of a bounded buffer in Dynamo's graph that its fewer rows change."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for placeholder, example in zip(placeholders, example_inputs, strict=False):
        if id(example) in bounded:
            yield from _reads(placeholder, *bounded[id(example)])


def _reads(table: fx.Node, name: str, dim: int, legacy: int, rows: int) -> Iterator[str]:
    for user in table.users:
        if user.op == "call_method" and user.target in _SAME_ROWS and user.args[0] is table:
            yield from _reads(user, name, dim, legacy, rows)
        elif user.op == "call_method" and user.target in ("size", "numel", "flip", "roll"):
            yield _line(user, name, f"its {user.target}() depends on the number of rows", legacy, rows)
        elif user.target is operator.getitem and user.args[0] is table:
            index = user.args[1] if isinstance(user.args[1], tuple) else (user.args[1],)
            if Ellipsis not in index and None not in index and len(index) > dim:
                problem = _problem(index[dim], rows)
                if problem:
                    yield _line(user, name, problem, legacy, rows)


def _problem(index, rows: int) -> str | None:
    ends = (index.start, index.stop) if isinstance(index, slice) else (index,)
    numbers = [number for number in ends if isinstance(number, int) and not isinstance(number, bool)]
    if any(number < 0 for number in numbers):
        return "a read from its end finds other rows"
    last = max(numbers, default=0) - isinstance(index, slice)
    return f"a read of row {last} is past it" if last >= rows else None


def _line(node: fx.Node, name: str, problem: str, legacy: int, rows: int) -> str:
    return f"{location(node.meta.get('stack_trace'))}: {name} has {rows} of {legacy} rows: {problem}"
