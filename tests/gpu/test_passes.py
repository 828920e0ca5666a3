"""The graph pass on a GPU: values, the form that the cost rule leaves, memory, CUDA graphs."""

import pytest
import torch
from torch import nn

import rope_ops
from rope_ops.certify import bind
from rope_ops.passes import explain, rope_bounded
from rope_ops.passes.cost import rule

ROWS, BOUND, HALF = 1 << 20, 1 << 15, 32


class Rope(nn.Module):
    def __init__(self, join="cat"):
        super().__init__()
        self.join = join
        self.register_buffer("inv", 1e7 ** -(torch.arange(HALF, device="cuda") / HALF))

    def forward(self, positions, q):
        freqs = torch.outer(torch.arange(ROWS, dtype=torch.float32, device="cuda"), self.inv)
        if self.join == "polar":
            rows = torch.view_as_real(torch.polar(torch.ones_like(freqs), freqs)[positions])
            cos, sin = rows[..., 0], rows[..., 1]
        elif self.join == "cat":
            cos, sin = torch.cat((freqs.cos(), freqs.sin()), -1).to(q.dtype)[positions].chunk(2, -1)
        else:
            cos, sin = freqs[: q.shape[0]].cos(), freqs[: q.shape[0]].sin()
        first, second = q.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def certified(*args):
    return rope_ops.sequence_bounded_mrope(type("Model", (Rope,), {}))(*args)


def inputs(tokens):
    generator = torch.Generator().manual_seed(tokens)
    positions = torch.randint(0, BOUND, (tokens,), generator=generator).cuda()
    return positions, torch.randn(tokens, 2 * HALF, generator=generator).cuda()


@pytest.mark.parametrize("join", ["cat", "polar", "slice"])
@pytest.mark.parametrize("form", ["auto", "bounded"])
@pytest.mark.parametrize("tokens", [1, 300])
def test_eager_kernels_give_the_bits_of_eager(join, form, tokens):
    model, args = certified(join), inputs(tokens)
    torch._dynamo.reset()
    options = {"max_model_len": BOUND, "inner": "aot_eager", "form": form}
    function = torch.compile(model, backend=rope_bounded, options=options)
    assert torch.equal(function(*args), model(*args))


def test_the_cost_rule_leaves_few_tokens_plain():
    least = rule("cuda").plain_below
    few = explain(certified(), *inputs(max(least - 1, 1)), max_model_len=BOUND)
    many = explain(certified(), *inputs(least), max_model_len=BOUND)
    assert [str(t.reason) for t in few.tables] == (["cost"] if least > 1 else ["None"])
    assert [str(t.outcome) for t in many.tables] == ["rows"]
    # polar is stored by plain Inductor: its rows are worth computing at any count.
    assert [str(t.outcome) for t in explain(certified("polar"), *inputs(1), max_model_len=BOUND).tables] == ["rows"]


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_inductor_agrees_with_eager_and_builds_no_table(mode):
    model, args = certified(), inputs(4096)
    bind(model, BOUND)
    wanted = model(*args)
    torch._dynamo.reset()
    function = torch.compile(model, backend=rope_bounded, mode=mode)
    for _ in range(3):
        found = function(*args).clone()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function(*args)
    assert torch.cuda.max_memory_allocated() - before < 16 << 20


@pytest.mark.parametrize("form", ["auto", "bounded"])
def test_gradients(form):
    model, (positions, q) = certified(), inputs(512)
    q.requires_grad_(True)
    torch._dynamo.reset()
    function = torch.compile(model, backend=rope_bounded, options={"max_model_len": BOUND, "form": form})
    (wanted,) = torch.autograd.grad(model(positions, q).square().sum(), q)
    (found,) = torch.autograd.grad(function(positions, q).square().sum(), q)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_dynamic_token_counts_compile_once():
    from torch._dynamo.utils import counters

    model = certified()
    torch._dynamo.reset()
    counters.clear()
    function = torch.compile(model, backend=rope_bounded, dynamic=True, options={"max_model_len": BOUND})
    for tokens in (300, 5, 4096):
        args = inputs(tokens)
        torch.testing.assert_close(function(*args), model(*args), rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1
