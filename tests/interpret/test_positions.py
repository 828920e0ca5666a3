"""The position kernel in Triton's interpreter against the token-by-token reference."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))
from position_batches import POISON, arguments, prompt_segments, random_batch

from rope_ops import reference
from rope_ops.kernels import positions as kernels
from rope_ops.positions import RopeState, SegmentBuilder

BLOCK = 16


def expected(batch, **options):
    batch = arguments(batch)
    reference.prepare_positions(**batch, **options)
    return batch["positions"]


def launched(batch, num_tokens_padded=None, prefill_index=None, block=BLOCK):
    batch = arguments(batch)
    kernels.launch(*batch.values(), prefill_index=prefill_index, num_tokens_padded=num_tokens_padded, block=block)
    return batch["positions"]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_dims=st.sampled_from([1, 3, 4]),
    num_reqs=st.integers(0, 8),
    longest=st.sampled_from([1, 5, 70]),
    padding=st.sampled_from([None, 0, 2]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_dense_table(seed, num_dims, num_reqs, longest, padding, dtype):
    batch = random_batch(seed, num_dims=num_dims, num_reqs=num_reqs, longest=longest, width=90, dtype=dtype)
    padded = None if padding is None else int(batch["query_start_loc"][-1]) + padding
    assert torch.equal(launched(batch, padded), expected(batch, num_tokens_padded=padded))


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), num_dims=st.sampled_from([3, 4]), store_dense=st.booleans())
def test_stores(seed, num_dims, store_dense):
    """Segments, their dense fallback and the dense store, through chunks that cross segments and the prefill's end."""
    generator = torch.Generator().manual_seed(seed)
    state = RopeState(num_dims, 6, 400, 12_000, "cpu", store="dense" if store_dense else "segments")
    width = 12_000
    table = torch.full((6 * num_dims, width), POISON, dtype=torch.int32)
    lengths, deltas = [], []
    for slot in range(6):
        # Slot 0 has more segments than one round of the search looks at.
        blocks, largest = ((80, 5), (12, 4), (12, 7))[slot % 3]
        segments = prompt_segments(seed + slot, num_dims, blocks=blocks, largest=largest)
        if slot == 5:
            # Nothing regular about it: kept dense in either store.
            values = torch.randint(0, 500, (num_dims, 60), generator=generator)
            state.set_prefill_positions(slot, values, -3)
        else:
            values = torch.from_numpy(segments.to_dense())
            state.set_prefill_positions(slot, segments, segments.delta)
        table[slot * num_dims : (slot + 1) * num_dims, : values.shape[1]] = values
        lengths.append(values.shape[1])
        deltas.append(-3 if slot == 5 else segments.delta)
    state.apply_staged_writes()
    lengths = torch.tensor(lengths, dtype=torch.int32)
    order = torch.randperm(6, generator=generator).int()
    computed = (torch.rand(6, generator=generator) * (lengths + 3)).int()
    tokens = torch.randint(0, 65, (6,), generator=generator)
    batch = {
        "positions": torch.full((num_dims, 400), POISON),
        "prefill_positions": table,
        "prefill_delta": torch.tensor(deltas, dtype=torch.int32),
        "idx_mapping": order,
        "query_start_loc": torch.cat((torch.zeros(1), tokens.cumsum(0))).int(),
        "prefill_lens": lengths,
        "num_computed_tokens": computed,
    }
    want = expected(batch, num_tokens_padded=399)
    # The engine may count a longer prefill than was stored, as after pruning: what is not stored is computed.
    batch |= {"prefill_lens": lengths + 40}
    batch |= {"prefill_positions": state._store.words, "prefill_delta": state._store.delta}
    assert torch.equal(launched(batch, 399, state._store.index), want)


