"""How model families number the tokens of a multimodal prompt, as plain functions of the prompt's blocks.

A prompt is a sequence of :class:`Text`, :class:`Image` and :class:`Video` blocks in the order of their tokens. Grids
are in language-model tokens, after merging: a processor's ``grid_thw`` divided by the merge sizes. Each function
returns the positions as :class:`Segments`, and the delta of the tokens after the prompt.

Where implementations differ, ``rule`` names the one meant: after a video, ``"transformers-4.57"`` (and vLLM 0.33)
continues past the largest position of its grid, ``"transformers-5.23"`` past its height and width only.

Bounded, a proof: let a block start at base ``B``. If its token ``k`` has no position above ``B + k`` and the next base
is at most ``B`` plus the block's tokens, then by induction token ``i`` has no position above ``i``. Text: ``B + k``. A
grid with unit steps: ``k = (i3 * h + i2) * w + i1`` is at least each of ``i1``, ``i2``, ``i3``, and ``max(t, h, w)`` is
at most ``t * h * w``. An image that restarts at 0: a row has more tokens than ``w``, and no more images come before it
than tokens. So every function here is bounded but :func:`qwen2_5_vl`, whose temporal step the request sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rope_ops.positions.segments import SegmentBuilder, Segments

RULES = ("transformers-4.57", "transformers-5.23")


@dataclass(frozen=True)
class Text:
    """Tokens that are not part of a grid, marks and timestamps included."""

    num_tokens: int


@dataclass(frozen=True)
class Image:
    """A grid of ``h * w`` tokens, row by row."""

    h: int
    w: int


@dataclass(frozen=True)
class Video:
    """A grid of ``t * h * w`` tokens, frame by frame; ``seconds_per_step`` is the time from one ``t`` to the next."""

    t: int
    h: int
    w: int
    seconds_per_step: float = 1.0


Block = Text | Image | Video
Prompt = Sequence[Block]
_AXES = ((0, 0, 1), (0, 1, 0), (1, 0, 0))


def qwen2_vl(prompt: Prompt, *, rule: str = RULES[0]) -> tuple[Segments, int]:
    """Qwen2-VL: text moves all axes, a grid moves (t, h, w), each by one a step."""
    return _grids("qwen2_vl", prompt, rule, lambda video: range(video.t))


def qwen2_5_vl(prompt: Prompt, *, tokens_per_second: float = 2, rule: str = RULES[0]) -> tuple[Segments, int]:
    """Qwen2.5-VL: as Qwen2-VL, but a video's step ``i`` lies at ``floor(i * tokens_per_second * seconds_per_step)``.

    **Not bounded**: seconds come with the request and no number of tokens follows from them. The product is taken in
    float32 in transformers 5.23 and in float64 in vLLM 0.33, which can differ by one.
    """
    dtype = np.float32 if rule == RULES[1] else np.float64

    def times(video: Video) -> Sequence[int]:
        interval = dtype(tokens_per_second) * dtype(video.seconds_per_step)
        return (np.arange(video.t).astype(dtype) * interval).astype(np.int64).tolist()

    return _grids("qwen2_5_vl", prompt, rule, times)


def ernie4_5_vl(prompt: Prompt, *, temporal_merge_size: int = 2, rule: str = RULES[0]) -> tuple[Segments, int]:
    """Ernie-4.5-VL: as Qwen2-VL, with ``t // temporal_merge_size`` steps a video; ``t`` counts before merging.

    ``"transformers-4.57"`` stands for what vLLM 0.33 does.
    """
    return _grids("ernie4_5_vl", prompt, rule, lambda video: range(video.t // temporal_merge_size))


def qwen3_vl(prompt: Prompt) -> tuple[Segments, int]:
    """Qwen3-VL, Qwen3.5: every frame of a video is a grid of its own with ``t = 1``, as an image is.

    Processors put text (a timestamp and marks) between frames: give that as ``Text``, each frame as ``Video(1, h, w)``.
    """
    builder, position = SegmentBuilder(3), 0
    for block in _checked("qwen3_vl", prompt):
        if isinstance(block, Text):
            builder.text(block.num_tokens, position)
            position += block.num_tokens
            continue
        for _ in range(block.t if isinstance(block, Video) else 1):
            builder.grid((block.w, block.h), (position,) * 3, _AXES[:2])
            position += max(block.h, block.w)
    return _finished(builder)


def glm4v(prompt: Prompt) -> tuple[Segments, int]:
    """GLM-4.1V, GLM-4.5V, GLM-4.6V, GLM-OCR: per-frame grids, the rule of :func:`qwen3_vl`."""
    return qwen3_vl(prompt)


def hunyuan_vl(prompt: Prompt, *, num_dims: int = 4) -> tuple[Segments, int]:
    """Hunyuan-VL, HunyuanOCR (XD-RoPE): text has its plain index on every axis, an image restarts at 0.

    The last three axes of an image are (w, h, number of the image); an axis before them keeps the index. A row has
    ``w + 1`` tokens, the last one a newline, so an image has ``h * (w + 1)``; its two marks are text. No delta: a token
    after the prompt has its index on every axis. (transformers 5.23; it states a delta too, which is 0 for every
    prompt that ends in text.)
    """
    if num_dims not in (3, 4):
        raise ValueError(f"hunyuan_vl: num_dims must be 3 or 4, got {num_dims}")
    builder, images = SegmentBuilder(num_dims), 0
    for block in _checked("hunyuan_vl", prompt):
        if isinstance(block, Text):
            builder.text(block.num_tokens, builder.length)
            continue
        if isinstance(block, Video):
            raise ValueError(f"hunyuan_vl: the family numbers text and images only, got {block}")
        row = block.w + 1
        index, per_token, per_row = ((builder.length,), (1,), (row,)) if num_dims == 4 else ((), (), ())
        builder.grid((row, block.h), (*index, 0, 0, images), ((*per_token, 1, 0, 0), (*per_row, 0, 1, 0)))
        images += 1
    return _finished(builder)[0], 0


def _grids(name: str, prompt: Prompt, rule: str, times: Callable[[Video], Sequence[int]]) -> tuple[Segments, int]:
    """The rule that Qwen2-VL began: one grid a video, whose steps lie at ``times(video)``."""
    if rule not in RULES:
        raise ValueError(f"{name}: rule must be one of {', '.join(map(repr, RULES))}, got {rule!r}")
    builder, position = SegmentBuilder(3), 0
    for block in _checked(name, prompt):
        if isinstance(block, Text):
            builder.text(block.num_tokens, position)
            position += block.num_tokens
            continue
        reach = max(block.h, block.w)
        if isinstance(block, Image):
            builder.grid((block.w, block.h), (position,) * 3, _AXES[:2])
        else:
            steps = times(block)
            _time_grid(builder, steps, block.h, block.w, position)
            if rule == RULES[0]:
                reach = max(reach, max(steps) + 1)
        position += reach
    return _finished(builder)


def _time_grid(builder: SegmentBuilder, steps: Sequence[int], h: int, w: int, base: int) -> None:
    """One segment where the steps are even, else one a frame: exact for any rounding."""
    stride = steps[1] - steps[0] if len(steps) > 1 else 0
    if all(step == i * stride for i, step in enumerate(steps)):
        builder.grid((w, h, len(steps)), (base,) * 3, (*_AXES[:2], (stride, 0, 0)))
    else:
        for step in steps:
            builder.grid((w, h), (base + step, base, base), _AXES[:2])


def _checked(name: str, prompt: Prompt) -> Prompt:
    sizes: tuple[int, ...]
    for block in prompt:
        if isinstance(block, Text):
            sizes, least = (block.num_tokens,), 0
        elif isinstance(block, Image):
            sizes, least = (block.h, block.w), 1
        elif isinstance(block, Video):
            sizes, least = (block.t, block.h, block.w), 1
            if not 0 <= block.seconds_per_step < float("inf"):
                raise ValueError(f"{name}: seconds_per_step must be finite and not negative, got {block}")
        else:
            raise TypeError(f"{name}: a prompt must hold Text, Image and Video blocks, got {block!r}")
        for size in sizes:
            if not isinstance(size, int) or size < least:
                raise ValueError(f"{name}: sizes must be integers of at least {least}, got {block}")
    return prompt


def _finished(builder: SegmentBuilder) -> tuple[Segments, int]:
    segments = builder.build()
    return segments, segments.delta
