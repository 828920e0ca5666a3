"""`prepare_positions` on CPU: values, arguments, and its contract with torch.library and torch.compile."""

import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from position_batches import POISON, arguments, random_batch

from rope_ops import reference
from rope_ops.ops import prepare_positions

OP = torch.ops.rope_ops.prepare_positions


def expected(batch, **options):
    batch = arguments(batch)
    reference.prepare_positions(**batch, **options)
    return batch["positions"]


def filled(batch, **options):
    batch = arguments(batch)
    prepare_positions(**batch, **options)
    return batch["positions"]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_dims=st.sampled_from([1, 2, 3, 4]),
    num_reqs=st.integers(0, 8),
    longest=st.integers(0, 30),
    padding=st.sampled_from([None, 0, 2]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_equals_the_reference(seed, num_dims, num_reqs, longest, padding, dtype):
    """Random batches; the output is poisoned, so is all that must not be read."""
    batch = random_batch(seed, num_dims=num_dims, num_reqs=num_reqs, longest=longest, dtype=dtype)
    padded = None if padding is None else int(batch["query_start_loc"][-1]) + padding
    assert torch.equal(filled(batch, num_tokens_padded=padded), expected(batch, num_tokens_padded=padded))


def r42_batch(chunks, computed, order=(0,)):
    """R42's prompt in slot 2 beside a decode request in slot 0; `chunks` gives the tokens of each batch row."""
    table = torch.full((3 * 3, 16), POISON, dtype=torch.int32)
    table[6:9, :10] = torch.tensor(
        [[0, 1, 2, 2, 2, 2, 4, 5, 6, 7], [0, 1, 2, 2, 3, 3, 4, 5, 6, 7], [0, 1, 2, 3, 2, 3, 4, 5, 6, 7]]
    )
    table[0:3, :3] = torch.arange(3)
    starts = torch.tensor([0, *chunks]).cumsum(0)
    return {
        "positions": torch.full((3, 17), POISON),
        "prefill_positions": table,
        "prefill_delta": torch.tensor([0, 5, -2], dtype=torch.int32),
        "idx_mapping": torch.tensor(order),
        "query_start_loc": starts,
        "prefill_lens": torch.tensor([3, 0, 10]),
        "num_computed_tokens": torch.tensor(computed),
    }


def test_r42_chunks_and_decode():
    """Chunks of 4 + 4 + 2, then decode with the delta of the whole prompt; the order of the batch changes nothing."""
    whole = r42_batch([], [0, 0, 0])["prefill_positions"][6:9, :10].long()
    for done, tokens in ((0, 4), (4, 4), (8, 2)):
        got = filled(r42_batch([tokens, 1], [7, 0, done], order=(2, 0)))
        assert torch.equal(got[:, :tokens], whole[:, done : done + tokens])
        assert got[:, tokens].tolist() == [7, 7, 7]
        got = filled(r42_batch([1, tokens], [7, 0, done], order=(0, 2)))
        assert torch.equal(got[:, 1 : tokens + 1], whole[:, done : done + tokens])
    assert filled(r42_batch([2, 1], [7, 0, 10], order=(2, 0)))[:, :3].tolist() == [[8, 9, 7]] * 3


def test_a_chunk_crosses_the_end_of_its_prefill():
    """Tokens 8 and 9 are stored, 10 and 11 are computed: one chunk of four, as after speculation or preemption."""
    got = filled(r42_batch([4], [0, 0, 8], order=(2,)))
    assert got[:, :4].tolist() == [[6, 7, 8, 9]] * 3
    # A prefill longer than the table is wide: what lies outside the table is computed.
    batch = r42_batch([4], [0, 0, 14], order=(2,)) | {"prefill_lens": torch.tensor([3, 0, 99])}
    batch["prefill_positions"][6:9, 14:] = 1
    assert filled(batch)[:, :4].tolist() == [[1, 1, 14, 15]] * 3


def test_r28_four_axes_without_delta():
    table = torch.tensor([[5, 1], [6, 1], [7, 1], [8, 1]], dtype=torch.int32)
    one = torch.tensor([1])
    batch = {
        "positions": torch.full((4, 4), POISON),
        "prefill_positions": table,
        "prefill_delta": torch.zeros(1, dtype=torch.int32),
        "idx_mapping": torch.tensor([0]),
        "query_start_loc": torch.tensor([0, 3]),
        "prefill_lens": one,
        "num_computed_tokens": torch.tensor([0]),
    }
    assert filled(batch)[:, :3].tolist() == [[5, 1, 2], [6, 1, 2], [7, 1, 2], [8, 1, 2]]


def test_r30_padding_is_zero_and_replays_leave_nothing_stale():
    """Two real decodes padded to four; then one decode in the same buffer: no old position is left."""
    batch = r42_batch([1, 1], [9, 0, 12], order=(2, 0))
    out = batch["positions"]
    prepare_positions(**batch, num_tokens_padded=4)
    assert out[:, :4].tolist() == [[10, 9, 0, 0]] * 3
    assert (out[:, 4:] == POISON).all()
    batch |= {"query_start_loc": torch.tensor([0, 1, 1]), "idx_mapping": torch.tensor([0, -1])}
    prepare_positions(**batch, num_tokens_padded=4)
    assert out[:, :4].tolist() == [[9, 0, 0, 0]] * 3
    assert out[:, :4].max() < 16


def test_r48_sizes_at_the_edges():
    """No request, a request without tokens between two others, and 70,000 requests."""
    empty = random_batch(0, num_reqs=0, spare=4)
    assert (filled(empty, num_tokens_padded=2) == torch.tensor([0, 0, POISON, POISON])).all()
    assert torch.equal(filled(empty), empty["positions"])
    got = filled(r42_batch([1, 0, 2], [7, 0, 0], order=(0, 10**6, 2)))
    assert got[:, :4].tolist() == [[7, 0, 1, POISON]] * 3

    many = random_batch(1, num_reqs=70_000, num_slots=70_000, longest=2, width=4)
    rows = torch.repeat_interleave(torch.arange(70_000), many["query_start_loc"].long().diff())
    slots = many["idx_mapping"].long()[rows]
    index = many["num_computed_tokens"].long()[slots] + torch.arange(len(rows)) - many["query_start_loc"].long()[rows]
    stored = index < many["prefill_lens"].long().clamp(max=4)[slots]
    table = many["prefill_positions"].view(70_000, 3, 4).long()
    for dim in range(3):
        want = torch.where(stored, table[slots, dim, index.clamp(max=3)], index + many["prefill_delta"].long()[slots])
        assert torch.equal(filled(many)[dim, : len(rows)], want)


def test_strided_tensors():
    batch = random_batch(5, num_reqs=6, longest=20)
    want = expected(batch)
    strided = dict(batch)
    strided["prefill_positions"] = torch.stack((batch["prefill_positions"],) * 2, dim=-1)[..., 1]
    for name in ("idx_mapping", "query_start_loc", "prefill_lens", "num_computed_tokens", "prefill_delta"):
        strided[name] = torch.stack((batch[name], torch.full_like(batch[name], -7)), dim=-1)[:, 0]
    columns = want.shape[1]
    for out in (torch.full((columns, 3), POISON).t(), torch.full((3, 2 * columns), POISON)[:, ::2]):
        prepare_positions(**(strided | {"positions": out}))
        assert torch.equal(out, want)


BASE = random_batch(2, num_reqs=3, num_slots=4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"positions": torch.zeros(9, dtype=torch.int64)}, ValueError, r"positions must be 2-D .* shape \[9\]"),
        ({"positions": torch.zeros(9, 40, dtype=torch.int64)}, ValueError, "1 to 8 axes, got 9"),
        ({"positions": torch.zeros(3, 40, dtype=torch.int32)}, TypeError, "must be torch.int64, got torch.int32"),
        ({"positions": torch.zeros(3, 1).long().expand(3, 60)}, ValueError, "an element of its own"),
        ({"positions": torch.zeros(3, 1).long()}, ValueError, "more than the 1 columns"),
        ({"positions": torch.zeros(4, 40).long()}, ValueError, r"\[4 \* 4, width\], got shape \[12, 40\]"),
        ({"prefill_positions": BASE["prefill_positions"].long()}, TypeError, "prefill_positions must be torch.int32"),
        ({"prefill_positions": BASE["prefill_positions"].to("meta")}, ValueError, "on the device of positions, cpu"),
        ({"prefill_delta": torch.zeros(4)}, TypeError, "prefill_delta must be .*int32 or torch.int64, got .*float32"),
        ({"prefill_lens": torch.zeros(3, dtype=torch.int32)}, ValueError, r"prefill_lens .* \[4\] has, got \[3\]"),
        ({"idx_mapping": torch.zeros(1, 3).long()}, ValueError, r"idx_mapping must be 1-D, got shape \[1, 3\]"),
        ({"idx_mapping": torch.zeros(2).long()}, ValueError, r"one value more than idx_mapping \[2\], got \[4\]"),
        ({"idx_mapping": torch.tensor([0, 4, 1])}, ValueError, r"slots from 0 to 3, got \[0, 4, 1\]"),
        ({"query_start_loc": torch.tensor([0, 2, 1, 3])}, ValueError, r"never fall, got \[0, 2, 1, 3\]"),
        ({"query_start_loc": torch.tensor([1, 2, 3, 3])}, ValueError, "must start at 0"),
        ({"num_computed_tokens": torch.full((4,), -1)}, ValueError, "num_computed_tokens must not be negative"),
        ({"num_tokens_padded": -1}, ValueError, "num_tokens_padded must not be negative, got -1"),
        ({"num_tokens_padded": 99}, ValueError, "at most the columns of positions"),
        ({"num_tokens_padded": 1}, ValueError, "ends at 3 tokens, more than the 1 columns"),
        ({"prefill_index": torch.zeros(4, 4).long()}, ValueError, "flat 1-D store where prefill_index is given"),
        (
            {"prefill_index": torch.zeros(4, 3).long(), "prefill_positions": torch.zeros(9, dtype=torch.int32)},
            ValueError,
            r"\[4, 4\] \(offset, num_segments, row_stride, stored_len\), got shape \[4, 3\]",
        ),
        (
            {"prefill_index": torch.zeros(4, 4), "prefill_positions": torch.zeros(9, dtype=torch.int32)},
            TypeError,
            "prefill_index must be torch.int64",
        ),
    ],
)
def test_errors_say_what_must_hold(changes, error, message):
    batch = arguments(BASE) | {"idx_mapping": torch.tensor([0, 1, 2]), "query_start_loc": torch.tensor([0, 1, 2, 3])}
    before = batch["positions"].clone()
    with pytest.raises(error, match="prepare_positions: .*" + message):
        prepare_positions(**(batch | changes))
    assert torch.equal(batch["positions"], before)


