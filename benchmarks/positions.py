"""Suite ``positions``: the positions of a serving step, against one program (on CPU: one loop turn) a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.harness import Curve, Row, Table, interleaved_us
from rope_ops import RopeState, prepare_positions
from rope_ops.positions import Image, Segments, Text, rules

NUM_DIMS = 3
MAX_MODEL_LEN = 65_536

# Requests of each batch as (tokens of the step, computed before); a prefill has 32,768 tokens.
BATCHES = {
    "256 decodes": [(1, 33_000)] * 256,
    "one 32,768-token chunk": [(32_768, 0)],
    "8,192-token chunk + 255 decodes": [(8_192, 8_192)] + [(1, 33_000)] * 255,
    "256 chunks of 128": [(128, 1_000)] * 256,
}
CHUNKS = [1 << power for power in range(0, 16, 3)]
REQUESTS = [1 << power for power in range(0, 13, 3)]

PEER = "one program a request"
LOOP = "loop over requests"
DENSE, SEGMENTS = "rope_ops, dense", "rope_ops, segments"
OURS = (DENSE, SEGMENTS)

_Requests = list[tuple[int, int]]


def run(device: torch.device) -> Iterator[Table]:
    prompt = _prompt()
    rows = [row for case, requests in BATCHES.items() for row in _measure(case, requests, prompt, device, 0.5)]
    yield Table("a step of four kinds", rows, OURS)
    sweeps: list[tuple[str, str, list[tuple[int, _Requests]]]] = [
        ("how the step grows with one chunk", "tokens of the chunk", [(n, [(n, 0)]) for n in CHUNKS]),
        ("how the step grows with decodes", "requests decoding", [(n, [(1, 33_000)] * n) for n in REQUESTS]),
    ]
    for title, x, sizes in sweeps:
        rows, series = [], {}
        for size, requests in sizes:
            for row in _measure(f"{size:,} {x}", requests, prompt, device, 0.1):
                rows.append(row)
                series.setdefault(row.name, []).append((size, row.us))
        yield Table(title, rows, OURS, Curve("Positions of a step", x, series))


def _prompt() -> tuple[Segments, int]:
    """32,768 tokens: eight images of 60 x 60 between text."""
    return rules.qwen2_vl([block for _ in range(8) for block in (Text(496), Image(60, 60))])


def _measure(
    case: str, requests: _Requests, prompt: tuple[Segments, int], device: torch.device, seconds: float
) -> list[Row]:
    segments, delta = prompt
    num_tokens = sum(tokens for tokens, _ in requests)
    state, on_cpu = (RopeState(NUM_DIMS, len(requests), num_tokens, MAX_MODEL_LEN, d) for d in (device, "cpu"))
    for slot in range(len(requests)):
        state.set_prefill_positions(slot, segments, delta)
        on_cpu.set_prefill_positions(slot, segments, delta)
    step = _step(requests, device)
    on_cpu.prepare_positions(*(tensor.cpu() for tensor in step))
    expected = on_cpu.get_positions(num_tokens)
    table = torch.from_numpy(segments.to_dense()).to(device, torch.int32).repeat(len(requests), 1)
    deltas = torch.full((len(requests),), delta, dtype=torch.int32, device=device)
    # Poisoned, so that a column that is not written shows.
    out = torch.full_like(state.positions, -7)
    state.positions.fill_(-7)
    if device.type == "cuda":
        from benchmarks.positions_peer import launch as peer
    else:
        peer = _loop
    functions: dict[str, Callable[[int], object]] = {
        PEER if device.type == "cuda" else LOOP: lambda i: peer(out, table, deltas, *step),
        DENSE: lambda i: prepare_positions(out, table, deltas, *step),
        SEGMENTS: lambda i: state.prepare_positions(*step),
    }
    notes = {}
    for name, function in functions.items():
        out.fill_(-7)
        function(0)
        got = (state.positions if name == SEGMENTS else out)[:, :num_tokens].cpu()
        notes[name] = "" if torch.equal(got, expected) else "WRONG"
    times = interleaved_us({n: f for n, f in functions.items() if not notes[n]}, device, seconds=seconds)
    moved = 2 * NUM_DIMS * num_tokens * 8
    return [Row(case, name, times.get(name), moved, note=notes[name]) for name in functions]


def _step(requests: _Requests, device: torch.device) -> tuple[torch.Tensor, ...]:
    """idx_mapping, query_start_loc, prefill_lens, num_computed_tokens; slots in another order than the batch."""
    slots = torch.randperm(len(requests), generator=torch.Generator().manual_seed(0))
    tokens, done = torch.tensor(requests).unbind(1)
    computed = torch.empty_like(done)
    computed[slots] = done
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), tokens.cumsum(0)))
    prefill_lens = torch.full((len(requests),), 32_768)
    return tuple(x.to(device, torch.int32) for x in (slots, starts, prefill_lens, computed))


def _loop(positions, table, delta, idx_mapping, query_start_loc, prefill_lens, num_computed_tokens) -> None:
    """What engines do on CPU: slices of each request in turn."""
    lists = (x.tolist() for x in (delta, idx_mapping, query_start_loc, prefill_lens, num_computed_tokens))
    deltas, slots, starts, lens, computeds = lists
    for row, slot in enumerate(slots):
        start, end, computed = starts[row], starts[row + 1], computeds[slot]
        stored = max(0, min(end - start, lens[slot] - computed))
        rows = table[NUM_DIMS * slot : NUM_DIMS * (slot + 1)]
        positions[:, start : start + stored] = rows[:, computed : computed + stored]
        first = computed + stored + deltas[slot]
        positions[:, start + stored : end] = torch.arange(first, first + end - start - stored)
