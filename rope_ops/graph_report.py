"""What the graph pass does to the embedded model: graphs, bytes, and whether the bits are those of eager mode."""

from __future__ import annotations

import contextlib
import io
import re
import statistics
import time
from dataclasses import dataclass

import torch

from rope_ops.config import ModelConfig
from rope_ops.examples import ExampleModel

# On a GPU enough of them that the cost rule does not leave the table to plain Inductor.
_TOKENS = {"cpu": 16, "cuda": 1024}


@dataclass(frozen=True)
class GraphReport:
    """The pass on one traced call.

    Attributes:
        before, after: the lines of the graph that make and read the table, without and with the pass; no views.
        outcome: one line a table, as ``explain`` prints it.
        bytes_before, bytes_after: of the tensors that are read row by row.
        equal_to_eager: whether the result is the one of the rotary module in eager mode, to the bit.
        plain_ms, rope_bounded_ms: time of a call compiled by plain Inductor and by the backend; None unless asked for.
    """

    before: list[str]
    after: list[str]
    outcome: str
    bytes_before: int
    bytes_after: int
    equal_to_eager: bool
    plain_ms: float | None = None
    rope_bounded_ms: float | None = None


def graph_report(config: ModelConfig, device: torch.device, *, timed: bool = False) -> GraphReport:
    """Trace the example model, which builds its legacy table in forward, with the bound of ``config``.

    Args:
        config: of a certified class.
        device: where it runs.
        timed: also compile with Inductor, plain and bounded, and time a call of each (half a minute on a CPU).
    """
    from rope_ops.passes import explain

    bound = config.mrope_cache_max_position
    if bound is None:
        raise ValueError(f"graph_report: the config must have a bound, got none ({config.no_bound_reason})")
    model = ExampleModel(config, device)
    generator = torch.Generator().manual_seed(0)
    tokens = _TOKENS.get(device.type, 1024)
    shape = (tokens,) if config.num_dims == 1 else (config.num_dims, tokens)
    positions = torch.randint(0, min(bound, config.legacy_rows), shape, generator=generator).to(device)
    query = torch.randn(tokens, 2, config.head_size, generator=generator).to(device, config.dtype)
    torch._dynamo.reset()
    with contextlib.redirect_stdout(io.StringIO()):
        report = explain(model, positions, query, max_model_len=bound)
    (before, after), *_ = report.graphs
    rows = [table for table in report.tables if table.bytes_after is not None]
    short_before, short_after = _shortened(before, after, config.legacy_rows)
    return GraphReport(
        before=short_before,
        after=short_after,
        outcome="; ".join(f"{table.outcome}" + (f" ({table.reason})" if table.reason else "") for table in rows),
        bytes_before=sum(table.bytes_before or 0 for table in rows),
        bytes_after=sum(table.bytes_after or 0 for table in rows),
        equal_to_eager=torch.equal(report.result, config.get_rope(device)(positions, query)[0]),
        **(_times(model, bound, positions, query) if timed else {}),
    )


def _times(model, bound: int, positions: torch.Tensor, query: torch.Tensor) -> dict[str, float]:
    from rope_ops.passes import rope_bounded

    torch._dynamo.reset()
    ways = {
        "plain_ms": torch.compile(model, dynamic=False),
        "rope_bounded_ms": torch.compile(model, backend=rope_bounded, options={"max_model_len": bound}, dynamic=False),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(8):
        for name, way in ways.items():
            begin = time.perf_counter()
            way(positions, query)
            if query.is_cuda:
                torch.cuda.synchronize(query.device)
            if turn:
                times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in times.items()}


# Views, and the arithmetic that a plain range leaves behind (times 1, plus 0): they say nothing here.
_NOISE = re.compile(r"aten\.(unsqueeze|permute|view)\.|(mul|add)\.Tensor\(%\d+, (1|0|1\.0)\)")


def _shortened(before: str, after: str, rows: int) -> tuple[list[str], list[str]]:
    """Of the first graph what has the table's rows and its first read; of the second what the first has not."""
    known = {_operation(line) for line in before.splitlines()}
    lines = [line for line in before.splitlines() if not _NOISE.search(line)]
    read = next((line for line in lines if "aten.index" in line), None)
    short = [line for line in lines if f"[{rows}" in line.partition("=")[0] or line is read]
    new = [line for line in after.splitlines() if _operation(line) not in known and not _NOISE.search(line)]
    return short, new


def _operation(line: str) -> str:
    """A line without the numbers of its values."""
    return re.sub(r"%\d+", "%", line)
