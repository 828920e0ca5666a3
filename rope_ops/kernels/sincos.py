"""Sine and cosine of one angle together, bit for bit what ``torch.sin`` and ``torch.cos`` give on CUDA.

CUDA's two functions each reduce the angle to ``r`` in [-pi/4, pi/4] and then evaluate one of two polynomials; both
reductions and both polynomials are the same. Here the reduction is done once, and for large angles (where CUDA
multiplies by 192 bits of 2/pi) in float64, which is enough up to ``2 ** 24``: tests/gpu compares every float32 up to
there. Launch kernels that call this with ``enable_fp_fusion=False``: a multiplication merged into an addition rounds
once where CUDA rounds twice.
"""

import triton
import triton.language as tl

# Below it CUDA reduces with three float32 constants.
SMALL = tl.constexpr(105615.0)
# From here on the float64 reduction is not proved.
PROVED = tl.constexpr(16777216.0)


@triton.jit
def sin_cos(angle, largest):
    """``(sin, cos)`` of a tile of float32 angles.

    Args:
        angle: float32, any shape.
        largest: scalar, at least the magnitude of every angle; decides the path for the whole tile.
    """
    if largest < SMALL:
        r, quadrant = _reduce_small(angle)
        sin, cos = _polynomials(r, quadrant)
    elif largest < PROVED:
        r, quadrant = _reduce_small(angle)
        r64, quadrant64 = _reduce_large(angle)
        small = tl.abs(angle) < SMALL
        sin, cos = _polynomials(tl.where(small, r, r64), tl.where(small, quadrant, quadrant64))
    else:
        sin, cos = tl.sin(angle), tl.cos(angle)
    return sin, cos


@triton.jit
def _reduce_small(angle):
    """Cody and Waite: subtract the nearest multiple of pi/2, held in three float32 parts."""
    # Adding 1.5 * 2**23 rounds to an integer and leaves it in the low bits.
    shifted = angle * 0.6366197466850281 + 12582912.0
    multiple = shifted - 12582912.0
    r = tl.fma(multiple, -1.570796251296997, angle)
    r = tl.fma(multiple, -7.549789415861596e-08, r)
    r = tl.fma(multiple, -5.390302953474238e-15, r)
    return r, shifted.to(tl.int32, bitcast=True)


@triton.jit
def _reduce_large(angle):
    """The same in float64: the first product is exact for multiples below 2**24, the second adds 53 more bits."""
    # As float64 tensors: a bare Python float would be rounded to float32 on its way.
    shift = tl.full((), 6755399441055744.0, tl.float64)
    two_over_pi = tl.full((), 0.6366197723675814, tl.float64)
    high = tl.full((), -1.5707963267948966, tl.float64)
    low = tl.full((), -6.123233995736766e-17, tl.float64)
    wide = angle.to(tl.float64)
    shifted = tl.fma(wide, two_over_pi, shift)
    multiple = shifted - shift
    r = tl.fma(multiple, high, wide)
    r = tl.fma(multiple, low, r)
    return r.to(tl.float32), shifted.to(tl.int64, bitcast=True).to(tl.int32)


@triton.jit
def _polynomials(r, quadrant):
    square = r * r
    cos = tl.fma(square, 2.4279579520225525e-05, -0.0013887860113754869)
    cos = tl.fma(cos, square, 0.041666727513074875)
    cos = tl.fma(cos, square, -0.4999999701976776)
    cos = tl.fma(cos, square, 1.0)
    sin = tl.fma(square, -0.00019574658654164523, 0.00833270326256752)
    sin = tl.fma(sin, square, -0.16666662693023682)
    sin = tl.fma(sin, square * r, r)
    swapped = (quadrant & 1) != 0
    turned_sin = tl.where(swapped, cos, sin)
    turned_cos = tl.where(swapped, sin, cos)
    return _negate_if(turned_sin, quadrant), _negate_if(turned_cos, quadrant + 1)


@triton.jit
def _negate_if(value, quadrant):
    sign = (quadrant & 2) << 30
    return (value.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
