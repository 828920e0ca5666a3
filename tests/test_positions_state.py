"""RopeState and get_rope_state: what a serving engine does with them, step by step."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from position_batches import prompt_segments

from rope_ops import reference
from rope_ops.positions import (
    PositionVariant,
    RopeState,
    SegmentBuilder,
    Segments,
    SupportsMRoPE,
    get_rope_state,
    position_variant,
)

R42 = torch.tensor([[0, 1, 2, 2, 2, 2, 4, 5, 6, 7], [0, 1, 2, 2, 3, 3, 4, 5, 6, 7], [0, 1, 2, 3, 2, 3, 4, 5, 6, 7]])
STORES = ("segments", "dense")


def make(store="segments", **options):
    defaults = {"num_dims": 3, "max_num_reqs": 4, "max_num_tokens": 16, "max_model_len": 32, "device": "cpu"}
    return RopeState(**(defaults | options), store=store)


def step(state, slots, tokens, computed, prefill_lens, padded=None):
    """One step with per-slot dictionaries; the filled columns."""
    slot_values = lambda values: torch.tensor([values.get(slot, 0) for slot in range(state.max_num_reqs)])  # noqa: E731
    starts = torch.tensor([0, *tokens]).cumsum(0)
    state.prepare_positions(
        torch.tensor(slots), starts, slot_values(prefill_lens), slot_values(computed), num_tokens_padded=padded
    )
    return state.get_positions(padded if padded is not None else int(starts[-1]))


@pytest.mark.parametrize("store", STORES)
def test_r42_through_the_state(store):
    state = make(store)
    state.set_prefill_positions(2, R42, -2)
    state.apply_staged_writes()
    for done, tokens in ((0, 4), (4, 4), (8, 2)):
        got = step(state, [2, 0], [tokens, 1], {0: 7, 2: done}, {0: 3, 2: 10})
        assert torch.equal(got, torch.cat((R42[:, done : done + tokens], torch.full((3, 1), 7)), dim=1))
    assert step(state, [0, 2], [1, 2], {0: 7, 2: 10}, {0: 3, 2: 10}).tolist() == [[7, 8, 9]] * 3


@pytest.mark.parametrize("store", STORES)
def test_r43_restaged_after_pruning(store):
    """Prompt tokens 3 and 4 pruned after four are computed: the delta is new before the next step."""
    state = make(store)
    state.set_prefill_positions(1, R42, -2)
    assert step(state, [1], [4], {}, {1: 10}).tolist() == R42[:, :4].tolist()
    read = state.read_prefill_positions(1, 10)
    assert torch.equal(read, R42) and read.dtype == torch.int64
    kept = read[:, [0, 1, 2, 5, 6, 7, 8, 9]]
    state.update_prefill_positions(1, kept, int(kept.max()) + 1 - 8)
    # Before anything is applied, what was staged is what is read.
    assert torch.equal(state.read_prefill_positions(1, 8), kept)
    assert step(state, [1], [4], {1: 4}, {1: 8}).tolist() == kept[:, 4:].tolist()
    assert step(state, [1], [2], {1: 8}, {1: 8}).tolist() == [[8, 9]] * 3
    # The engine still counts the old length: columns past the new one are computed, not read.
    assert step(state, [1], [2], {1: 8}, {1: 10}).tolist() == [[8, 9]] * 3
    with pytest.raises(ValueError, match="from 0 to the 8 tokens stored for slot 1, got 9"):
        state.read_prefill_positions(1, 9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), num_dims=st.sampled_from([3, 4]))
def test_stores_are_interchangeable(seed, num_dims):
    """A random life of requests in both stores and in the reference: arrivals, updates, removals, mixed steps."""
    rng = np.random.default_rng(seed)
    slots, longest = 5, 900
    # A small first store, so that it grows and its free ranges are reused.
    states = {
        "segments": make(
            num_dims=num_dims, max_num_reqs=slots, max_num_tokens=200, max_model_len=longest, store_words=64
        ),
        "dense": make("dense", num_dims=num_dims, max_num_reqs=slots, max_num_tokens=200, max_model_len=longest),
    }
    table = torch.full((slots * num_dims, longest), 10**9, dtype=torch.int32)
    delta, lens = torch.zeros(slots, dtype=torch.int32), torch.zeros(slots, dtype=torch.int32)
    for event in range(8):
        slot = int(rng.integers(slots))
        if rng.random() < 0.25:
            delta[slot] = lens[slot] = 0
            for state in states.values():
                state.remove_request(slot)
        else:
            segments = prompt_segments(seed + event, num_dims)
            dense = segments.to_dense() if rng.random() < 0.7 else rng.integers(0, 99, (num_dims, 40))
            shift = min(0, int(dense.max()) + 1 - dense.shape[1])
            for state in states.values():
                state.set_prefill_positions(slot, torch.from_numpy(dense) if event % 2 else dense, shift)
            table[slot * num_dims : (slot + 1) * num_dims, : dense.shape[1]] = torch.from_numpy(dense)
            delta[slot], lens[slot] = shift, dense.shape[1]
        tokens = torch.from_numpy(rng.integers(0, 30, slots))
        batch = (
            torch.from_numpy(rng.permutation(slots)),
            torch.cat((torch.zeros(1, dtype=torch.int64), tokens.cumsum(0))),
            lens.clone(),
            torch.from_numpy(rng.integers(0, 1 + lens.numpy())),
        )
        want = torch.full((num_dims, 200), 10**9)
        reference.prepare_positions(want, table, delta, *batch, num_tokens_padded=180)
        for state in states.values():
            state.prepare_positions(*batch, num_tokens_padded=180)
            assert torch.equal(state.get_positions(180), want[:, :180])
    for slot in range(slots):
        for state in states.values():
            if lens[slot]:
                stored = state.read_prefill_positions(slot, int(lens[slot]))
                assert torch.equal(stored, table.view(slots, num_dims, -1)[slot, :, : lens[slot]].long())


def test_what_a_prefill_costs():
    """Grids take segments, noise takes a dense array, and the whole state is small beside a dense table."""
    state = make(max_num_reqs=2, max_model_len=262_144)
    builder = SegmentBuilder(3)
    for _ in range(64):
        builder.text(64, builder.length)
        builder.grid((64, 63), (builder.length,) * 3, ((0, 0, 1), (0, 1, 0)))
    segments = builder.build()
    state.set_prefill_positions(0, segments, segments.delta if segments.delta < 0 else 0)
    noise = np.random.default_rng(0).integers(0, 100, (3, 50))
    state.set_prefill_positions(1, noise, 0)
    assert (state.used_bytes(0), state.used_bytes(1)) == (128 * 60, 4 * 3 * 50)
    state.apply_staged_writes()
    assert (state.used_bytes(0), state.used_bytes(1)) == (128 * 60, 4 * 3 * 50)
    state.remove_request(0)
    assert state.used_bytes(0) == 0
    big = RopeState(3, 1024, 16, 262_144, "meta")
    dense_bytes = 4 * 3 * 262_144 * 1024
    assert big.nbytes < dense_bytes / 150


def test_a_removed_slot_holds_plain_positions():
    state = make()
    state.set_prefill_positions(1, R42, -2)
    assert step(state, [1], [3], {1: 9}, {1: 10}).tolist() == [[7, 8, 9]] * 3
    state.remove_request(1)
    assert step(state, [1], [3], {1: 2}, {1: 10}).tolist() == [[2, 3, 4]] * 3


def test_staged_positions_are_a_copy():
    state = make()
    for slot, positions in enumerate((R42.clone(), R42.numpy().copy(), R42.to(torch.int32))):
        state.set_prefill_positions(slot, positions, 0)
        positions[:] = 77
    noise = np.arange(30).reshape(3, 10) ** 2 % 11
    kept = noise.copy()
    state.set_prefill_positions(3, noise, 0)
    noise[:] = 77
    for slot in range(3):
        assert torch.equal(state.read_prefill_positions(slot, 10), R42)
    got = step(state, [3], [10], {}, {3: 10})
    assert torch.equal(got, torch.from_numpy(kept))
    read = state.read_prefill_positions(0, 10)
    read[:] = 5
    assert torch.equal(state.read_prefill_positions(0, 10), R42)


def test_the_store_grows_and_keeps_what_it_holds():
    state = make(store_words=8)
    for slot in range(3):
        state.set_prefill_positions(slot, R42 + slot, 0)
        state.apply_staged_writes()
    got = step(state, [0, 1, 2], [5, 5, 5], {}, {0: 10, 1: 10, 2: 10})
    assert torch.equal(got, torch.cat([R42[:, :5] + slot for slot in range(3)], dim=1))


def test_the_store_does_not_grow_under_a_captured_graph():
    state = make(store_words=8)
    state._store.captured = True
    state.set_prefill_positions(0, R42, 0)
    with pytest.raises(RuntimeError, match="store of 8 words is full and cannot grow.*Give a larger store_words"):
        state.apply_staged_writes()


def test_freed_words_are_used_again():
    state = make(store_words=100)
    before = state.nbytes
    for round_ in range(50):
        for slot in range(2):
            state.set_prefill_positions(slot, R42 + round_, 0)
        state.apply_staged_writes()
        if round_ % 3 == 0:
            state.remove_request(round_ % 2)
    assert state.nbytes == before


def test_padding_is_zero_before_anything_is_written():
    assert not make().get_positions(16).any()
    state = make()
    state.set_prefill_positions(0, R42, -2)
    assert step(state, [0], [2], {0: 10}, {0: 10}, padded=4).tolist() == [[8, 9, 0, 0]] * 3


class Model:
    def get_mrope_input_positions(self, prefill_token_ids, mm_features):
        assert mm_features == "features"
        return R42[:, : len(prefill_token_ids)], -2

    def get_xdrope_input_positions(self, prefill_token_ids, mm_features):
        return Segments.from_dense(np.stack((np.arange(len(prefill_token_ids)),) * 4))


def test_the_model_is_asked_for_its_positions():
    state = make()
    state.init_prefill_positions(3, Model(), list(range(10)), "features")
    assert torch.equal(state.read_prefill_positions(3, 10), R42)
    assert step(state, [3], [1], {3: 10}, {3: 10}).tolist() == [[8]] * 3
    state = make(num_dims=4, has_delta=False)
    state.init_prefill_positions(3, Model(), list(range(10)), "features")
    assert step(state, [3], [2], {3: 9}, {3: 10}).tolist() == [[9, 10]] * 4


def test_without_delta_none_is_staged():
    state = make(has_delta=False)
    with pytest.raises(ValueError, match=r"set_prefill_positions: delta must be 0 .*has_delta=False\), got -2"):
        state.set_prefill_positions(0, R42, -2)
    # Whatever is in the delta's memory stays: nothing is copied over it.
    state._store.delta.fill_(5)
    state.set_prefill_positions(0, R42, 0)
    state.apply_staged_writes()
    assert state._store.delta.tolist() == [5] * 4


def test_r29_lengths_and_positions_are_bounded():
    """15 computed + 1 is the last token of 16; 15 + 2 and 16 + 1 are refused, as is a prefill that leaves the table."""
    state = make(max_model_len=16, cache_max_position=16)
    assert step(state, [0], [1], {0: 15}, {}).tolist() == [[15]] * 3
    for computed, tokens in ((15, 2), (16, 1)):
        with pytest.raises(ValueError, match="within max_model_len 16 tokens, got one that reaches 17"):
            step(state, [0], [tokens], {0: computed}, {})
    with pytest.raises(ValueError, match="num_computed_tokens must not be negative"):
        step(state, [0], [1], {0: -1}, {})
    state.set_prefill_positions(0, R42, 0)
    with pytest.raises(ValueError, match="delta 1, which takes token 15 to position 16"):
        state.set_prefill_positions(0, R42, 1)
    with pytest.raises(ValueError, match="below cache_max_position 16, got position 16 in the prefill"):
        state.set_prefill_positions(0, R42 + 9, -2)
    # A wider table takes both.
    make(max_model_len=16, cache_max_position=17).set_prefill_positions(0, R42 + 9, 1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((4, R42, 0), ValueError, "req_idx must be a slot from 0 to 3, got 4"),
        ((-1, R42, 0), ValueError, "req_idx must be a slot from 0 to 3, got -1"),
        ((0, R42[:2], 0), ValueError, r"3 axes \[num_dims, length\], got 2"),
        ((0, R42[0], 0), ValueError, r"2-D \[num_dims, length\], got shape \[10\]"),
        ((0, R42.float(), 0), TypeError, "must be integers, got float32"),
        ((0, R42 - 1, 0), ValueError, "got -1 to 6"),
        ((0, torch.zeros(3, 33, dtype=torch.int64), 0), ValueError, "at most max_model_len 32 long, got 33"),
        ((0, R42, -11), ValueError, "at 0 or above, got -11 for 10 tokens"),
        ((0, R42, 0.5), ValueError, "delta must be an integer, got 0.5"),
    ],
)
def test_prefills_that_are_refused(arguments, error, message):
    state = make()
    with pytest.raises(error, match=message):
        state.set_prefill_positions(*arguments)
    assert not state._store.has_staged_writes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_reqs": 0}, "max_num_reqs must be a positive integer, got 0"),
        ({"max_num_tokens": True}, "max_num_tokens must be a positive integer, got True"),
        ({"cache_max_position": 0}, "cache_max_position must be a positive integer, got 0"),
        ({"store": "sparse"}, "store must be one of 'segments', 'dense', got 'sparse'"),
        ({"store": "dense", "store_words": 9}, "store_words sizes the segment store"),
    ],
)
def test_states_that_are_refused(options, message):
    with pytest.raises(ValueError, match="RopeState: " + message):
        make(**options)


def test_other_errors_of_the_state():
    state = make()
    with pytest.raises(ValueError, match="slot 0 must hold positions, it holds none"):
        state.update_prefill_positions(0, R42, 0)
    with pytest.raises(ValueError, match="num_tokens must be from 0 to max_num_tokens 16, got 17"):
        state.get_positions(17)
    with pytest.raises(ValueError, match="num_tokens_padded must be at most max_num_tokens 16, got 17"):
        step(state, [0], [1], {}, {}, padded=17)
    assert state.read_prefill_positions(0, 0).shape == (3, 0)


def test_r32_the_spare_column():
    """Views of the buffer compile once for all lengths; a full view of a buffer without the column ties its stride."""
    from torch._dynamo.testing import CompileCounter

    def frames(buffer, lengths):
        counter = CompileCounter()
        torch._dynamo.reset()
        compiled = torch.compile(lambda positions: positions.to(torch.float32) * 2, backend=counter, fullgraph=True)
        for length in lengths:
            view = buffer[:, :length]
            torch._dynamo.mark_dynamic(view, 1)
            assert torch.equal(compiled(view), view.float() * 2)
        return counter.frame_count

    state = make()
    state.positions.random_(100)
    assert state.get_positions(16).stride() == (17, 1)
    assert frames(state.positions, (16, 3, 4, 7)) == 1
    assert frames(torch.randint(0, 9, (3, 16)), (16, 3, 4, 7)) == 2


SECTIONS = [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("config", "variant", "num_dims"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, PositionVariant.PLAIN, 1),
        ({"model_type": "llama", "rope_scaling": None}, PositionVariant.PLAIN, 1),
        ({"rope_type": "dynamic", "alpha": 1000.0}, PositionVariant.PLAIN, 1),
        ({"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]}, PositionVariant.MROPE, 3),
        ({"text_config": {"rope_parameters": {"mrope_section": [11, 11, 10]}}}, PositionVariant.MROPE, 3),
        ({"thinker_config": {"text_config": {"rope_scaling": {"mrope_section": [2, 2, 2]}}}}, PositionVariant.MROPE, 3),
        (
            {"rope_parameters": {"full": {"mrope_section": [2, 1, 1]}, "sliding": {"rope_theta": 1e4}}},
            PositionVariant.MROPE,
            3,
        ),
        # R28: the three forms of four sections.
        ({"type": "xdrope", "xdrope_section": SECTIONS}, PositionVariant.XDROPE, 4),
        ({"type": "dynamic", "alpha": 1000, "mrope_section": SECTIONS}, PositionVariant.XDROPE, 4),
        ({"type": "default", "mrope_section": SECTIONS}, PositionVariant.MROPE, 4),
        ({"type": "xdrope", "xdrope_section": [2, 1, 1]}, PositionVariant.XDROPE, 3),
    ],
)
def test_the_variant_of_a_config(config, variant, num_dims):
    assert position_variant(config) == (variant, num_dims)
    state = get_rope_state(config, Model(), 2, 8, 16, "cpu", store="dense")
    if variant is PositionVariant.PLAIN:
        assert state is None
    else:
        assert (state.num_dims, state.has_delta) == (num_dims, variant is PositionVariant.MROPE)
        assert state.max_model_len == 16
    # The same through objects with attributes, as configs are.
    as_object = type("Config", (), {"rope_parameters": config}) if "type" in config else None
    if as_object is not None:
        assert position_variant(type("Engine", (), {"hf_text_config": as_object})) == (variant, num_dims)


def test_plain_positions_ask_nothing_of_the_model():
    assert get_rope_state({"rope_type": "default"}, object(), 2, 8, 16, "cpu") is None


def test_a_model_without_its_interface_is_named():
    class OnlyMRoPE:
        def get_mrope_input_positions(self, prefill_token_ids, mm_features): ...

    class Neither: ...

    assert isinstance(OnlyMRoPE(), SupportsMRoPE)
    with pytest.raises(TypeError, match=r"xdrope .*SupportsXDRoPE, got .*OnlyMRoPE without get_xdrope_input_positions"):
        get_rope_state({"xdrope_section": SECTIONS}, OnlyMRoPE(), 2, 8, 16, "cpu")
    with pytest.raises(TypeError, match=r"mrope .*SupportsMRoPE, got .*Neither without get_mrope_input_positions"):
        get_rope_state({"mrope_section": [1, 1, 1]}, Neither(), 2, 8, 16, "cpu")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "xdrope"}, "'xdrope' needs mrope_section or xdrope_section"),
        ({"rope_type": "mrope"}, "'mrope' needs mrope_section or xdrope_section"),
        ({"mrope_interleaved": True}, "needs mrope_section or xdrope_section"),
        ({"mrope_section": []}, r"sections must be frequencies an axis, got \[\]"),
        ({"mrope_section": [8, -1, 1]}, r"sections must be frequencies an axis, got \[8, -1, 1\]"),
    ],
)
def test_sections_that_make_no_sense(config, message):
    with pytest.raises(ValueError, match="get_rope_state: .*" + message):
        position_variant(config)
