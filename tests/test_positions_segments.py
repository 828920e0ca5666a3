"""Segments: exact against dense positions, compact, fast enough, and clear about what they refuse."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from position_batches import prompt_segments

from rope_ops.positions import SegmentBuilder, Segments


def prompt(blocks, num_dims=3):
    """Text as a number of tokens, a grid as (t, h, w), with the rule of Qwen2-VL."""
    builder, position = SegmentBuilder(num_dims), 0
    for block in blocks:
        if isinstance(block, int):
            builder.text(block, position)
            position += block
        else:
            t, h, w = block
            builder.grid((w, h, t), (position,) * 3, ((0, 0, 1), (0, 1, 0), (1, 0, 0)))
            position += max(block)
    return builder.build()


def written_out(blocks):
    """The same, one token after another."""
    rows, position = [], 0
    for block in blocks:
        if isinstance(block, int):
            rows += [(position + i,) * 3 for i in range(block)]
            position += block
        else:
            t, h, w = block
            rows += [(position + i, position + j, position + k) for i in range(t) for j in range(h) for k in range(w)]
            position += max(block)
    return np.array(rows, dtype=int).reshape(-1, 3).T


BLOCKS = {
    "text": [7],
    "r42": [2, (1, 2, 2), 4],
    "video": [3, (4, 3, 5), 2],
    "adjacent": [(1, 3, 4), (1, 3, 4), (2, 3, 4), 1],
    "narrow": [2, (1, 1, 6), 1, (1, 6, 1), 1, (5, 1, 1), 3, (1, 1, 1)],
    "empty": [],
}
# 64 images of 63 x 64 with 64 tokens of text around each: 262,144 tokens.
MANY_IMAGES = [64] + [block for _ in range(64) for block in ((1, 63, 64), 63)] + [0]


@pytest.mark.parametrize("name", BLOCKS)
def test_builder_and_encoder_give_every_token(name):
    want = written_out(BLOCKS[name])
    for segments in (prompt(BLOCKS[name]), Segments.from_dense(want)):
        assert np.array_equal(segments.to_dense(), want)
        assert segments.max_position == want.max(initial=-1)
        assert segments.delta == want.max(initial=-1) + 1 - want.shape[1]


def test_r42_delta():
    assert prompt(BLOCKS["r42"]).delta == -2


@settings(max_examples=300, deadline=None)
@given(
    arrays.arrays(
        np.int64,
        st.tuples(st.integers(1, 4), st.integers(0, 40)),
        elements=st.integers(0, 3) | st.sampled_from([2**31 - 1, 1000]),
    )
)
def test_encoder_is_exact_on_anything(positions):
    assert np.array_equal(Segments.from_dense(positions).to_dense(), positions)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), num_dims=st.sampled_from([3, 4]), largest=st.sampled_from([2, 4, 9]))
def test_encoder_is_exact_on_prompts(seed, num_dims, largest):
    direct = prompt_segments(seed, num_dims, blocks=8, largest=largest)
    found = Segments.from_dense(direct.to_dense())
    assert np.array_equal(found.to_dense(), direct.to_dense())


def test_encoder_finds_the_grids():
    """Text | image | text ...: the first token of an image goes to the image, though it continues the text."""
    segments = Segments.from_dense(written_out([5, (1, 3, 4), 6, (2, 3, 5), 1]))
    assert segments == prompt([5, (1, 3, 4), 6, (2, 3, 5), 1])
    assert segments.table[:3].tolist() == [[0, 5, 17, 23, 53], [5, 4, 6, 5, 1], [1, 3, 1, 3, 1]]


def test_size_and_time_of_a_long_prompt():
    """262,144 tokens, 64 images: at most 16 KiB; 1 ms from grids, 100 ms from a dense array."""

    def fastest(function, *args, repeat):
        times = []
        for _ in range(repeat):
            start = time.perf_counter()
            function(*args)
            times.append(time.perf_counter() - start)
        return min(times)

    segments = prompt(MANY_IMAGES)
    dense = segments.to_dense()
    assert dense.shape == (3, 262_144)
    found = Segments.from_dense(dense)
    assert found == segments
    assert found.nbytes == 7740 <= 16 << 10
    assert fastest(prompt, MANY_IMAGES, repeat=20) < 1e-3
    assert fastest(Segments.from_dense, dense, repeat=3) < 100e-3


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        (np.zeros(3, int), ValueError, r"2-D \[num_dims, length\], got shape \[3\]"),
        (np.zeros((3, 2)), TypeError, "must be integers, got float64"),
        (np.full((3, 2), -1), ValueError, r"from 0 to 2\*\*31 - 1, got -1 to -1"),
        (np.full((3, 2), 2**31), ValueError, "got 2147483648 to 2147483648"),
    ],
)
def test_dense_positions_that_cannot_be_stored(positions, error, message):
    with pytest.raises(error, match=message):
        Segments.from_dense(positions)


def test_builder_refuses_positions_out_of_range():
    builder = SegmentBuilder(3)
    builder.grid((3,), (0, 0, 0), ((0, 0, -1),))
    with pytest.raises(ValueError, match="from 0 to .*, got -2 to 0"):
        builder.build()
    builder = SegmentBuilder(3)
    builder.text(10, 2**31 - 5)
    with pytest.raises(ValueError, match=r"2\*\*31 - 1, got .* to 2147483652"):
        builder.build()


@pytest.mark.parametrize(
    ("table", "length", "message"),
    [
        (np.ones((9, 1)), 1, "3 \\+ 4 \\* num_dims rows, got 9"),
        (np.ones((7, 1)), 1, "starts must rise from 0"),
        (np.zeros((7, 1)), 1, "n1 and n2 must be 1 or more"),
        (np.array([[0, 2, 2, 0, 1, 1, 1]]).T, 6, "a whole number of n1 x n2 planes"),
        (np.zeros((7, 0)), 1, "starts must rise from 0"),
    ],
)
def test_tables_that_are_none(table, length, message):
    with pytest.raises(ValueError, match="Segments: .*" + message):
        Segments(table, length)
