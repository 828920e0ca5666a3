"""What building a table costs: bytes that stay, bytes at the peak, milliseconds, and whether the bits are right."""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from rope_ops import reference
from rope_ops.config import ModelConfig
from rope_ops.ops import build_cos_sin_cache

_Build = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Construction:
    """One way to build a model's table, measured.

    Attributes:
        name: ``legacy``, ``bounded_eager`` or ``rope_ops``.
        rows: rows allocated.
        resident_bytes: bytes of the table.
        peak_bytes: most bytes allocated at once during construction, the table included.
        milliseconds: median time of one construction.
        bitwise_prefix: whether all rows that the legacy table has too are equal to the bit.
    """

    name: str
    rows: int
    resident_bytes: int
    peak_bytes: int
    milliseconds: float
    bitwise_prefix: bool


def constructions(config: ModelConfig, device: torch.device) -> dict[str, tuple[int, _Build]]:
    """The ways to build this model's table: name to rows and a function that builds it.

    Without a bound (no certified class, or pruning) there is no ``bounded_eager``, and ``rope_ops`` builds the legacy
    rows too.
    """
    inv_freq, attention_factor = config.rope_frequencies(device)
    bound = config.mrope_cache_max_position

    def build(builder, rows: int) -> tuple[int, _Build]:
        return rows, partial(builder, inv_freq, rows, attention_factor, config.dtype)

    ways = {"legacy": build(reference.build_cos_sin_cache, config.legacy_rows)}
    if bound is not None:
        ways["bounded_eager"] = build(reference.build_cos_sin_cache, bound)
    ways["rope_ops"] = build(build_cos_sin_cache, bound or config.legacy_rows)
    return ways


def measure(config: ModelConfig, device: torch.device) -> Iterator[Construction]:
    """Measure each construction of :func:`constructions`, in order, on ``device``."""
    legacy = None
    for name, (rows, build) in constructions(config, device).items():
        table, peak = _build_and_peak(build, device)
        legacy = table if legacy is None else legacy
        shared = min(rows, legacy.shape[0])
        exact = torch.equal(table[:shared], legacy[:shared])
        resident = table.nbytes
        del table
        yield Construction(name, rows, resident, peak, milliseconds(build, device), exact)


def peak_bytes(build: _Build, device: torch.device) -> int:
    """Most bytes that ``build`` holds at once, its result included.

    On CUDA from the allocator's statistics, on CPU from the profiler's allocation events, which are exact.
    """
    return _build_and_peak(build, device)[1]


def _build_and_peak(build: _Build, device: torch.device) -> tuple[torch.Tensor, int]:
    if device.type == "cuda":
        # The first call compiles the kernel and proves it, which takes memory of its own.
        build()
        # Modules die in cycles: one that is collected while this one is built would hide its bytes.
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        table = build()
        torch.cuda.synchronize(device)
        return table, torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        table = build()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    held = peak = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return table, peak


def milliseconds(build: _Build, device: torch.device) -> float:
    """Median time of one call, in milliseconds: of five calls, or of as many as a quarter of a second allows."""
    times: list[float] = []
    while len(times) < 5 and sum(times) < 250:
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            build()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            begin = time.perf_counter()
            build()
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)