@pytest.mark.parametrize("padded", [None, 30])
@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck(padded, transposed):
    batch = random_batch(4, num_reqs=3, spare=40)
    if transposed:
        batch["positions"] = batch["positions"].t().contiguous().t()
    torch.library.opcheck(OP.default, tuple(batch.values()), {"num_tokens_padded": padded})


def test_r36_meta_tensors_and_vmap():
    batch = random_batch(4, num_reqs=3)
    assert OP(*(tensor.to("meta") for tensor in batch.values())) is None

    two = [random_batch(4, num_reqs=3), random_batch(4, num_reqs=3)]
    two[1]["num_computed_tokens"] = two[1]["num_computed_tokens"] + 2
    out = torch.stack([batch["positions"] for batch in two], dim=1)
    computed = torch.stack([batch["num_computed_tokens"] for batch in two])

    def one(positions, computed):
        rest = {name: two[0][name] for name in batch if name not in ("positions", "num_computed_tokens")}
        prepare_positions(positions, **rest, num_computed_tokens=computed)
        return positions

    got = torch.vmap(one, in_dims=(1, 0))(out, computed)
    assert torch.equal(got, torch.stack([expected(batch) for batch in two]))
    with pytest.raises(ValueError, match="under vmap the positions it writes must be batched"):
        torch.vmap(one, in_dims=(None, 0))(out[:, 0], computed)


