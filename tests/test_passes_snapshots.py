"""What the pass leaves in the graph, before and after, as text; each with a check of values, strides and aliasing.

``EXPECTTEST_ACCEPT=1 pytest tests/test_passes_snapshots.py`` accepts new text. R07, R14.
"""

import expecttest
import torch
from passes_helpers import POSITIONS, ROWS, angles, certified, check, outcomes, table

AXES = torch.tensor([[3, 0, 15, 7], [1, 2, 3, 4], [9, 9, 0, 1]])

_library = torch.library.Library("ropetest", "FRAGMENT")
_library.define("read(Tensor positions, Tensor table) -> Tensor")
_library.define("double(Tensor table) -> Tensor")
_library.impl("read", lambda positions, table: table[positions].clone(), "CompositeExplicitAutograd")
_library.impl("double", lambda table: table * 2, "CompositeExplicitAutograd")


class Snapshots(expecttest.TestCase):
    def rewritten(self, forward, *args, **options):
        """``(report, text)`` of a model in both forms; every table of it must be rewritten."""
        parts = []
        for form in ("auto", "bounded"):
            report, spy = check(certified(forward), *args, form=form, **options)
            assert all(outcome != "left" for outcome, _ in outcomes(report)) and report.tables
            if form == "auto":
                first = report
                parts += ["before", *spy.before]
            parts += [f"form={form}: {', '.join(outcome for outcome, _ in outcomes(report))}", *spy.after]
        return first, "\n".join(parts)

    def left(self, reason, forward, *args, plain=False, **options):
        """The graph of a model with a table that is left: exactly the graph of a model without a certificate."""
        model = certified(forward)
        if plain:
            model = type("Plain", (type(model),), {})()
            model.register_buffer("inv", certified(forward).inv)
        report, spy = check(model, *args, **options)
        assert ("left", reason) in outcomes(report), outcomes(report)
        assert all(outcome == "left" for outcome, _ in outcomes(report)), outcomes(report)
        _, untouched = check(model, *args, **{**options, "pruning": True})
        assert spy.after == untouched.after
        return "\n".join(spy.after)

    def test_plain_cat_table_with_one_gather(self):
        def forward(model, p):
            return table(model)[p]

        report, text = self.rewritten(forward, POSITIONS)
        assert [table.rows_before for table in report.tables] == [ROWS] * len(report.tables)
        self.assertExpectedInline(
            text,
            """\
before
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: float32[64] = rope_ops.position_range.default(0, 64, 1, 16, float32, cpu)
%3: float32[64, 1] = aten.view.default(%2, [64, 1])
%4: float32[64, 4] = aten.mul.Tensor(%3, %0)
%5: float32[64, 4] = aten.cos.default(%4)
%6: float32[64, 4] = aten.sin.default(%4)
%7: float32[64, 8] = aten.cat.default([%5, %6], -1)
%8: float32[5, 8] = aten.index.Tensor(%7, [%1])
return [%8]
form=auto: rows
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: float32[5] = aten.index.Tensor(%5, [%1])
%7: float32[5, 1] = aten.view.default(%6, [-1, 1])
%8: float32[5, 4] = aten.mul.Tensor(%7, %0)
%9: float32[5, 4] = aten.cos.default(%8)
%10: float32[5, 4] = aten.sin.default(%8)
%11: float32[5, 8] = aten.cat.default([%9, %10], -1)
%12: float32[5, 8] = rope_ops.rows_once.default(%11)
return [%12]
form=bounded: bounded
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: float32[16, 8] = rope_ops.build_cos_sin_cache.default(%0, 16, 1.0, float32)
%3: bool[5] = aten.lt.Scalar(%1, 0)
%4: int64[5] = aten.add.Tensor(%1, 64)
%5: int64[5] = aten.where.self(%3, %4, %1)
%6: bool[5] = aten.lt.Scalar(%5, 0)
%7: int64[5] = aten.where.ScalarSelf(%6, 64, %5)
%8: float32[5, 8] = aten.index.Tensor(%2, [%7])
return [%8]""",
        )

    def test_yarn_with_attention_factor(self):
        def forward(model, p):
            f = angles(model)
            return torch.cat((f.cos() * 1.1386, f.sin() * 1.1386), -1).to(torch.bfloat16)[p]

        report, text = self.rewritten(forward, POSITIONS)
        assert [table.rows_before for table in report.tables] == [ROWS] * len(report.tables)
        self.assertExpectedInline(
            text,
            """\
before
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: float32[64] = rope_ops.position_range.default(0, 64, 1, 16, float32, cpu)
%3: float32[64, 1] = aten.view.default(%2, [64, 1])
%4: float32[64, 4] = aten.mul.Tensor(%3, %0)
%5: float32[64, 4] = aten.cos.default(%4)
%6: float32[64, 4] = aten.mul.Tensor(%5, 1.1386)
%7: float32[64, 4] = aten.sin.default(%4)
%8: float32[64, 4] = aten.mul.Tensor(%7, 1.1386)
%9: float32[64, 8] = aten.cat.default([%6, %8], -1)
%10: bfloat16[64, 8] = prims.convert_element_type.default(%9, bfloat16)
%11: bfloat16[5, 8] = aten.index.Tensor(%10, [%1])
return [%11]
form=auto: rows
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: float32[5] = aten.index.Tensor(%5, [%1])
%7: float32[5, 1] = aten.view.default(%6, [-1, 1])
%8: float32[5, 4] = aten.mul.Tensor(%7, %0)
%9: float32[5, 4] = aten.cos.default(%8)
%10: float32[5, 4] = aten.mul.Tensor(%9, 1.1386)
%11: float32[5, 4] = aten.sin.default(%8)
%12: float32[5, 4] = aten.mul.Tensor(%11, 1.1386)
%13: float32[5, 8] = aten.cat.default([%10, %12], -1)
%14: bfloat16[5, 8] = prims.convert_element_type.default(%13, bfloat16)
%15: bfloat16[5, 8] = rope_ops.rows_once.default(%14)
return [%15]
form=bounded: bounded
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: bfloat16[16, 8] = rope_ops.build_cos_sin_cache.default(%0, 16, 1.1386, bfloat16)
%3: bool[5] = aten.lt.Scalar(%1, 0)
%4: int64[5] = aten.add.Tensor(%1, 64)
%5: int64[5] = aten.where.self(%3, %4, %1)
%6: bool[5] = aten.lt.Scalar(%5, 0)
%7: int64[5] = aten.where.ScalarSelf(%6, 64, %5)
%8: bfloat16[5, 8] = aten.index.Tensor(%2, [%7])
return [%8]""",
        )

    def test_mrope_sections_of_3_axes(self):
        def forward(model, p):
            c, s = table(model)[p].chunk(2, -1)
            return torch.cat([x[i] for i, x in enumerate(c.split([1, 1, 2], -1))], -1) + s[0]

        report, text = self.rewritten(forward, AXES)
        assert [table.rows_before for table in report.tables] == [ROWS] * len(report.tables)
        self.assertExpectedInline(
            text,
            """\
before
%0: float32[4] = placeholder
%1: int64[3, 4] = placeholder
%2: float32[64] = rope_ops.position_range.default(0, 64, 1, 16, float32, cpu)
%3: float32[64, 1] = aten.view.default(%2, [64, 1])
%4: float32[64, 4] = aten.mul.Tensor(%3, %0)
%5: float32[64, 4] = aten.cos.default(%4)
%6: float32[64, 4] = aten.sin.default(%4)
%7: float32[64, 8] = aten.cat.default([%5, %6], -1)
%8: float32[3, 4, 8] = aten.index.Tensor(%7, [%1])
%9: list = aten.split.Tensor(%8, 4, -1)
%10: float32[3, 4, 4] = getitem(%9, 0)
%11: float32[3, 4, 4] = getitem(%9, 1)
%12: list = aten.split_with_sizes.default(%10, [1, 1, 2], -1)
%13: float32[3, 4, 1] = getitem(%12, 0)
%14: float32[3, 4, 1] = getitem(%12, 1)
%15: float32[3, 4, 2] = getitem(%12, 2)
%16: float32[4, 1] = aten.select.int(%13, 0, 0)
%17: float32[4, 1] = aten.select.int(%14, 0, 1)
%18: float32[4, 2] = aten.select.int(%15, 0, 2)
%19: float32[4, 4] = aten.cat.default([%16, %17, %18], -1)
%20: float32[4, 4] = aten.select.int(%11, 0, 0)
%21: float32[4, 4] = aten.add.Tensor(%19, %20)
return [%21]
form=auto: rows
%0: float32[4] = placeholder
%1: int64[3, 4] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: int64[12] = aten.view.default(%1, [-1])
%7: float32[12] = aten.index.Tensor(%5, [%6])
%8: float32[12, 1] = aten.view.default(%7, [-1, 1])
%9: float32[12, 4] = aten.mul.Tensor(%8, %0)
%10: float32[12, 4] = aten.cos.default(%9)
%11: float32[12, 4] = aten.sin.default(%9)
%12: float32[12, 8] = aten.cat.default([%10, %11], -1)
%13: float32[12, 8] = rope_ops.rows_once.default(%12)
%14: float32[3, 4, 8] = aten.view.default(%13, [3, 4, 8])
%15: list = aten.split.Tensor(%14, 4, -1)
%16: float32[3, 4, 4] = getitem(%15, 0)
%17: float32[3, 4, 4] = getitem(%15, 1)
%18: list = aten.split_with_sizes.default(%16, [1, 1, 2], -1)
%19: float32[3, 4, 1] = getitem(%18, 0)
%20: float32[3, 4, 1] = getitem(%18, 1)
%21: float32[3, 4, 2] = getitem(%18, 2)
%22: float32[4, 1] = aten.select.int(%19, 0, 0)
%23: float32[4, 1] = aten.select.int(%20, 0, 1)
%24: float32[4, 2] = aten.select.int(%21, 0, 2)
%25: float32[4, 4] = aten.cat.default([%22, %23, %24], -1)
%26: float32[4, 4] = aten.select.int(%17, 0, 0)
%27: float32[4, 4] = aten.add.Tensor(%25, %26)
return [%27]
form=bounded: bounded
%0: float32[4] = placeholder
%1: int64[3, 4] = placeholder
%2: float32[16, 8] = rope_ops.build_cos_sin_cache.default(%0, 16, 1.0, float32)
%3: bool[3, 4] = aten.lt.Scalar(%1, 0)
%4: int64[3, 4] = aten.add.Tensor(%1, 64)
%5: int64[3, 4] = aten.where.self(%3, %4, %1)
%6: bool[3, 4] = aten.lt.Scalar(%5, 0)
%7: int64[3, 4] = aten.where.ScalarSelf(%6, 64, %5)
%8: float32[3, 4, 8] = aten.index.Tensor(%2, [%7])
%9: list = aten.split.Tensor(%8, 4, -1)
%10: float32[3, 4, 4] = getitem(%9, 0)
%11: float32[3, 4, 4] = getitem(%9, 1)
%12: list = aten.split_with_sizes.default(%10, [1, 1, 2], -1)
%13: float32[3, 4, 1] = getitem(%12, 0)
%14: float32[3, 4, 1] = getitem(%12, 1)
%15: float32[3, 4, 2] = getitem(%12, 2)
%16: float32[4, 1] = aten.select.int(%13, 0, 0)
%17: float32[4, 1] = aten.select.int(%14, 0, 1)
%18: float32[4, 2] = aten.select.int(%15, 0, 2)
%19: float32[4, 4] = aten.cat.default([%16, %17, %18], -1)
%20: float32[4, 4] = aten.select.int(%11, 0, 0)
%21: float32[4, 4] = aten.add.Tensor(%19, %20)
return [%21]""",
        )

    def test_mrope_interleaved_of_3_axes(self):
        def forward(model, p):
            c, s = table(model)[p].chunk(2, -1)
            channel = torch.arange(4) % 3
            return [torch.where(channel == 1, x[1], torch.where(channel == 2, x[2], x[0])) for x in (c, s)][0]

        report, text = self.rewritten(forward, AXES)
        assert [table.rows_before for table in report.tables] == [ROWS] * len(report.tables)
        self.assertExpectedInline(
            text,
            """\
before
%0: float32[4] = placeholder
%1: int64[3, 4] = placeholder
%2: float32[64] = rope_ops.position_range.default(0, 64, 1, 16, float32, cpu)
%3: float32[64, 1] = aten.view.default(%2, [64, 1])
%4: float32[64, 4] = aten.mul.Tensor(%3, %0)
%5: float32[64, 4] = aten.cos.default(%4)
%6: float32[64, 4] = aten.sin.default(%4)
%7: float32[64, 8] = aten.cat.default([%5, %6], -1)
%8: float32[3, 4, 8] = aten.index.Tensor(%7, [%1])
%9: list = aten.split.Tensor(%8, 4, -1)
%10: float32[3, 4, 4] = getitem(%9, 0)
%11: int64[4] = prims.iota.default(4, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%12: int64[4] = aten.remainder.Scalar(%11, 3)
%13: bool[4] = aten.eq.Scalar(%12, 1)
%14: float32[4, 4] = aten.select.int(%10, 0, 1)
%15: bool[4] = aten.eq.Scalar(%12, 2)
%16: float32[4, 4] = aten.select.int(%10, 0, 2)
%17: float32[4, 4] = aten.select.int(%10, 0, 0)
%18: float32[4, 4] = aten.where.self(%15, %16, %17)
%19: float32[4, 4] = aten.where.self(%13, %14, %18)
return [%19]
form=auto: rows
%0: float32[4] = placeholder
%1: int64[3, 4] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: int64[12] = aten.view.default(%1, [-1])
%7: float32[12] = aten.index.Tensor(%5, [%6])
%8: float32[12, 1] = aten.view.default(%7, [-1, 1])
%9: float32[12, 4] = aten.mul.Tensor(%8, %0)
%10: float32[12, 4] = aten.cos.default(%9)
%11: float32[12, 4] = aten.sin.default(%9)
%12: float32[12, 8] = aten.cat.default([%10, %11], -1)
%13: float32[12, 8] = rope_ops.rows_once.default(%12)
%14: float32[3, 4, 8] = aten.view.default(%13, [3, 4, 8])
%15: list = aten.split.Tensor(%14, 4, -1)
%16: float32[3, 4, 4] = getitem(%15, 0)
%17: int64[4] = prims.iota.default(4, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%18: int64[4] = aten.remainder.Scalar(%17, 3)
%19: bool[4] = aten.eq.Scalar(%18, 1)
%20: float32[4, 4] = aten.select.int(%16, 0, 1)
%21: bool[4] = aten.eq.Scalar(%18, 2)
%22: float32[4, 4] = aten.select.int(%16, 0, 2)
%23: float32[4, 4] = aten.select.int(%16, 0, 0)
%24: float32[4, 4] = aten.where.self(%21, %22, %23)
%25: float32[4, 4] = aten.where.self(%19, %20, %24)
return [%25]
form=bounded: bounded
%0: float32[4] = placeholder
%1: int64[3, 4] = placeholder
%2: float32[16, 8] = rope_ops.build_cos_sin_cache.default(%0, 16, 1.0, float32)
%3: bool[3, 4] = aten.lt.Scalar(%1, 0)
%4: int64[3, 4] = aten.add.Tensor(%1, 64)
%5: int64[3, 4] = aten.where.self(%3, %4, %1)
%6: bool[3, 4] = aten.lt.Scalar(%5, 0)
%7: int64[3, 4] = aten.where.ScalarSelf(%6, 64, %5)
%8: float32[3, 4, 8] = aten.index.Tensor(%2, [%7])
%9: list = aten.split.Tensor(%8, 4, -1)
%10: float32[3, 4, 4] = getitem(%9, 0)
%11: int64[4] = prims.iota.default(4, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%12: int64[4] = aten.remainder.Scalar(%11, 3)
%13: bool[4] = aten.eq.Scalar(%12, 1)
%14: float32[4, 4] = aten.select.int(%10, 0, 1)
%15: bool[4] = aten.eq.Scalar(%12, 2)
%16: float32[4, 4] = aten.select.int(%10, 0, 2)
%17: float32[4, 4] = aten.select.int(%10, 0, 0)
%18: float32[4, 4] = aten.where.self(%15, %16, %17)
%19: float32[4, 4] = aten.where.self(%13, %14, %18)
return [%19]""",
        )

    def test_two_tables_of_doubled_angles(self):
        def forward(model, p):
            e = torch.cat((angles(model), angles(model)), -1)
            return e.cos()[p], e.sin()[p]

        report, text = self.rewritten(forward, POSITIONS)
        assert [table.rows_before for table in report.tables] == [ROWS] * len(report.tables)
        self.assertExpectedInline(
            text,
            """\
before
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: float32[64] = rope_ops.position_range.default(0, 64, 1, 16, float32, cpu)
%3: float32[64, 1] = aten.view.default(%2, [64, 1])
%4: float32[64, 4] = aten.mul.Tensor(%3, %0)
%5: float32[64] = rope_ops.position_range.default(0, 64, 1, 16, float32, cpu)
%6: float32[64, 1] = aten.view.default(%5, [64, 1])
%7: float32[64, 4] = aten.mul.Tensor(%6, %0)
%8: float32[64, 8] = aten.cat.default([%4, %7], -1)
%9: float32[64, 8] = aten.cos.default(%8)
%10: float32[5, 8] = aten.index.Tensor(%9, [%1])
%11: float32[64, 8] = aten.sin.default(%8)
%12: float32[5, 8] = aten.index.Tensor(%11, [%1])
return [%10, %12]
form=auto: rows, rows
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: float32[5] = aten.index.Tensor(%5, [%1])
%7: float32[5, 1] = aten.view.default(%6, [-1, 1])
%8: float32[5, 4] = aten.mul.Tensor(%7, %0)
%9: float32[5, 8] = aten.cat.default([%8, %8], -1)
%10: float32[5, 8] = aten.cos.default(%9)
%11: float32[5, 8] = rope_ops.rows_once.default(%10)
%12: float32[5, 8] = aten.sin.default(%9)
%13: float32[5, 8] = rope_ops.rows_once.default(%12)
return [%11, %13]
form=bounded: bounded, bounded
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[16] = prims.iota.default(16, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: float32[16] = prims.convert_element_type.default(%2, float32)
%4: float32[16, 1] = aten.view.default(%3, [-1, 1])
%5: float32[16, 4] = aten.mul.Tensor(%4, %0)
%6: float32[16, 8] = aten.cat.default([%5, %5], -1)
%7: float32[16, 8] = aten.cos.default(%6)
%8: bool[5] = aten.lt.Scalar(%1, 0)
%9: int64[5] = aten.add.Tensor(%1, 64)
%10: int64[5] = aten.where.self(%8, %9, %1)
%11: bool[5] = aten.lt.Scalar(%10, 0)
%12: int64[5] = aten.where.ScalarSelf(%11, 64, %10)
%13: float32[5, 8] = aten.index.Tensor(%7, [%12])
%14: float32[16, 8] = aten.sin.default(%6)
%15: float32[5, 8] = aten.index.Tensor(%14, [%12])
return [%13, %15]""",
        )

    def test_complex_polar(self):
        def forward(model, p):
            f = angles(model)
            return torch.view_as_real(torch.polar(torch.ones_like(f), f)[p])

        report, text = self.rewritten(forward, POSITIONS)
        assert [table.rows_before for table in report.tables] == [ROWS] * len(report.tables)
        self.assertExpectedInline(
            text,
            """\
before
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: float32[64] = rope_ops.position_range.default(0, 64, 1, 16, float32, cpu)
%3: float32[64, 1] = aten.view.default(%2, [64, 1])
%4: float32[64, 4] = aten.mul.Tensor(%3, %0)
%5: float32[64, 4] = aten.full.default([64, 4], 1, device=cpu, dtype=float32, layout=strided, pin_memory=False)
%6: complex64[64, 4] = aten.polar.default(%5, %4)
%7: complex64[5, 4] = aten.index.Tensor(%6, [%1])
%8: float32[5, 4, 2] = aten.view_as_real.default(%7)
return [%8]
form=auto: rows
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: float32[5, 4] = aten.full.default([5, 4], 1, device=cpu, dtype=float32, layout=strided, pin_memory=False)
%7: float32[5] = aten.index.Tensor(%5, [%1])
%8: float32[5, 1] = aten.view.default(%7, [-1, 1])
%9: float32[5, 4] = aten.mul.Tensor(%8, %0)
%10: complex64[5, 4] = aten.polar.default(%6, %9)
%11: complex64[5, 4] = rope_ops.rows_once.default(%10)
%12: float32[5, 4, 2] = aten.view_as_real.default(%11)
return [%12]
form=bounded: bounded
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: float32[16, 4] = aten.full.default([16, 4], 1, device=cpu, dtype=float32, layout=strided, pin_memory=False)
%3: int64[16] = prims.iota.default(16, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%4: float32[16] = prims.convert_element_type.default(%3, float32)
%5: float32[16, 1] = aten.view.default(%4, [-1, 1])
%6: float32[16, 4] = aten.mul.Tensor(%5, %0)
%7: complex64[16, 4] = aten.polar.default(%2, %6)
%8: bool[5] = aten.lt.Scalar(%1, 0)
%9: int64[5] = aten.add.Tensor(%1, 64)
%10: int64[5] = aten.where.self(%8, %9, %1)
%11: bool[5] = aten.lt.Scalar(%10, 0)
%12: int64[5] = aten.where.ScalarSelf(%11, 64, %10)
%13: complex64[5, 4] = aten.index.Tensor(%7, [%12])
%14: float32[5, 4, 2] = aten.view_as_real.default(%13)
return [%14]""",
        )

    def test_two_layers_build_and_gather(self):
        def forward(model, p):
            return table(model)[p] + table(model)[p] * 2

        report, text = self.rewritten(forward, POSITIONS)
        assert [table.rows_before for table in report.tables] == [ROWS] * len(report.tables)
        self.assertExpectedInline(
            text,
            """\
before
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: float32[64] = rope_ops.position_range.default(0, 64, 1, 16, float32, cpu)
%3: float32[64, 1] = aten.view.default(%2, [64, 1])
%4: float32[64, 4] = aten.mul.Tensor(%3, %0)
%5: float32[64, 4] = aten.cos.default(%4)
%6: float32[64, 4] = aten.sin.default(%4)
%7: float32[64, 8] = aten.cat.default([%5, %6], -1)
%8: float32[5, 8] = aten.index.Tensor(%7, [%1])
%9: float32[64] = rope_ops.position_range.default(0, 64, 1, 16, float32, cpu)
%10: float32[64, 1] = aten.view.default(%9, [64, 1])
%11: float32[64, 4] = aten.mul.Tensor(%10, %0)
%12: float32[64, 4] = aten.cos.default(%11)
%13: float32[64, 4] = aten.sin.default(%11)
%14: float32[64, 8] = aten.cat.default([%12, %13], -1)
%15: float32[5, 8] = aten.index.Tensor(%14, [%1])
%16: float32[5, 8] = aten.mul.Tensor(%15, 2)
%17: float32[5, 8] = aten.add.Tensor(%8, %16)
return [%17]
form=auto: rows, rows
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: float32[5] = aten.index.Tensor(%5, [%1])
%7: float32[5, 1] = aten.view.default(%6, [-1, 1])
%8: float32[5, 4] = aten.mul.Tensor(%7, %0)
%9: float32[5, 4] = aten.cos.default(%8)
%10: float32[5, 4] = aten.sin.default(%8)
%11: float32[5, 8] = aten.cat.default([%9, %10], -1)
%12: float32[5, 8] = rope_ops.rows_once.default(%11)
%13: float32[5, 8] = aten.mul.Tensor(%12, 2)
%14: float32[5, 8] = aten.add.Tensor(%12, %13)
return [%14]
form=bounded: bounded, bounded
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: float32[16, 8] = rope_ops.build_cos_sin_cache.default(%0, 16, 1.0, float32)
%3: bool[5] = aten.lt.Scalar(%1, 0)
%4: int64[5] = aten.add.Tensor(%1, 64)
%5: int64[5] = aten.where.self(%3, %4, %1)
%6: bool[5] = aten.lt.Scalar(%5, 0)
%7: int64[5] = aten.where.ScalarSelf(%6, 64, %5)
%8: float32[5, 8] = aten.index.Tensor(%2, [%7])
%9: float32[5, 8] = aten.mul.Tensor(%8, 2)
%10: float32[5, 8] = aten.add.Tensor(%8, %9)
return [%10]""",
        )

    def test_prefix_slice(self):
        def forward(model, p):
            return table(model)[: p.shape[0]] * 2

        report, text = self.rewritten(forward, POSITIONS)
        assert [table.rows_before for table in report.tables] == [ROWS] * len(report.tables)
        self.assertExpectedInline(
            text,
            """\
before
%0: float32[4] = placeholder
%1: float32[64] = rope_ops.position_range.default(0, 64, 1, 16, float32, cpu)
%2: float32[64, 1] = aten.view.default(%1, [64, 1])
%3: float32[64, 4] = aten.mul.Tensor(%2, %0)
%4: float32[64, 4] = aten.cos.default(%3)
%5: float32[64, 4] = aten.sin.default(%3)
%6: float32[64, 8] = aten.cat.default([%4, %5], -1)
%7: float32[5, 8] = aten.slice.Tensor(%6, 0, 0, 5)
%8: float32[5, 8] = aten.mul.Tensor(%7, 2)
return [%8]
form=auto: shortened
%0: float32[4] = placeholder
%1: int64[5] = prims.iota.default(5, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%2: float32[5] = prims.convert_element_type.default(%1, float32)
%3: float32[5, 1] = aten.view.default(%2, [-1, 1])
%4: float32[5, 4] = aten.mul.Tensor(%3, %0)
%5: float32[5, 4] = aten.cos.default(%4)
%6: float32[5, 4] = aten.sin.default(%4)
%7: float32[5, 8] = aten.cat.default([%5, %6], -1)
%8: float32[5, 8] = aten.mul.Tensor(%7, 2)
return [%8]
form=bounded: shortened
%0: float32[4] = placeholder
%1: int64[5] = prims.iota.default(5, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%2: float32[5] = prims.convert_element_type.default(%1, float32)
%3: float32[5, 1] = aten.view.default(%2, [-1, 1])
%4: float32[5, 4] = aten.mul.Tensor(%3, %0)
%5: float32[5, 4] = aten.cos.default(%4)
%6: float32[5, 4] = aten.sin.default(%4)
%7: float32[5, 8] = aten.cat.default([%5, %6], -1)
%8: float32[5, 8] = aten.mul.Tensor(%7, 2)
return [%8]""",
        )

    def test_opaque_reader(self):
        def forward(model, p):
            return torch.ops.ropetest.read(p, table(model))

        report, text = self.rewritten(forward, POSITIONS, opaque_readers=True)
        assert [table.rows_before for table in report.tables] == [ROWS] * len(report.tables)
        self.assertExpectedInline(
            text,
            """\
before
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: float32[64] = rope_ops.position_range.default(0, 64, 1, 16, float32, cpu)
%3: float32[64, 1] = aten.view.default(%2, [64, 1])
%4: float32[64, 4] = aten.mul.Tensor(%3, %0)
%5: float32[64, 4] = aten.cos.default(%4)
%6: float32[64, 4] = aten.sin.default(%4)
%7: float32[64, 8] = aten.cat.default([%5, %6], -1)
%8: float32[5, 8] = ropetest.read.default(%1, %7)
return [%8]
form=auto: bounded
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: float32[16, 8] = rope_ops.build_cos_sin_cache.default(%0, 16, 1.0, float32)
%3: float32[5, 8] = ropetest.read.default(%1, %2)
return [%3]
form=bounded: bounded
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: float32[16, 8] = rope_ops.build_cos_sin_cache.default(%0, 16, 1.0, float32)
%3: float32[5, 8] = ropetest.read.default(%1, %2)
return [%3]""",
        )

    def test_joined_tables(self):
        def forward(model, p):
            return torch.cat((table(model), table(model) * 0.5))[p + 64]

        report, text = self.rewritten(forward, POSITIONS)
        assert [table.rows_before for table in report.tables] == [ROWS] * len(report.tables)
        self.assertExpectedInline(
            text,
            """\
before
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: float32[64] = rope_ops.position_range.default(0, 64, 1, 16, float32, cpu)
%3: float32[64, 1] = aten.view.default(%2, [64, 1])
%4: float32[64, 4] = aten.mul.Tensor(%3, %0)
%5: float32[64, 4] = aten.cos.default(%4)
%6: float32[64, 4] = aten.sin.default(%4)
%7: float32[64, 8] = aten.cat.default([%5, %6], -1)
%8: float32[64] = rope_ops.position_range.default(0, 64, 1, 16, float32, cpu)
%9: float32[64, 1] = aten.view.default(%8, [64, 1])
%10: float32[64, 4] = aten.mul.Tensor(%9, %0)
%11: float32[64, 4] = aten.cos.default(%10)
%12: float32[64, 4] = aten.sin.default(%10)
%13: float32[64, 8] = aten.cat.default([%11, %12], -1)
%14: float32[64, 8] = aten.mul.Tensor(%13, 0.5)
%15: float32[128, 8] = aten.cat.default([%7, %14])
%16: int64[5] = aten.add.Tensor(%1, 64)
%17: float32[5, 8] = aten.index.Tensor(%15, [%16])
return [%17]
form=auto: rows, rows
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%7: int64[64] = aten.mul.Tensor(%6, 1)
%8: int64[64] = aten.add.Tensor(%7, 0)
%9: float32[64] = prims.convert_element_type.default(%8, float32)
%10: int64[5] = aten.add.Tensor(%1, 64)
%11: bool[5] = aten.lt.Scalar(%10, 0)
%12: int64[5] = aten.add.Tensor(%10, 128)
%13: int64[5] = aten.where.self(%11, %12, %10)
%14: bool[5] = aten.lt.Scalar(%13, 0)
%15: int64[5] = aten.where.ScalarSelf(%14, 128, %13)
%16: int64[5] = aten.clamp_max.default(%15, 63)
%17: float32[5] = aten.index.Tensor(%5, [%16])
%18: float32[5, 1] = aten.view.default(%17, [-1, 1])
%19: float32[5, 4] = aten.mul.Tensor(%18, %0)
%20: float32[5, 4] = aten.cos.default(%19)
%21: float32[5, 4] = aten.sin.default(%19)
%22: float32[5, 8] = aten.cat.default([%20, %21], -1)
%23: int64[5] = aten.sub.Tensor(%15, 64)
%24: int64[5] = aten.clamp_min.default(%23, 0)
%25: float32[5] = aten.index.Tensor(%9, [%24])
%26: float32[5, 1] = aten.view.default(%25, [-1, 1])
%27: float32[5, 4] = aten.mul.Tensor(%26, %0)
%28: float32[5, 4] = aten.cos.default(%27)
%29: float32[5, 4] = aten.sin.default(%27)
%30: float32[5, 8] = aten.cat.default([%28, %29], -1)
%31: float32[5, 8] = aten.mul.Tensor(%30, 0.5)
%32: bool[5] = aten.ge.Scalar(%15, 64)
%33: bool[5, 1] = aten.view.default(%32, [-1, 1])
%34: float32[5, 8] = aten.where.self(%33, %31, %22)
%35: float32[5, 8] = rope_ops.rows_once.default(%34)
return [%35]
form=bounded: rows, rows
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%7: int64[64] = aten.mul.Tensor(%6, 1)
%8: int64[64] = aten.add.Tensor(%7, 0)
%9: float32[64] = prims.convert_element_type.default(%8, float32)
%10: int64[5] = aten.add.Tensor(%1, 64)
%11: bool[5] = aten.lt.Scalar(%10, 0)
%12: int64[5] = aten.add.Tensor(%10, 128)
%13: int64[5] = aten.where.self(%11, %12, %10)
%14: bool[5] = aten.lt.Scalar(%13, 0)
%15: int64[5] = aten.where.ScalarSelf(%14, 128, %13)
%16: int64[5] = aten.clamp_max.default(%15, 63)
%17: float32[5] = aten.index.Tensor(%5, [%16])
%18: float32[5, 1] = aten.view.default(%17, [-1, 1])
%19: float32[5, 4] = aten.mul.Tensor(%18, %0)
%20: float32[5, 4] = aten.cos.default(%19)
%21: float32[5, 4] = aten.sin.default(%19)
%22: float32[5, 8] = aten.cat.default([%20, %21], -1)
%23: int64[5] = aten.sub.Tensor(%15, 64)
%24: int64[5] = aten.clamp_min.default(%23, 0)
%25: float32[5] = aten.index.Tensor(%9, [%24])
%26: float32[5, 1] = aten.view.default(%25, [-1, 1])
%27: float32[5, 4] = aten.mul.Tensor(%26, %0)
%28: float32[5, 4] = aten.cos.default(%27)
%29: float32[5, 4] = aten.sin.default(%27)
%30: float32[5, 8] = aten.cat.default([%28, %29], -1)
%31: float32[5, 8] = aten.mul.Tensor(%30, 0.5)
%32: bool[5] = aten.ge.Scalar(%15, 64)
%33: bool[5, 1] = aten.view.default(%32, [-1, 1])
%34: float32[5, 8] = aten.where.self(%33, %31, %22)
return [%34]""",
        )

    def test_one_row_selected(self):
        def forward(model, p):
            return table(model)[3] * 2

        report, text = self.rewritten(forward, POSITIONS)
        assert [table.rows_before for table in report.tables] == [ROWS] * len(report.tables)
        self.assertExpectedInline(
            text,
            """\
before
%0: float32[4] = placeholder
%1: float32[64] = rope_ops.position_range.default(0, 64, 1, 16, float32, cpu)
%2: float32[64, 1] = aten.view.default(%1, [64, 1])
%3: float32[64, 4] = aten.mul.Tensor(%2, %0)
%4: float32[64, 4] = aten.cos.default(%3)
%5: float32[64, 4] = aten.sin.default(%3)
%6: float32[64, 8] = aten.cat.default([%4, %5], -1)
%7: float32[8] = aten.select.int(%6, 0, 3)
%8: float32[8] = aten.mul.Tensor(%7, 2)
return [%8]
form=auto: shortened
%0: float32[4] = placeholder
%1: int64[1] = prims.iota.default(1, device=cpu, dtype=int64, requires_grad=False, start=3, step=1)
%2: float32[1] = prims.convert_element_type.default(%1, float32)
%3: float32[1, 1] = aten.view.default(%2, [-1, 1])
%4: float32[1, 4] = aten.mul.Tensor(%3, %0)
%5: float32[1, 4] = aten.cos.default(%4)
%6: float32[1, 4] = aten.sin.default(%4)
%7: float32[1, 8] = aten.cat.default([%5, %6], -1)
%8: float32[8] = aten.select.int(%7, 0, 0)
%9: float32[8] = aten.mul.Tensor(%8, 2)
return [%9]
form=bounded: shortened
%0: float32[4] = placeholder
%1: int64[1] = prims.iota.default(1, device=cpu, dtype=int64, requires_grad=False, start=3, step=1)
%2: float32[1] = prims.convert_element_type.default(%1, float32)
%3: float32[1, 1] = aten.view.default(%2, [-1, 1])
%4: float32[1, 4] = aten.mul.Tensor(%3, %0)
%5: float32[1, 4] = aten.cos.default(%4)
%6: float32[1, 4] = aten.sin.default(%4)
%7: float32[1, 8] = aten.cat.default([%5, %6], -1)
%8: float32[8] = aten.select.int(%7, 0, 0)
%9: float32[8] = aten.mul.Tensor(%8, 2)
return [%9]""",
        )

    def test_left_unmarked(self):
        def forward(model, p):
            return table(model)[p]

        text = self.left("unmarked", forward, POSITIONS, plain=True)
        self.assertExpectedInline(
            text,
            """\
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: float32[64, 1] = aten.view.default(%5, [64, 1])
%7: float32[64, 4] = aten.mul.Tensor(%6, %0)
%8: float32[64, 4] = aten.cos.default(%7)
%9: float32[64, 4] = aten.sin.default(%7)
%10: float32[64, 8] = aten.cat.default([%8, %9], -1)
%11: float32[5, 8] = aten.index.Tensor(%10, [%1])
return [%11]""",
        )

    def test_left_within_bound(self):
        def forward(model, p):
            return table(model, 16)[p]

        text = self.left("within_bound", forward, POSITIONS)
        self.assertExpectedInline(
            text,
            """\
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[16] = prims.iota.default(16, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[16] = aten.mul.Tensor(%2, 1)
%4: int64[16] = aten.add.Tensor(%3, 0)
%5: float32[16] = prims.convert_element_type.default(%4, float32)
%6: float32[16, 1] = aten.view.default(%5, [16, 1])
%7: float32[16, 4] = aten.mul.Tensor(%6, %0)
%8: float32[16, 4] = aten.cos.default(%7)
%9: float32[16, 4] = aten.sin.default(%7)
%10: float32[16, 8] = aten.cat.default([%8, %9], -1)
%11: float32[5, 8] = aten.index.Tensor(%10, [%1])
return [%11]""",
        )

    def test_left_symbolic_length(self):
        def forward(model, p):
            return torch.outer(torch.arange(p.shape[0], dtype=torch.float32), model.inv).cos()

        text = self.left("symbolic_length", forward, POSITIONS, dynamic=True)
        self.assertExpectedInline(
            text,
            """\
%0: SymInt = placeholder
%1: float32[4] = placeholder
%2: int64[s33] = prims.iota.default(%0, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[s33] = aten.mul.Tensor(%2, 1)
%4: int64[s33] = aten.add.Tensor(%3, 0)
%5: float32[s33] = prims.convert_element_type.default(%4, float32)
%6: float32[s33, 1] = aten.view.default(%5, [%0, 1])
%7: float32[s33, 4] = aten.mul.Tensor(%6, %1)
%8: float32[s33, 4] = aten.cos.default(%7)
return [%8]""",
        )

    def test_left_multimodal_pruning(self):
        def forward(model, p):
            return table(model)[p]

        text = self.left("multimodal_pruning", forward, POSITIONS, pruning=True)
        self.assertExpectedInline(
            text,
            """\
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: float32[64, 1] = aten.view.default(%5, [64, 1])
%7: float32[64, 4] = aten.mul.Tensor(%6, %0)
%8: float32[64, 4] = aten.cos.default(%7)
%9: float32[64, 4] = aten.sin.default(%7)
%10: float32[64, 8] = aten.cat.default([%8, %9], -1)
%11: float32[5, 8] = aten.index.Tensor(%10, [%1])
return [%11]""",
        )

    def test_left_no_range(self):
        def forward(model, p):
            return torch.outer(torch.linspace(0, 63, 64), model.inv).cos()[p]

        text = self.left("no_range", forward, POSITIONS)
        self.assertExpectedInline(
            text,
            """\
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: bool[64] = aten.lt.Scalar(%2, 32.0)
%4: float32[64] = prims.convert_element_type.default(%2, float32)
%5: float32[64] = aten.mul.Tensor(%4, 1.0)
%6: float32[64] = aten.add.Tensor(%5, 0)
%7: int64[64] = aten.sub.Tensor(63, %2)
%8: float32[64] = prims.convert_element_type.default(%7, float32)
%9: float32[64] = aten.mul.Tensor(%8, 1.0)
%10: float32[64] = aten.sub.Tensor(63, %9)
%11: float32[64] = aten.where.self(%3, %6, %10)
%12: float32[64, 1] = aten.view.default(%11, [64, 1])
%13: float32[64, 4] = aten.mul.Tensor(%12, %0)
%14: float32[64, 4] = aten.cos.default(%13)
%15: float32[5, 4] = aten.index.Tensor(%14, [%1])
return [%15]""",
        )

    def test_left_not_bit_stable(self):
        def forward(model, p):
            return angles(model).cos().sigmoid()[p]

        text = self.left("not_bit_stable", forward, POSITIONS)
        self.assertExpectedInline(
            text,
            """\
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: float32[64, 1] = aten.view.default(%5, [64, 1])
%7: float32[64, 4] = aten.mul.Tensor(%6, %0)
%8: float32[64, 4] = aten.cos.default(%7)
%9: float32[64, 4] = aten.sigmoid.default(%8)
%10: float32[5, 4] = aten.index.Tensor(%9, [%1])
return [%10]""",
        )

    def test_left_two_axes(self):
        def forward(model, p):
            f = angles(model)
            return (f.cos()[:, None] + f.cos()[None])[p]

        text = self.left("two_axes", forward, POSITIONS)
        self.assertExpectedInline(
            text,
            """\
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: float32[64, 1] = aten.view.default(%5, [64, 1])
%7: float32[64, 4] = aten.mul.Tensor(%6, %0)
%8: float32[64, 4] = aten.cos.default(%7)
%9: float32[64, 1, 4] = aten.unsqueeze.default(%8, 1)
%10: float32[64, 4] = aten.cos.default(%7)
%11: float32[1, 64, 4] = aten.unsqueeze.default(%10, 0)
%12: float32[64, 64, 4] = aten.add.Tensor(%9, %11)
%13: float32[5, 64, 4] = aten.index.Tensor(%12, [%1])
return [%13]""",
        )

    def test_left_rows_merged(self):
        def forward(model, p):
            return angles(model).cos().view(8, 8, 4)[p % 8]

        text = self.left("rows_merged", forward, POSITIONS)
        self.assertExpectedInline(
            text,
            """\
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: float32[64, 1] = aten.view.default(%5, [64, 1])
%7: float32[64, 4] = aten.mul.Tensor(%6, %0)
%8: float32[64, 4] = aten.cos.default(%7)
%9: float32[8, 8, 4] = aten.view.default(%8, [8, 8, 4])
%10: int64[5] = aten.remainder.Scalar(%1, 8)
%11: float32[5, 8, 4] = aten.index.Tensor(%9, [%10])
return [%11]""",
        )

    def test_left_rows_joined(self):
        def forward(model, p):
            out = torch.zeros(66, 4)
            out[1:65] = angles(model).cos()
            return out[p]

        text = self.left("rows_joined", forward, POSITIONS)
        self.assertExpectedInline(
            text,
            """\
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: float32[66, 4] = aten.full.default([66, 4], 0, device=cpu, dtype=float32, layout=strided, pin_memory=False)
%3: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%4: int64[64] = aten.mul.Tensor(%3, 1)
%5: int64[64] = aten.add.Tensor(%4, 0)
%6: float32[64] = prims.convert_element_type.default(%5, float32)
%7: float32[64, 1] = aten.view.default(%6, [64, 1])
%8: float32[64, 4] = aten.mul.Tensor(%7, %0)
%9: float32[64, 4] = aten.cos.default(%8)
%10: float32[64, 4] = aten.slice.Tensor(%2, 0, 1, 65)
%11: float32[64, 4] = aten.copy.default(%10, %9)
%12: float32[66, 4] = aten.slice_scatter.default(%2, %11, 0, 1, 65)
%13: float32[5, 4] = aten.index.Tensor(%12, [%1])
return [%13]""",
        )

    def test_left_rows_reordered(self):
        def forward(model, p):
            return table(model).flip(0)[p]

        text = self.left("rows_reordered", forward, POSITIONS)
        self.assertExpectedInline(
            text,
            """\
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: float32[64, 1] = aten.view.default(%5, [64, 1])
%7: float32[64, 4] = aten.mul.Tensor(%6, %0)
%8: float32[64, 4] = aten.cos.default(%7)
%9: float32[64, 4] = aten.sin.default(%7)
%10: float32[64, 8] = aten.cat.default([%8, %9], -1)
%11: float32[64, 8] = prims.rev.default(%10, [0])
%12: float32[5, 8] = aten.index.Tensor(%11, [%1])
return [%12]""",
        )

    def test_left_rows_reduced(self):
        def forward(model, p):
            return table(model).mean(0) + p.sum()

        text = self.left("rows_reduced", forward, POSITIONS)
        self.assertExpectedInline(
            text,
            """\
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: float32[64, 1] = aten.view.default(%5, [64, 1])
%7: float32[64, 4] = aten.mul.Tensor(%6, %0)
%8: float32[64, 4] = aten.cos.default(%7)
%9: float32[64, 4] = aten.sin.default(%7)
%10: float32[64, 8] = aten.cat.default([%8, %9], -1)
%11: float32[8] = aten.mean.dim(%10, [0])
%12: int64[] = aten.sum.default(%1)
%13: float32[8] = aten.add.Tensor(%11, %12)
return [%13]""",
        )

    def test_left_whole_table(self):
        def forward(model, p, x):
            return angles(model).cos() * x

        text = self.left("whole_table", forward, POSITIONS, torch.ones(64, 4))
        self.assertExpectedInline(
            text,
            """\
%0: float32[4] = placeholder
%1: float32[64, 4] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: float32[64, 1] = aten.view.default(%5, [64, 1])
%7: float32[64, 4] = aten.mul.Tensor(%6, %0)
%8: float32[64, 4] = aten.cos.default(%7)
%9: float32[64, 4] = aten.mul.Tensor(%8, %1)
return [%9]""",
        )

    def test_left_past_bound(self):
        def forward(model, p):
            whole = table(model)
            return whole[-1] * 2 + whole[p]

        text = self.left("past_bound", forward, POSITIONS)
        self.assertExpectedInline(
            text,
            """\
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: float32[64, 1] = aten.view.default(%5, [64, 1])
%7: float32[64, 4] = aten.mul.Tensor(%6, %0)
%8: float32[64, 4] = aten.cos.default(%7)
%9: float32[64, 4] = aten.sin.default(%7)
%10: float32[64, 8] = aten.cat.default([%8, %9], -1)
%11: float32[8] = aten.select.int(%10, 0, -1)
%12: float32[8] = aten.mul.Tensor(%11, 2)
%13: float32[5, 8] = aten.index.Tensor(%10, [%1])
%14: float32[5, 8] = aten.add.Tensor(%12, %13)
return [%14]""",
        )

    def test_left_escapes(self):
        def forward(model, p):
            return table(model)

        text = self.left("escapes", forward, POSITIONS)
        self.assertExpectedInline(
            text,
            """\
%0: float32[4] = placeholder
%1: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%2: int64[64] = aten.mul.Tensor(%1, 1)
%3: int64[64] = aten.add.Tensor(%2, 0)
%4: float32[64] = prims.convert_element_type.default(%3, float32)
%5: float32[64, 1] = aten.view.default(%4, [64, 1])
%6: float32[64, 4] = aten.mul.Tensor(%5, %0)
%7: float32[64, 4] = aten.cos.default(%6)
%8: float32[64, 4] = aten.sin.default(%6)
%9: float32[64, 8] = aten.cat.default([%7, %8], -1)
return [%9]""",
        )

    def test_left_opaque_reader(self):
        def forward(model, p):
            return torch.ops.ropetest.read(p, table(model))

        text = self.left("opaque_reader", forward, POSITIONS)
        self.assertExpectedInline(
            text,
            """\
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: float32[64, 1] = aten.view.default(%5, [64, 1])
%7: float32[64, 4] = aten.mul.Tensor(%6, %0)
%8: float32[64, 4] = aten.cos.default(%7)
%9: float32[64, 4] = aten.sin.default(%7)
%10: float32[64, 8] = aten.cat.default([%8, %9], -1)
%11: float32[5, 8] = ropetest.read.default(%1, %10)
return [%11]""",
        )

    def test_left_reader_shape(self):
        def forward(model, p):
            return torch.ops.ropetest.double(table(model))

        text = self.left("reader_shape", forward, POSITIONS, opaque_readers=True)
        self.assertExpectedInline(
            text,
            """\
%0: float32[4] = placeholder
%1: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%2: int64[64] = aten.mul.Tensor(%1, 1)
%3: int64[64] = aten.add.Tensor(%2, 0)
%4: float32[64] = prims.convert_element_type.default(%3, float32)
%5: float32[64, 1] = aten.view.default(%4, [64, 1])
%6: float32[64, 4] = aten.mul.Tensor(%5, %0)
%7: float32[64, 4] = aten.cos.default(%6)
%8: float32[64, 4] = aten.sin.default(%6)
%9: float32[64, 8] = aten.cat.default([%7, %8], -1)
%10: float32[64, 8] = ropetest.double.default(%9)
return [%10]""",
        )

    def test_left_unknown_op(self):
        def forward(model, p):
            return torch.lgamma(angles(model).cos())[p]

        text = self.left("unknown_op", forward, POSITIONS)
        self.assertExpectedInline(
            text,
            """\
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: float32[64, 1] = aten.view.default(%5, [64, 1])
%7: float32[64, 4] = aten.mul.Tensor(%6, %0)
%8: float32[64, 4] = aten.cos.default(%7)
%9: float32[64, 4] = aten.lgamma.default(%8)
%10: float32[5, 4] = aten.index.Tensor(%9, [%1])
return [%10]""",
        )

    def test_left_shared(self):
        def forward(model, p):
            a, b = angles(model).cos(), torch.outer(torch.arange(64) + 1.0, model.inv).sin()
            return (a + b)[p], b

        text = self.left("shared", forward, POSITIONS)
        self.assertExpectedInline(
            text,
            """\
%0: float32[4] = placeholder
%1: int64[5] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: float32[64, 1] = aten.view.default(%5, [64, 1])
%7: float32[64, 4] = aten.mul.Tensor(%6, %0)
%8: float32[64, 4] = aten.cos.default(%7)
%9: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%10: float32[64] = aten.add.Tensor(%9, 1.0)
%11: float32[64, 1] = aten.view.default(%10, [64, 1])
%12: float32[64, 4] = aten.mul.Tensor(%11, %0)
%13: float32[64, 4] = aten.sin.default(%12)
%14: float32[64, 4] = aten.add.Tensor(%8, %13)
%15: float32[5, 4] = aten.index.Tensor(%14, [%1])
return [%15, %13]""",
        )

    def test_left_cost(self):
        def forward(model, p):
            return table(model)[p]

        text = self.left("cost", forward, torch.arange(65) % 16)
        self.assertExpectedInline(
            text,
            """\
%0: float32[4] = placeholder
%1: int64[65] = placeholder
%2: int64[64] = prims.iota.default(64, device=cpu, dtype=int64, requires_grad=False, start=0, step=1)
%3: int64[64] = aten.mul.Tensor(%2, 1)
%4: int64[64] = aten.add.Tensor(%3, 0)
%5: float32[64] = prims.convert_element_type.default(%4, float32)
%6: float32[64, 1] = aten.view.default(%5, [64, 1])
%7: float32[64, 4] = aten.mul.Tensor(%6, %0)
%8: float32[64, 4] = aten.cos.default(%7)
%9: float32[64, 4] = aten.sin.default(%7)
%10: float32[64, 8] = aten.cat.default([%8, %9], -1)
%11: float32[65, 8] = aten.index.Tensor(%10, [%1])
return [%11]""",
        )
