"""Values: what the pass rewrites computes what eager computes, for the inputs that break naive rewrites."""

import expecttest
import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from passes_helpers import (
    BOUND,
    HALF,
    POSITIONS,
    ROWS,
    Spy,
    angles,
    certified,
    check,
    compiled,
    inv_freq,
    outcomes,
    table,
)
from torch.utils.checkpoint import checkpoint

from rope_ops.passes import Report, mark
from rope_ops.passes.printer import canonical

FORMS = pytest.mark.parametrize("form", ["auto", "bounded"])


def gather(self, positions):
    return table(self)[positions]


# Positions


@FORMS
@pytest.mark.parametrize(
    "positions",
    [
        torch.tensor([0, 15], dtype=torch.int32),
        torch.tensor([3]),
        torch.tensor([], dtype=torch.int64),
        torch.zeros((3, 0), dtype=torch.int64),
        torch.arange(12).view(3, 4).t(),
        torch.arange(16).view(2, 4, 2).permute(2, 0, 1),
        torch.arange(51).view(3, 17)[:, :5] % 16,
        torch.arange(10).expand(2, 10),
        torch.arange(30)[::2][:8] // 2,
    ],
    ids=["int32", "one", "empty", "empty axes", "transposed", "permuted", "spare column", "expanded", "strided"],
)
def test_positions_of_any_layout(positions, form):
    report, _ = check(certified(gather), positions, form=form)
    assert outcomes(report) == [("rows" if form == "auto" else "bounded", None)]


@FORMS
@pytest.mark.parametrize("scale", [torch.arange(1.0, 1 + HALF), torch.tensor(0.5)], ids=["lane", "number"])
def test_a_factor_that_is_a_tensor_is_not_lost(scale, form):
    def forward(self, positions):
        freqs = angles(self)
        return torch.cat((freqs.cos() * self.scale, freqs.sin() * self.scale), -1)[positions]

    report, _ = check(certified(forward, scale=scale), POSITIONS, form=form)
    assert outcomes(report) == [("rows" if form == "auto" else "bounded", None)]


def test_a_negative_position_counts_from_the_end_of_the_whole_table():
    check(certified(gather), torch.tensor([-1, -64, 3]))


@FORMS
@pytest.mark.parametrize("position", [ROWS, -ROWS - 1])
def test_a_position_outside_the_whole_table_fails_as_it_did(position, form):
    function, _, _ = compiled(certified(gather), form=form)
    with pytest.raises(IndexError):
        function(torch.tensor([position]))


def test_r02_past_a_wrong_bound_rows_are_right_and_a_bounded_table_raises():
    positions = torch.tensor([0, 20, 40, 60])
    check(certified(gather), positions)
    for wrong in (positions, torch.tensor([-1])):
        function, report, _ = compiled(certified(gather), form="bounded")
        with pytest.raises(IndexError, match="out of bounds"):
            function(wrong)
        assert outcomes(report) == [("bounded", None)]


def test_r32_views_of_a_growing_batch_share_one_compile():
    buffer = torch.arange(3 * 17).view(3, 17) % BOUND
    model = certified(gather)
    function, _, spy = compiled(model, dynamic=True)
    for columns in (4, 7, 16):
        assert torch.equal(function(buffer[:, :columns]), model(buffer[:, :columns]))
    assert spy.calls == 1
    for columns in (1, 3):
        assert torch.equal(function(buffer[:, :columns]), model(buffer[:, :columns]))
    fresh = torch.arange(12).view(3, 4)
    assert torch.equal(function(fresh), model(fresh))


def test_arithmetic_on_positions_never_reads_a_bounded_table():
    report, _ = check(certified(lambda self, p: table(self)[p + 20]), POSITIONS, form="bounded")
    assert outcomes(report) == [("rows", None)]


# Readers


@pytest.mark.parametrize(
    "read",
    [
        lambda t, p: t.index_select(0, p),
        lambda t, p: F.embedding(p, t),
        lambda t, p: t.t()[:, p],
        lambda t, p: t.t().contiguous().index_select(1, p),
        lambda t, p: t[p, p % 8],
        lambda t, p: t[p[:4].view(2, 2).t(), p[:4].view(2, 2).t() % 8],
        lambda t, p: t[None].expand(2, -1, -1)[:, p],
        lambda t, p: t[:, [1, 3]][p],
        lambda t, p: t[:40][p],
        lambda t, p: t[2:][p],
        lambda t, p: t[::2][p],
        lambda t, p: t[1 : 1 + p.shape[0]] * 2,
        lambda t, p: torch.gather(t, 0, p[:, None].expand(-1, 8)),
        lambda t, p: t.view(-1, 1).repeat(1, 2).view(ROWS, 16)[p],
        lambda t, p: torch.cat((torch.zeros(1, 8), t))[p + 1],
        lambda t, p: torch.cat((t, t[:, :4].repeat(1, 2) * 2, torch.ones(2, 8)))[p + 62],
        lambda t, p: torch.cat((t, -t))[60:][p],
        lambda t, p: F.pad(t, (1, 2))[p],
        lambda t, p: torch.stack((t, -t), 1).flatten(1)[p],
        lambda t, p: torch.where(torch.arange(ROWS)[:, None] > 5, t, 0.0)[p],
    ],
)
def test_readers(read):
    report, _ = check(certified(lambda self, p: read(table(self), p)), POSITIONS)
    assert all(outcome in ("rows", "shortened") for outcome, _ in outcomes(report) if outcome != "left")
    assert ("left", "unknown_op") not in outcomes(report)
    assert any(outcome != "left" for outcome, _ in outcomes(report)), outcomes(report)


