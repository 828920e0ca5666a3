"""Bounded construction on the GPU: bits, peak memory, device contexts."""

import gc

import pytest
import torch
from torch import nn

import rope_ops
from rope_ops.construct import bound_buffers, sequence_bound
from rope_ops.construct.measure import measure_constructor
from rope_ops.examples import EXAMPLES, ExampleModel

CUDA = torch.device("cuda")
ROWS, DIM, BOUND = 1 << 18, 64, 1 << 15


def inv_freq(device=None):
    return 1.0 / (1e7 ** (torch.arange(0, DIM, 2, dtype=torch.float32, device=device) / DIM))


def standard(self, device, dtype=torch.bfloat16):
    t = torch.arange(ROWS, dtype=torch.float32, device=device)
    f = torch.einsum("i,j -> ij", t, inv_freq(device))
    self.register_buffer("table", torch.cat((f.cos(), f.sin()), -1).to(dtype), persistent=False)


def scaled(self, device):
    t = torch.arange(ROWS, device=device).float() / 3
    f = torch.outer(t, inv_freq(device))
    e = torch.cat((f, f), -1)
    self.cos, self.sin = e.cos()[None, None], (e.sin() * 1.1386).half()[None, None]


def polar(self, device):
    f = torch.outer(torch.arange(ROWS, device=device), inv_freq(device)).float()
    self.freqs_cis = torch.polar(torch.ones_like(f), f)


def on_cpu_then_moved(self, device):
    standard(self, "cpu")
    self.to(device)


def certified(build):
    class Model(nn.Module):
        def __init__(self, device):
            super().__init__()
            build(self, device)

    return rope_ops.sequence_bounded_mrope(Model)


def tensors(model):
    own = {name: value for name, value in vars(model).items() if isinstance(value, torch.Tensor)}
    return dict(model.named_buffers()) | own


@pytest.mark.parametrize("build", [standard, scaled, polar, on_cpu_then_moved])
@pytest.mark.parametrize("how", ["argument", "context"])
def test_rows_are_those_of_the_legacy_table_to_the_bit(build, how):
    cls = certified(build)
    device = CUDA if how == "argument" else None
    if how == "context" and build is on_cpu_then_moved:
        pytest.skip("names its devices")
    with torch.device(CUDA) if how == "context" else torch.no_grad():
        legacy = cls(device)
        with sequence_bound(BOUND) as report:
            model = cls(device)
    assert report.tables and all(str(table.outcome) == "bounded" for table in report.tables), str(report)
    for name, table in tensors(model).items():
        whole = tensors(legacy)[name]
        (dim,) = (d for d in range(whole.dim()) if whole.shape[d] != table.shape[d])
        assert type(table) is torch.Tensor and table.device == whole.device and table.shape[dim] == BOUND
        part = whole.narrow(dim, 0, BOUND)
        if table.is_complex():
            table, part = torch.view_as_real(table), torch.view_as_real(part)
        assert torch.equal(table, part), name


def peak(construct):
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = construct()
    torch.cuda.synchronize()
    return model, torch.cuda.max_memory_allocated() - before


def test_the_peak_is_the_bounded_table():
    cls = certified(standard)
    with sequence_bound(8):
        cls(CUDA)  # imports, and the comparison of the kernel with eager

    def construct():
        with sequence_bound(BOUND):
            return cls(CUDA)

    model, most = peak(construct)
    assert model.table.nbytes <= most <= model.table.nbytes + (1 << 20)


def test_another_formula_never_holds_the_whole_table():
    cls = certified(scaled)

    def construct():
        with sequence_bound(BOUND):
            return cls(CUDA)

    construct()
    model, most = peak(construct)
    assert most < 8 * model.cos.nbytes <= ROWS * DIM * 4


def test_the_embedded_model_through_an_ordinary_constructor():
    config = rope_ops.ModelConfig.from_hf(EXAMPLES["qwen3.5"], model_cls=ExampleModel)
    legacy, bounded = measure_constructor(config, CUDA)
    print(legacy, bounded, sep="\n")
    assert bounded.bitwise_prefix and bounded.rows * 4 == legacy.rows
    assert bounded.peak_bytes <= bounded.resident_bytes + (1 << 20)
    assert legacy.peak_bytes > 4 * bounded.peak_bytes


def test_meta_then_to_empty_on_the_gpu():
    cls = certified(standard)
    with torch.device("meta"), sequence_bound(BOUND):
        model = cls(None)
    assert model.table.is_meta and model.table.shape == (BOUND, DIM)
    model.to_empty(device=CUDA)
    assert model.table.device.type == "cuda" and model.table.shape == (BOUND, DIM)


def test_bound_buffers_frees_the_rest():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("inv_freq", inv_freq(CUDA), persistent=False)
            standard(self, CUDA)

    cls = rope_ops.sequence_bounded_mrope(Rotary)
    model, legacy = cls(), cls()
    before = torch.cuda.memory_allocated()
    report = bound_buffers(model, BOUND)
    assert [str(table.outcome) for table in report.tables] == ["bounded"], str(report)
    assert torch.equal(model.table, legacy.table[:BOUND])
    assert before - torch.cuda.memory_allocated() >= (ROWS - BOUND) * DIM * 2 - (1 << 20)
