"""Every public form of building a table, as a constructor: what becomes of it is committed in construct_outcomes.txt.

``python tests/test_construct_forms.py`` writes that table anew; read its difference before committing it.
"""

import pathlib

import pytest
import torch
from torch import nn

import rope_ops
from rope_ops.construct import sequence_bound
from rope_ops.passes.report import Outcome
from tests.construct_forms import FALSE, FORMS, VISION

OUTCOMES = pathlib.Path(__file__).with_name("construct_outcomes.txt")
ROWS, ROTARY_DIM, BOUND = 256, 16, 48


def model_of(name, certified=True):
    """A class whose constructor builds one form: in a submodule, ``visual`` for tables of image grids."""

    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            FORMS[name](self, ROWS, ROTARY_DIM)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            setattr(self, "visual" if name in VISION else "rotary", Rotary())

    return rope_ops.sequence_bounded_mrope(exclude=("visual",))(Model) if certified else Model


def tensors_of(model):
    """Every tensor of the submodule by name, those in lists and dictionaries included."""
    (module,) = model.children()
    found = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        found |= {f"{name}.{key}": item for key, item in items if isinstance(item, torch.Tensor)}
        if isinstance(value, torch.Tensor):
            found[name] = value
    return found


def is_rows_of(table, legacy, bound):
    """Whether a table is the first ``bound`` rows of the legacy one, along the one dimension in which they differ."""
    differing = [dim for dim in range(legacy.dim()) if table.shape[dim] != legacy.shape[dim]]
    if table.dim() != legacy.dim() or len(differing) != 1 or table.shape[differing[0]] != bound:
        return False
    return torch.equal(torch.view_as_real(table) if table.is_complex() else table, rows(legacy, differing[0], bound))


def rows(legacy, dim, bound):
    part = legacy.narrow(dim, 0, bound)
    return torch.view_as_real(part) if part.is_complex() else part


def outcome(name):
    """``bounded``, ``left (reason)`` ... of a form, after a check of every tensor; raises for a wrong or silent one."""
    legacy = model_of(name, certified=False)()
    with sequence_bound(BOUND) as report:
        model = model_of(name, certified=name not in FALSE)()
    made = {where: tensor for where, tensor in tensors_of(model).items()}
    changed = set()
    for where, before in tensors_of(legacy).items():
        after = made.pop(where)
        assert type(after) is type(before), f"{name} {where}: {type(after)}"
        assert after.dtype == before.dtype and after.requires_grad == before.requires_grad
        if after.shape == before.shape:
            assert torch.equal(after, before) or before.isnan().any(), f"{name} {where}: other values"
            assert after.stride() == before.stride(), f"{name} {where}: other strides"
        else:
            assert is_rows_of(after, before, BOUND), f"{name} {where}: {list(after.shape)} of {list(before.shape)}"
            changed.add(where)
    assert not made
    bounded = [table for table in report.tables if table.outcome is Outcome.BOUNDED]
    left = [table for table in report.tables if table.outcome is Outcome.LEFT]
    assert bool(bounded) == bool(changed), f"{name}: the report does not say what happened"
    if name in FALSE:
        assert not report.tables
        return "not certifiable"
    parts = ["bounded"] if bounded else []
    parts += sorted({f"left ({table.reason})" for table in left})
    return ", ".join(parts) or ("no long range" if name in VISION else "no table")


def lines():
    return [f"{name:5s} {outcome(name)}" for name in sorted(FORMS, key=lambda name: int(name[1:]))]


@pytest.mark.parametrize("name", sorted(FORMS))
def test_the_outcome_is_the_committed_one(name):
    committed = dict(line.split(None, 1) for line in OUTCOMES.read_text().splitlines())
    assert outcome(name) == committed[name]


def test_at_least_45_forms_are_bounded_and_each_other_one_says_why():
    committed = dict(line.split(None, 1) for line in OUTCOMES.read_text().splitlines())
    assert committed.keys() == FORMS.keys()
    assert sum(text.startswith("bounded") for text in committed.values()) >= 45
    known = ("bounded", "left (", "no table", "no long range", "not certifiable")
    assert all(text.startswith(known) for text in committed.values())


if __name__ == "__main__":
    OUTCOMES.write_text("\n".join(lines()) + "\n")
