"""``python -m rope_ops [config.json]``: what a model's rotary table costs, legacy and bounded, measured here.

``python -m rope_ops certify pkg.mod:Class [config.json]`` shows the state of a class's certificate instead.
"""

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
from rope_ops.config import ModelConfig
from rope_ops.examples import EXAMPLES, ExampleModel
from rope_ops.frequencies import has_several_factors
from rope_ops.graph_report import GraphReport, graph_report
from rope_ops.measure import Construction, measure

_MIB = 1 << 20
_LABELS = {
    "legacy": "legacy, eager",
    "bounded_eager": "bounded, eager",
    "rope_ops": "rope_ops",
    "constructor": "a model's constructor",
    "constructor, sequence_bound": "... in sequence_bound",
}


class _Parser(argparse.ArgumentParser):
    """Errors are one line: what was wrong, and status 2."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the report; exits with status 2 and one line on standard error for input that cannot be used."""
    if arguments is None:
        arguments = sys.argv[1:]
        # As under `python -m`, so that the console script finds the same model classes.
        sys.path.insert(0, os.getcwd())
    if arguments[:1] == ["certify"]:
        from rope_ops import certify_command

        sys.exit(certify_command.run(_Parser(prog="rope-ops certify"), arguments[1:]))
    parser = _make_parser()
    options = parser.parse_args(arguments)
    # The profiler, which counts bytes, otherwise reports its own start and stop on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        config = _model_config(options)
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        results = _measured(config, device)
        constructors = _constructors(config, device)
        graph = _graph(config, device, options.compile)
        if options.plot:
            _plot([*results, *constructors], options.plot)
    except (OSError, ValueError, TypeError, ImportError, AttributeError, RuntimeError) as error:
        parser.error(str(error))
    skipped = _skipped(config, device)
    if options.json:
        print(json.dumps(_as_data(config, results, constructors, graph, device, skipped), indent=2))
    else:
        print(_as_text(options, config, [*results, *constructors], graph, device, skipped))


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="rope_ops", description=__doc__.partition("\n")[0])
    parser.add_argument("config", nargs="?", help="a Hugging Face config.json, or its folder; an example if left out")
    parser.add_argument("--example", choices=sorted(EXAMPLES), default="qwen3.5", help="embedded config")
    parser.add_argument("--max-model-len", type=int, help="longest sequence served, draft tokens included")
    parser.add_argument("--model-class", metavar="PKG.MOD:CLASS", help="the class that is served")
    parser.add_argument("--layer-type", help="whose rope to read, for a config with one for each layer type")
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one")
    parser.add_argument("--compile", action="store_true", help="also time a compiled call, plain and bounded")
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
    return ModelConfig.from_hf(
        source, model_cls=model_cls, max_model_len=options.max_model_len, layer_type=options.layer_type
    )


def _measured(config: ModelConfig, device: torch.device) -> list[Construction]:
    from tqdm import tqdm

    return list(tqdm(measure(config, device), desc="building tables", leave=False, disable=not sys.stderr.isatty()))


def _constructors(config: ModelConfig, device: torch.device) -> list[Construction]:
    # Without a bound a constructor builds what the table's first line shows.
    if config.mrope_cache_max_position is None or has_several_factors(config.rope_parameters):
        return []
    from rope_ops.construct.measure import measure_constructor

    return list(measure_constructor(config, device))


def _graph(config: ModelConfig, device: torch.device, timed: bool) -> GraphReport | None:
    if config.mrope_cache_max_position is None or has_several_factors(config.rope_parameters):
        return None
    return graph_report(config, device, timed=timed)


def _skipped(config: ModelConfig, device: torch.device) -> list[str]:
    skipped = []
    if device.type != "cuda":
        why = "no CUDA device" if not torch.cuda.is_available() else f"--device {device}"
        skipped.append(f"Triton kernels ({why})")
    if config.mrope_cache_max_position is None:
        skipped.append(f"bounded, eager, and the graph pass (no bound: {config.no_bound_reason})")
    elif has_several_factors(config.rope_parameters):
        skipped.append("the graph pass (the example model builds one table, this config has one for each factor)")
    return skipped


def _certificate(config: ModelConfig) -> str:
    if config.mrope_cache_max_position is not None:
        return f"{config.model_class} is certified: positions < max_model_len = {config.max_model_len:,}"
    option = "" if config.model_class else " (--model-class)"
    what = f"{config.no_bound_reason}{option}: the legacy rows are kept"
    return what if config.supports_sequence_bounded_mrope else f"{what}; certified, {config.max_model_len:,} would do"


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
    if config.legacy_positions_factor == 1:
        return "as many rows as the model has positions, as serving engines allocate for one axis and for XD-RoPE"
    return (
        f"{config.legacy_positions_factor} x max_position_embeddings, as serving engines allocate for M-RoPE by "
        "default; vLLM 0.33 already uses 1 x for Qwen3-VL and 3.5"
    )


def _as_text(options, config: ModelConfig, results: list[Construction], graph, device: torch.device, skipped) -> str:
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
            *([] if graph is None else [_graph_text(graph), ""]),
            f"skipped: {'; '.join(skipped) or 'nothing'}",
            _machine(device),
        )
    )


def _graph_text(graph: GraphReport) -> str:
    lines = ["A model that builds this table in forward, under torch.compile, where it makes and reads the table:"]
    lines += [f"  {line}" for line in graph.before]
    lines += ['and with backend="rope_bounded":']
    lines += [f"  {line}" for line in graph.after] or ["  (the same)"]
    equal = "yes" if graph.equal_to_eager else "NO"
    lines += [f"{graph.outcome}: {graph.bytes_before:,} -> {graph.bytes_after:,} bytes; bitwise eager: {equal}"]
    if graph.plain_ms is not None:
        lines += [f"a compiled call: Inductor {graph.plain_ms:.2f} ms, rope_bounded {graph.rope_bounded_ms:.2f} ms"]
    return "\n".join(lines)


def _as_data(config: ModelConfig, results, constructors, graph, device: torch.device, skipped) -> dict[str, Any]:
    fields = dataclasses.asdict(config)
    return {
        "constructions": [dataclasses.asdict(result) for result in results],
        "constructors": [dataclasses.asdict(result) for result in constructors],
        "graph": None if graph is None else dataclasses.asdict(graph),
        "config": {
            **fields,
            "dtype": str(config.dtype),
            "rotary_dim": config.rotary_dim,
            "legacy_rows": config.legacy_rows,
            "mrope_cache_max_position": config.mrope_cache_max_position,
            "no_bound_reason": config.no_bound_reason,
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
