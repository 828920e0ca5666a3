"""R22: with what the bits of a bf16 table are compared, in eager mode, under Inductor and under the backend."""

import pytest
import torch
from torch import nn

import rope_ops
from rope_ops import reference
from rope_ops.passes import rope_bounded

ROWS, BOUND = 4096, 256


class Rotary(nn.Module):
    def forward(self, positions, query):
        inv_freq = 1e4 ** -(torch.arange(0, 16, 2) / 16)
        table = reference.build_cos_sin_cache(inv_freq, ROWS, 1.0, torch.bfloat16)
        cos, sin = reference.gather_cos_sin(table, positions)
        return reference.rotate(query, cos, sin)


class Built(nn.Module):
    def forward(self, inv_freq):
        return rope_ops.build_cos_sin_cache(inv_freq, BOUND, 1.0, torch.bfloat16)


def ulps(a, b):
    """Steps between bf16 values: their bits, taken as signed numbers, count them."""

    def ordered(x):
        bits = x.view(torch.int16).int()
        return torch.where(bits < 0, -32768 - bits, bits)

    return (ordered(a) - ordered(b)).abs().max().item()


@pytest.mark.compiles
@pytest.mark.parametrize("emulate_precision_casts", [False, True])
def test_the_backend_rounds_as_plain_inductor_does(emulate_precision_casts):
    model = rope_ops.sequence_bounded_mrope(type("Model", (Rotary,), {}))()
    positions, query = torch.randint(0, BOUND, (33,)), torch.randn(33, 2, 16).bfloat16()
    options = {"emulate_precision_casts": emulate_precision_casts}
    torch._dynamo.reset()
    plain = torch.compile(Rotary(), options=options)(positions, query)
    ours = torch.compile(model, backend=rope_bounded, options={**options, "max_model_len": BOUND})(positions, query)
    if emulate_precision_casts:
        assert ulps(ours, plain) <= 1
    else:
        # Plain Inductor drops the table's rounding to bf16 and reads float32; the backend's rows are rounded as eager's
        # are. Each product may then be off by half a bf16 step of cos or sin, and the result by one step of its own.
        first, second = query.float().abs().chunk(2, -1)
        allowed = (2**-9 * (first + second)).repeat(1, 1, 2) + 2**-7 * plain.float().abs()
        assert ((ours.float() - plain.float()).abs() <= allowed + 1e-6).all()


@pytest.mark.compiles
@pytest.mark.parametrize("backend", ["eager", "inductor", rope_bounded], ids=["eager", "inductor", "rope_bounded"])
def test_the_table_operator_gives_the_eager_prefix_under_every_compiler(backend):
    inv_freq = 1e4 ** -(torch.arange(0, 16, 2) / 16)
    torch._dynamo.reset()
    table = torch.compile(Built(), backend=backend)(inv_freq)
    assert torch.equal(table, reference.build_cos_sin_cache(inv_freq, ROWS, 1.0, torch.bfloat16)[:BOUND])
