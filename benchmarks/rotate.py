"""Suite ``rotate``: turning query and key, from a table and from none; the limit is a copy of the same bytes.

Alone: ``python -m benchmarks.rotate``; ``--sweep`` times other ways to cut the launch beside the planned one.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from benchmarks.harness import Curve, Row, Table, input_sets, interleaved_us, release, render
from rope_ops import reference
from rope_ops.axes import axis_map
from rope_ops.ops import rotate, rotate_

EAGER = "eager"
COPY = "limit: copy of the same bytes"
TWO_STEP = "gather, then kernel"
OURS = ("rotate_, table", "rotate_, no table", "rotate, table", "rotate, no table")
DTYPE = torch.bfloat16
TABLE_ROWS = 131072


class Case(NamedTuple):
    """Sizes of one model's rotation, as its checkpoint has them."""

    query_heads: int
    key_heads: int
    head_size: int
    mrope_section: tuple[int, int, int]
    mrope_interleaved: bool
    rope_theta: float

    @property
    def half(self) -> int:
        return sum(self.mrope_section)

    def describe(self, num_tokens: int) -> str:
        layout = ", interleaved" if self.mrope_interleaved else ""
        return (
            f"{num_tokens:,} tokens x ({self.query_heads}+{self.key_heads}) heads of {self.head_size}, "
            f"rotary_dim {2 * self.half}{layout}"
        )


FULL = Case(32, 8, 128, (16, 24, 24), False, 1e6)
PARTIAL = Case(24, 4, 256, (11, 11, 10), True, 1e7)
GPU_CASES = [(FULL, 1), (FULL, 256), (FULL, 8192), (PARTIAL, 1), (PARTIAL, 256), (PARTIAL, 8192), (PARTIAL, 32768)]
CPU_CASES = [(FULL, 1), (FULL, 256), (FULL, 8192), (PARTIAL, 1), (PARTIAL, 256)]


