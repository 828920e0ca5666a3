"""Which position axis each rotary frequency turns with."""

from __future__ import annotations

from collections.abc import Sequence


def axis_map(mrope_section: Sequence[int], mrope_interleaved: bool = False) -> tuple[int, ...]:
    """The axis of each frequency, for sections of any number of axes.

    Args:
        mrope_section: frequencies of each axis; they sum to ``rotary_dim // 2``.
        mrope_interleaved: False lays the axes out one after the other, ``TTT..HHH..WWW``. True deals them out:
            axis ``a > 0`` has the lanes ``a, a + n, a + 2n, ...`` below ``n * mrope_section[a]`` of ``n`` axes, and
            axis 0 the rest, ``THWTHW..TT``.

    Returns:
        ``sum(mrope_section)`` axis numbers.
    """
    half, axes = sum(mrope_section), len(mrope_section)
    if not mrope_interleaved:
        return tuple(axis for axis, section in enumerate(mrope_section) for _ in range(section))
    lanes = [0] * half
    for axis in range(1, axes):
        for lane in range(axis, min(axes * mrope_section[axis], half), axes):
            lanes[lane] = axis
    return tuple(lanes)
