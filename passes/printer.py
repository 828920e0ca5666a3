"""A graph as text that does not change with names, paths or the torch version: for snapshots, reports and diffs.

One line a node, numbered in order: ``%3: float32[6, 8] = aten.cos.default(%2)``.
"""

from __future__ import annotations

import torch
from torch import fx

from rope_ops.passes.rows import value_of


def canonical(graph: fx.Graph) -> str:
    """The text of a graph; nodes are numbered, keyword arguments sorted, shapes and dtypes from the fake values."""
    numbers: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {_text(node.args[0], numbers)}")
            continue
        numbers[node] = f"%{len(numbers)}"
        lines.append(f"{numbers[node]}: {_type(value_of(node))} = {_call(node, numbers)}")
    return "\n".join(lines)


def _call(node: fx.Node, numbers: dict) -> str:
    if node.op in ("placeholder", "get_attr"):
        return node.op
    arguments = [_text(argument, numbers) for argument in node.args]
    arguments += [f"{name}={_text(value, numbers)}" for name, value in sorted(node.kwargs.items())]
    return f"{_target(node.target)}({', '.join(arguments)})"


def _target(target) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", str(target))


def _text(value, numbers: dict) -> str:
    if isinstance(value, fx.Node):
        return numbers[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, numbers) for item in value)}]"
    return str(value).removeprefix("torch.")


def _type(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
