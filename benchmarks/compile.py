"""Suite ``compile``: a model that builds its rotary table in forward, and public text models that build none.

The 8-layer graph is the one where rewriting pays; with separate cos and sin tables ("already inlined") plain Inductor
builds no table either. transformers' text models compute cos and sin from positions: nothing is there to rewrite, and
the compiled code must not get slower.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import nn

import rope_ops
from benchmarks.harness import Curve, Row, Table, interleaved_us
from rope_ops.passes import rope_bounded

LEGACY_ROWS, LAYERS, HEADS, HEAD_SIZE = 1_048_576, 8, 32, 64
# On a GPU the bound of Qwen3.5's config; on a CPU one that a test machine would serve.
BOUNDS = {"cuda": 262_144, "cpu": 32_768}
TOKENS = {"cuda": (1, 256, 512, 8192), "cpu": (1, 256)}
# Error that compiled code may have: some roundings a layer.
_ALLOWED = {torch.bfloat16: 3e-2, torch.float32: 1e-5}
PLAIN, OURS, BOUNDED, LIMIT = "Inductor", "rope_bounded", "rope_bounded, form=bounded", "limit: the matmuls alone"


class Model(nn.Module):
    """Layers of ``x @ w`` and a NeoX rotation, all reading one table built in forward."""

    def __init__(self, joined: bool, layers: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.joined = joined
        self.register_buffer("inv_freq", 1e7 ** -(torch.arange(0, HEAD_SIZE, 2, device=device) / HEAD_SIZE))
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(layers, HEAD_SIZE, HEAD_SIZE, generator=generator) / HEAD_SIZE**0.5
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

    def matmuls(self, x):
        for weight in self.weights:
            x = x @ weight
        return x


def certified(model: nn.Module) -> nn.Module:
    """The model as an instance of a certified class of its own."""
    model.__class__ = rope_ops.sequence_bounded_mrope(type("Certified", (type(model),), {}))
    return model


def run(device: torch.device) -> Iterator[Table]:
    rows = []
    for tokens in TOKENS[device.type]:
        rows += _graph(tokens, LAYERS, True, device, 1.0)
    # On a GPU plain Inductor inlines the joined table as well.
    for tokens in (1, 256) if device.type == "cpu" else ():
        rows += _graph(tokens, LAYERS, False, device, 1.0)
    yield Table(f"{LAYERS} layers over a table of {LEGACY_ROWS:,} rows built in forward", rows, (OURS, BOUNDED))
    rows, series = [], {}
    for layers in (1, 4, 16):
        for row in _graph(256, layers, True, device, 0.3, forms=(PLAIN, OURS)):
            rows.append(row)
            if row.us is not None:
                series.setdefault(row.name, []).append((layers, row.us))
    yield Table("how a call grows with layers", rows, (OURS,), Curve("A compiled call of 256 tokens", "layers", series))
    yield Table("text models of transformers", _public(device), (OURS,))


@torch.no_grad()
def _graph(
    tokens: int,
    layers: int,
    joined: bool,
    device: torch.device,
    seconds: float,
    forms: tuple[str, ...] = (PLAIN, OURS, BOUNDED),
) -> list[Row]:
    bound = BOUNDS[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(0, bound, (tokens,), generator=generator).to(device)
    x = torch.randn(tokens, HEADS, HEAD_SIZE, generator=generator).to(device, dtype)
    torch._dynamo.reset()
    model = Model(joined, layers, dtype, device)
    ways: dict[str, Callable] = {
        PLAIN: torch.compile(model, dynamic=False),
        OURS: _backend(Model(joined, layers, dtype, device), bound, "auto"),
        BOUNDED: _backend(Model(joined, layers, dtype, device), bound, "bounded"),
    }
    ways = {name: ways[name] for name in forms if joined or name != BOUNDED}
    wanted = model(positions, x)
    functions: dict[str, Callable[[int], object]] = {}
    notes = {}
    for name, way in ways.items():
        error = _error(way(positions, x), wanted)
        right = error < _ALLOWED[dtype]
        notes[name] = f"{'' if right else 'WRONG: '}{error:.0e} from eager"
        if right:
            functions[name] = lambda i, way=way: way(positions, x)
    functions[LIMIT] = lambda i: model.matmuls(x)
    times = interleaved_us(functions, device, seconds=seconds)
    case = f"{tokens:,} tokens, {layers} layers, {'cat table' if joined else 'already inlined'}, bound {bound:,}"
    return [Row(case, name, times.get(name), note=notes.get(name, "")) for name in [*ways, LIMIT]]


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference relative to the norm of what is right; NaN fails every comparison."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def _backend(model: nn.Module, bound: int, form: str):
    options = {"max_model_len": bound, "form": form}
    return torch.compile(certified(model), backend=rope_bounded, options=options, dynamic=False)


def _public(device: torch.device) -> list[Row]:
    """Two layers of narrow models with the head shapes of the published ones, prefill and decode."""
    if importlib.util.find_spec("transformers") is None:
        return [Row("Qwen2-VL, Qwen3-VL", PLAIN, None, note="skipped: transformers is not installed")]
    rows = []
    for name in ("qwen2_vl", "qwen3_vl"):
        for tokens in (1, 256):
            rows += _public_case(name, tokens, device)
    return rows


@torch.no_grad()
def _public_case(name: str, tokens: int, device: torch.device) -> list[Row]:
    from transformers import AutoConfig, AutoModel

    torch._dynamo.reset()
    sections = {"qwen2_vl": [16, 24, 24], "qwen3_vl": [24, 20, 20]}[name]
    whole = AutoConfig.for_model(name)
    config = type(whole.text_config)(
        vocab_size=128,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections},
    )
    torch.manual_seed(0)
    model = AutoModel.from_config(config).to(device, torch.bfloat16).eval()
    embeds = torch.randn(1, tokens, 512, device=device, dtype=torch.bfloat16)
    positions = torch.arange(tokens, device=device).expand(3, 1, tokens)

    def call(function):
        return lambda i=0: (
            function(
                inputs_embeds=embeds, position_ids=positions, attention_mask=None, use_cache=False
            ).last_hidden_state
        )

    wanted = call(model)()
    plain = call(torch.compile(model, dynamic=False))
    found = {PLAIN: plain()}
    ours = call(_backend(model, 32_768, "auto"))
    found[OURS] = ours()
    functions, notes = {}, {}
    for way, function in ((PLAIN, plain), (OURS, ours)):
        error = _error(found[way], wanted)
        right = error < _ALLOWED[torch.bfloat16]
        notes[way] = f"{'' if right else 'WRONG: '}{error:.0e} from eager"
        if right:
            functions[way] = function
    times = interleaved_us(functions, device, seconds=0.5)
    return [Row(f"{name}, {tokens} tokens", way, times.get(way), note=notes[way]) for way in (PLAIN, OURS)]
