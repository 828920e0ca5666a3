"""A model that builds its rotary table in forward, compiled by plain Inductor and by the rope_bounded backend.

``python -m benchmarks.compile``: 8 layers of a matmul and a rotation, a table of 1,048,576 legacy rows and a bound of
32,768. Both are compiled in one process and timed in turns; the results are compared first. On CUDA calls are replays
of a CUDA graph. The inlined row is the same model with separate cos and sin tables, which plain Inductor inlines.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

import rope_ops
from rope_ops.passes import rope_bounded

# Calls in one captured graph: a replay then costs far more than starting it.
REPLAYED = 20
LEGACY_ROWS, BOUND, LAYERS, HEADS, HEAD_SIZE = 1_048_576, 32_768, 8, 32, 64


class Model(nn.Module):
    """Layers of ``x @ w`` and a NeoX rotation, all reading one table built in forward."""

    def __init__(self, joined: bool, dtype: torch.dtype, device: str):
        super().__init__()
        self.joined = joined
        self.register_buffer("inv_freq", 1e7 ** -(torch.arange(0, HEAD_SIZE, 2, device=device) / HEAD_SIZE))
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(LAYERS, HEAD_SIZE, HEAD_SIZE, generator=generator) / HEAD_SIZE**0.5
        self.register_buffer("weights", weights.to(device, dtype))

    def forward(self, positions, x):
        t = torch.arange(LEGACY_ROWS, dtype=torch.float32, device=x.device)
        freqs = torch.outer(t, self.inv_freq)
        if self.joined:
            cos, sin = torch.cat((freqs.cos(), freqs.sin()), -1).to(x.dtype)[positions].chunk(2, -1)
        else:
            cos, sin = freqs.cos().to(x.dtype)[positions], freqs.sin().to(x.dtype)[positions]
        cos, sin = cos[:, None], sin[:, None]
        for weight in self.weights:
            first, second = (x @ weight).chunk(2, -1)
            x = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return x


def certified(joined: bool, dtype: torch.dtype, device: str) -> Model:
    return rope_ops.sequence_bounded_mrope(type("Certified", (Model,), {}))(joined, dtype, device)


def replay(function, *args):
    """A call of a CUDA graph of the function; the function itself on CPU."""
    if args[0].device.type == "cpu":
        return lambda: function(*args)
    for _ in range(3):
        function(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPLAYED):
            function(*args)
    return graph.replay


def paired(first, second, device: str, seconds: float = 4.0) -> tuple[float, float]:
    """Medians in microseconds of calls made in turns, so that what else the machine does falls on both.

    A turn is about 20 ms of one of them: the first call after the other one's has cold caches and sleeping threads.
    """

    def timed(call) -> float:
        begin = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e6

    times: tuple[list, list] = ([], [])
    calls = [max(1, int(20_000 / min(timed(call) for _ in range(3)))) for call in (first, second)]
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or min(map(len, times)) < 5:
        for call, count, spent in zip((first, second), calls, times, strict=True):
            spent += [timed(call) for _ in range(count)]
    return statistics.median(times[0]), statistics.median(times[1])


@torch.no_grad()
def measure(tokens: int, joined: bool, device: str, options: dict | None = None) -> dict:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(0, BOUND, (tokens,), generator=generator).to(device)
    x = torch.randn(tokens, HEADS, HEAD_SIZE, generator=generator).to(device, dtype)
    torch._dynamo.reset()
    plain = torch.compile(Model(joined, dtype, device))
    chosen = {"max_model_len": BOUND, **(options or {})}
    ours = torch.compile(certified(joined, dtype, device), backend=rope_bounded, options=chosen)
    wanted, found = plain(positions, x), ours(positions, x)
    close = {"rtol": 2e-2, "atol": 8e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found, wanted, **close)
    before, after = paired(replay(plain, positions, x), replay(ours, positions, x), device)
    if device != "cpu":
        before, after = before / REPLAYED, after / REPLAYED
    return {"tokens": tokens, "plain": before, "ours": after, "ratio": before / after}


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = (1, 256, 8192) if device == "cuda" else (1, 256)
    print(f"table of {LEGACY_ROWS:,} rows, bound {BOUND:,}, {LAYERS} layers, {HEADS} heads of {HEAD_SIZE}")
    print(f"{'table':>10} {'form':>8} {'tokens':>6} {'plain us':>10} {'rope_bounded us':>16} {'ratio':>7}")
    for joined in (True, False):
        for tokens in sizes:
            for form in ("auto", "bounded") if device == "cuda" and joined else ("auto",):
                row = measure(tokens, joined, device, {"form": form})
                name = "cat" if joined else "inlined"
                print(
                    f"{name:>10} {form:>8} {tokens:>6} {row['plain']:>10.1f} {row['ours']:>16.1f} {row['ratio']:>6.2f}x"
                )
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"machine: {name} | torch {torch.__version__} | medians of calls in turns"
        + " (CUDA graph replay)" * (device == "cuda")
    )


if __name__ == "__main__":
    main()
