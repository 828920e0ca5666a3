"""Suite ``construct``: a model's ordinary constructor, outside and inside of ``sequence_bound``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Row, Table
from rope_ops import ModelConfig
from rope_ops.construct.measure import measure_constructor
from rope_ops.examples import EXAMPLES, ExampleModel


def run(device: torch.device) -> Iterator[Table]:
    rows = []
    for name, example in EXAMPLES.items():
        config = ModelConfig.from_hf(example, model_cls=ExampleModel)
        for result in measure_constructor(config, device):
            case = f"{name}, {config.legacy_rows:,} legacy rows"
            us = 1e3 * result.milliseconds if result.bitwise_prefix else None
            note = f"{result.rows:,} rows, " + ("bitwise eager" if result.bitwise_prefix else "WRONG")
            memory = {"resident_bytes": result.resident_bytes, "peak_bytes": result.peak_bytes}
            rows.append(Row(case, result.name, us, note=note, **memory))
    yield Table("an ordinary constructor", rows, ("constructor, sequence_bound",))
