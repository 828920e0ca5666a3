"""``python -m rope_ops [config.json]``: what a model's rotary table costs, legacy and bounded, measured here."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pkgutil
import platform
import sys
from collections.abc import Sequence
from typing import Any

import torch

from rope_ops import __version__
from rope_ops.config import LEGACY_POSITIONS_FACTOR, ModelConfig
from rope_ops.examples import EXAMPLES, ExampleModel
from rope_ops.measure import Construction, measure

_MIB = 1 << 20
_LABELS = {"legacy": "legacy, eager", "bounded_eager": "bounded, eager", "rope_ops": "rope_ops"}


class _Parser(argparse.ArgumentParser):
    """Errors are one line: what was wrong, and status 2."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the report; exits with status 2 and one line on standard error for input that cannot be used."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    # The profiler, which counts bytes, otherwise reports its own start and stop on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        config = _model_config(options)
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        results = _measured(config, device)
        if options.plot:
            _plot(results, options.plot)
    except (OSError, ValueError, TypeError, ImportError, AttributeError, RuntimeError) as error:
        parser.error(str(error))
    skipped = _skipped(config, device)
    if options.json:
        print(json.dumps(_as_data(config, results, device, skipped), indent=2))
    else:
        print(_as_text(options, config, results, device, skipped))


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="rope_ops", description=__doc__)
    parser.add_argument("config", nargs="?", help="a Hugging Face config.json, or its folder; an example if left out")
    parser.add_argument("--example", choices=sorted(EXAMPLES), default="qwen3.5", help="embedded config")
    parser.add_argument("--max-model-len", type=int, help="longest sequence served, draft tokens included")
    parser.add_argument("--model-class", metavar="PKG.MOD:CLASS", help="the class that is served")
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one")
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    parser.add_argument("--plot", metavar="OUT.PNG", help="also write a bar picture (needs matplotlib)")
    return parser


def _model_config(options: argparse.Namespace) -> ModelConfig:
    model_cls = None
    if options.model_class:
        model_cls = pkgutil.resolve_name(options.model_class)
        if not isinstance(model_cls, type):
            raise TypeError(f"--model-class must name a class, got {model_cls!r}")
    elif options.config is None:
        model_cls = ExampleModel
    source = EXAMPLES[options.example] if options.config is None else options.config
    return ModelConfig.from_hf(source, model_cls=model_cls, max_model_len=options.max_model_len)


def _measured(config: ModelConfig, device: torch.device) -> list[Construction]:
    from tqdm import tqdm

    return list(tqdm(measure(config, device), desc="building tables", leave=False, disable=not sys.stderr.isatty()))


def _skipped(config: ModelConfig, device: torch.device) -> list[str]:
    skipped = []
    if device.type != "cuda":
        why = "no CUDA device" if not torch.cuda.is_available() else f"--device {device}"
        skipped.append(f"Triton kernels ({why})")
    if config.mrope_cache_max_position is None:
        skipped.append("bounded, eager (no bound without a certified class)")
    return skipped


def _certificate(config: ModelConfig) -> str:
    if config.mrope_cache_max_position is not None:
        return f"{config.model_class} is certified: positions < max_model_len = {config.max_model_len:,}"
    what = f"{config.model_class} is not certified" if config.model_class else "no model class given (--model-class)"
    return f"{what}: the legacy rows are kept; certified, {config.max_model_len:,} would do"


def _machine(device: torch.device) -> str:
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else f"{platform.machine()}, {os.cpu_count()} CPUs"
    triton = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "none"
    return f"machine: {name} | torch {torch.__version__} | triton {triton} | device {device}"


def _rope(config: ModelConfig) -> str:
    parameters = dict(config.rope_parameters)
    sizes = f"head_size {config.head_size}, rotary_dim {config.rotary_dim}, {str(config.dtype).removeprefix('torch.')}"
    return ", ".join([sizes, *(f"{key} {value}" for key, value in parameters.items())])


def _legacy(config: ModelConfig) -> str:
    if config.num_dims == 1:
        return "one position axis: as many rows as the model has positions"
    return (
        f"{LEGACY_POSITIONS_FACTOR} x max_position_embeddings, as serving engines allocate for M-RoPE by default; "
        "vLLM 0.33 already uses 1 x for Qwen3-VL and 3.5"
    )


def _as_text(options, config: ModelConfig, results: list[Construction], device: torch.device, skipped) -> str:
    from tabulate import tabulate

    source = options.config or f"{options.example} (embedded)"
    rows = [
        (
            _LABELS[r.name],
            f"{r.rows:,}",
            f"{r.resident_bytes / _MIB:.1f}",
            f"{r.peak_bytes / _MIB:.1f}",
            f"{r.milliseconds:.2f}",
            "yes" if r.bitwise_prefix else "NO",
        )
        for r in results
    ]
    headers = ("construction", "rows", "resident MiB", "peak MiB", "ms", "bitwise prefix of legacy")
    return "\n".join(
        (
            f"rope-ops {__version__} | {source}",
            f"rope: {_rope(config)}",
            f"legacy: {_legacy(config)}",
            f"certificate: {_certificate(config)}",
            "",
            tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * 4, "left")),
            "",
            f"skipped: {'; '.join(skipped) or 'nothing'}",
            _machine(device),
        )
    )


def _as_data(config: ModelConfig, results: list[Construction], device: torch.device, skipped) -> dict[str, Any]:
    fields = dataclasses.asdict(config)
    return {
        "constructions": [dataclasses.asdict(result) for result in results],
        "config": {
            **fields,
            "dtype": str(config.dtype),
            "rotary_dim": config.rotary_dim,
            "legacy_rows": config.legacy_rows,
            "mrope_cache_max_position": config.mrope_cache_max_position,
            "hash": config.compute_hash(),
        },
        "certificate": _certificate(config),
        "machine": _machine(device).removeprefix("machine: "),
        "skipped": skipped,
    }


def _plot(results: list[Construction], path: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib (pip install 'rope-ops[plot]')") from error
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.subplots()
    labels = [_LABELS[result.name] for result in results]
    for offset, attribute, label in ((-0.2, "peak_bytes", "construction peak"), (0.2, "resident_bytes", "resident")):
        values = [getattr(result, attribute) / _MIB for result in results]
        bars = axes.barh([i + offset for i in range(len(results))], values, height=0.38, label=label)
        axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.set_yticks(range(len(results)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("MiB")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
