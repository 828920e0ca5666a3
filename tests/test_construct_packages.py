"""The constructors of public packages, unchanged, certified by a call: bounded tables, equal rows, equal results.

Each class is a subclass made here, so that the package's own class stays as it was for other tests.
"""

import importlib.util
import pathlib

import pytest
import torch
from torch import nn

import rope_ops
from rope_ops.construct import bound_buffers, report_of, sequence_bound
from rope_ops.passes.report import Outcome

ROWS, BOUND = 256, 48


def built_twice(base, *args, **kwargs):
    """The model as the package builds it, and bounded, with equal weights."""

    def once():
        torch.manual_seed(0)
        return type("Certified", (base,), {})(*args, **kwargs)

    legacy = once()
    torch.manual_seed(0)
    certified = rope_ops.sequence_bounded_mrope(type("Certified", (base,), {}))
    with sequence_bound(BOUND) as report:
        model = certified(*args, **kwargs)
    for (name, one), other in zip(model.named_parameters(), legacy.parameters(), strict=True):
        assert type(one) is nn.Parameter and torch.equal(one, other), name
    return model, legacy, report


def assert_rows(table, legacy, dim=0):
    assert table.shape[dim] == BOUND and legacy.shape[dim] >= ROWS
    assert type(table) is torch.Tensor and torch.equal(table, legacy.narrow(dim, 0, BOUND))


