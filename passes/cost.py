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


# Measured on an NVIDIA H200, torch 2.11.0, triton 3.6.0: the 8-layer graph of benchmarks/compile.py, bound 32,768,
# CUDA graph replay, plain Inductor against rows computed once: 1 token 27.6 and 26.7 us, 64 tokens 38.6 and 37.0, 128
# tokens 37.7 and 38.2, 256 tokens 44.5 and 45.4 (the same within noise), 8,192 tokens 477 and 391. So the plain form
# stays where nothing is gained.
RULES = {
    "cuda": Rule(rows_once_from=512, plain_below=512),
    "cpu": Rule(rows_once_from=1, plain_below=0),
}
_ELSEWHERE = RULES["cuda"]


def rule(device_type: str) -> Rule:
    return RULES.get(device_type, _ELSEWHERE)
