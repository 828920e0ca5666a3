"""``python -m benchmarks [suite ...]``: measure the product against what people use, on this machine, in one run."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import sys
import time
import traceback
from pathlib import Path

import torch
from tqdm import tqdm

import rope_ops
from benchmarks.harness import Table, copy_bytes_per_second, release, render

SUITES = ("cache", "positions", "rotate", "compile", "construct", "state")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"some of {', '.join(SUITES)}; all if left out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="OUT.JSON", help="write the figures as data")
    parser.add_argument("--markdown", metavar="OUT.MD", help="write the tables as a page")
    parser.add_argument("--plot", metavar="DIR", help="draw how cost grows, one SVG a sweep")
    options = parser.parse_args()
    unknown = sorted(set(options.suites) - set(SUITES))
    if unknown:
        parser.error(f"no suite {', '.join(unknown)}; there are {', '.join(SUITES)}")
    device = torch.device(options.device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    print(header := machine(device), flush=True)
    bandwidth = copy_bytes_per_second(device)
    print(ceiling := f"A large copy moves {bandwidth / 1e9:,.0f} GB/s, counting bytes read and bytes written.\n")
    tables: dict[str, list[Table]] = {}
    failed: list[str] = []
    for name in tqdm(options.suites or SUITES, desc="suites", file=sys.stderr):
        suite = importlib.import_module(f"benchmarks.{name}")
        begin = time.perf_counter()
        tables[name] = []
        try:
            for table in suite.run(device):
                tables[name].append(table)
                print(f"{name}: {table.title}\n\n{render(table, 'simple')}\n", flush=True)
                release(device)
        except Exception:
            # The other suites are still worth their time; the exit status tells.
            failed.append(name)
            traceback.print_exc()
        print(f"{name} took {time.perf_counter() - begin:.0f} s\n", flush=True)

    if options.json:
        Path(options.json).write_text(json.dumps(_as_data(header, bandwidth, tables), indent=1) + "\n")
    if options.markdown:
        Path(options.markdown).write_text(_as_markdown(header, ceiling, tables))
    if options.plot:
        from benchmarks.plot import draw

        for name, of_suite in tables.items():
            for curve in (table.curve for table in of_suite if table.curve):
                draw(curve, header, Path(options.plot) / f"{name}-{curve.x.split()[0]}-{device.type}.svg")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def machine(device: torch.device) -> str:
    """Machine, driver and versions, in one line."""
    if device.type == "cuda":
        import pynvml

        pynvml.nvmlInit()
        what = f"{torch.cuda.get_device_name(device)}, driver {pynvml.nvmlSystemGetDriverVersion()}"
    else:
        what = f"{platform.machine()}, {torch.get_num_threads()} threads"
    versions = [f"torch {torch.__version__}"]
    for package in ("triton", "transformers", "vllm", "liger_kernel"):
        found = importlib.util.find_spec(package)
        versions.append(f"{package} {importlib.metadata.version(package) if found else 'none'}")
    return f"Machine: {what} | " + " | ".join(versions) + f" | rope-ops {rope_ops.__version__}"


def _as_data(header: str, bandwidth: float, tables: dict[str, list[Table]]) -> dict:
    suites = {name: [dataclasses.asdict(table) for table in of_suite] for name, of_suite in tables.items()}
    return {"machine": header, "copy_bytes_per_second": bandwidth, "suites": suites}


def _as_markdown(header: str, ceiling: str, tables: dict[str, list[Table]]) -> str:
    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    parts = [header, f"Command: `{command}`", ceiling.strip()]
    for name, of_suite in tables.items():
        for table in of_suite:
            parts += [f"### {name}: {table.title}", render(table, "github")]
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    main()
