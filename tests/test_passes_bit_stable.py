"""The allow-list of ``passes/bit_stable.py``, swept: an element has the same bits in a short tensor as in a long one.

Each operator on each dtype, over numbers of rows, widths and thread counts; ``python tests/test_passes_bit_stable.py``
runs the long sweep.
"""

import itertools
import sys

import pytest
import torch

from rope_ops.passes.bit_stable import ARITHMETIC

LONG = 2048
_FACTOR = {torch.float16: 0.37, torch.bfloat16: 0.37, torch.float32: 0.37113402, torch.float64: 0.3711340206185567}


def values(dtype, width, seed=0):
    """``[LONG, width]`` of positions times frequencies, the arguments that a table has; whole numbers for integers."""
    rows = torch.arange(LONG, dtype=torch.float64)[:, None]
    columns = 1.0 / 10000.0 ** (torch.arange(width, dtype=torch.float64) / width) + 0.013 * seed
    full = rows * columns
    if dtype == torch.bool:
        return full.to(torch.int64) % 2 == 0
    return full.to(dtype) if dtype.is_floating_point else full.to(torch.int64).remainder(100).to(dtype)


def call(name, x, y):
    aten = torch.ops.aten
    factor = _FACTOR.get(x.dtype, 3)
    unary = {
        "neg": lambda: torch.neg(x),
        "reciprocal": lambda: torch.reciprocal(x + 1),
        "log": lambda: torch.log(x + 1),
        "exp": lambda: torch.exp(-x / 50),
        "polar": lambda: torch.view_as_real(torch.polar(torch.ones_like(x), x)),
        "complex": lambda: torch.view_as_real(torch.complex(x, y)),
        "clamp": lambda: torch.clamp(x, 1, 50),
        "clamp_min": lambda: torch.clamp_min(x, 5),
        "clamp_max": lambda: torch.clamp_max(x, 5),
        "rsub": lambda: torch.rsub(x, 5),
        "logical_not": lambda: torch.logical_not(x),
        "bitwise_not": lambda: torch.bitwise_not(x),
        **{n: (lambda n=n: getattr(torch, n)(x)) for n in ("cos", "sin", "abs", "floor", "trunc")},
    }
    if name in unary:
        return (unary[name](),)
    operator = getattr(aten, name)
    divides = name in ("div", "remainder", "fmod", "floor_divide")
    other = y + 1 if divides and y.dtype != torch.bool else y
    results = [operator(x, other)]
    if name in ("add", "sub", "mul", "div", "remainder", "fmod") and x.dtype.is_floating_point:
        results.append(operator(x, factor))
    return tuple(results)


def real(value):
    return torch.view_as_real(value) if value.is_complex() else value


def unstable(name, dtype, widths, rows, threads):
    """The shortest description of a difference, or None; None as well where torch has no such kernel on this device."""
    if dtype.is_complex:
        single = torch.float32 if dtype == torch.complex64 else torch.float64

        def make(width, seed):
            return torch.complex(values(single, width, seed), values(single, width, seed + 2))
    else:

        def make(width, seed):
            return values(dtype, width, seed)

    before = torch.get_num_threads()
    try:
        for width, count in itertools.product(widths, threads):
            x, y = make(width, 0), make(width, 1)
            torch.set_num_threads(before)
            try:
                whole = call(name, x, y)
            except (RuntimeError, TypeError, NotImplementedError):
                return None
            torch.set_num_threads(count)
            for taken in rows:
                index = (torch.arange(taken) * 37 + 5) % LONG
                for found, full in zip(call(name, x[index], y[index]), whole, strict=True):
                    same = torch.equal(real(found).nan_to_num(), real(full[index]).nan_to_num())
                    if not same:
                        return f"{name} {dtype} width {width} rows {taken} threads {count}"
    finally:
        torch.set_num_threads(before)
    return None


ALLOWED = [(name, dtype) for name, dtypes in ARITHMETIC.items() for dtype in sorted(dtypes, key=str)]


@pytest.mark.parametrize("name", ARITHMETIC)
def test_allowed_operators_are_bit_stable(name):
    found = [
        unstable(name, dtype, widths=(1, 5, 32), rows=(1, 2, 3, 7, 31, 33), threads=(1, 2))
        for allowed, dtype in ALLOWED
        if allowed == name
    ]
    assert not any(found), found


def test_the_sweep_finds_what_is_not_stable():
    """Had ``pow`` been on the list, this is how it would have been caught (vector body and tail differ)."""
    x = values(torch.float32, 5) + 0.5
    short = [torch.equal((x[:n] ** 1.37), (x**1.37)[:n]) for n in range(1, 40)]
    assert not all(short)
    assert "pow" not in ARITHMETIC and "exp2" not in ARITHMETIC and "sigmoid" not in ARITHMETIC


if __name__ == "__main__":
    wrong = [unstable(n, d, (1, 2, 3, 5, 8, 16, 31, 32, 64, 128), range(1, 80), (1, 2, 3, 4)) for n, d in ALLOWED]
    print(
        "\n".join(filter(None, wrong))
        or f"{len(ALLOWED)} operators x dtypes are bit-stable on torch {torch.__version__}"
    )
    sys.exit(any(wrong))