def test_joined_tables_wrap_and_fail_as_they_did():
    def forward(self, p):
        return torch.cat((table(self), table(self) * 2))[p]

    check(certified(forward), torch.tensor([-1, -128, 127, 64, 63]))
    function, _, _ = compiled(certified(forward))
    for wrong in (128, -129):
        with pytest.raises(IndexError):
            function(torch.tensor([wrong]))


def test_layers_that_build_the_same_table_compute_its_rows_once():
    _, spy = check(certified(lambda self, p: sum(table(self)[p] * k for k in range(1, 9))), POSITIONS)
    assert (spy.before[0].count("aten.cos.default"), spy.after[0].count("aten.cos.default")) == (8, 1)


# R07: what a pattern might take for the plain table


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda self, p: torch.outer(torch.arange(1.0, ROWS + 1), self.inv).cos()[p], "rows"),
        (lambda self, p: torch.outer(torch.arange(0.0, 2 * ROWS, 2), self.inv).cos()[p], "rows"),
        (lambda self, p: (angles(self) + 0.5).cos()[p], "rows"),
        (lambda self, p: table(self) * 1.0, "left"),
        (lambda self, p: table(self).mean(0), "left"),
        (lambda self, p: table(self)[-1] * 1.0, "left"),
        (lambda self, p: table(self)[p.flip(0) * 2], "rows"),
        (lambda self, p: table(self)[10:20] * 1.0, "left"),
        (lambda self, p: table(self).flip(0)[p], "left"),
    ],
)
@FORMS
def test_r07_look_alikes(forward, expected, form):
    report, _ = check(certified(forward), POSITIONS, form=form)
    (table_,) = report.tables
    assert (table_.outcome != "left") == (expected != "left")


# R14: one table, many spellings


def spelled(angle, join=lambda f: torch.cat((f.cos(), f.sin()), -1), cast=None):
    def forward(self, p):
        joined = join(angle(torch.arange(ROWS, dtype=torch.float32), self.inv))
        return (joined if cast is None else joined.to(cast))[p]

    return forward


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (spelled(lambda t, inv: torch.einsum("i,j->ij", t, inv)), None),
        (spelled(torch.outer), None),
        (spelled(lambda t, inv: t[:, None] * inv), None),
        (spelled(lambda t, inv: t[:, None] @ inv[None]), "not_bit_stable"),
        (spelled(lambda t, inv: torch.outer(torch.arange(ROWS, dtype=torch.bfloat16).float(), inv)), None),
        (spelled(torch.outer, lambda f: torch.stack((f.cos(), f.sin()), -1)), None),
        (spelled(torch.outer, lambda f: torch.cat((f, f), -1).cos()), None),
        (spelled(torch.outer, lambda f: torch.cat((f.cos().half(), f.sin().half()), -1)), None),
        (spelled(torch.outer, lambda f: torch.cat((f.cos() * 1.1, f.sin() * 1.1), -1), torch.bfloat16), None),
    ],
)
@FORMS
def test_r14_spellings(forward, reason, form):
    report, _ = check(certified(forward), POSITIONS, form=form)
    assert [table.reason for table in report.tables] == [reason]


# Training


def rotate(self, p, q):
    c, s = table(self)[p].chunk(2, -1)
    a, b = q.chunk(2, -1)
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def checkpointed(self, p, q):
    return checkpoint(lambda x: rotate(self, p, x), q, use_reentrant=False)


@pytest.mark.parametrize("forward", [rotate, checkpointed])
@FORMS
def test_gradients(forward, form):
    model, q = certified(forward), torch.randn(5, 2 * HALF, requires_grad=True)
    function, report, _ = compiled(model, form=form)
    (wanted,) = torch.autograd.grad(model(POSITIONS, q).square().sum(), q)
    (found,) = torch.autograd.grad(function(POSITIONS, q).square().sum(), q)
    assert torch.equal(found, wanted)
    assert outcomes(report) == [("rows" if form == "auto" else "bounded", None)]


def test_trainable_frequencies_are_left():
    model = certified(rotate)
    inv = torch.nn.Parameter(model.inv.clone())
    del model.inv
    model.inv = inv
    q = torch.randn(5, 2 * HALF)
    function, report, _ = compiled(model)
    (wanted,) = torch.autograd.grad(model(POSITIONS, q).square().sum(), inv)
    (found,) = torch.autograd.grad(function(POSITIONS, q).square().sum(), inv)
    assert torch.equal(found, wanted)
    assert outcomes(report) == [("left", "trainable")]
    with torch.no_grad():
        assert outcomes(check(model, POSITIONS, q)[0]) == [("rows", None)]


