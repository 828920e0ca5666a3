"""RotaryEmbedding, MRotaryEmbedding and the registry: the contracts that concern tables."""

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rope_ops import MRotaryEmbedding, RotaryEmbedding, get_rope, reference, rope_frequencies

PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
SECTIONS = {**PLAIN, "mrope_section": [2, 3, 3], "mrope_interleaved": True}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parameters", [PLAIN, YARN, SECTIONS, {**YARN, "mrope_section": [2, 3, 3]}])
def test_without_a_bound_the_table_is_the_legacy_construction(parameters, dtype):
    rope = get_rope(16, 64, rope_parameters=parameters, dtype=dtype)
    factor = 4 if "mrope_section" in parameters else 1
    semantic = dict(parameters)
    if "factor" in parameters:
        semantic["original_max_position_embeddings"] = 16 * factor
    inv_freq, attention_factor = rope_frequencies(semantic, 16, 64 * factor)
    rows = 64 * factor  # YaRN: 16 x 4 x factor, the same number
    assert rope.legacy_rows == rows
    assert torch.equal(rope.cos_sin_cache, reference.build_cos_sin_cache(inv_freq, rows, attention_factor, dtype))


@pytest.mark.parametrize("parameters", [PLAIN, YARN, SECTIONS, {**YARN, "mrope_section": [2, 3, 3]}])
@pytest.mark.parametrize("bound", [1, 7, 33])
def test_with_a_bound_the_table_is_a_bitwise_prefix(parameters, bound):
    legacy = get_rope(16, 64, rope_parameters=parameters, dtype=torch.bfloat16)
    bounded = get_rope(16, 64, rope_parameters=parameters, dtype=torch.bfloat16, cache_max_position=bound)
    assert bounded.cos_sin_cache.shape == (bound, 16)
    assert torch.equal(bounded.cos_sin_cache, legacy.cos_sin_cache[:bound])
    assert torch.equal(bounded.inv_freq, legacy.inv_freq)


def test_a_bound_above_the_legacy_rows_extends_the_table():
    legacy = get_rope(16, 64, rope_parameters=PLAIN)
    longer = get_rope(16, 64, rope_parameters=PLAIN, cache_max_position=100)
    assert torch.equal(longer.cos_sin_cache[:64], legacy.cos_sin_cache)
    assert longer.cos_sin_cache.shape[0] == 100


def test_bound_does_not_stand_in_for_a_missing_original_length():
    """R01: YaRN without original_max_position_embeddings takes the semantic maximum, never the rows."""
    parameters = {"rope_type": "yarn", "rope_theta": 10000, "factor": 4}
    rope = get_rope(16, 64, rope_parameters=parameters, cache_max_position=8)
    expected = [1, 0.237171, 0.05, 0.007906, 0.0025, 0.000791, 0.00025, 0.000079]
    torch.testing.assert_close(rope.inv_freq, torch.tensor(expected), atol=1e-6, rtol=1e-3)
    assert torch.equal(rope.cos_sin_cache, get_rope(16, 64, rope_parameters=parameters).cos_sin_cache[:8])


@pytest.mark.parametrize("bound", [64, 16, 8])
def test_bound_does_not_switch_yarn_off(bound):
    """R23"""
    rope = get_rope(16, 64, rope_parameters=YARN, cache_max_position=bound)
    torch.testing.assert_close(rope.inv_freq[:4], torch.tensor([1, 0.079057, 0.025, 0.007906]), atol=1e-6, rtol=1e-3)
    assert rope.attention_factor == pytest.approx(1.138629, abs=1e-6)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"factor": 64, "attention_factor": 1.0}, 1.0),
        ({"factor": 64}, 1.415888),
        ({"factor": 40, "mscale": 1.0, "mscale_all_dim": 0.707}, 1.085726),
        ({"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 4, "attn_factor": 2.0}, 2 * 1.138629),
    ],
)
def test_attention_factor_reaches_row_zero(extra, expected):
    """R17: cos of position 0 is the attention factor."""
    rope = get_rope(8, 1024, rope_parameters={**YARN, **extra}, cache_max_position=4)
    torch.testing.assert_close(rope.cos_sin_cache[0, :4], torch.full((4,), expected), atol=2e-6, rtol=0)