def step(positions, padded, *tensors):
    prepare_positions(positions, *tensors, num_tokens_padded=padded)
    return positions[:, :padded] * 2


@pytest.mark.compiles
def test_compiled_without_a_copy_of_the_buffer():
    """Functionalised on the way, re-inplaced by Inductor: the graph input itself is written, and nothing is cloned."""
    from torch._inductor.utils import run_and_get_code

    batch = random_batch(4, num_reqs=3, spare=40)
    positions, *tensors = arguments(batch).values()
    want = expected(batch, num_tokens_padded=32)
    torch._dynamo.reset()
    got, code = run_and_get_code(torch.compile(step, fullgraph=True), positions, 32, *tensors)
    assert torch.equal(positions, want)
    assert torch.equal(got, want[:, :32] * 2)
    (code,) = code
    assert "torch.ops.rope_ops.prepare_positions.default(arg" in code
    call = code.split("def call(")[1].split("runner =")[0]
    # The one allocation is the result's.
    assert re.findall(r"empty_strided_cpu\((.*), torch.int64\)", call) == ["(3, 32), (32, 1)"]
    assert "clone" not in call and "copy_" not in call


def test_r32_one_graph_for_all_lengths():
    """num_tokens_padded and the sizes are symbols, not constants."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for num_reqs, padded in ((5, 32), (4, 35), (6, 40)):
        batch = random_batch(4, num_reqs=num_reqs, longest=5, spare=40)
        positions, *tensors = arguments(batch).values()
        want = expected(batch, num_tokens_padded=padded)
        assert torch.equal(compiled(positions, padded, *tensors), want[:, :padded] * 2)
        assert torch.equal(positions, want)
    assert counter.frame_count == 1


def test_r47_works_without_triton_and_imports_none():
    code = """
import sys
sys.modules["triton"] = None
import torch
import rope_ops.positions as p
assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
state = p.RopeState(3, 2, 8, 8, "cpu")
state.set_prefill_positions(1, torch.arange(12).view(3, 4), -1)
one = torch.tensor
state.prepare_positions(one([1]), one([0, 3]), one([0, 4]), one([0, 2]))
assert state.get_positions(3).tolist() == [[2, 3, 3], [6, 7, 3], [10, 11, 3]], state.get_positions(3)
# What the dispatcher would run for CUDA tensors.
from rope_ops.ops import positions
try:
    positions._cuda(state.positions, torch.zeros(6, 4).int(), *map(one, ([0, 0], [0], [0, 1], [0, 0], [0, 0])))
except RuntimeError as error:
    assert "needs Triton, which cannot be imported (pip install triton)" in str(error), error
else:
    raise AssertionError("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
