"""The rotation operators against the eager reference: bits, layouts, errors, gradients, transforms, compilation."""

import importlib
import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rope_ops import reference
from rope_ops.axes import axis_map, spatial_first_axis_map
from rope_ops.ops import rotate, rotate_, rows_computed

module = importlib.import_module("rope_ops.ops.rotate")
HEAD_SIZE, HALF = 14, 5
INV_FREQ = 1.0 / 10000 ** (torch.arange(HALF).float() / HALF)
AXES = axis_map([1, 2, 2])
ROWS = 40


def make(num_tokens=6, heads=3, key_heads=1, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(num_tokens, heads, HEAD_SIZE, generator=generator).to(dtype)
    key = torch.randn(num_tokens, key_heads, HEAD_SIZE, generator=generator).to(dtype)
    positions = torch.randint(0, ROWS, (3, num_tokens), generator=generator)
    return query, key, positions


def expected_of(x, positions, axes=AXES, dtype=None, attention_factor=1.0, style=True, rounding="cache", inverse=False):
    """The reference's result, from a table of every row."""
    rows = max(1, int(positions.max()) + 1) if positions.numel() else 1
    cache = reference.build_cos_sin_cache(INV_FREQ, rows, attention_factor, dtype or x.dtype)
    cos, sin = reference.gather_cos_sin(cache, positions, axes)
    return reference.rotate(x, cos, -sin if inverse else sin, style, rounding)


def assert_bits(got, expected):
    assert got.dtype == expected.dtype and torch.equal(got, expected)


# Axis maps.


def test_axis_maps_of_the_families():
    assert axis_map([1, 2, 1]) == (0, 1, 1, 2)
    assert axis_map([2, 1, 1, 1]) == (0, 0, 1, 2, 3)
    interleaved = axis_map([11, 11, 10], True)
    assert interleaved[:7] == (0, 1, 2, 0, 1, 2, 0) and interleaved[-2:] == (0, 1)
    assert [interleaved.count(axis) for axis in range(3)] == [11, 11, 10]
    assert axis_map([24, 20, 20], True)[57:] == (0, 1, 2, 0, 0, 0, 0)
    assert axis_map([1, 1, 0], True) == (0, 1)
    # The published rule stops at the last frequency: w asks for three and finds two.
    assert axis_map([2, 3, 3], True) == (0, 1, 2, 0, 1, 2, 0, 1)
    ernie = spatial_first_axis_map([22, 22, 20])
    assert ernie[:4] == (1, 2, 1, 2) and ernie[44:] == (0,) * 20 and len(ernie) == 64


@pytest.mark.parametrize(
    "function, arguments, message",
    [
        (axis_map, ([2, -1],), "must not hold a negative number"),
        (axis_map, ([1] * 5,), "must be 1 to 4 integers"),
        (axis_map, ([1.5, 2],), "must be 1 to 4 integers"),
        (spatial_first_axis_map, ([22, 20, 22],), "h == w"),
    ],
)
def test_axis_map_errors(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


# Bits.

FORMS = list(
    itertools.product(
        (torch.float32, torch.bfloat16, torch.float16),
        (True, False),
        ("cache", "float32"),
        (1.0, 1.1386),
        (False, True),
    )
)


@pytest.mark.parametrize("dtype, style, rounding, attention_factor, inverse", FORMS)
def test_bits_of_the_reference(dtype, style, rounding, attention_factor, inverse):
    """With the whole table, with a bounded one and with none; out of place and in place."""
    query, key, positions = make(dtype=dtype)
    options = dict(axis_map=AXES, is_neox_style=style, rounding=rounding, inverse=inverse)
    options["attention_factor"] = attention_factor
    expected = [
        expected_of(x, positions, attention_factor=attention_factor, style=style, rounding=rounding, inverse=inverse)
        for x in (query, key)
    ]
    cache = reference.build_cos_sin_cache(INV_FREQ, ROWS, attention_factor, dtype)
    for table in (cache, cache[:7], cache[:0], None):
        for got, want in zip(rotate(query, key, positions, INV_FREQ, table, **options), expected, strict=True):
            assert_bits(got, want)
        written = query.clone(), key.clone()
        rotate_(*written, positions, INV_FREQ, table, **options)
        for got, want in zip(written, expected, strict=True):
            assert_bits(got, want)


@pytest.mark.parametrize(
    "cache_dtype, dtype", itertools.permutations((torch.float32, torch.bfloat16, torch.float16), 2)
)
def test_table_of_another_dtype(cache_dtype, dtype):
    """Rows are rounded to the table's dtype, then to query's, as the reference casts them; the table stays (R16)."""
    query, _, positions = make(dtype=dtype)
    cache = reference.build_cos_sin_cache(INV_FREQ, ROWS, 1.0, cache_dtype)
    before = cache.clone()
    for rounding in ("cache", "float32"):
        expected = expected_of(query, positions, dtype=cache_dtype, rounding=rounding)
        assert_bits(rotate(query, None, positions, INV_FREQ, cache, axis_map=AXES, rounding=rounding)[0], expected)
        virtual = rotate(query, None, positions, INV_FREQ, axis_map=AXES, rounding=rounding, cache_dtype=cache_dtype)[0]
        assert_bits(virtual, expected)
    assert_bits(cache, before)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_shape_and_form(data):
    draw = data.draw
    half = draw(st.integers(1, 9), "half")
    head_size = 2 * half + draw(st.integers(0, 3), "rest")
    num_dims = draw(st.integers(1, 4), "num_dims")
    axes = draw(st.lists(st.integers(0, num_dims - 1), min_size=half, max_size=half), "axes")
    num_tokens = draw(st.integers(0, 5), "num_tokens")
    style, dtype = draw(st.booleans()), draw(st.sampled_from(module.ROTATED_DTYPES[:3]))
    inv_freq = torch.rand(half) + 0.01
    query = torch.randn(num_tokens, draw(st.integers(1, 4)), head_size).to(dtype)
    positions = torch.randint(0, 1 << draw(st.sampled_from((3, 12))), (num_dims, num_tokens))
    cache = reference.build_cos_sin_cache(inv_freq, 1 << 12, 1.0, dtype)
    expected = reference.rotate(query, *reference.gather_cos_sin(cache, positions, axes), style)
    rows = draw(st.sampled_from((None, 1, 8, 1 << 12)), "rows")
    table = None if rows is None else cache[:rows]
    flat = query.flatten(1) if num_tokens else query
    got, _ = rotate(flat, None, positions, inv_freq, table, head_size=head_size, axis_map=axes, is_neox_style=style)
    assert_bits(got.view(expected.shape), expected)


def test_many_tokens_go_through_in_blocks(monkeypatch):
    """R48, and the tails of blocks: any number of lanes at a time gives the same bits."""
    query, key, positions = make(num_tokens=70_000 // 8, dtype=torch.bfloat16)
    expected = [expected_of(x, positions) for x in (query, key)]
    for lanes in (1 << 19, 1000):
        monkeypatch.setattr(module, "_BLOCK_LANES", lanes)
        for got, want in zip(rotate(query, key, positions, INV_FREQ, axis_map=AXES), expected, strict=True):
            assert_bits(got, want)


def test_large_positions_round_as_the_table_does():
    """From 2**24 on neighbouring positions share a row; int32 positions are the same positions."""
    positions = torch.tensor([2**24 - 1, 2**24, 2**24 + 1, 2**24 + 2])
    query, _, _ = make(num_tokens=4)
    angle = positions.float()[:, None] * INV_FREQ
    expected = reference.rotate(query, angle.cos(), angle.sin())
    assert_bits(rotate(query, None, positions, INV_FREQ)[0], expected)
    assert_bits(rotate(query, None, positions.int(), INV_FREQ)[0], expected)
    rotated = rotate(query[:1].expand(4, -1, -1), None, positions, INV_FREQ)[0]
    assert torch.equal(rotated[1], rotated[2]) and not torch.equal(rotated[1], rotated[3])


def test_fractional_positions_without_a_table():
    query, _, _ = make(num_tokens=3)
    positions = torch.tensor([0.0, 9.5, 16.25])
    angle = positions[:, None] * INV_FREQ
    assert_bits(rotate(query, None, positions, INV_FREQ)[0], reference.rotate(query, angle.cos(), angle.sin()))


# Layouts.


def test_which_position_each_channel_uses():
    """R28, R38: a table with cos = row and sin = 0 shows the row that was read; lanes that do not turn stay."""
    cache = torch.cat((torch.arange(9.0)[:, None].expand(9, 4), torch.zeros(9, 4)), dim=-1)
    positions = torch.tensor([5, 6, 7, 8])[:, None]
    got, _ = rotate(torch.ones(1, 1, 10), None, positions, torch.ones(4), cache, axis_map=axis_map([1, 1, 1, 1]))
    assert got.flatten().tolist() == [5, 6, 7, 8, 5, 6, 7, 8, 1, 1]
    pairs, _ = rotate(
        torch.ones(1, 1, 10), None, positions, torch.ones(4), cache, axis_map=(3, 2, 1, 0), is_neox_style=False
    )
    assert pairs.flatten().tolist() == [8, 8, 7, 7, 6, 6, 5, 5, 1, 1]


def test_one_row_of_positions_is_equal_rows():
    """R31."""
    query, key, positions = make(num_tokens=5)
    equal = positions[:1].expand(3, -1)
    expected = rotate(query, key, equal, INV_FREQ, axis_map=AXES)
    for one in (positions[0], positions[:1]):
        for got, want in zip(rotate(query, key, one, INV_FREQ, axis_map=AXES), expected, strict=True):
            assert_bits(got, want)


def layouts():
    """Query-like tensors of 4 tokens, 2 heads of HEAD_SIZE, by the strides that models make (R35, R39)."""
    generator = torch.Generator().manual_seed(3)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "contiguous": randn(4, 2, HEAD_SIZE),
        "flat": randn(4, 2 * HEAD_SIZE),
        "flat slice of a projection": randn(4, 5 * HEAD_SIZE)[:, HEAD_SIZE : 3 * HEAD_SIZE],
        "slice of a projection": randn(4, 5, HEAD_SIZE)[:, 1:3],
        "every other token": randn(8, 2, HEAD_SIZE)[::2],
        "transposed": randn(2, 4, HEAD_SIZE).transpose(0, 1),
        "lanes apart": randn(4, HEAD_SIZE, 2).transpose(1, 2),
        "slice of a wider head": randn(4, 2, HEAD_SIZE + 3)[..., 1 : HEAD_SIZE + 1],
    }


LAYOUTS = list(layouts())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("style", [True, False])
def test_layouts(layout, style):
    """Out of place the result is contiguous and the input stays; in place its own memory changes, nothing around."""
    query = layouts()[layout]
    _, key, positions = make(num_tokens=4)
    options = dict(head_size=HEAD_SIZE, axis_map=AXES, is_neox_style=style)
    expected = expected_of(query.reshape(4, 2, HEAD_SIZE), positions, style=style).view(query.shape)
    before = query.clone()
    key = key.flatten(1) if query.dim() == 2 else key
    got, got_key = rotate(query, key, positions, INV_FREQ, **options)
    assert_bits(got, expected)
    assert got.is_contiguous() and torch.equal(query, before)
    assert_bits(got_key.view(4, 1, HEAD_SIZE), expected_of(key.view(4, 1, HEAD_SIZE), positions, style=style))

    storage = torch.empty(0).set_(query.untyped_storage())
    around = torch.ones(storage.shape, dtype=torch.bool)
    around.as_strided(query.shape, query.stride(), query.storage_offset()).fill_(False)
    storage_before = storage.clone()
    rotate_(query, None, positions, INV_FREQ, **options)
    assert_bits(query, expected)
    assert torch.equal(storage[around], storage_before[around])


def test_slices_of_one_projection_with_one_key_head():
    """R39: query and key are slices of one tensor, the key has a single head; value and gaps stay."""
    projection = torch.randn(5, 5 * 6)
    before = projection.clone()
    query, key = projection[:, : 3 * 6], projection[:, 3 * 6 : 4 * 6]
    positions = torch.arange(5)
    inv_freq = torch.tensor([1.0, 0.5, 0.25])
    rotate_(query, key, positions, inv_freq, head_size=6)
    cache = reference.build_cos_sin_cache(inv_freq, 5)
    expected = reference.rotate(before[:, : 4 * 6].unflatten(-1, (4, 6)), *reference.gather_cos_sin(cache, positions))
    assert_bits(projection[:, : 4 * 6], expected.flatten(1))
    assert_bits(projection[:, 4 * 6 :], before[:, 4 * 6 :])


@pytest.mark.parametrize("lead", [(2, 3), (1, 4), (2, 1, 3), (2, 2, 2, 2)])
@pytest.mark.parametrize("lanes", [1 << 17, 30])
def test_several_dimensions_of_tokens(lead, lanes, monkeypatch):
    """[batch, heads, sequence, head_size] transposed, as Hugging Face models have it, with positions for each."""
    monkeypatch.setattr(module, "_BLOCK_LANES", lanes)
    query = torch.randn(*lead[:-1], 2, lead[-1], HEAD_SIZE).transpose(-2, -3)
    positions = torch.randint(0, ROWS, (3, *lead))
    expected = expected_of(query.reshape(-1, 2, HEAD_SIZE), positions.flatten(1)).view(query.shape)
    for table in (None, reference.build_cos_sin_cache(INV_FREQ, 9)):
        assert_bits(rotate(query, None, positions, INV_FREQ, table, axis_map=AXES)[0], expected)
    one_axis = rotate(query, None, positions[0], INV_FREQ)[0]
    assert_bits(one_axis.view(-1, 2, HEAD_SIZE), expected_of(query.reshape(-1, 2, HEAD_SIZE), positions[0].flatten()))
    rotate_(query, None, positions, INV_FREQ, axis_map=AXES)
    assert_bits(query, expected)


@pytest.mark.parametrize("shape", [(0, 3, HEAD_SIZE), (4, 0, HEAD_SIZE), (0, 3 * HEAD_SIZE), (2, 0, 3, HEAD_SIZE)])
def test_nothing_to_rotate(shape):
    tokens = shape[:1] if len(shape) == 2 else shape[:-2]
    positions = torch.zeros(3, *tokens, dtype=torch.int64)
    options = dict(head_size=HEAD_SIZE, axis_map=AXES, check_positions=True)
    for table in (None, torch.ones(4, 2 * HALF)):
        got, key = rotate(torch.empty(shape), None, positions, INV_FREQ, table, **options)
        assert got.shape == shape and key is None
        rotate_(torch.empty(shape), torch.empty(shape), positions, INV_FREQ, table, **options)


# Positions outside the table.


def test_rows_outside_the_table_are_computed_and_counted():
    """R02, R09, R29: never another row; the same bits as the legacy table's; only real tokens count."""
    query, key, _ = make(num_tokens=5, dtype=torch.bfloat16)
    positions = torch.tensor([[3, 31, 32, 60, 0], [3, 31, 0, 0, 33], [3, 31, 0, 1, 0]])
    cache = reference.build_cos_sin_cache(INV_FREQ, 32, 1.0, torch.bfloat16)
    rows_computed(reset=True)
    got = rotate(query, key, positions, INV_FREQ, cache, axis_map=AXES)
    for x, of_x in zip((query, key), got, strict=True):
        assert_bits(of_x, expected_of(x, positions))
    assert rows_computed() == 3
    assert rows_computed("cpu", reset=True) == 3
    rotate(query[:2], key[:2], positions[:, :2], INV_FREQ, cache, axis_map=AXES)
    rotate(query, key, positions, INV_FREQ, axis_map=AXES)
    assert rows_computed() == 0


def test_a_row_inside_is_read_even_when_another_is_computed():
    """The table is what the caller gave: rows of it are not replaced by computed ones."""
    cache = torch.full((4, 2), 7.0)
    got, _ = rotate(torch.tensor([1.0, 0.0]).expand(2, 1, 2), None, torch.tensor([3, 4]), torch.ones(1), cache)
    assert got[0].flatten().tolist() == [7.0, 7.0]
    assert_bits(got[1].flatten(), torch.stack((torch.tensor(4.0).cos(), torch.tensor(4.0).sin())))


@pytest.mark.parametrize("table", [None, reference.build_cos_sin_cache(INV_FREQ, 8)])
def test_a_negative_position_turns_backwards(table):
    query, _, _ = make(num_tokens=2)
    angle = torch.tensor([-1.0, -40.0])[:, None] * INV_FREQ
    expected = reference.rotate(query, angle.cos(), angle.sin())
    assert_bits(rotate(query, None, torch.tensor([-1, -40]), INV_FREQ, table)[0], expected)


@pytest.mark.parametrize("function", [rotate, rotate_])
def test_checked_positions(function):
    query, _, _ = make(num_tokens=2)
    before = query.clone()
    cache = reference.build_cos_sin_cache(INV_FREQ, 32)
    with pytest.raises(ValueError, match=r"positions must be below the 32 rows of cos_sin_cache, got 60"):
        function(query, None, torch.tensor([1, 60]), INV_FREQ, cache, check_positions=True)
    for table in (cache, None):
        with pytest.raises(ValueError, match=r"positions must not be negative, got -2"):
            function(query, None, torch.tensor([1, -2]), INV_FREQ, table, check_positions=True)
    assert torch.equal(query, before)
    # An axis that no frequency turns with may hold anything.
    positions = torch.tensor([[1, 31], [-5, 99]])
    function(query, None, positions, INV_FREQ, cache, axis_map=(0,) * HALF, check_positions=True)


# Errors.


def arguments(**changes):
    query, key, positions = make()
    cache = reference.build_cos_sin_cache(INV_FREQ, ROWS)
    given = dict(query=query, key=key, positions=positions, inv_freq=INV_FREQ, cos_sin_cache=cache, axis_map=AXES)
    return given | changes


BAD = {
    "two shapes of tokens": (
        dict(positions=torch.zeros(3, 4, dtype=torch.int64)),
        ValueError,
        r"tokens of query.*\[6, 3, 14\] and \[3, 4\]",
    ),
    "too few axes": (
        dict(positions=torch.zeros(2, 6, dtype=torch.int64)),
        ValueError,
        r"turns with 3 axes.*\[2, 6\] for query of shape \[6, 3, 14\]",
    ),
    "too many axes": (dict(positions=torch.zeros(5, 6, dtype=torch.int64)), ValueError, "at most 4"),
    "axes without a map": (dict(axis_map=()), ValueError, r"turns with 1 axis.*got shape \[3, 6\]"),
    "flattened positions": (dict(positions=torch.zeros(18, dtype=torch.int64)), ValueError, r"\[6, 3, 14\] and \[18\]"),
    "positions of another rank": (
        dict(positions=torch.zeros(3, 2, 3, dtype=torch.int64)),
        ValueError,
        "must be .num_tokens. or",
    ),
    "float positions": (dict(positions=torch.zeros(3, 6)), TypeError, "positions must be torch.int64"),
    "short positions": (dict(positions=torch.zeros(3, 6, dtype=torch.int16)), TypeError, "got torch.int16"),
    "key tokens": (
        dict(key=torch.zeros(5, 1, 14)),
        ValueError,
        r"same tokens, got shapes \[6, 3, 14\] and \[5, 1, 14\]",
    ),
    "key rank": (dict(key=torch.zeros(6, 1, 1, 14)), ValueError, "same tokens"),
    "key dtype": (dict(key=torch.zeros(6, 1, 14).half()), TypeError, "one dtype, got torch.float32 and torch.float16"),
    "integer query": (
        dict(query=torch.zeros(6, 3, 14, dtype=torch.int32), key=None),
        TypeError,
        "query must have one of",
    ),
    "one dimension": (dict(query=torch.zeros(14), key=None, head_size=14), ValueError, r"got shape \[14\]"),
    "head size": (dict(head_size=12), ValueError, "must be head_size 12"),
    "flat size": (
        dict(query=torch.zeros(6, 40), key=None, head_size=14),
        ValueError,
        r"heads \* head_size with head_size 14",
    ),
    "flat without head size": (dict(query=torch.zeros(6, 42), key=None), ValueError, "head_size must be given"),
    "head size of nothing": (dict(head_size=0), ValueError, "head_size must be positive"),
    "rotary_dim": (dict(query=torch.zeros(6, 3, 8), key=None), ValueError, "at most head_size 8, got 10"),
    "inv_freq dtype": (
        dict(inv_freq=INV_FREQ.double()),
        TypeError,
        "inv_freq must be torch.float32, got torch.float64",
    ),
    "inv_freq shape": (dict(inv_freq=INV_FREQ[None]), ValueError, "inv_freq must be 1-D"),
    "table width": (dict(cos_sin_cache=torch.zeros(4, 8)), ValueError, r"= 10, got shape \[4, 8\]"),
    "table dtype": (dict(cos_sin_cache=torch.zeros(4, 10).double()), TypeError, "cos_sin_cache must have one of"),
    "cache_dtype of a table": (dict(cache_dtype=torch.bfloat16), TypeError, "None or the dtype of cos_sin_cache"),
    "cache_dtype": (dict(cos_sin_cache=None, cache_dtype=torch.float64), TypeError, "cache_dtype must be one of"),
    "map length": (dict(axis_map=(0, 1)), ValueError, "len.inv_freq. = 5 entries, got 2"),
    "map axes": (dict(axis_map=(0, 1, 2, 3, 4)), ValueError, "must name axes 0 to 3, got '01234'"),
    "rounding": (dict(rounding="none"), ValueError, "rounding must be one of 'cache', 'float32', got 'none'"),
    "rounding of float64": (
        dict(query=torch.zeros(6, 3, 14).double(), key=None, rounding="float32"),
        TypeError,
        "lose bits",
    ),
    "attention_factor": (dict(attention_factor=float("nan")), ValueError, "attention_factor must be finite"),
    "devices": (
        dict(positions=torch.zeros(3, 6, dtype=torch.int64, device="meta")),
        ValueError,
        "query's device, cpu; positions is on meta",
    ),
}


@pytest.mark.parametrize("function", [rotate, rotate_])
@pytest.mark.parametrize("case", BAD)
def test_errors(case, function):
    changes, error, message = BAD[case]
    with pytest.raises(error, match=rf"^{function.__name__}: .*{message}") as raised:
        function(**arguments(**changes))
    assert type(raised.value) is error


def test_in_place_refuses_shared_memory():
    query, key, positions = make()
    with pytest.raises(ValueError, match="query must not be expanded.*use rotate"):
        rotate_(query[:1].expand(6, -1, -1), key, positions, INV_FREQ, axis_map=AXES)
    with pytest.raises(ValueError, match="key must not be expanded"):
        rotate_(query, key.expand(-1, 2, -1), positions, INV_FREQ, axis_map=AXES)
    with pytest.raises(ValueError, match="turned twice"):
        rotate_(query, query, positions, INV_FREQ, axis_map=AXES)
    got, _ = rotate(query[:1].expand(6, -1, -1), None, positions, INV_FREQ, axis_map=AXES)
    assert_bits(got, expected_of(query[:1].expand(6, -1, -1), positions))


# Gradients.


@pytest.mark.parametrize("style, with_table", [(True, True), (False, False)])
def test_gradients(style, with_table):
    query, key, positions = make(num_tokens=2, heads=1)
    query, key = query.double().requires_grad_(), key.double().requires_grad_()
    table = reference.build_cos_sin_cache(INV_FREQ, 20) if with_table else None

    def function(query, key):
        return rotate(
            query, key, positions, INV_FREQ, table, axis_map=AXES, is_neox_style=style, attention_factor=1.5,
            cache_dtype=torch.float32,
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, (query, key))
    assert torch.autograd.gradgradcheck(function, (query, key))
    only_key = torch.autograd.grad(function(query.detach(), key)[1].sum(), key)[0]
    assert torch.equal(only_key, torch.autograd.grad(function(query, key)[1].sum(), key)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_has_the_bits_of_the_reference(dtype):
    query, _, positions = make(dtype=dtype)
    weight = torch.randn(query.shape).to(dtype)
    grads = []
    for function in (
        lambda x: rotate(x, None, positions, INV_FREQ, axis_map=AXES)[0],
        lambda x: expected_of(x, positions),
    ):
        leaf = query.clone().requires_grad_()
        (function(leaf) * weight).sum().backward()
        grads.append(leaf.grad)
    assert_bits(*grads)


def test_no_gradient_for_positions_and_none_for_rows():
    query, _, _ = make(num_tokens=2)
    positions = torch.tensor([0.5, 1.5], requires_grad=True)
    rotate(query.requires_grad_(), None, positions, INV_FREQ)[0].sum().backward()
    assert positions.grad is None and query.grad is not None
    with pytest.raises(RuntimeError, match="inv_freq and cos_sin_cache have no gradient"):
        rotate(query, None, positions, INV_FREQ.clone().requires_grad_())


def test_in_place_refuses_to_lose_a_gradient():
    """R06: an intermediate and a leaf raise, and nothing is written; without grad mode both work."""
    leaf = torch.randn(2, 1, 2, requires_grad=True)
    intermediate = leaf * 1
    positions, inv_freq = torch.tensor([1, 2]), torch.ones(1)
    for query in (leaf, intermediate):
        before = query.detach().clone()
        with pytest.raises(RuntimeError, match="rotate_: query requires grad.*use the functional form"):
            rotate_(query, None, positions, inv_freq)
        assert torch.equal(query, before)
    with pytest.raises(RuntimeError, match="rotate_: key requires grad"):
        rotate_(torch.zeros(2, 1, 2), intermediate, positions, inv_freq)
    with pytest.raises(RuntimeError, match="rotate_: inv_freq requires grad"):
        rotate_(torch.zeros(2, 1, 2), None, positions, inv_freq.clone().requires_grad_())
    with torch.no_grad():
        expected = rotate(leaf, None, positions, inv_freq)[0]
        rotate_(leaf, None, positions, inv_freq)
        assert torch.equal(leaf, expected)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_in_place_is_seen_by_autograd(mode):
    """A value that a formula saved and rotate_ then wrote to must not be used for its gradient."""
    weight = torch.ones(2, 1, 2, requires_grad=True)
    query = torch.randn(2, 1, 2)
    product = weight * query
    with mode():
        rotate_(query, None, torch.tensor([1, 2]), torch.ones(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


# Transforms and tracing.


@pytest.mark.parametrize("in_dims", [(0, 0, 1), (2, None, None), (0, 1, None), (None, None, 0), (1, 0, 2)])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("with_key", [True, False])
def test_vmap_is_a_loop(in_dims, flat, with_key):
    """R36."""
    tensors = list(make(num_tokens=4))
    if flat:
        tensors[:2] = [x.flatten(1) for x in tensors[:2]]
    if not with_key:
        in_dims = (in_dims[0], None, in_dims[2])
    batched = []
    for x, dim in zip(tensors, in_dims, strict=True):
        dim = None if dim is None else min(dim, x.dim())
        batched.append((x if dim is None else torch.stack([x, x.flip(0) * 2], dim), dim))

    def function(query, key, positions):
        out = rotate(query, key if with_key else None, positions, INV_FREQ, head_size=HEAD_SIZE, axis_map=AXES)
        return out if with_key else out[0]

    if all(dim is None for _, dim in batched):
        pytest.skip("no dimension to map over without the key")
    got = torch.vmap(function, in_dims=tuple(dim for _, dim in batched))(*(x for x, _ in batched))
    loop = [function(*(x if dim is None else x.select(dim, i) for x, dim in batched)) for i in range(2)]
    for i, one in enumerate(loop):
        for g, want in zip(got, one, strict=True) if with_key else ((got, one),):
            assert_bits(g[i], want)


def test_vmap_over_frequencies_and_in_place():
    query, key, positions = make(num_tokens=2)
    inv_freqs = torch.stack([INV_FREQ, INV_FREQ * 2])
    got = torch.vmap(lambda f: rotate(query, None, positions, f, axis_map=AXES)[0])(inv_freqs)
    for i in range(2):
        assert_bits(got[i], rotate(query, None, positions, inv_freqs[i], axis_map=AXES)[0])

    batch = torch.stack([query, query * 2], 1)
    expected = torch.stack([rotate(x, None, positions, INV_FREQ, axis_map=AXES)[0] for x in (query, query * 2)], 1)
    torch.vmap(lambda x: rotate_(x, None, positions, INV_FREQ, axis_map=AXES), in_dims=1, out_dims=None)(batch)
    assert_bits(batch, expected)
    with pytest.raises(ValueError, match="under vmap query must be batched"):
        torch.vmap(lambda p: rotate_(query, None, p, INV_FREQ), out_dims=None)(positions)


SAMPLES = [
    (layout, dtype, with_table, grad)
    for layout in LAYOUTS
    for dtype, with_table, grad in ((torch.float32, True, True), (torch.bfloat16, False, False))
]


@pytest.mark.parametrize("layout, dtype, with_table, grad", SAMPLES)
def test_opcheck(layout, dtype, with_table, grad):
    """R34, R35: schema, fake strides, autograd and compilation with symbolic sizes, on every layout."""
    query = layouts()[layout]
    strided = torch.empty_strided(query.shape, query.stride(), dtype=dtype).copy_(query)
    _, key, positions = make(num_tokens=4, dtype=dtype)
    key = key.flatten(1) if query.dim() == 2 else key
    table = reference.build_cos_sin_cache(INV_FREQ, 20, 1.0, dtype) if with_table else None
    form = (HEAD_SIZE, "01122", True, 1.0, None, "cache", False, False)
    torch.library.opcheck(
        torch.ops.rope_ops.rotate.default,
        (strided.requires_grad_(grad), key.requires_grad_(grad), positions, INV_FREQ, table, *form),
    )
    torch.library.opcheck(
        torch.ops.rope_ops.rotate_.default,
        (strided.detach(), None if grad else key.detach(), positions, INV_FREQ, table, *form),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_and_meta_results(layout):
    """R36: shapes, strides and dtypes as the real op's, on meta tensors and fake ones; an expanded query too."""
    for query in (layouts()[layout], layouts()[layout][:1].expand(4, *[-1] * (layouts()[layout].dim() - 1))):
        _, _, positions = make(num_tokens=4)
        options = dict(head_size=HEAD_SIZE, axis_map=AXES)
        real, _ = rotate(query, None, positions, INV_FREQ, **options)
        meta, _ = rotate(query.to("meta"), None, positions.to("meta"), INV_FREQ.to("meta"), **options)
        assert (meta.shape, meta.stride(), meta.dtype) == (real.shape, real.stride(), real.dtype)


def layer(query, key, positions, table):
    query, key = query * 2, key * 2
    query, key = rotate(query, key, positions, INV_FREQ, table, head_size=HEAD_SIZE, axis_map="01122")
    query, key = query + 1, key + 1
    rotate_(query, key, positions, INV_FREQ, table, head_size=HEAD_SIZE, axis_map="01122")
    return query, key


def test_one_compile_for_every_number_of_tokens():
    """R32: positions are slices of a wider buffer; 1 token, and as many as there are axes, are no special case."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    table = reference.build_cos_sin_cache(INV_FREQ, ROWS)
    buffer = torch.randint(0, ROWS, (3, 18))
    for num_tokens in (5, 7, 3, 16, 4):
        query, key, _ = make(num_tokens=num_tokens)
        positions = buffer[:, :num_tokens]
        if num_tokens == 5:
            for x, dim in ((query, 0), (key, 0), (positions, 1)):
                torch._dynamo.mark_dynamic(x, dim)
        for got, want in zip(compiled(query, key, positions, table), layer(query, key, positions, table), strict=True):
            assert_bits(got, want)
    assert counter.frame_count == 1


@pytest.mark.compiles
def test_generated_code_has_no_copies():
    """Inductor keeps the operators as they are and writes in place: no clone, no copy, also of a slice (R39)."""
    from torch._inductor.utils import run_and_get_code

    def attention_inputs(hidden, weight, positions):
        projection = hidden @ weight
        query, key = projection[:, : 3 * HEAD_SIZE], projection[:, 3 * HEAD_SIZE : 4 * HEAD_SIZE]
        rotate_(query, key, positions, INV_FREQ, head_size=HEAD_SIZE, axis_map="01122")
        turned = rotate(query, key, positions, INV_FREQ, head_size=HEAD_SIZE, axis_map="01122")
        return *turned, projection

    arguments = torch.randn(6, 8), torch.randn(8, 5 * HEAD_SIZE), torch.randint(0, ROWS, (3, 6))
    with torch.no_grad():
        got, (code,) = run_and_get_code(torch.compile(attention_inputs, fullgraph=True, dynamic=True), *arguments)
        expected = attention_inputs(*arguments)
    for g, want in zip(got, expected, strict=True):
        torch.testing.assert_close(g, want)
    assert code.count("torch.ops.rope_ops.rotate.default(") == 1
    assert code.count("torch.ops.rope_ops.rotate_.default(") == 1
    body = code[code.index("def call(") :]
    assert "clone" not in body and "copy_" not in body and "cpp_fused" not in body


def test_gradients_through_a_compiled_layer():
    query, key, positions = make()

    def function(query, key):
        turned = rotate(query, key, positions, INV_FREQ, head_size=HEAD_SIZE, axis_map="01122")
        return (turned[0].sum(1) * turned[1].sum(1)).sum()

    grads = []
    for f in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in (query, key)]
        grads.append(torch.autograd.grad(f(*leaves), leaves))
    for got, want in zip(*grads, strict=True):
        assert_bits(got, want)
    with pytest.raises(Exception, match="rotate_: query requires grad"):
        torch.compile(
            lambda q: rotate_(q * 1, None, positions, INV_FREQ, axis_map="01122"), backend="aot_eager", fullgraph=True
        )(query.requires_grad_())


def test_a_second_copy_of_the_module_and_no_triton():
    """R47, R49: reloading registers nothing twice, operators outlive a collection, the CPU needs no Triton."""
    code = """
import sys; sys.modules["triton"] = None
import gc, importlib, torch
from rope_ops.ops import rotate
q, p = torch.randn(3, 2, 8), torch.arange(3)
first = rotate(q, None, p, torch.ones(4))[0]
importlib.reload(sys.modules["rope_ops.ops.rotate"]); gc.collect()
from rope_ops.ops.rotate import rotate
assert torch.equal(rotate(q, None, p, torch.ones(4))[0], first)
loaded = [name for name in ("torch._dynamo", "torch._inductor", "torch.distributed.tensor") if name in sys.modules]
assert not loaded, loaded
print("done")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "done\n", result.stderr


def test_no_effect_of_default_device_and_dtype():
    from rope_ops.ops import rotate as op

    query, positions, inv_freq = torch.randn(5, 2, 14), torch.arange(5), torch.rand(7)
    expected = op(query, None, positions, inv_freq)[0]
    torch.set_default_dtype(torch.float64)
    try:
        # Another map than any test before, so that nothing is found made already.
        with torch.device("meta"):
            got = op(query, None, positions, inv_freq, is_neox_style=False)[0]
            assert torch.equal(op(query, None, positions, inv_freq)[0], expected)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.device.type == "cpu" and torch.equal(got, op(query, None, positions, inv_freq, is_neox_style=False)[0])
