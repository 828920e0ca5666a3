"""What the tests of the graph pass share: a model of a serving engine's shape, and compilers that keep the graphs."""

import torch
from torch import nn

import rope_ops
from rope_ops.passes import BoundedRopePass, Report, mark
from rope_ops.passes.backend import _aot_eager
from rope_ops.passes.printer import canonical
from rope_ops.passes.replay import fake_result

ROWS, BOUND, HALF = 64, 16, 4


class Spy(BoundedRopePass):
    """The pass, keeping the text of each graph before and after."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.before, self.after, self.graphs = [], [], []

    def __call__(self, graph):
        self.before.append(canonical(graph))
        super().__call__(graph)
        self.after.append(canonical(graph))
        self.graphs.append(graph)


def compiled(model, max_model_len=BOUND, *, dynamic=None, fullgraph=True, pruning=False, **options):
    """``(function, report, spy)``: the model through both stages and eager kernels."""
    report = Report()
    spy = Spy(max_model_len, report=report, **options)

    def backend(gm, example_inputs):
        mark(gm, max_model_len, multimodal_pruning=pruning, report=report)
        return _aot_eager(spy)(gm, example_inputs)

    torch._dynamo.reset()
    return torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=fullgraph), report, spy


def check(model, *args, max_model_len=BOUND, **options):
    """Run a model through the pass; its results must be eager's, bit for bit. Returns ``(report, spy)``."""
    expected = model(*args)
    function, report, spy = compiled(model, max_model_len, **options)
    results = function(*args)
    many = isinstance(expected, tuple)
    for result, wanted in zip(results if many else (results,), expected if many else (expected,), strict=True):
        assert result.dtype == wanted.dtype and torch.equal(result, wanted)
        assert result.stride() == wanted.stride()
        # No output shares memory with an input that did not in eager.
        shared = [_storage(result) == _storage(arg) for arg in args if isinstance(arg, torch.Tensor)]
        assert shared == [_storage(wanted) == _storage(arg) for arg in args if isinstance(arg, torch.Tensor)]
    for graph in spy.graphs:
        assert_values_are_right(graph)
    return report, spy


def _storage(tensor):
    return tensor.untyped_storage().data_ptr() if tensor.numel() else None


def assert_values_are_right(graph):
    """Each operator's recorded fake value is what its operands' fake values give."""
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            recorded, found = node.meta["val"], fake_result(node)
            for one, other in zip(
                torch.utils._pytree.tree_leaves(recorded), torch.utils._pytree.tree_leaves(found), strict=True
            ):
                if isinstance(one, torch.Tensor):
                    assert (str(one.shape), one.dtype, str(one.stride())) == (
                        str(other.shape),
                        other.dtype,
                        str(other.stride()),
                    )


def outcomes(report):
    return [(str(table.outcome), table.reason and str(table.reason)) for table in report.tables]


def inv_freq(half=HALF):
    return 1.0 / 10000.0 ** (torch.arange(half) / half)


def certified(forward, **buffers):
    """An instance of a fresh certified class with this ``forward``; ``inv`` is its buffer of frequencies."""
    cls = rope_ops.sequence_bounded_mrope(type("Model", (nn.Module,), {"forward": forward}))
    model = cls()
    for name, value in {"inv": inv_freq(), **buffers}.items():
        model.register_buffer(name, value)
    return model


def angles(model, rows=ROWS):
    return torch.outer(torch.arange(rows, dtype=torch.float32), model.inv)


def table(model, rows=ROWS):
    freqs = angles(model, rows)
    return torch.cat((freqs.cos(), freqs.sin()), -1)


POSITIONS = torch.tensor([3, 0, 15, 7, 7])