@pytest.mark.parametrize("num_reqs", [1, BLOCK, BLOCK + 1, BLOCK**2 + 1])
def test_search_over_many_requests(num_reqs):
    """Tiles find their request in one, two and three rounds; every token is written once."""
    batch = random_batch(3, num_dims=1, num_reqs=num_reqs, num_slots=num_reqs, longest=1, width=80)
    starts = batch["query_start_loc"].long()
    # One long request in the middle, so that tiles have work.
    starts[num_reqs // 2 + 1 :] += 70
    batch["idx_mapping"][num_reqs // 2] = 0
    batch |= {"query_start_loc": starts, "positions": torch.full((1, int(starts[-1]) + 1), POISON)}
    assert torch.equal(launched(batch), expected(batch))


def test_every_block_size_gives_the_same():
    batch = random_batch(11, num_reqs=6, longest=50, width=90)
    assert torch.equal(launched(batch, block=32), launched(batch, block=256))


def test_strided_buffers():
    """A transposed output, a sliced table and strided index tensors."""
    batch = random_batch(5, num_reqs=6, longest=40, width=90)
    want = expected(batch)
    strided = dict(batch)
    strided["prefill_positions"] = torch.stack((batch["prefill_positions"],) * 2, dim=-1)[..., 1]
    for name in ("idx_mapping", "query_start_loc", "prefill_lens", "num_computed_tokens", "prefill_delta"):
        strided[name] = torch.stack((batch[name], torch.full_like(batch[name], -7)), dim=-1)[:, 0]
    columns = batch["positions"].shape[1]
    strided["positions"] = torch.full((columns, 3), POISON).t()
    kernels.launch(*strided.values(), block=BLOCK)
    assert torch.equal(strided["positions"], want)


@pytest.mark.parametrize("num_segments", [BLOCK, BLOCK + 1, 83, 84, 90, BLOCK**2 + 3])
def test_the_search_ends_with_the_last_segment(num_segments):
    """What follows the starts in the store are counts, which a search one step too long would take for starts."""
    builder = SegmentBuilder(3)
    for _ in range(num_segments):
        builder.grid((3, 3), (builder.length,) * 3, ((0, 0, 1), (0, 1, 0)))
    segments = builder.build()
    state = RopeState(3, 1, 8, 3000, "cpu")
    state.set_prefill_positions(0, segments, 0)
    state.apply_staged_writes()
    assert state._store.index[0, 1] == num_segments
    one, length = torch.tensor, segments.length
    batch = (state._store.delta, one([0]), one([0, 2]), one([length]), one([length - 2]), state._store.index)
    out = torch.full((3, 2), POISON)
    kernels.launch(out, state._store.words, *batch, block=BLOCK)
    assert torch.equal(out, torch.from_numpy(segments.to_dense()[:, -2:]))


@pytest.mark.parametrize("slot", [-1, 4, 2**31 - 1])
def test_a_slot_that_does_not_exist(slot):
    """It is not looked up; its tokens get -1, the other requests are right."""
    batch = random_batch(5, num_reqs=2, num_slots=4)
    batch |= {"query_start_loc": torch.tensor([0, 2, 3]), "idx_mapping": torch.tensor([3, 3])}
    batch["positions"] = torch.full((3, 3), POISON)
    want = expected(batch)
    want[:, :2] = -1
    batch["idx_mapping"] = torch.tensor([slot, 3])
    assert torch.equal(launched(batch), want)


@pytest.mark.parametrize("limit", [0, 1, 17, 33])
def test_no_column_past_the_limit_is_written(limit):
    """More tokens than columns to write is the caller's mistake, which CUDA does not see: memory stays whole."""
    batch = random_batch(5, num_reqs=6, longest=40, width=90)
    assert int(batch["query_start_loc"][-1]) > 40
    want = expected(batch)
    want[:, limit:] = POISON
    assert torch.equal(launched(batch, num_tokens_padded=limit), want)


def test_negative_counts_read_nothing_before_the_store():
    state = RopeState(3, 1, 16, 64, "cpu")
    state.set_prefill_positions(0, torch.arange(60).view(3, 20), 0)
    state.apply_staged_writes()
    # The store lies between poison: a read before its first word would show in the segment that is found.
    words = torch.cat((torch.full((8,), -POISON, dtype=torch.int32), state._store.words))
    index = state._store.index + torch.tensor([8, 0, 0, 0])
    out = torch.full((3, 5), POISON)
    one = torch.tensor
    kernels.launch(out, words, state._store.delta, one([0]), one([0, 4]), one([20]), one([-2]), index, block=BLOCK)
    assert out.tolist() == [[-2, -1, 0, 1, POISON], [-2, -1, 20, 21, POISON], [-2, -1, 40, 41, POISON]]


def test_zeros_reach_their_columns_only():
    batch = random_batch(7, num_reqs=3, longest=5, spare=60)
    num_tokens = int(batch["query_start_loc"][-1])
    got = launched(batch, num_tokens + 40)
    assert (got[:, num_tokens : num_tokens + 40] == 0).all()
    assert (got[:, num_tokens + 40 :] == POISON).all()