def torchtune(*path):
    """One of torchtune's files; the package itself wants others that are of no use here."""
    spec = importlib.util.find_spec("torchtune")
    if spec is None:
        pytest.skip("could not import 'torchtune'")
    file = pathlib.Path(spec.origin).parent.joinpath(*path)
    spec = importlib.util.spec_from_file_location("torchtune_" + "_".join(path[:-1]), file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_torchtune():
    base = torchtune("modules", "position_embeddings.py").RotaryPositionalEmbeddings
    model, legacy, _ = built_twice(base, 16, ROWS)
    assert_rows(model.cache, legacy.cache)
    x, positions = torch.randn(2, 5, 3, 16), torch.randint(0, BOUND, (2, 5))
    assert torch.equal(model(x, input_pos=positions), legacy(x, input_pos=positions))
    assert torch.equal(model(x), legacy(x))


def test_torchtune_on_meta_then_materialised_and_built_again():
    base = torchtune("modules", "position_embeddings.py").RotaryPositionalEmbeddings
    legacy = base(16, ROWS)
    with torch.device("meta"), sequence_bound(BOUND):
        model = rope_ops.sequence_bounded_mrope(type("Certified", (base,), {}))(16, ROWS)
    assert model.cache.is_meta and model.cache.shape == (BOUND, 8, 2)
    model.to_empty(device="cpu")
    model.rope_init()  # as the package asks: a second construction, outside of the context, is the legacy one
    assert torch.equal(model.cache, legacy.cache)


def test_torchtune_llama3_scaling_and_phi3():
    llama = torchtune("models", "llama3_1", "_position_embeddings.py").Llama3ScaledRoPE
    model, legacy, _ = built_twice(llama, 16, ROWS)
    assert_rows(model.cache, legacy.cache)
    phi = torchtune("models", "phi3", "_position_embeddings.py").Phi3RotaryPositionalEmbeddings
    model, legacy, _ = built_twice(phi, 16, ROWS)
    assert_rows(model.cache, legacy.cache)


def test_litgpt():
    pytest.importorskip("litgpt", exc_type=ImportError)
    from litgpt import GPT, Config

    config = Config(block_size=ROWS, n_layer=1, n_embd=32, n_head=2, padded_vocab_size=97, rotary_percentage=1.0)
    model, legacy, report = built_twice(GPT, config)
    assert_rows(model.cos, legacy.cos)
    assert_rows(model.sin, legacy.sin)
    assert {table.outcome for table in report.tables} == {Outcome.BOUNDED}
    # The package checks requests against this number, which is not the table's.
    assert any("max_seq_length = 256 is the row count" in note for note in report.notes)
    tokens = torch.randint(0, 97, (2, 20))
    assert torch.equal(model(tokens), legacy(tokens))
    loaded = rope_ops.sequence_bounded_mrope(type("Other", (GPT,), {}))
    with sequence_bound(BOUND):
        other = loaded(config)
    other.load_state_dict(legacy.state_dict())
    assert torch.equal(other(tokens), legacy(tokens))


def test_transformers_gptj():
    transformers = pytest.importorskip("transformers")
    from transformers.models.gptj.modeling_gptj import GPTJModel

    config = transformers.GPTJConfig(
        n_positions=ROWS, n_embd=32, n_layer=1, n_head=2, rotary_dim=8, vocab_size=97, attn_implementation="eager"
    )
    model, legacy, report = built_twice(GPTJModel, config)
    model.eval(), legacy.eval()
    table, whole = (m.h[0].attn.embed_positions for m in (model, legacy))
    assert_rows(table, whole)
    tokens = torch.randint(0, 97, (2, 20))
    with torch.no_grad():
        one, other = model(tokens).last_hidden_state, legacy(tokens).last_hidden_state
    assert torch.equal(one, other)


def test_rotary_embedding_torch_fills_its_own_buffer_lazily():
    pytest.importorskip("rotary_embedding_torch")
    from rotary_embedding_torch import RotaryEmbedding

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.rope = RotaryEmbedding(dim=8, cache_max_seq_len=ROWS)

        def forward(self, x):
            return self.rope.rotate_queries_or_keys(x)

    model, legacy, report = built_twice(Attention)
    x = torch.randn(1, 2, 20, 8)
    for _ in range(2):
        assert torch.equal(model(x), legacy(x))


class VllmRotary(nn.Module):
    """The operators of vLLM 0.33's classes: base, linear scaling, llama3, YaRN; a factor of 4 for M-RoPE."""

    def __init__(self, kind, rows, dim=16, dtype=torch.bfloat16):
        super().__init__()
        self.kind, self.max_position_embeddings, self.rotary_dim, self.base = kind, rows, dim, 10000.0
        self.register_buffer("cos_sin_cache", self._compute_cos_sin_cache().to(dtype), persistent=False)

    def _compute_inv_freq(self):
        inv_freq = 1.0 / (self.base ** (torch.arange(0, self.rotary_dim, 2, dtype=torch.float) / self.rotary_dim))
        if self.kind == "llama3":
            wave_len = 2 * torch.pi / inv_freq
            inv_freq = torch.where(wave_len > 64, inv_freq / 8, inv_freq)
        if "yarn" in self.kind:
            ramp = ((torch.arange(self.rotary_dim // 2, dtype=torch.float) - 1) / 4).clamp(0, 1)
            inv_freq = inv_freq / 4 * ramp + inv_freq * (1 - ramp)
        return inv_freq

    def _compute_cos_sin_cache(self):
        rows = self.max_position_embeddings * (4 if "mrope" in self.kind else 1)
        t = torch.arange(rows / 2 * 2.0 if "yarn" in self.kind else rows, dtype=torch.float)
        if self.kind == "linear":
            t = t / 4.0
        freqs = torch.einsum("i,j -> ij", t, self._compute_inv_freq())
        factor = 1.1386 if "yarn" in self.kind else 1.0
        return torch.cat((freqs.cos() * factor, freqs.sin() * factor), dim=-1)


class VllmLongrope(VllmRotary):
    """Two tables of different frequencies, one below the other; readers add the length of the first."""

    def _compute_cos_sin_cache(self):
        return torch.cat([super(VllmLongrope, self)._compute_cos_sin_cache() for _ in range(2)])


@pytest.mark.parametrize("kind", ["base", "mrope", "linear", "llama3", "yarn", "mrope yarn"])
def test_vllm(kind):
    model, legacy, report = built_twice(VllmRotary, kind, ROWS)
    assert_rows(model.cos_sin_cache, legacy.cos_sin_cache)
    expected = "cos cat" if kind == "linear" else "cos_sin_cache"
    assert expected in report.tables[0].formula or kind == "linear"


def test_vllm_longrope_is_left():
    model, legacy, report = built_twice(VllmLongrope, "base", ROWS)
    assert torch.equal(model.cos_sin_cache, legacy.cos_sin_cache)
    assert [str(table.reason) for table in report.tables] == ["rows_joined"]


@pytest.mark.parametrize("kind", ["base", "mrope"])
def test_bound_buffers_of_a_model_that_is_built(kind):
    model = rope_ops.sequence_bounded_mrope(type("Certified", (VllmRotary,), {}))(kind, ROWS)
    legacy = VllmRotary(kind, ROWS)
    report = bound_buffers(model, BOUND)
    assert_rows(model.cos_sin_cache, legacy.cos_sin_cache)
    assert [table.outcome for table in report.tables] == [Outcome.BOUNDED]
    assert report_of(model).tables == report.tables
