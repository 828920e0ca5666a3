"""The families' rules: worked by hand, against transformers, and against the bound they claim."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rope_ops.positions import Image, RopeState, Text, Video, check_sequence_bounded, rules
from rope_ops.positions.check import adversarial_prompts

BOUNDED = {
    "qwen2_vl": rules.qwen2_vl,
    "qwen2_vl 5.23": lambda prompt: rules.qwen2_vl(prompt, rule="transformers-5.23"),
    "qwen3_vl": rules.qwen3_vl,
    "glm4v": rules.glm4v,
    "ernie4_5_vl": lambda prompt: rules.ernie4_5_vl(_even(prompt)),
    "ernie4_5_vl 5.23": lambda prompt: rules.ernie4_5_vl(_even(prompt), rule="transformers-5.23"),
}
IMAGES_ONLY = {
    "qwen2_5_vl": rules.qwen2_5_vl,
    "hunyuan_vl 3": lambda prompt: rules.hunyuan_vl(prompt, num_dims=3),
    "hunyuan_vl 4": rules.hunyuan_vl,
}


def _even(prompt):
    """Ernie's frames come in pairs."""
    return [Video(2 * b.t, b.h, b.w) if isinstance(b, Video) else b for b in prompt]


def written(result):
    segments, delta = result
    return segments.to_dense().tolist(), delta


def test_qwen2_vl_by_hand():
    prompt = [Text(2), Image(2, 2), Text(4)]
    t, h, w = [0, 1, 2, 2, 2, 2, 4, 5, 6, 7], [0, 1, 2, 2, 3, 3, 4, 5, 6, 7], [0, 1, 2, 3, 2, 3, 4, 5, 6, 7]
    for rule in rules.RULES:
        assert written(rules.qwen2_vl(prompt, rule=rule)) == ([t, h, w], -2)


def test_the_two_rules_after_a_video():
    """A video of 50 x 2 x 2 and three tokens: 52, 53, 54 then 55; or 4, 5, 6 inside the video, then 52."""
    prompt = [Text(2), Video(50, 2, 2), Text(3)]
    for rule, text, then in (("transformers-4.57", [52, 53, 54], 55), ("transformers-5.23", [4, 5, 6], 52)):
        segments, delta = rules.qwen2_vl(prompt, rule=rule)
        assert segments.to_dense()[:, -3:].tolist() == [text] * 3
        assert segments.length + delta == then
        assert segments.num_segments == 3


def test_qwen3_vl_by_hand():
    """Each frame is a grid of its own: time does not move inside it."""
    stamped = [Text(1), Text(2), Video(1, 1, 2), Text(2), Video(1, 1, 2), Text(1)]
    t, w = [0, 1, 2, 3, 3, 5, 6, 7, 7, 9], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert written(rules.qwen3_vl(stamped)) == ([t, t, w], 0)
    assert written(rules.qwen3_vl([Video(2, 1, 2)])) == ([[0, 0, 2, 2], [0, 0, 2, 2], [0, 1, 2, 3]], 0)


def test_ernie_by_hand():
    """Four frames merge to two steps."""
    t, h, w = [0, 1, 1, 2, 2, 3], [0, 1, 1, 1, 1, 3], [0, 1, 2, 1, 2, 3]
    assert written(rules.ernie4_5_vl([Text(1), Video(4, 1, 2), Text(1)])) == ([t, h, w], -2)


@pytest.mark.parametrize("num_dims", [3, 4])
def test_hunyuan_by_hand(num_dims):
    """Two images of 1 x 2 and 2 x 1 with their newlines: w, h, number; text is its index everywhere."""
    index = list(range(10))
    w = [0, 0, 1, 2, 4, 0, 1, 0, 1, 9]
    h = [0, 0, 0, 0, 4, 0, 0, 1, 1, 9]
    number = [0, 0, 0, 0, 4, 1, 1, 1, 1, 9]
    want = [index, w, h, number][4 - num_dims :]
    assert written(rules.hunyuan_vl([Text(1), Image(1, 2), Text(1), Image(2, 1), Text(1)], num_dims=num_dims)) == (
        want,
        0,
    )


def test_r02_time_scaled_video_is_refused():
    """4 x 2 x 2 at 10 s a step and 2 positions a second: 60 in 16 tokens. The same grid as an image is bounded."""
    segments, delta = rules.qwen2_5_vl([Video(4, 2, 2, seconds_per_step=10)], tokens_per_second=2)
    assert segments.to_dense()[0].tolist() == [0] * 4 + [20] * 4 + [40] * 4 + [60] * 4
    assert (segments.length, segments.max_position, delta) == (16, 60, 45)
    state = RopeState(3, 1, 16, 32, "cpu", cache_max_position=32)
    with pytest.raises(ValueError, match="below cache_max_position 32, got position 60 in the prefill"):
        state.set_prefill_positions(0, segments, delta)
    segments, delta = rules.qwen2_5_vl([Video(4, 2, 2, seconds_per_step=0.5)], tokens_per_second=2)
    assert (segments.max_position, delta) == (3, -12)
    state.set_prefill_positions(0, segments, delta)


