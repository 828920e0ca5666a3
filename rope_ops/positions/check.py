"""Try whether a model's positions stay below the sequence length: a way to earn the certificate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rope_ops.positions.rules import Block, Image, Prompt, Text, Video
from rope_ops.positions.segments import Segments, check_dense

_MEDIA = ("image", "video")


@dataclass(frozen=True)
class BoundReport:
    """What :func:`check_sequence_bounded` found; prints as one sentence.

    Attributes:
        bounded: whether every prompt stayed below its number of tokens.
        num_prompts: prompts tried.
        num_unbounded: those that did not stay below.
        worst_position: the largest position, prefill or later, of the prompt with the worst ratio.
        num_tokens: tokens of that prompt.
        prompt: its blocks.
    """

    bounded: bool
    num_prompts: int
    num_unbounded: int
    worst_position: int
    num_tokens: int
    prompt: Prompt

    @property
    def worst_ratio(self) -> float:
        """Table rows needed a token; 1 or less where bounded."""
        return (self.worst_position + 1) / self.num_tokens

    def __str__(self) -> str:
        where = f"position {self.worst_position} in {self.num_tokens} tokens (ratio {self.worst_ratio:.3f})"
        blocks = ", ".join(map(str, self.prompt[:8])) + (", ..." if len(self.prompt) > 8 else "")
        if self.bounded:
            return f"bounded in {self.num_prompts} prompts tried; nearest: {where}: {blocks}"
        return f"NOT bounded in {self.num_unbounded} of {self.num_prompts} prompts tried; worst: {where}: {blocks}"


def check_sequence_bounded(
    position_fn: Callable[[Prompt], Any],
    *,
    num_prompts: int = 1000,
    seed: int = 0,
    media: tuple[str, ...] = _MEDIA,
    max_tokens: int = 100_000,
) -> BoundReport:
    """Run a position function on prompts chosen to break the bound, and report the worst.

    Prompts are tall, wide, long, tiny and many grids between little text; videos run from 0.04 to 1,000 seconds a
    step. The same seed gives the same prompts. A report that is bounded is evidence, not a proof: a certificate should
    rest on an argument such as the one in :mod:`rope_ops.positions.rules`. One that is not is a counterexample.

    A prompt of ``n`` tokens is bounded if no position of it is ``n`` or more and its delta is not above 0: tokens after
    it are then bounded for ever.

    Args:
        position_fn: prompt (a sequence of ``Text``, ``Image`` and ``Video``) to positions ``[num_dims, tokens]``
            (segments, array or tensor), or to a pair of positions and delta. Without a delta 0 is taken.
        num_prompts: how many prompts to try.
        seed: of the prompts.
        media: which blocks beside text, of ``"image"`` and ``"video"``.
        max_tokens: most grid tokens of a prompt.

    Raises:
        ValueError: an unknown medium, no prompt to try, or a function that returns no token.
    """
    if not media or not set(media) <= set(_MEDIA):
        raise ValueError(f"check_sequence_bounded: media must be some of {', '.join(_MEDIA)}, got {media!r}")
    if num_prompts < 1:
        raise ValueError(f"check_sequence_bounded: num_prompts must be 1 or more, got {num_prompts}")
    worst: tuple[int, int, Prompt] | None = None
    unbounded = 0
    prompts = adversarial_prompts(seed, media, max_tokens)
    for _ in range(num_prompts):
        prompt = next(prompts)
        last, num_tokens = _reach(position_fn(prompt), prompt)
        unbounded += last >= num_tokens
        if worst is None or (last + 1) * worst[1] > (worst[0] + 1) * num_tokens:
            worst = (last, num_tokens, prompt)
    assert worst is not None
    return BoundReport(unbounded == 0, num_prompts, unbounded, *worst)


def adversarial_prompts(seed: int, media: tuple[str, ...] = _MEDIA, max_tokens: int = 100_000) -> Iterator[Prompt]:
    """Endless prompts; first one block of each extreme shape, then mixtures."""
    rng = np.random.default_rng(seed)
    extremes: list[Block] = []
    if "image" in media:
        extremes += [Image(1, 1), Image(1, 200), Image(200, 1), Image(200, 200)]
    if "video" in media:
        for t, h, w in ((1, 1, 1), (2, 1, 1), (300, 1, 1), (50, 2, 2), (2, 1, 200), (2, 200, 1), (2, 200, 200)):
            extremes += [Video(t, h, w, seconds) for seconds in (1000.0, 1.0, 0.04)]
    for block in extremes:
        if _grid_tokens(block) <= max_tokens:
            yield (Text(1), block, Text(3))
    while True:
        blocks: list[Block] = [Text(int(rng.integers(0, 3)))]
        left = max_tokens
        for _ in range(rng.choice((1, 2, 5, 64))):
            block = _random_block(rng, media)
            if _grid_tokens(block) > left:
                break
            left -= _grid_tokens(block)
            blocks += (block, Text(int(rng.integers(1, 4))))
        yield tuple(blocks) if len(blocks) > 1 else (Text(1),)


def _random_block(rng: np.random.Generator, media: tuple[str, ...]) -> Block:
    def size(largest: int) -> int:
        # As often tiny or extreme as anything between.
        return int(rng.choice((1, 2, largest, int(rng.integers(1, largest + 1)))))

    if rng.choice(media) == "image":
        return Image(size(200), size(200))
    # Round numbers of milliseconds, on a logarithmic scale.
    seconds = round(float(10 ** rng.uniform(-1.4, 3)), 3)
    return Video(size(300), size(60), size(60), seconds)


def _grid_tokens(block: Block) -> int:
    if isinstance(block, Text):
        return 0
    return (block.t if isinstance(block, Video) else 1) * block.h * block.w


def _reach(result: Any, prompt: Prompt) -> tuple[int, int]:
    """The largest position at or after a prompt, and the prompt's tokens."""
    positions, delta = result if isinstance(result, tuple) else (result, 0)
    if isinstance(positions, Segments):
        last, num_tokens = positions.max_position, positions.length
    else:
        positions = check_dense(np.asarray(positions))
        last, num_tokens = int(positions.max(initial=-1)), positions.shape[1]
    if num_tokens == 0:
        raise ValueError(f"check_sequence_bounded: the position function must number each token, got none for {prompt}")
    return max(last, num_tokens - 1 + int(delta)), num_tokens
