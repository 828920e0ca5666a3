"""Every form of ``tests/forms`` ends as ``outcomes.txt`` says, computes what eager computes, and is never silent.

``EXPECTTEST_ACCEPT=1 pytest tests/test_passes_forms.py`` rewrites the table.
"""

import os
import pathlib
import sys

import pytest
import torch
from passes_helpers import compiled

import rope_ops
from rope_ops.passes.rows import value_of

FOLDER = pathlib.Path(__file__).parent / "forms"
sys.path.insert(0, str(FOLDER))
import forms  # noqa: E402

ROWS, ROTARY_DIM, BOUND = 256, 16, 100
OUTCOMES = FOLDER / "outcomes.txt"
ACCEPT = bool(os.environ.get("EXPECTTEST_ACCEPT"))

for _form in forms.REG.values():
    rope_ops.sequence_bounded_mrope(_form)


def expected():
    lines = [line for line in OUTCOMES.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("  ", 1) for line in lines)


def summary(report):
    def one(table):
        if table.reason is not None:
            return f"left {table.reason}"
        return f"{table.outcome} {table.rows_before} -> {table.rows_after}"

    return ", ".join(sorted({one(table) for table in report.tables})) or "no table: " + report.notes[0].split(":")[0]


@pytest.mark.parametrize("name", forms.REG)
def test_form(name):
    cls = forms.REG[name]
    torch.manual_seed(0)
    wanted = cls(ROWS, ROTARY_DIM)(*forms.make_inputs(cls, ROWS, ROTARY_DIM))
    torch.manual_seed(0)
    model = cls(ROWS, ROTARY_DIM)
    function, report, spy = compiled(model, BOUND, fullgraph=False, opaque_readers=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        results = function(*forms.make_inputs(cls, ROWS, ROTARY_DIM))
    wanted, results = (value if isinstance(value, tuple) else (value,) for value in (wanted, results))
    assert all(torch.equal(result, right) for result, right in zip(results, wanted, strict=True))
    assert report.tables or report.notes
    rewritten = [table for table in report.tables if table.reason is None]
    assert all(isinstance(table.rows_after, int) and table.rows_after <= BOUND for table in rewritten)
    if rewritten and all(table.reason in (None, "within_bound") for table in report.tables):
        # Nothing of the table's size is left but one-dimensional ranges.
        values = [value_of(node) for graph in spy.graphs for node in graph.nodes]
        tables = [v for v in values if isinstance(v, torch.Tensor) and v.dim() > 1]
        assert not [v.shape for v in tables if v.dtype not in (torch.int64, torch.bool) and max(v.shape) >= ROWS]
    if ACCEPT:
        _accepted[name] = summary(report)
        if len(_accepted) == len(forms.REG):
            head = OUTCOMES.read_text().split("\n\n", 1)[0]
            OUTCOMES.write_text(head + "\n\n" + "".join(f"{form}  {text}\n" for form, text in _accepted.items()))
    else:
        assert summary(report) == expected()[name]


_accepted: dict[str, str] = {}


def test_at_least_45_forms_are_rewritten():
    table = expected()
    assert list(table) == list(forms.REG) and len(table) == 87
    done = [form for form, text in table.items() if any(word in text for word in ("rows ", "bounded ", "shortened "))]
    assert len(done) >= 45, len(done)
