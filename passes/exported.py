"""The pass on an exported program, for ahead-of-time compilation and for graphs that leave this process."""

from __future__ import annotations

import torch

from rope_ops.passes.marks import mark
from rope_ops.passes.report import Report
from rope_ops.passes.rewrite import Options, rewrite


def bound_exported(
    program: torch.export.ExportedProgram, max_model_len: int | None = None, report: Report | None = None
) -> torch.export.ExportedProgram:
    """Rewrite the tables of a program exported with ``torch.export.export(model, args, strict=True)``.

    Only a strict export keeps the marks of a certified class; another program is returned unrewritten, and the report
    says so. The result holds ATen operators alone: it can be saved, loaded and compiled without this package.

    Args:
        program: the exported program; it is not changed.
        max_model_len: the bound; None takes that of each instance.
        report: gets a record for each table.

    Returns:
        A new program past ``run_decompositions()``.

    Raises:
        ValueError: ``max_model_len`` is not a positive integer, or a marked range has no bound.
    """
    report = Report() if report is None else report
    program = program.run_decompositions()
    mark(program.graph_module, max_model_len, report=report)
    # No copy that is computed once, no builder: nothing that is not ATen. The signature names the outputs' nodes.
    graph = program.graph_module.graph
    rewrite(graph, Options(rows_once=False), report, decomposed=False)
    program.graph_module.recompile()
    output = next(node for node in graph.nodes if node.op == "output")
    for spec, node in zip(program.graph_signature.output_specs, output.args[0], strict=True):
        if isinstance(node, torch.fx.Node) and hasattr(spec.arg, "name"):
            spec.arg.name = node.name
    return program