class Inputs(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    positions: torch.Tensor

    def clone(self) -> Inputs:
        return Inputs(self.query.clone(), self.key.clone(), self.positions)


def make(case: Case, num_tokens: int, device: torch.device) -> Inputs:
    # Positions of a long prompt with images in it: mostly one after the other, the axes apart.
    start = torch.randint(0, max(1, TABLE_ROWS - num_tokens), (), device=device)
    positions = start + torch.arange(num_tokens, device=device) + torch.zeros(3, 1, dtype=torch.int64, device=device)
    positions[1:] = (positions[1:] - torch.randint(0, 64, (2, num_tokens), device=device)).clamp(min=0)
    return Inputs(
        torch.randn(num_tokens, case.query_heads, case.head_size, device=device).to(DTYPE),
        torch.randn(num_tokens, case.key_heads, case.head_size, device=device).to(DTYPE),
        positions,
    )


def ways_of(case: Case, inv_freq: torch.Tensor, cache: torch.Tensor) -> dict[str, Callable[[Inputs], object]]:
    """What turns query and key, by name: in place (returning None), or returning the turned pair."""
    axes = axis_map(case.mrope_section, case.mrope_interleaved)
    digits = "".join(map(str, axes))

    # On the device already: a graph capture allows no copy from the host.
    device_axes = torch.tensor(axes, device=cache.device)

    def eager(query, key, positions):
        cos, sin = reference.gather_cos_sin(cache, positions, device_axes)
        return reference.rotate(query, cos, sin), reference.rotate(key, cos, sin)

    form = dict(axis_map=digits, cache_dtype=DTYPE)
    ways = {
        EAGER: lambda inputs: eager(*inputs),
        OURS[0]: lambda inputs: rotate_(*inputs, inv_freq, cache, **form),
        OURS[1]: lambda inputs: rotate_(*inputs, inv_freq, **form),
        OURS[2]: lambda inputs: rotate(*inputs, inv_freq, cache, **form),
        OURS[3]: lambda inputs: rotate(*inputs, inv_freq, **form),
    }
    if not cache.is_cuda:
        return ways
    compiled = torch.compile(eager, dynamic=False)
    ways["Inductor on eager"] = lambda inputs: compiled(*inputs)
    from benchmarks import two_step

    section = list(case.mrope_section)
    ways[TWO_STEP] = lambda inputs: two_step.rotate_(*inputs, cache, section, case.mrope_interleaved, case.head_size)
    for name, make_way in (("vLLM", _vllm), ("Liger-Kernel", _liger)):
        way = make_way(case, cache)
        if way is not None:
            ways[name] = way
    return ways


def _vllm(case: Case, cache: torch.Tensor) -> Callable[[Inputs], object] | None:
    """vLLM's own gather and kernel, where it is installed and has them under these names."""
    if importlib.util.find_spec("vllm") is None:
        return None
    try:
        from vllm.model_executor.layers.rotary_embedding.mrope import triton_mrope
    except Exception as error:
        print(f"vLLM left out: {error!r}", file=sys.stderr)
        return None

    def way(inputs: Inputs):
        cos, sin = cache[inputs.positions].chunk(2, dim=-1)
        query, key = triton_mrope(
            inputs.query.flatten(1),
            inputs.key.flatten(1),
            cos,
            sin,
            list(case.mrope_section),
            case.head_size,
            2 * case.half,
            case.mrope_interleaved,
        )
        return query.view_as(inputs.query), key.view_as(inputs.key)

    return way


def _liger(case: Case, cache: torch.Tensor) -> Callable[[Inputs], object] | None:
    """Liger-Kernel's M-RoPE, where it is installed; it takes gathered rows and whole heads in contiguous sections."""
    if importlib.util.find_spec("liger_kernel") is None or 2 * case.half != case.head_size or case.mrope_interleaved:
        return None
    try:
        from liger_kernel.ops.qwen2vl_mrope import LigerQwen2VLMRopeFunction
    except Exception as error:
        print(f"Liger-Kernel left out: {error!r}", file=sys.stderr)
        return None

    def way(inputs: Inputs):
        rows = cache[inputs.positions]
        cos, sin = (half.repeat(1, 1, 2)[:, None] for half in rows.chunk(2, dim=-1))
        query, key = (x.transpose(0, 1)[None] for x in inputs[:2])
        query, key = LigerQwen2VLMRopeFunction.apply(query, key, cos, sin, list(case.mrope_section))
        return query[0].transpose(0, 1), key[0].transpose(0, 1)

    return way


def _setup(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    steps = torch.arange(0, 2 * case.half, 2, device=device).float() / (2 * case.half)
    inv_freq = 1.0 / case.rope_theta**steps
    return inv_freq, reference.build_cos_sin_cache(inv_freq, TABLE_ROWS, 1.0, DTYPE)


def _difference(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> tuple[int, float]:
    """How many values differ, and by how much at most."""
    pairs = list(zip(got, expected, strict=True))
    different = sum(int((g != e).sum()) for g, e in pairs)
    return different, max(float((g.float() - e.float()).abs().max()) for g, e in pairs)


def run(device: torch.device) -> Iterator[Table]:
    rows = []
    for case, num_tokens in GPU_CASES if device.type == "cuda" else CPU_CASES:
        rows += _measure(case, num_tokens, device)
        torch.compiler.reset()
        release(device)
    yield Table("turning query and key", rows, OURS)
    top = 17 if device.type == "cuda" else 13
    tokens = [(FULL, 1 << power) for power in range(0, top + 1, 4 if device.type == "cuda" else 3)]
    tokens += [(FULL, 1 << top)] if tokens[-1][1] != 1 << top else []
    yield _sweep_over("tokens", [(num_tokens, case, num_tokens) for case, num_tokens in tokens], device)
    heads = [(5 * n, FULL._replace(query_heads=4 * n, key_heads=n), 1024) for n in (1, 4, 16)]
    yield _sweep_over("heads of query and key, 1,024 tokens", heads, device)


def _sweep_over(x: str, sizes: list[tuple[int, Case, int]], device: torch.device) -> Table:
    """Ours in place, against the two-step form on a GPU and the eager one on a CPU."""
    names = (TWO_STEP if device.type == "cuda" else EAGER, *OURS[:2], COPY)
    rows, series = [], {}
    for size, case, num_tokens in sizes:
        for row in _measure(case, num_tokens, device, names):
            rows.append(row)
            if row.us is not None:
                name = f"rope_ops {row.name}" if row.name in OURS else row.name
                series.setdefault(name, []).append((size, row.us))
        release(device)
    return Table(f"how it grows with {x}", rows, OURS, Curve("Turning query and key", x, series))


def _measure(case: Case, num_tokens: int, device: torch.device, names: tuple[str, ...] | None = None) -> list[Row]:
    """Rows of one size: all ways, or those of ``names``; the eager one is what the others are compared with."""
    ways = ways_of(case, *_setup(case, device))
    ways = {name: way for name, way in ways.items() if names is None or name in names or name == EAGER}
    moved = 2 * num_tokens * (case.query_heads + case.key_heads) * 2 * case.half * DTYPE.itemsize
    notes, wrong = _check(ways, make(case, num_tokens, device))
    sets = [make(case, num_tokens, device) for _ in range(input_sets(moved // 2, device))]
    source = torch.zeros(len(sets), moved // 4, dtype=DTYPE, device=device)
    target = torch.empty_like(source)
    functions: dict[str, Callable[[int], object]] = {
        name: lambda i, way=way: way(sets[i])
        for name, way in ways.items()
        if name not in wrong and (names is None or name in names)
    }
    functions[COPY] = lambda i: torch.neg(source[i], out=target[i])
    with torch.no_grad():
        times = interleaved_us(functions, device, sets=len(sets), seconds=0.3)
    rows = []
    for name in [name for name in [*ways, COPY] if names is None or name in names]:
        note = notes.get(name, "")
        if name in OURS and name in times:
            note += f"; {times[COPY] / times[name]:.2f} of copy"
            if TWO_STEP in times:
                note += f"; {times[TWO_STEP] / times[name]:.2f}x two steps"
        rows.append(Row(case.describe(num_tokens), name, times.get(name), moved, note=note))
    return rows


def _check(ways: dict[str, Callable[[Inputs], object]], first: Inputs) -> tuple[dict[str, str], set[str]]:
    """What each result is worth, and the names of those that are wrong: they are not timed."""
    expected = ways[EAGER](first)
    notes, wrong = {}, set()
    for name, way in ways.items():
        inputs = first.clone()
        try:
            got = way(inputs)
        except Exception as error:
            if name in OURS:
                raise
            notes[name] = f"failed: {type(error).__name__}"
            wrong.add(name)
            continue
        different, most = _difference(got or inputs[:2], expected)
        notes[name] = "bitwise eager" if not different else f"{different:,} values not eager's, by {most:.2g} at most"
        if (different and name in OURS) or most > 0.25:
            notes[name] = "WRONG: " + notes[name]
            wrong.add(name)
    return notes, wrong


def sweep(device: torch.device) -> Iterator[Table]:
    """Other ways to cut the launch, the quickest of each case first; the planned one is marked."""
    for case, num_tokens in GPU_CASES:
        yield Table(case.describe(num_tokens) + " (tokens, heads, warps)", _sweep_one(case, num_tokens, device), ())
        release(device)


def _sweep_one(case: Case, num_tokens: int, device: torch.device) -> list[Row]:
    from rope_ops.kernels import rotate as kernels

    planned = kernels.plan
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    ours = planned(num_tokens, case.query_heads, case.key_heads, case.half, processors)
    candidates = {ours} | {
        kernels.Blocks(tokens, heads, num_warps)
        for tokens, heads, num_warps in itertools.product((1, 4, 8, 16, 32), (1, 4, 8, 32), (1, 2, 4, 8))
        if tokens <= num_tokens and 2 <= tokens * case.half / (32 * num_warps) <= 16
    }
    ways = ways_of(case, *_setup(case, device))
    sets = [make(case, num_tokens, device) for _ in range(input_sets(num_tokens * 20480, device))]
    rows = []
    for name in OURS[:2]:
        timed = []
        for blocks in candidates:
            kernels.plan = lambda *sizes, blocks=blocks: blocks
            function = {name: lambda i, name=name: ways[name](sets[i])}
            timed.append((interleaved_us(function, device, sets=len(sets), seconds=0.02)[name], blocks))
        kernels.plan = planned
        timed.sort()
        for us, blocks in timed[:4] + [pair for pair in timed[4:] if pair[1] == ours]:
            rows.append(Row(name, str(tuple(blocks)), us, note="planned" if blocks == ours else ""))
    return rows


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    from benchmarks.__main__ import machine

    print(machine(device))
    suite = sweep if "--sweep" in sys.argv[1:] else run
    for table in suite(device):
        print(f"\n{table.title}\n{render(table, 'simple')}", flush=True)


if __name__ == "__main__":
    main()
