"""sin and cos of one float32 angle, bitwise those of ``torch.sin`` and ``torch.cos`` on the same device."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sin_cos(angle):
    return tl.sin(angle), tl.cos(angle)
