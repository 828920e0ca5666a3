"""Where a rewrite pays: the one place that holds measured numbers.

Plain Inductor on CUDA never builds a table that is made of pointwise operators: it inlines the construction into the
readers, and so computes cos and sin again for every head of every layer. Computing the rows once costs one small
kernel and a read of it. Below some number of tokens the kernel costs more than it saves. A table that plain Inductor
does build (``polar``, complex values, writes into it; on CPU anything joined by ``cat`` or ``stack``) is always worth
its rows. A symbolic number of tokens is taken as the one it was traced with: that decides speed only, never values.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Rule:
    """``rows_once_from``: read rows are computed once and stored from this many rows on.

    ``plain_below``: with fewer rows, a table that plain Inductor inlines is left alone.
    """

    rows_once_from: int
    plain_below: int


# Measured with benchmarks/compile.py. NVIDIA H200, torch 2.11, 8 layers of 32 heads, CUDA graph replay: 1 token 33.5 us
# plain against 44.3 us with the rows computed once, 256 tokens 66 against 59.8, 8,192 tokens 743 against 360.
RULES = {
    "cuda": Rule(rows_once_from=256, plain_below=256),
    "cpu": Rule(rows_once_from=1, plain_below=0),
}
_ELSEWHERE = Rule(rows_once_from=256, plain_below=256)


def rule(device_type: str) -> Rule:
    return RULES.get(device_type, _ELSEWHERE)
