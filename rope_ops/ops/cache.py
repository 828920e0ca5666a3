"""``rope_ops::build_cos_sin_cache``: the bounded table, each element written once.

On CUDA one Triton kernel writes the result directly. On CPU the table is filled in blocks of rows through two
scratch buffers that stay in cache, so neither path ever holds a temporary of the table's size.
"""

from __future__ import annotations

import functools
import math
import warnings

import torch

from rope_ops import reference
from rope_ops.ops._library import define, kernels

TABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Elements of one scratch buffer on CPU: 1 MiB of float32, so that the two of them fit a core's second-level cache.
_BLOCK_ELEMENTS = 1 << 18


def _check(inv_freq: torch.Tensor, rows: int, attention_factor: float, dtype: torch.dtype) -> None:
    name = "build_cos_sin_cache"
    if inv_freq.dim() != 1:
        raise ValueError(f"{name}: inv_freq must be 1-D [rotary_dim // 2], got shape {list(inv_freq.shape)}")
    if inv_freq.dtype != torch.float32:
        raise TypeError(f"{name}: inv_freq must be torch.float32, got {inv_freq.dtype}")
    if dtype not in TABLE_DTYPES:
        raise TypeError(f"{name}: dtype must be one of {', '.join(map(str, TABLE_DTYPES))}, got {dtype}")
    if not math.isfinite(attention_factor):
        raise ValueError(f"{name}: attention_factor must be finite, got {attention_factor}")
    torch._check_value(rows >= 0, lambda: f"{name}: rows must not be negative, got {rows}")


def _row_blocks(inv_freq: torch.Tensor, rows: int, attention_factor: float, dtype: torch.dtype) -> torch.Tensor:
    """The eager construction in blocks of rows: bitwise the same, with two small scratch buffers."""
    half = inv_freq.shape[0]
    out = torch.empty((rows, 2 * half), dtype=dtype, device=inv_freq.device)
    block = max(1, min(rows, _BLOCK_ELEMENTS // max(half, 1)))
    # Contiguous scratch: ATen's cos takes another code path, with other last bits, when it writes to a strided view.
    freqs, values = torch.empty((2, block, half), dtype=torch.float32, device=inv_freq.device)
    for start in range(0, rows, block):
        stop = min(start + block, rows)
        # Integers first: from 2**24 on each position must round by itself, as it does in one long float range.
        t = torch.arange(start, stop, device=inv_freq.device).to(torch.float32)
        angle, value = freqs[: stop - start], values[: stop - start]
        torch.mul(t[:, None], inv_freq, out=angle)
        for function, column in ((torch.cos, 0), (torch.sin, half)):
            function(angle, out=value)
            if attention_factor != 1.0:
                value.mul_(attention_factor)
            out[start:stop, column : column + half] = value
    return out


def _cpu(inv_freq: torch.Tensor, rows: int, attention_factor: float, dtype: torch.dtype) -> torch.Tensor:
    _check(inv_freq, rows, attention_factor, dtype)
    return _row_blocks(inv_freq.detach(), rows, attention_factor, dtype)


def _cuda(inv_freq: torch.Tensor, rows: int, attention_factor: float, dtype: torch.dtype) -> torch.Tensor:
    _check(inv_freq, rows, attention_factor, dtype)
    launcher = _kernels()
    inv_freq = inv_freq.detach().contiguous()
    if _proved_exact(inv_freq.device.index):
        return launcher.build_cos_sin_cache(inv_freq, rows, attention_factor, dtype)
    return _row_blocks(inv_freq, rows, attention_factor, dtype)


def _kernels():
    return kernels("cache", "build_cos_sin_cache")


def _proved_exact(device_index: int) -> bool:
    """Whether the kernel's table is known to be eager's on this device, compared once a process."""
    if torch.cuda.is_current_stream_capturing() and device_index not in _proofs:
        # The comparison synchronises, which a capture forbids: take the slow exact way, prove it another time.
        return False
    return _proof(device_index)


_proofs: set[int] = set()


@functools.cache
def _proof(device_index: int) -> bool:
    _proofs.add(device_index)
    device = torch.device("cuda", device_index)
    # A million arguments from 1e-7 to 2**24, through both of CUDA's range reductions.
    inv_freq = torch.logspace(-7, math.log10(255.9), 16, dtype=torch.float64).to(device, torch.float32)
    for dtype, attention_factor in ((torch.float32, 1.0), (torch.bfloat16, 1.1386)):
        expected = reference.build_cos_sin_cache(inv_freq, 1 << 16, attention_factor, dtype)
        if not torch.equal(_kernels().build_cos_sin_cache(inv_freq, 1 << 16, attention_factor, dtype), expected):
            warnings.warn(
                f"build_cos_sin_cache: the Triton kernel and torch.cos/torch.sin differ on {device} with torch "
                f"{torch.__version__}; tables are built with ATen in row blocks instead (exact, slower)",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
    return True


def _fake(inv_freq: torch.Tensor, rows: int, attention_factor: float, dtype: torch.dtype) -> torch.Tensor:
    _check(inv_freq, rows, attention_factor, dtype)
    return inv_freq.new_empty((rows, 2 * inv_freq.shape[0]), dtype=dtype)


def _setup_context(ctx, inputs, output) -> None:
    inv_freq, ctx.rows, ctx.attention_factor, _ = inputs
    ctx.save_for_backward(inv_freq)


def _backward(ctx, grad: torch.Tensor):
    """d/d inv_freq of the table: position times (cos * grad_sin - sin * grad_cos), summed over rows."""
    (inv_freq,) = ctx.saved_tensors
    t = torch.arange(ctx.rows, device=inv_freq.device).to(torch.float32)[:, None]
    grad_cos, grad_sin = grad.to(torch.float32).chunk(2, dim=-1)
    angle = t * inv_freq
    slope = t * (angle.cos() * grad_sin - angle.sin() * grad_cos)
    return slope.sum(0) * ctx.attention_factor, None, None, None


def _vmap(info, in_dims, inv_freq, rows, attention_factor, dtype):
    if in_dims[0] is None:
        return torch.ops.rope_ops.build_cos_sin_cache(inv_freq, rows, attention_factor, dtype), None
    tables = [
        torch.ops.rope_ops.build_cos_sin_cache(one, rows, attention_factor, dtype)
        for one in inv_freq.unbind(in_dims[0])
    ]
    return torch.stack(tables), 0


define(
    "build_cos_sin_cache(Tensor inv_freq, SymInt rows, float attention_factor, ScalarType dtype) -> Tensor",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    vmap=_vmap,
)


def build_cos_sin_cache(
    inv_freq: torch.Tensor, rows: int, attention_factor: float = 1.0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Build the first ``rows`` rows of a rotary table, bitwise those that eager PyTorch builds on the same device.

    Args:
        inv_freq: float32 ``[rotary_dim // 2]``, radians a position.
        rows: number of rows to allocate; any size, no larger table is built on the way.
        attention_factor: multiplies cos and sin in float32, before the cast to ``dtype``.
        dtype: ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``.

    Returns:
        ``[rows, rotary_dim]``: cos in the first half of a row, sin in the second.

    Raises:
        ValueError: ``inv_freq`` is not 1-D, ``rows`` is negative, ``attention_factor`` is not finite.
        TypeError: ``inv_freq`` is not float32, ``dtype`` is another dtype.
        RuntimeError: a CUDA tensor without Triton.
    """
    return torch.ops.rope_ops.build_cos_sin_cache(inv_freq, rows, attention_factor, dtype)
