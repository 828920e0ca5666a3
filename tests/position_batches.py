"""Batches and prompts that the tests of request positions share."""

import numpy as np
import torch

from rope_ops.positions import SegmentBuilder

POISON = 10**9


def random_batch(seed, *, num_dims=3, num_reqs=5, num_slots=8, width=40, longest=12, dtype=torch.int32, spare=3):
    """Arguments of `prepare_positions` with a dense table: chunks, decodes, crossings and empty requests, any order.

    What a request must not read is poisoned: the table past its prefill, and the slots of empty rows.
    """
    rng = np.random.default_rng(seed)
    idx = rng.permutation(num_slots)[:num_reqs]
    lengths = rng.integers(0, longest + 1, num_reqs) * (rng.random(num_reqs) > 0.2)
    # Now and then longer than the table is wide: what lies outside it is computed.
    prefill_lens = rng.integers(0, width + 5, num_slots)
    # Computed tokens around the end of the prefill, so that chunks cross it often.
    computed = np.maximum(0, prefill_lens + rng.integers(-longest - 3, 4, num_slots))
    table = rng.integers(0, 1000, (num_slots * num_dims, width))
    table[np.arange(width) >= np.repeat(prefill_lens, num_dims)[:, None]] = POISON
    idx = np.where(lengths > 0, idx, rng.choice([-1, 10**6], num_reqs)) if num_reqs else idx
    starts = np.concatenate(([0], np.cumsum(lengths)))
    positions = torch.full((num_dims, int(starts[-1]) + spare), POISON)
    tensor = lambda values: torch.from_numpy(np.ascontiguousarray(values)).to(dtype)  # noqa: E731
    return {
        "positions": positions,
        "prefill_positions": torch.from_numpy(table).to(torch.int32),
        "prefill_delta": tensor(rng.integers(-20, 1, num_slots)),
        "idx_mapping": tensor(idx),
        "query_start_loc": tensor(starts),
        "prefill_lens": tensor(prefill_lens),
        "num_computed_tokens": tensor(computed),
    }


def prompt_segments(seed, num_dims=3, blocks=6, largest=6):
    """A random prompt of text, images and videos, as segments."""
    rng = np.random.default_rng(seed)
    builder, position = SegmentBuilder(num_dims), 0
    for _ in range(rng.integers(1, blocks + 1)):
        t, h, w = (int(n) for n in rng.integers(1, largest + 1, 3))
        if rng.random() < 0.5:
            builder.text(t, position)
            position += t
        else:
            axes = np.eye(3, num_dims, num_dims - 3, dtype=int) if num_dims > 3 else np.eye(3, dtype=int)
            slopes = [tuple(int(v) for v in axis[:num_dims]) for axis in axes[::-1]]
            builder.grid((w, h, t), (position,) * num_dims, slopes)
            position += max(t, h, w)
    return builder.build()


def arguments(batch, **changes):
    """A fresh copy of a batch, to be written into."""
    return {name: value.clone() if name == "positions" else value for name, value in (batch | changes).items()}
