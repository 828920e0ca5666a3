"""Timing and printing that every suite shares.

A suite is a module with ``run(device) -> Iterator[Table]``. It checks correctness before it times: a row whose check
failed carries no speed.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping

import torch

COPY_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation of one case.

    Attributes:
        case: what is done: sizes with units.
        name: who does it.
        us: median microseconds of one call; None where it was skipped or its result was wrong.
        moved_bytes: bytes that must be read and written at least; None where that says nothing.
        resident_bytes, peak_bytes: memory, where the suite measures it.
        note: why there is no time, or what else there is to say.
    """

    case: str
    name: str
    us: float | None
    moved_bytes: int | None = None
    resident_bytes: int | None = None
    peak_bytes: int | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Curve:
    """How the cost of several implementations grows: ``series[name]`` is a list of (x, us)."""

    title: str
    x: str
    series: Mapping[str, list[tuple[float, float]]]


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of one question, and the curve where it sweeps something. ``ours`` names our implementations."""

    title: str
    rows: list[Row]
    ours: tuple[str, ...]
    curve: Curve | None = None


def interleaved_us(
    functions: Mapping[str, Callable[[int], object]], device: torch.device, *, sets: int = 1, seconds: float = 0.6
) -> dict[str, float]:
    """Median microseconds of one call of each function, measured in turns so that drift meets all alike.

    Args:
        functions: name to a function of the number of an input set, ``0 .. sets - 1``.
        sets: input sets to go round, so that a call does not find its inputs in cache. See :func:`input_sets`.
        seconds: time to spend on each function.

    On CUDA a sample is the replay of a graph of at least 20 calls; on CPU it is some milliseconds of calls.
    """
    if device.type == "cuda":
        samples = {name: _graph(function, max(20, sets), sets) for name, function in functions.items()}
    else:
        samples = {name: _host(function, sets) for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    repetitions = {}
    for name, sample in samples.items():
        # The first sample compiles, allocates and fills caches; the second says how many fit the time.
        sample()
        begin = time.perf_counter()
        times[name].append(sample())
        repetitions[name] = max(3, min(200, int(seconds / (time.perf_counter() - begin))))
    for turn in range(max(repetitions.values())):
        for name, sample in samples.items():
            if turn < repetitions[name]:
                times[name].append(sample())
    return {name: statistics.median(values) for name, values in times.items()}


def _graph(function: Callable[[int], object], calls: int, sets: int) -> Callable[[], float]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(min(calls, max(3, sets))):
            function(i % sets)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            function(i % sets)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample() -> float:
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return 1e3 * start.elapsed_time(stop) / calls

    return sample


def _host(function: Callable[[int], object], sets: int) -> Callable[[], float]:
    """A sample of calls that take a few milliseconds together, after one that warms caches and threads up."""
    begin = time.perf_counter()
    function(0)
    calls = max(1, min(1000, int(5e-3 / max(time.perf_counter() - begin, 1e-9))))

    def sample() -> float:
        if calls > 1:
            function(0)
        begin = time.perf_counter()
        for i in range(calls):
            function(i % sets)
        return 1e6 * (time.perf_counter() - begin) / calls

    return sample


def input_sets(bytes_of_one: int, device: torch.device) -> int:
    """How many input sets push each other out of the last-level cache of a GPU; 1 on CPU, where calls follow work."""
    if device.type != "cuda":
        return 1
    cache = 3 * torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(64, -(-cache // max(bytes_of_one, 1))))


def copy_bytes_per_second(device: torch.device) -> float:
    """Bytes read plus bytes written by a large elementwise copy: the ceiling of memory-bound work on this machine.

    A negation, since a plain copy inside a CUDA graph goes to the slower copy engines.
    """
    source = torch.zeros(COPY_BYTES // (4 if device.type == "cuda" else 32), device=device)
    target = torch.empty_like(source)
    us = interleaved_us({"copy": lambda i: torch.neg(source, out=target)}, device)["copy"]
    return 2 * source.nbytes / us * 1e6


def release(device: torch.device) -> None:
    """Give memory back between cases."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def best_baseline(rows: Iterable[Row], ours: Iterable[str]) -> float | None:
    """The time that counts as 1.00x: the fastest of the others; a limit is nobody's."""
    times = [row.us for row in rows if row.us is not None and row.name not in ours and not row.name.startswith("limit")]
    return min(times, default=None)


def render(table: Table, tablefmt: str) -> str:
    """The table as text: one line a row, units in the header, a column only where a row fills it."""
    from tabulate import tabulate

    mib = 1 << 20
    columns: dict[str, Callable[[Row], str]] = {
        "case": lambda row: row.case,
        "implementation": lambda row: row.name,
        "us": lambda row: _number(row.us),
        "speed": lambda row: _speed(row, table),
        "GB/s": lambda row: "" if not row.us or row.moved_bytes is None else f"{row.moved_bytes / row.us / 1e3:,.0f}",
        "resident MiB": lambda row: "" if row.resident_bytes is None else f"{row.resident_bytes / mib:,.2f}",
        "peak MiB": lambda row: "" if row.peak_bytes is None else f"{row.peak_bytes / mib:,.2f}",
        "note": lambda row: row.note,
    }
    cells = {header: [value(row) for row in table.rows] for header, value in columns.items()}
    cells = {header: values for header, values in cells.items() if any(values)}
    align = ["left" if header in ("case", "implementation", "note") else "right" for header in cells]
    lines = list(zip(*cells.values(), strict=True))
    return tabulate(lines, list(cells), tablefmt=tablefmt, disable_numparse=True, colalign=align)


def _number(us: float | None) -> str:
    if us is None:
        return ""
    return f"{us:,.0f}" if us >= 1000 else f"{us:.3g}" if us < 100 else f"{us:.0f}"


def _speed(row: Row, table: Table) -> str:
    best = best_baseline((other for other in table.rows if other.case == row.case), table.ours)
    if row.us is None or best is None:
        return ""
    return "1.00x (ref)" if row.us == best and row.name not in table.ours else f"{best / row.us:.2f}x"