def test_uneven_time_steps():
    """1.34 positions a step: floor of 0, 1.34, 2.68, 4.02; one segment a frame. Even steps make one."""
    segments, _ = rules.qwen2_5_vl([Text(1), Video(4, 1, 2, 0.67)])
    assert segments.to_dense()[0].tolist() == [0, 1, 1, 2, 2, 3, 3, 5, 5]
    assert segments.num_segments == 5
    assert rules.qwen2_5_vl([Text(1), Video(4, 1, 2, 1.5)])[0].num_segments == 2


@pytest.mark.parametrize("name", BOUNDED)
def test_certified_rules_are_bounded(name):
    report = check_sequence_bounded(BOUNDED[name], num_prompts=300)
    assert report.bounded and report.worst_ratio <= 1, str(report)
    assert str(report).startswith("bounded in 300 prompts tried; nearest: position ")


@pytest.mark.parametrize("name", IMAGES_ONLY)
def test_image_rules_are_bounded(name):
    report = check_sequence_bounded(IMAGES_ONLY[name], num_prompts=300, media=("image",))
    assert report.bounded and report.worst_ratio <= 1, str(report)


def test_qwen2_5_vl_is_refused_with_an_example():
    report = check_sequence_bounded(rules.qwen2_5_vl, num_prompts=200)
    assert not report.bounded
    assert report.prompt == (Text(1), Video(300, 1, 1, 1000.0), Text(3))
    assert (report.worst_position, report.num_tokens) == (598_004, 304)
    assert str(report).startswith("NOT bounded in ")
    assert "position 598004 in 304 tokens (ratio 1967.122): Text(num_tokens=1), Video(t=300" in str(report)
    # The example stands by itself.
    segments, delta = rules.qwen2_5_vl(report.prompt)
    assert segments.max_position >= segments.length and delta > 0


def test_the_check_looks_at_deltas_and_at_every_kind_of_result():
    index = lambda prompt: np.arange(9)[None]  # noqa: E731
    assert check_sequence_bounded(index, num_prompts=1).bounded
    assert check_sequence_bounded(lambda prompt: (index(prompt), -1), num_prompts=1).bounded
    report = check_sequence_bounded(lambda prompt: (index(prompt), 1), num_prompts=1)
    assert not report.bounded and report.worst_position == 9
    with pytest.raises(ValueError, match="must number each token, got none"):
        check_sequence_bounded(lambda prompt: np.zeros((3, 0), int))
    with pytest.raises(ValueError, match=re.escape("media must be some of image, video, got ('audio',)")):
        check_sequence_bounded(index, media=("audio",))
    with pytest.raises(ValueError, match="num_prompts must be 1 or more, got 0"):
        check_sequence_bounded(index, num_prompts=0)


def test_prompts_are_seeded_and_hostile():
    def take(seed):
        prompts = adversarial_prompts(seed)
        return [next(prompts) for _ in range(200)]

    assert take(1) == take(1) != take(2)
    blocks = [block for prompt in take(1) for block in prompt]
    assert any(isinstance(b, Image) and b.h == 200 and b.w == 1 for b in blocks)
    assert any(isinstance(b, Image) and b.h == 1 and b.w == 200 for b in blocks)
    assert any(isinstance(b, Video) and b.t == 300 for b in blocks)
    assert max(len(prompt) for prompt in take(1)) > 60


BLOCK = st.one_of(
    st.builds(Text, st.integers(0, 5)),
    st.builds(Image, st.integers(1, 9), st.integers(1, 9)),
    st.builds(Video, st.integers(1, 9), st.integers(1, 5), st.integers(1, 5)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(BLOCK, min_size=1), st.sampled_from(sorted(BOUNDED)))
def test_no_token_passes_its_index(prompt, name):
    """The lemma, pointwise."""
    segments, delta = BOUNDED[name](prompt)
    assert (segments.to_dense() <= np.arange(segments.length)).all()
    assert delta <= 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: rules.qwen2_vl([Image(0, 2)]),
            ValueError,
            "qwen2_vl: sizes must be integers of at least 1, got Image",
        ),
        (lambda: rules.glm4v([Text(-1)]), ValueError, "at least 0, got Text"),
        (lambda: rules.qwen2_vl([3]), TypeError, "must hold Text, Image and Video blocks, got 3"),
        (lambda: rules.qwen2_vl([], rule="5.0"), ValueError, "rule must be one of 'transformers-4.57'.*got '5.0'"),
        (lambda: rules.qwen2_5_vl([Video(1, 1, 1, -1.0)]), ValueError, "seconds_per_step must be finite"),
        (lambda: rules.hunyuan_vl([Video(1, 1, 1)]), ValueError, "text and images only, got Video"),
        (lambda: rules.hunyuan_vl([], num_dims=2), ValueError, "num_dims must be 3 or 4, got 2"),
    ],
)
def test_prompts_that_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
