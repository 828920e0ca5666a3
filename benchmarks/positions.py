"""Time the position kernel against one program a request, on four batches of a serving step.

    python -m benchmarks.positions

Each figure is the median of replays of a CUDA graph that holds 20 launches. The batch's positions are compared with
the ATen path on CPU before anything is timed. The peer is a kernel of our own in the form engines use: one program a
request that walks over its tokens, from a dense table.
"""

from __future__ import annotations

import statistics
import sys

import torch

from rope_ops.ops import prepare_positions
from rope_ops.positions import Image, RopeState, Text, rules

LAUNCHES = 20
REPLAYS = 100
NUM_DIMS = 3
MAX_NUM_TOKENS = 32_768
MAX_MODEL_LEN = 65_536

# Requests of each batch as (tokens of the step, computed before); a prefill has 32,768 tokens. With the most time a
# batch may take relative to one program a request.
BATCHES = {
    "256 decodes": ([(1, 33_000)] * 256, 1.05),
    "one 32,768-token chunk": ([(32_768, 0)], 1 / 10),
    "8,192-token chunk + 255 decodes": ([(8_192, 8_192)] + [(1, 33_000)] * 255, 1 / 2.5),
    "256 chunks of 128": ([(128, 1_000)] * 256, None),
}
DENSE_LIMIT = 1.5


def _prompt():
    """32,768 tokens: eight images of 60 x 60 between text."""
    blocks = [block for _ in range(8) for block in (Text(496), Image(60, 60))]
    return rules.qwen2_vl(blocks)


def _inputs(requests, device):
    tensor = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    # Slots in another order than the batch.
    slots = [(7 * row + 3) % len(requests) if len(requests) % 7 else row for row in range(len(requests))]
    computed = [0] * len(requests)
    for slot, (_, done) in zip(slots, requests, strict=True):
        computed[slot] = done
    starts = [0]
    for tokens, _ in requests:
        starts.append(starts[-1] + tokens)
    return tensor(slots), tensor(starts), tensor([32_768] * len(requests)), tensor(computed)


def _microseconds(function) -> float:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            function()
    for _ in range(5):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / LAUNCHES)
    return statistics.median(times)


def run(device: str = "cuda") -> list[dict]:
    """One row a batch: microseconds of the peer, of the dense table and of the segment store."""
    from benchmarks.positions_peer import launch as peer

    segments, delta = _prompt()
    rows = []
    for name, (requests, limit) in BATCHES.items():
        state = RopeState(NUM_DIMS, len(requests), MAX_NUM_TOKENS, MAX_MODEL_LEN, device)
        on_cpu = RopeState(NUM_DIMS, len(requests), MAX_NUM_TOKENS, MAX_MODEL_LEN, "cpu")
        for slot in range(len(requests)):
            state.set_prefill_positions(slot, segments, delta)
            on_cpu.set_prefill_positions(slot, segments, delta)
        inputs = _inputs(requests, device)
        table = torch.from_numpy(segments.to_dense()).to(device, torch.int32).repeat(len(requests), 1)
        deltas = torch.full((len(requests),), delta, dtype=torch.int32, device=device)
        num_tokens = sum(tokens for tokens, _ in requests)
        out = {form: torch.full_like(state.positions, -7) for form in ("peer", "dense")}
        forms = {
            "peer": lambda out=out, table=table, deltas=deltas, inputs=inputs: peer(
                out["peer"], table, deltas, *inputs
            ),
            "dense": lambda out=out, table=table, deltas=deltas, inputs=inputs: prepare_positions(
                out["dense"], table, deltas, *inputs
            ),
            "segments": lambda state=state, inputs=inputs: state.prepare_positions(*inputs),
        }
        on_cpu.prepare_positions(*(tensor.cpu() for tensor in inputs))
        for form, function in forms.items():
            function()
            got = state.positions if form == "segments" else out[form]
            if not torch.equal(got[:, :num_tokens].cpu(), on_cpu.get_positions(num_tokens)):
                raise AssertionError(f"{name}, {form}: positions differ from the ATen path; nothing was timed")
        rows.append({"batch": name, "limit": limit} | {form: _microseconds(fn) for form, fn in forms.items()})
    return rows


def main() -> int:
    """Print the table; 1 where a limit is missed, 0 otherwise or without a GPU."""
    if not torch.cuda.is_available():
        print("skipped: positions (no CUDA device)")
        return 0
    import triton
    from tabulate import tabulate

    missed = []
    table = []
    for row in run():
        dense, compact = row["dense"] / row["peer"], row["segments"] / row["peer"]
        table.append(
            [
                row["batch"],
                f"{row['peer']:.2f}",
                f"{row['dense']:.2f}",
                f"{1 / dense:.2f}x",
                f"{row['segments']:.2f}",
                f"{1 / compact:.2f}x",
                f"{compact / dense:.2f}",
            ]
        )
        if row["limit"] is not None and dense > row["limit"]:
            missed.append(f"{row['batch']}: dense takes {dense:.3f} of the peer's time, more than {row['limit']:.3f}")
        if compact > DENSE_LIMIT * dense:
            missed.append(f"{row['batch']}: segments take {compact / dense:.2f} of dense, more than {DENSE_LIMIT}")
    headers = ["batch", "peer us", "dense us", "speed-up", "segments us", "speed-up", "segments / dense"]
    print(tabulate(table, headers, disable_numparse=True))
    print(
        f"machine: {torch.cuda.get_device_name()} | CUDA {torch.version.cuda} | torch {torch.__version__} | "
        f"triton {triton.__version__} | peer: one program a request | {LAUNCHES} launches a graph, median of {REPLAYS}"
    )
    for line in missed:
        print("missed:", line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
