"""Suite ``state``: staging one prompt of 262,144 tokens with 64 images, host work only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.harness import Curve, Row, Table, interleaved_us
from rope_ops import RopeState
from rope_ops.positions import Image, Text, rules

NUM_DIMS = 3
LENGTH = 262_144
LISTS, ARRAY, DENSE, GRIDS = (
    "Python lists",
    "dense array, dense store",
    "rope_ops, dense array to segments",
    "rope_ops, grids to segments",
)


def run(device: torch.device) -> Iterator[Table]:
    yield Table("staging one prompt", _measure(f"{LENGTH:,} tokens, 64 images", 64, device, 1.0), (DENSE, GRIDS))
    series: dict[str, list[tuple[float, float]]] = {}
    rows = []
    for images in (1, 4, 16, 64):
        for row in _measure(f"{images * LENGTH // 64:,} tokens, {images} images", images, device, 0.2):
            rows.append(row)
            if row.us is not None:
                series.setdefault(row.name, []).append((images * LENGTH // 64, row.us))
    yield Table("how staging grows", rows, (DENSE, GRIDS), Curve("Staging a prompt", "tokens of the prompt", series))


def _measure(case: str, images: int, device: torch.device, seconds: float) -> list[Row]:
    blocks = [block for _ in range(images) for block in (Text(64), Image(63, 64))]
    segments, delta = rules.qwen2_vl(blocks)
    dense = segments.to_dense()
    length = segments.length
    stores = {
        name: RopeState(NUM_DIMS, 1, 16, length, device, store="dense" if name in (LISTS, ARRAY) else "segments")
        for name in (LISTS, ARRAY, DENSE, GRIDS)
    }

    def stage(name: str, positions, delta: int) -> None:
        stores[name].set_prefill_positions(0, positions, delta)
        stores[name].apply_staged_writes()

    functions = {
        LISTS: lambda i: stage(LISTS, np.array([axis.tolist() for axis in dense], dtype=np.int32), delta),
        ARRAY: lambda i: stage(ARRAY, dense, delta),
        DENSE: lambda i: stage(DENSE, dense, delta),
        GRIDS: lambda i: stage(GRIDS, *rules.qwen2_vl(blocks)),
    }
    notes = {}
    for name, function in functions.items():
        function(0)
        got = stores[name].read_prefill_positions(0, length).numpy()
        notes[name] = "" if np.array_equal(got, dense) else "WRONG"
    # Host work: timed by the host's clock on every machine.
    times = interleaved_us({n: f for n, f in functions.items() if not notes[n]}, torch.device("cpu"), seconds=seconds)
    return [
        Row(case, name, times.get(name), resident_bytes=stores[name].used_bytes(0), note=notes[name])
        for name in functions
    ]
