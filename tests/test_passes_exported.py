"""The pass on exported programs."""

import io

import pytest
import torch
from passes_helpers import BOUND, POSITIONS, ROWS, certified, outcomes, table

from rope_ops.certify import bind
from rope_ops.passes import Report, bound_exported
from rope_ops.passes.printer import canonical


def gather(self, positions):
    return table(self)[positions]


def test_a_strict_export_is_rewritten_into_plain_aten():
    model = bind(certified(gather), BOUND)
    tokens = torch.export.Dim("tokens", min=2, max=1000)
    program = torch.export.export(model, (POSITIONS,), dynamic_shapes=({0: tokens},), strict=True)
    before, report = canonical(program.graph), Report()
    bounded = bound_exported(program, report=report)
    assert outcomes(report) == [("rows", None)] and canonical(program.graph) == before
    assert "rope_ops" not in canonical(bounded.graph) and f"[{ROWS}, " not in canonical(bounded.graph)
    saved = io.BytesIO()
    torch.export.save(bounded, saved)
    saved.seek(0)
    loaded = torch.export.load(saved)
    for positions in (POSITIONS, torch.tensor([-1, 0, 15])):
        assert torch.equal(loaded.module()(positions), gather(model, positions))


def test_a_program_without_marks_is_not_rewritten_and_says_so():
    model = bind(certified(gather), BOUND)
    report = Report()
    program = bound_exported(torch.export.export(model, (POSITIONS,), strict=False), BOUND, report)
    assert all(outcome == "left" for outcome, _ in outcomes(report))
    assert report.notes == ["no certified class traced this graph: nothing is rewritten"]
    assert torch.equal(program.module()(POSITIONS), gather(model, POSITIONS))


def test_a_bad_bound_raises():
    program = torch.export.export(certified(gather), (POSITIONS,), strict=True)
    with pytest.raises(ValueError, match="max_model_len must be a positive integer, got 0"):
        bound_exported(program, 0)
    with pytest.raises(ValueError, match="nothing says how long its sequences are"):
        bound_exported(program)
