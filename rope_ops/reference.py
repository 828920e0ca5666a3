"""The eager constructions that every op, kernel and pass is compared with.

Plain PyTorch, whole-tensor, on any device: written to be read, not to be fast. Serving engines build their table
with this sequence of operators, so the results are also what "legacy" means in this package.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def build_cos_sin_cache(
    inv_freq: torch.Tensor, rows: int, attention_factor: float = 1.0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The table of ``rows`` positions: ``[cos(p * inv_freq) | sin(p * inv_freq)] * attention_factor``.

    Args:
        inv_freq: float32 ``[rotary_dim // 2]``, radians a position.
        rows: number of positions, from 0.
        attention_factor: multiplies cos and sin in float32, before the cast.
        dtype: of the result.

    Returns:
        ``[rows, rotary_dim]``, cos in the first half of a row and sin in the second.
    """
    t = torch.arange(rows, dtype=torch.float32, device=inv_freq.device)
    freqs = torch.einsum("i,j->ij", t, inv_freq)
    cos = freqs.cos() * attention_factor
    sin = freqs.sin() * attention_factor
    return torch.cat((cos, sin), dim=-1).to(dtype)


def gather_cos_sin(
    cos_sin_cache: torch.Tensor, positions: torch.Tensor, axis_map: Sequence[int] | torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read cos and sin for each token, each frequency at the position of its own axis.

    Args:
        cos_sin_cache: ``[rows, rotary_dim]``.
        positions: integers, ``[num_tokens]`` or ``[num_dims, num_tokens]``.
        axis_map: for each of the ``rotary_dim // 2`` frequencies, the axis whose position it turns with. None for
            one axis.

    Returns:
        cos and sin, each ``[num_tokens, rotary_dim // 2]``.
    """
    half = cos_sin_cache.shape[-1] // 2
    if positions.dim() == 1 or axis_map is None:
        rows = cos_sin_cache[positions.reshape(-1)]
        return rows[:, :half], rows[:, half:]
    rows = cos_sin_cache[positions]
    axes = torch.as_tensor(axis_map, device=positions.device)
    lanes = torch.arange(half, device=positions.device)
    return rows[axes, :, lanes].T, rows[axes, :, lanes + half].T


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox_style: bool = True, rounding: str = "cache"
) -> torch.Tensor:
    """Rotate the first lanes of each head.

    Args:
        x: ``[num_tokens, heads, head_size]``.
        cos, sin: ``[num_tokens, rotary_dim // 2]``.
        is_neox_style: True pairs lane ``i`` with ``i + rotary_dim // 2``; False pairs lanes ``2i`` and ``2i + 1``.
        rounding: "cache" casts cos and sin to ``x.dtype`` and rounds to it after every operation, as serving engines
            do with their table; "float32" works in float32 and rounds once, at the end.

    Returns:
        A new tensor like ``x``; lanes from ``rotary_dim`` on are copied.
    """
    rotary_dim = 2 * cos.shape[-1]
    dtype = x.dtype if rounding == "cache" else torch.float32
    cos, sin = cos.unsqueeze(-2).to(dtype), sin.unsqueeze(-2).to(dtype)
    query_rot, query_pass = x[..., :rotary_dim].to(dtype), x[..., rotary_dim:]
    if is_neox_style:
        x1, x2 = query_rot.chunk(2, dim=-1)
    else:
        x1, x2 = query_rot[..., ::2], query_rot[..., 1::2]
    o1 = x1 * cos - x2 * sin
    o2 = x2 * cos + x1 * sin
    rotated = torch.cat((o1, o2), dim=-1) if is_neox_style else torch.stack((o1, o2), dim=-1).flatten(-2)
    return torch.cat((rotated.to(x.dtype), query_pass), dim=-1)


def prepare_positions(
    positions: torch.Tensor,
    prefill_positions: torch.Tensor,
    prefill_delta: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    prefill_lens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    num_tokens_padded: int | None = None,
) -> None:
    """Write the positions of a batch, token by token; arguments as for :func:`rope_ops.prepare_positions`, with a
    dense table ``[num_slots * num_dims, width]``.
    """
    num_dims, width = positions.shape[0], prefill_positions.shape[1]
    starts = query_start_loc.tolist()
    for row, slot in enumerate(idx_mapping.tolist()):
        for column in range(starts[row], starts[row + 1]):
            index = int(num_computed_tokens[slot]) + column - starts[row]
            stored = index < min(int(prefill_lens[slot]), width)
            for dim in range(num_dims):
                if stored:
                    positions[dim, column] = prefill_positions[slot * num_dims + dim, index].long()
                else:
                    positions[dim, column] = index + int(prefill_delta[slot])
    if num_tokens_padded is not None:
        positions[:, starts[-1] : num_tokens_padded] = 0
