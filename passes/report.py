"""What the pass found and did: one record a table, the reasons for leaving one alone, the log and the counters."""

from __future__ import annotations

import dataclasses
import enum
import logging
import re
from collections.abc import Iterable

log = logging.getLogger("rope_ops")

# Said wherever a table of a model was bounded.
UNCHECKED_READS = "reads of bounded tables in Python, outside of compiled graphs, are not checked"


class Outcome(str, enum.Enum):
    """What became of a table."""

    ROWS = "rows"  # no table: the rows at the positions read
    BOUNDED = "bounded"  # a table of the bound's rows, for readers that need a table
    SHORTENED = "shortened"  # only the slice that is read
    LEFT = "left"  # exactly as it was; the reason says why

    __str__ = str.__str__


class Reason(str, enum.Enum):
    """Why a table was left exactly as it was."""

    # Found on Dynamo's graph.
    UNMARKED = "unmarked"  # no certified class traced it
    EXCLUDED = "excluded"  # the certificate leaves this submodule out
    WITHIN_BOUND = "within_bound"  # it has no more rows than the bound
    SYMBOLIC_LENGTH = "symbolic_length"  # its length is not a constant of the graph
    SHARED_BODY = "shared_body"  # one traced body stands for several modules
    MULTIMODAL_PRUNING = "multimodal_pruning"  # pruning is on: positions are not bounded by the tokens left
    NO_RANGE = "no_range"  # its angles do not come from a torch.arange of this graph
    # Found while a constructor ran.
    LOOKED_INSIDE = "looked_inside"  # the constructor needed its values
    HELD_OUTSIDE = "held_outside"  # a cache or registry outside the model holds it too
    NOT_SWAPPED = "not_swapped"  # something refers to it in a way that forbids to replace its content
    UNPROVEN = "unproven"  # its rows could not be computed from what its module holds
    NOT_POSITIONS = "not_positions"  # its range starts below 0 or does not count by 1
    NOT_A_TABLE = "not_a_table"  # a range of which no angles are made
    # Found by the row analysis.
    NOT_BIT_STABLE = "not_bit_stable"  # an operator whose last bits depend on the size of its operand
    TWO_AXES = "two_axes"  # an element depends on two rows of the range, as in a grid
    ROWS_MERGED = "rows_merged"  # the row dimension is part of a larger one where it is read
    ROWS_JOINED = "rows_joined"  # tables joined along their rows
    ROWS_REORDERED = "rows_reordered"  # flipped, rolled or sorted rows
    ROWS_REDUCED = "rows_reduced"  # a sum, maximum or product over rows
    WHOLE_TABLE = "whole_table"  # every row meets other data
    PAST_BOUND = "past_bound"  # a fixed read at or past the bound, as of the table's end
    ESCAPES = "escapes"  # it is an output of the graph or is stored
    TRAINABLE = "trainable"  # a gradient flows into it
    OPAQUE_READER = "opaque_reader"  # an operator whose reads are not known (opaque_readers=True vouches for them)
    READER_SHAPE = "reader_shape"  # the opaque reader's result depends on the number of rows
    UNKNOWN_OP = "unknown_op"  # an operator that the analysis does not know
    NOT_READ = "not_read"  # nothing of it is read
    SHARED = "shared"  # a table that had to be left needs this range too
    COST = "cost"  # the plain form is as fast or faster here

    __str__ = str.__str__


@dataclasses.dataclass(frozen=True)
class Table:
    """One table, from its range of positions to its readers.

    ``rows_after`` counts the rows that are computed, over all reads; a number, or the text of a symbolic size.
    ``bytes_before`` and ``bytes_after`` are those of the tensors that are read row by row: the tables before, the
    rows or shorter tables after. ``bytes_after`` is None where ``rows_after`` is symbolic.
    """

    outcome: Outcome
    reason: Reason | None
    rows_before: int | str
    rows_after: int | str
    bytes_before: int | None
    bytes_after: int | None
    location: str
    formula: str
    detail: str = ""


@dataclasses.dataclass
class Report:
    """The tables of one or several compiled graphs; ``str()`` is the printed form.

    ``graphs`` holds the text of each graph before and after, where ``keep_graphs`` asks for it (``explain`` does), and
    ``result`` what the model returned to ``explain``.
    """

    tables: list[Table] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    keep_graphs: bool = False
    graphs: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    result: object = None

    def add(self, tables: Iterable[Table]) -> None:
        for table in tables:
            self.tables.append(table)
            _count(table)
            log.info("%s", describe(table))

    def note(self, text: str) -> None:
        self.notes.append(text)
        log.info("%s", text)

    def __str__(self) -> str:
        lines = [describe(table) for table in self.tables] or ["rope_ops: no table found"]
        rewritten = sum(table.outcome is not Outcome.LEFT for table in self.tables)
        lines.append(f"rope_ops: {len(self.tables)} tables, {rewritten} rewritten, {len(self.tables) - rewritten} left")
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def describe(table: Table) -> str:
    """One line: where, what, how many rows and bytes became how many, and why not."""
    what = f"{table.outcome}" if table.reason is None else f"{table.outcome} ({table.reason})"
    rows, size = f"{table.rows_before}", _bytes(table.bytes_before)
    if table.outcome is not Outcome.LEFT:
        rows, size = f"{rows} -> {table.rows_after}", f"{size} -> {_bytes(table.bytes_after)}"
    detail = f"; {table.detail}" if table.detail else ""
    return f"{table.location}: {table.formula}: {what}, rows {rows}, bytes {size}{detail}"


def _bytes(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"


def location(stack_trace: str | None) -> str:
    """``file.py:line in function`` of the innermost frame of a traced node."""
    frames = re.findall(r'File "([^"]*)", line (\d+), in (\S+)', stack_trace or "")
    if not frames:
        return "unknown source"
    file, line, function = frames[-1]
    return f"{file}:{line} in {function}"


def _count(table: Table) -> None:
    from torch._dynamo.utils import counters

    counters["rope_ops"][str(table.outcome)] += 1
    if table.reason is not None:
        counters["rope_ops"][f"left: {table.reason}"] += 1