def test_both_yarn_semantics_of_multi_axis_models():
    """Factor 1 computes transformers' correction range, factor 4 the serving engines'; they differ."""
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "mrope_section": [16, 24, 24],
    }
    one, four = (
        get_rope(128, 32768, rope_parameters=parameters, cache_max_position=8, mrope_positions_factor=factor)
        for factor in (1, 4)
    )
    assert int((one.inv_freq != four.inv_freq).sum()) == 23
    plain = {key: value for key, value in parameters.items() if key != "mrope_section"}
    assert torch.equal(one.inv_freq, get_rope(128, 32768, rope_parameters=plain, cache_max_position=8).inv_freq)
    assert (one.legacy_rows, four.legacy_rows) == (131072, 524288)


@pytest.mark.parametrize("bound", [0, -1, 2.0, "8", True])
def test_a_bound_must_be_a_positive_integer(bound):
    with pytest.raises(ValueError, match="get_rope: cache_max_position must be a positive integer, got"):
        get_rope(16, 64, rope_parameters=PLAIN, cache_max_position=bound)
    with pytest.raises(ValueError, match="RotaryEmbedding: cache_max_position must be a positive integer, got"):
        RotaryEmbedding(16, 16, 64, rope_parameters=PLAIN, cache_max_position=bound)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rope_parameters": None}, "needs 'rope_theta'"),
        ({"rope_parameters": {"rope_type": "nonesuch", "rope_theta": 1.0}}, "rope_type must be one of .*'nonesuch'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "needs 'factor'"),
        ({"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.5}}, "partial_rotary_factor must be in"),
        ({"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.2}}, "rotary_dim must be even and within head_size"),
        ({"rope_parameters": {**PLAIN, "mrope_section": [1, 1, 1]}}, r"must sum to rotary_dim // 2 = 8, got \[1, 1"),
    ],
)
def test_bad_parameters_say_what_must_hold(arguments, message):
    with pytest.raises(ValueError, match=message):
        get_rope(16, 64, **arguments)


def test_unknown_parameter_warns_by_name():
    """R17: a misspelt key is never dropped without a word."""
    with pytest.warns(UserWarning, match="does not read the rope parameter.s. 'betta_fast'"):
        get_rope(16, 64, rope_parameters={**YARN, "betta_fast": 3})


VARIANTS = [
    {},
    {"dtype": torch.bfloat16},
    {"cache_max_position": 64},
    {"cache_max_position": 32},
    {"is_neox_style": False},
    {"max_position": 65},
    {"head_size": 32},
    {"rope_parameters": {**PLAIN, "rope_theta": 1e5}},
    {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
    {"rope_parameters": YARN},
    {"rope_parameters": {**YARN, "factor": 8.0}},
    {"rope_parameters": {**YARN, "attention_factor": 1.0}},
    {"rope_parameters": SECTIONS},
    {"rope_parameters": {**SECTIONS, "mrope_interleaved": False}},
    {"rope_parameters": {**SECTIONS, "mrope_section": [4, 2, 2]}},
    {"rope_parameters": SECTIONS, "mrope_positions_factor": 1},
    {"device": "meta"},
]


def test_registry_never_aliases_what_differs():
    """R41, R09: every field that changes the table is in the key, the bound included."""
    base = {"head_size": 16, "max_position": 64, "rope_parameters": PLAIN}
    ropes = [get_rope(**{**base, **variant}) for variant in VARIANTS]
    for (i, a), (j, b) in itertools.combinations(enumerate(ropes), 2):
        assert a is not b, (VARIANTS[i], VARIANTS[j])
    # Asked again in another order: the same objects.
    for variant, rope in reversed(list(zip(VARIANTS, ropes, strict=True))):
        assert get_rope(**{**base, **variant}) is rope


def test_registry_reuses_what_is_equal():
    """R18, R41: order of keys, 4 and 4.0, lists and tuples, and both spellings of the type are the same request."""
    rope = get_rope(16, 64, rope_parameters={**YARN, "mrope_section": [2, 3, 3]})
    spelled = {key: YARN[key] for key in reversed(YARN) if key != "rope_type"}
    spelled |= {"type": "yarn", "factor": 4, "mrope_section": (2, 3, 3), "mrope_interleaved": None}
    assert get_rope(16, 64, rope_parameters=spelled, dtype=torch.float32, device="cpu") is rope


def test_registry_is_immune_to_the_callers_dictionary():
    section = [2, 3, 3]
    parameters = {**PLAIN, "mrope_section": section}
    rope = get_rope(16, 64, rope_parameters=parameters)
    section[0], parameters["rope_theta"] = 8, 5.0
    assert rope.mrope_section == (2, 3, 3) and rope.rope_parameters["mrope_section"] == [2, 3, 3]
    assert get_rope(16, 64, rope_parameters={**PLAIN, "mrope_section": [2, 3, 3]}) is rope


def test_registry_lets_go_of_tables_nobody_holds():
    rope = get_rope(16, 64, rope_parameters={**PLAIN, "rope_theta": 12345.0})
    table = weakref.ref(rope.cos_sin_cache)
    del rope
    gc.collect()
    assert table() is None


def test_registry_forgets_a_module_that_was_moved():
    rope = get_rope(16, 64, rope_parameters=PLAIN)
    rope.to("meta")
    again = get_rope(16, 64, rope_parameters=PLAIN)
    assert again is not rope and again.cos_sin_cache.device.type == "cpu"


def test_registry_holds_no_fake_tensor():
    parameters = {**PLAIN, "rope_theta": 777.0}
    with FakeTensorMode():
        assert isinstance(get_rope(16, 64, rope_parameters=parameters).cos_sin_cache, FakeTensor)
    assert type(get_rope(16, 64, rope_parameters=parameters).cos_sin_cache) is torch.Tensor


def test_registry_tables_made_in_inference_mode_can_be_trained_with():
    with torch.inference_mode():
        rope = get_rope(16, 64, rope_parameters={**PLAIN, "rope_theta": 778.0})
    query = torch.randn(3, 16, requires_grad=True)
    rope(torch.arange(3), query)[0].sum().backward()
    assert query.grad is not None


def test_meta_then_materialised_has_the_right_table():
    """R24 (a): to_empty leaves garbage in ordinary buffers."""
    with torch.device("meta"):
        rope = RotaryEmbedding(16, 16, 64, rope_parameters=PLAIN, dtype=torch.bfloat16)
    assert rope.cos_sin_cache.device.type == "meta"
    rope.to_empty(device="cpu")
    expected = RotaryEmbedding(16, 16, 64, rope_parameters=PLAIN, dtype=torch.bfloat16)
    assert torch.equal(rope.inv_freq, expected.inv_freq) and torch.equal(rope.cos_sin_cache, expected.cos_sin_cache)


def test_to_dtype_and_to_empty_leave_the_buffers_alone():
    """R24 (d)"""
    rope = RotaryEmbedding(16, 16, 64, rope_parameters=PLAIN)
    before = rope.inv_freq.clone(), rope.cos_sin_cache.clone()
    model = torch.nn.Sequential(rope, torch.nn.Linear(2, 2)).to(torch.bfloat16).to_empty(device="cpu").half()
    assert model[1].weight.dtype == torch.float16
    assert torch.equal(rope.inv_freq, before[0]) and torch.equal(rope.cos_sin_cache, before[1])


def test_deepcopy_and_pickle_are_independent():
    """R24 (e)"""
    rope = get_rope(16, 64, rope_parameters=PLAIN)
    expected = rope.cos_sin_cache.clone()
    for twin in (copy.deepcopy(rope), pickle.loads(pickle.dumps(rope))):
        assert torch.equal(twin.cos_sin_cache, expected)
        twin.cos_sin_cache.zero_()
        assert torch.equal(rope.cos_sin_cache, expected)
    assert get_rope(16, 64, rope_parameters=PLAIN) is rope


def test_buffers_are_not_in_the_state_dict():
    assert not RotaryEmbedding(16, 16, 64, rope_parameters=PLAIN).state_dict()


def test_forward_of_another_dtype_does_not_change_the_module():
    """R16"""
    rope = get_rope(16, 64, rope_parameters=SECTIONS, dtype=torch.float32)
    positions, query = torch.randint(0, 64, (3, 5)), torch.randn(5, 32)
    before, expected = rope.cos_sin_cache.clone(), rope(positions, query)[0]
    rope(positions, query.bfloat16())
    assert rope.cos_sin_cache.dtype == torch.float32 and torch.equal(rope.cos_sin_cache, before)
    assert torch.equal(rope(positions, query)[0], expected)


def rotate_by_hand(x, positions, inv_freq, axes, is_neox_style):
    """Complex multiplication in float64: token by token, lane by lane."""
    half, out = len(inv_freq), x.double().clone()
    for token, head, lane in itertools.product(range(x.shape[0]), range(x.shape[1]), range(half)):
        i, j = (lane, lane + half) if is_neox_style else (2 * lane, 2 * lane + 1)
        turn = torch.polar(
            torch.ones((), dtype=torch.float64), positions[axes[lane], token].double() * inv_freq[lane].double()
        )
        z = torch.complex(out[token, head, i], out[token, head, j]) * turn
        out[token, head, i], out[token, head, j] = z.real, z.imag
    return out


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize(
    ("section", "mrope_interleaved", "axes"),
    [
        ([4, 2, 2], False, [0, 0, 0, 0, 1, 1, 2, 2]),
        ([3, 3, 2], True, [0, 1, 2, 0, 1, 2, 0, 1]),
        ([4, 2, 2], True, [0, 1, 2, 0, 1, 2, 0, 0]),
        ([2, 2, 2, 2], False, [0, 0, 1, 1, 2, 2, 3, 3]),
    ],
)
def test_forward_turns_each_lane_with_its_own_axis(section, mrope_interleaved, axes, is_neox_style):
    parameters = {
        **PLAIN,
        "mrope_section": section,
        "mrope_interleaved": mrope_interleaved,
        "partial_rotary_factor": 0.5,
    }
    rope = get_rope(32, 64, is_neox_style, rope_parameters=parameters)
    assert isinstance(rope, MRotaryEmbedding)
    positions, query = torch.randint(0, 64, (len(section), 5)), torch.randn(5, 3, 32)
    rotated, none = rope(positions, query)
    expected = rotate_by_hand(query, positions, rope.inv_freq, axes, is_neox_style)
    torch.testing.assert_close(rotated.double(), expected, atol=1e-5, rtol=1e-5)
    assert none is None and torch.equal(rotated[..., 16:], query[..., 16:])


def test_one_row_of_positions_equals_equal_rows():
    """R31"""
    rope = get_rope(16, 64, rope_parameters=SECTIONS)
    positions, query, key = torch.arange(5), torch.randn(5, 48), torch.randn(5, 16)
    one = rope(positions, query, key)
    three = rope(positions.expand(3, 5), query, key)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))
    with pytest.raises(ValueError, match=r"positions must be \[3, num_tokens\] or \[num_tokens\].*got \[2, 5\]"):
        rope(positions.expand(2, 5), query, key)
