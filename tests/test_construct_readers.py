"""Reads of a bounded buffer in a compiled graph that its fewer rows change are found and said."""

import pytest
import torch
from torch import nn

import rope_ops

LEGACY, BOUND = 512, 64


class Reader(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read = read
        angle = torch.outer(torch.arange(LEGACY).float(), 1e4 ** (torch.arange(0, 8, 2) / -8))
        self.register_buffer("table", torch.cat((angle.cos(), angle.sin()), -1))

    def forward(self, positions):
        return self.read(self.table, positions) * 2


def notes_of(read):
    cls = rope_ops.sequence_bounded_mrope(type("Model", (Reader,), {}))
    with rope_ops.sequence_bound(BOUND):
        model = cls(read)
    assert model.table.shape[0] == BOUND
    torch._dynamo.reset()
    report = rope_ops.explain(model, torch.arange(5))
    assert [str(table.outcome) for table in report.tables][:1] == ["bounded"]
    return [note for note in report.notes if "of 512 rows" in note]


@pytest.mark.parametrize(
    ("read", "problem"),
    [
        (lambda table, positions: table[:256], "a read of row 255 is past it"),
        (lambda table, positions: table.float()[10:65], "a read of row 64 is past it"),
        (lambda table, positions: table[-4:], "a read from its end finds other rows"),
        (lambda table, positions: table[-1], "a read from its end finds other rows"),
        (lambda table, positions: table.flip(0), "its flip() depends on the number of rows"),
    ],
    ids=["slice", "cast, then slice", "tail", "last row", "flip"],
)
def test_reads_that_fewer_rows_change_are_reported(read, problem):
    (note,) = notes_of(read)
    assert "table has 64 of 512 rows: " + problem in note and "test_construct_readers.py:" in note


@pytest.mark.parametrize(
    "read",
    [
        lambda table, positions: table[positions],
        lambda table, positions: table[:64],
        lambda table, positions: table[63],
        lambda table, positions: table[: positions.shape[0]],
        lambda table, positions: table[:, -4:],
        lambda table, positions: table.index_select(0, positions),
    ],
    ids=["gather", "all rows", "last row there is", "tokens", "columns", "index_select"],
)
def test_reads_within_the_bound_are_not(read):
    assert notes_of(read) == []
