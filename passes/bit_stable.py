"""The operators whose every element has the same bits whatever the size of the tensor it is computed in.

Computing fewer rows changes where a vectorised CPU kernel ends its vector body and begins its tail, and how threads
share the work. Most kernels use one routine for both; some do not (``pow`` with a scalar, ``exp2``, ``sigmoid``,
bfloat16 ``rsqrt`` differ in the last bit), so a table made with those, row by row, must be left alone. This is a list
of what is allowed. ``tests/test_passes_bit_stable.py`` sweeps each entry over tail lengths, widths and thread counts.
"""

from __future__ import annotations

import torch

_REAL = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_SINGLE = frozenset((torch.float32, torch.float64))
_COMPLEX = frozenset((torch.complex64, torch.complex128))
_WHOLE = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))

# Operators that compute, by the dtypes in which they may. IEEE 754 fixes the result of the first group.
ARITHMETIC = {
    "add": _REAL | _WHOLE | _COMPLEX,
    "sub": _REAL | _WHOLE | _COMPLEX,
    "rsub": _REAL | _WHOLE,
    "neg": _REAL | _WHOLE | _COMPLEX,
    "mul": _REAL | _WHOLE,
    "div": _REAL | _WHOLE,
    "reciprocal": _SINGLE,
    "abs": _REAL | _WHOLE,
    "floor": _REAL,
    "trunc": _REAL,
    "minimum": _REAL | _WHOLE,
    "maximum": _REAL | _WHOLE,
    "clamp": _REAL | _WHOLE,
    "clamp_min": _REAL | _WHOLE,
    "clamp_max": _REAL | _WHOLE,
    "remainder": _REAL | _WHOLE,
    "fmod": _REAL | _WHOLE,
    "floor_divide": _WHOLE,
    "cos": _REAL,
    "sin": _REAL,
    "exp": _SINGLE,
    "log": _SINGLE,
    "polar": _SINGLE,
    "complex": _SINGLE,
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _REAL | _WHOLE),  # (the result's dtype is bool)
    **dict.fromkeys(("logical_and", "logical_or", "logical_not"), _REAL | _WHOLE),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor"), _WHOLE),
}

# Operators that move or convert values, in any dtype.
COPIES = frozenset(
    "where clone alias detach lift_fresh _to_copy convert_element_type device_put copy contiguous "
    "ones_like zeros_like full_like masked_fill fill".split()
)


def is_bit_stable(name: str, dtypes: frozenset[torch.dtype]) -> bool:
    """Whether operator ``name`` gives the same bits at every size when its tensors have these dtypes."""
    return name in COPIES or (name in ARITHMETIC and dtypes <= ARITHMETIC[name])
