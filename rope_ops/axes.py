"""Which position axis each frequency turns with: every family's layout, as a tuple of numbers.

An axis map has ``rotary_dim // 2`` entries; entry ``i`` names the row of ``positions`` (``[num_dims, num_tokens]``)
whose value multiplies ``inv_freq[i]``. Operators and kernels take the map and know no family.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_AXES = 4


def axis_map(mrope_section: Sequence[int], mrope_interleaved: bool = False) -> tuple[int, ...]:
    """The map of the two layouts that configurations name.

    Args:
        mrope_section: frequencies of each axis, in the order of the position rows (M-RoPE: t, h, w); 1 to 4 numbers.
            Their sum is ``rotary_dim // 2``.
        mrope_interleaved: False lays the axes in contiguous sections, ``[TTT...HHH...WWW]`` (Qwen2-VL, GLM-4V,
            XD-RoPE). True deals them out (Qwen3-VL, Qwen3.5): of ``n`` axes, axis ``a > 0`` gets frequencies ``a``,
            ``a + n``, ``a + 2n``, ... below ``n * mrope_section[a]``, and axis 0 the rest, ``[THWTHWTHW...TT]``. That
            rule is the published one and stops at the last frequency: an axis whose section is too long for it gets
            fewer.

    Returns:
        ``sum(mrope_section)`` axes.

    Raises:
        ValueError: a section is negative, or there are not 1 to 4 of them.
    """
    sections = _checked("axis_map", mrope_section)
    if not mrope_interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    half, num_dims = sum(sections), len(sections)
    axes = [0] * half
    for axis in range(1, num_dims):
        for frequency in range(axis, min(num_dims * sections[axis], half), num_dims):
            axes[frequency] = axis
    return tuple(axes)


def spatial_first_axis_map(mrope_section: Sequence[int]) -> tuple[int, ...]:
    """Ernie-4.5-VL's map: its sections are h, w, t; h and w alternate, and t takes the tail.

    Args:
        mrope_section: frequencies of h, w and t; h and w equal (the published one is ``[22, 22, 20]``).

    Returns:
        ``sum(mrope_section)`` axes, numbered as in every other map: t is 0, h is 1, w is 2.

    Raises:
        ValueError: not 3 sections, or h and w differ.
    """
    sections = _checked("spatial_first_axis_map", mrope_section)
    if len(sections) != 3 or sections[0] != sections[1]:
        raise ValueError(
            "spatial_first_axis_map: mrope_section must be [h, w, t] with h == w, "
            f"got mrope_section={list(mrope_section)}"
        )
    return (1, 2) * sections[0] + (0,) * sections[2]


def _checked(function: str, mrope_section: Sequence[int]) -> tuple[int, ...]:
    sections = tuple(mrope_section)
    if not 1 <= len(sections) <= MAX_AXES or any(isinstance(n, bool) or not isinstance(n, int) for n in sections):
        raise ValueError(f"{function}: mrope_section must be 1 to {MAX_AXES} integers, got {list(sections)}")
    if min(sections) < 0:
        raise ValueError(f"{function}: mrope_section must not hold a negative number, got {list(sections)}")
    return sections
