"""Suite ``cache``: building the table, legacy and bounded; the limit is writing its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.harness import Curve, Row, Table, interleaved_us
from rope_ops import ModelConfig, build_cos_sin_cache, reference
from rope_ops.examples import EXAMPLES, ExampleModel
from rope_ops.measure import peak_bytes

OURS = "rope_ops, bounded"
FILL = "limit: fill_ of the same bytes"


def run(device: torch.device) -> Iterator[Table]:
    config = ModelConfig.from_hf(EXAMPLES["qwen3.5"], model_cls=ExampleModel)
    inv_freq, attention_factor = config.rope_frequencies(device)
    compiled = torch.compile(reference.build_cos_sin_cache, dynamic=False)
    legacy_rows, bound = config.legacy_rows, config.mrope_cache_max_position

    def way(build, rows: int) -> Callable[[int], torch.Tensor]:
        return lambda i: build(inv_freq, rows, attention_factor, config.dtype)

    out = torch.empty((bound, config.rotary_dim), dtype=config.dtype, device=device)
    ways = {
        "eager, legacy": way(reference.build_cos_sin_cache, legacy_rows),
        "Inductor, legacy": way(compiled, legacy_rows),
        "eager, bounded": way(reference.build_cos_sin_cache, bound),
        "Inductor, bounded": way(compiled, bound),
        OURS: way(build_cos_sin_cache, bound),
        FILL: lambda i: out.fill_(1.0),
    }
    case = f"{legacy_rows:,} legacy rows, {bound:,} bounded, rotary_dim {config.rotary_dim}, bf16"
    legacy = ways["eager, legacy"](0)
    rows, notes = [], {}
    for name, build in ways.items():
        if name == FILL:
            continue
        table = build(0)
        different = int((table != legacy[: len(table)]).sum())
        notes[name] = "bitwise eager" if different == 0 else f"{different:,} of {table.numel():,} values not eager's"
    del legacy, table
    red = OURS if notes[OURS] != "bitwise eager" else None
    times = interleaved_us({name: build for name, build in ways.items() if name != red}, device)
    for name, build in ways.items():
        resident = out.nbytes if name == FILL else build(0).nbytes
        peak = None if name == FILL else peak_bytes(lambda build=build: build(0), device)
        rows.append(Row(case, name, times.get(name), resident, resident, peak, notes.get(name, "")))
    yield Table("one table of the default model", rows, (OURS,))

    series: dict[str, list[tuple[float, float]]] = {"eager": [], "Inductor": [], "rope_ops": [], "limit: fill_": []}
    rows = []
    for count in [1 << power for power in range(10, 21, 2)]:
        out = torch.empty((count, config.rotary_dim), dtype=config.dtype, device=device)
        ours = way(build_cos_sin_cache, count)(0)
        right = torch.equal(ours, way(reference.build_cos_sin_cache, count)(0))
        functions = {
            "eager": way(reference.build_cos_sin_cache, count),
            "Inductor": way(compiled, count),
            "rope_ops": way(build_cos_sin_cache, count),
            "limit: fill_": lambda i, out=out: out.fill_(1.0),
        }
        if not right:
            del functions["rope_ops"]
        for name, us in interleaved_us(functions, device, seconds=0.2).items():
            series[name].append((count, us))
            rows.append(Row(f"{count:,} rows", name, us, ours.nbytes))
    yield Table("how construction grows with rows", rows, ("rope_ops",), Curve("Building the table", "rows", series))