class Training(expecttest.TestCase):
    def test_a_training_graph_through_aot_function(self):
        """The joint graph of forward and backward after the pass, as functorch.compile.aot_function hands it over."""
        texts, report = [], Report()

        def partition(joint, inputs, **kwargs):
            Spy(BOUND, report=report)(joint.graph)
            joint.recompile()
            texts.append(canonical(joint.graph))
            return min_cut_rematerialization_partition(joint, inputs, **kwargs)

        def backend(gm, example_inputs):
            mark(gm, BOUND, report=report)
            nothing = lambda graph, inputs: make_boxed_func(graph.forward)  # noqa: E731
            from torch._inductor.decomposition import select_decomp_table

            return aot_function(gm, nothing, nothing, partition_fn=partition, decompositions=select_decomp_table())

        model, q = certified(rotate), torch.randn(5, 2 * HALF, requires_grad=True)
        torch._dynamo.reset()
        function = torch.compile(model, backend=backend)
        (wanted,) = torch.autograd.grad(model(POSITIONS, q).sum(), q)
        (found,) = torch.autograd.grad(function(POSITIONS, q).sum(), q)
        assert torch.equal(found, wanted) and outcomes(report) == [("rows", None)]
        self.assertExpectedInline(
            texts[0],
            """\
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: float32[5, 8] = placeholder
%3: float32[5, 8] = placeholder
%4: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%5: int64[64] = aten.mul.Tensor(%4, 1)
%6: int64[64] = aten.add.Tensor(%5, 0)
%7: float32[64] = prims.convert_element_type.default(%6, float32)
%8: float32[5] = aten.index.Tensor(%7, [%1])
%9: float32[5, 1] = aten.view.default(%8, [-1, 1])
%10: float32[5, 4] = aten.mul.Tensor(%9, %0)
%11: float32[5, 4] = aten.cos.default(%10)
%12: float32[5, 4] = aten.sin.default(%10)
%13: float32[5, 8] = aten.cat.default([%11, %12], -1)
%14: float32[5, 8] = rope_ops.rows_once.default(%13)
%15: list = aten.split.Tensor(%14, 4, -1)
%16: float32[5, 4] = getitem(%15, 0)
%17: float32[5, 4] = getitem(%15, 1)
%18: list = aten.split.Tensor(%2, 4, -1)
%19: float32[5, 4] = getitem(%18, 0)
%20: float32[5, 4] = getitem(%18, 1)
%21: float32[5, 4] = aten.mul.Tensor(%19, %16)
%22: float32[5, 4] = aten.mul.Tensor(%20, %17)
%23: float32[5, 4] = aten.sub.Tensor(%21, %22)
%24: float32[5, 4] = aten.mul.Tensor(%20, %16)
%25: float32[5, 4] = aten.mul.Tensor(%19, %17)
%26: float32[5, 4] = aten.add.Tensor(%24, %25)
%27: float32[5, 8] = aten.cat.default([%23, %26], -1)
%28: float32[5, 4] = aten.slice.Tensor(%3, 1, 0, 4)
%29: float32[5, 4] = aten.slice.Tensor(%3, 1, 4, 8)
%30: float32[5, 4] = aten.mul.Tensor(%29, %17)
%31: float32[5, 4] = aten.mul.Tensor(%29, %16)
%32: float32[5, 4] = aten.neg.default(%28)
%33: float32[5, 4] = aten.mul.Tensor(%32, %17)
%34: float32[5, 4] = aten.add.Tensor(%31, %33)
%35: float32[5, 4] = aten.mul.Tensor(%28, %16)
%36: float32[5, 4] = aten.add.Tensor(%30, %35)
%37: float32[5, 8] = aten.cat.default([%36, %34], 1)
return [%27, None, None, %37]""",
        )


# The hand-made graph that no frontend produces: a table nobody reads


def test_left_not_read():
    from rope_ops.passes.rewrite import Options, rewrite

    graph = torch.fx.Graph()
    inv = graph.placeholder("inv")
    inv.meta["val"] = inv_freq()
    cpu, single = torch.device("cpu"), torch.float32
    t = graph.call_function(torch.ops.rope_ops.position_range.default, (0, ROWS, 1, BOUND, single, cpu))
    t.meta["val"] = torch.arange(ROWS, dtype=single)
    c = graph.call_function(torch.ops.aten.cos.default, (t,))
    c.meta["val"] = t.meta["val"].cos()
    graph.output(inv)
    report = Report()
    assert rewrite(graph, Options(), report, decomposed=False) == 0
    assert outcomes(report) == [("left", "not_read")]
    assert "aten.arange.start_step(0, 64, 1" in canonical(graph)
