"""Every rope type against transformers, or a hand-worked example; what the length served may and may not change."""

from __future__ import annotations

import itertools
import math
import types
import warnings

import pytest
import torch

from rope_ops import ModelConfig, get_rope, reference, rope_frequencies
from rope_ops.embedding import MRotaryEmbedding, RotaryEmbedding
from rope_ops.frequencies import ROPE_TYPES, normalize_rope_parameters, semantic_frequencies
from rope_ops.linear_scaling import LinearScalingRotaryEmbedding

HEAD = 16
SHORT, LONG = [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5], [1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0]
PARAMETERS = {
    "default": {},
    "linear": {"factor": 3.0},
    "ntk": {"factor": 4.0},
    "ntk mixed": {"factor": 4.0, "mixed_b": 0.625},
    "dynamic": {"factor": 2.0},
    "dynamic alpha": {"alpha": 1000.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 16},
    "proportional": {"partial_rotary_factor": 0.25},
}


def parameters(case: str, **extra):
    return {"rope_type": case.split()[0], "rope_theta": 10000.0, **PARAMETERS[case], **extra}


def close(inv_freq: torch.Tensor, expected: list[float], rel: float = 2e-6) -> None:
    assert inv_freq.tolist()[: len(expected)] == pytest.approx(expected, rel=rel)


def test_every_registered_type_has_a_case():
    assert {case.split()[0] for case in PARAMETERS} == set(ROPE_TYPES)


# The oracle: transformers' own functions, equal to the bit.


def transformers_frequencies(given, head_dim, max_position, seq_len=None):
    oracle = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    config = types.SimpleNamespace(
        rope_parameters=dict(given),
        max_position_embeddings=max_position,
        head_dim=head_dim,
        hidden_size=head_dim * 4,
        num_attention_heads=4,
        standardize_rope_params=lambda: None,
    )
    return oracle[given["rope_type"]](config, torch.device("cpu"), seq_len=seq_len)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
ORACLE_CASES = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": YARN,
    "yarn, beta": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, truncate": {**YARN, "truncate": False},
    "yarn, attention_factor": {**YARN, "attention_factor": 1.3},
    "yarn, mscale": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn, factor below one": {**YARN, "factor": 0.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "proportional, factor": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 8.0},
    "proportional, whole head": {"rope_type": "proportional"},
}


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e7])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("case", ORACLE_CASES)
def test_frequencies_equal_transformers_to_the_bit(case, head_dim, theta):
    given = {**ORACLE_CASES[case], "rope_theta": theta}
    expected, attention_factor = transformers_frequencies(given, head_dim, 16384)
    inv_freq, factor = rope_frequencies(given, head_dim, 16384)
    assert torch.equal(inv_freq, expected)
    assert factor == attention_factor


@pytest.mark.parametrize("served", [16, 2048, 2049, 3000, 4096])
def test_dynamic_equals_transformers_for_the_length_served(served):
    given = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    expected, _ = transformers_frequencies(given, 128, 2048, seq_len=served)
    assert torch.equal(rope_frequencies(given, 128, 2048, max_model_len=served)[0], expected)


@pytest.mark.parametrize("extra", [{}, {"factor": 16.0}, {"attention_factor": 1.25}])
@pytest.mark.parametrize("served", [100, 4096, 4097, 32768])
def test_longrope_equals_transformers_for_the_length_served(served, extra):
    given = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1 + i / 64 for i in range(32)],
        "long_factor": [1.0 + i for i in range(32)],
        "original_max_position_embeddings": 4096,
        **extra,
    }
    expected, attention_factor = transformers_frequencies(given, 64, 32768, seq_len=served)
    inv_freq, factor = rope_frequencies(given, 64, 32768, max_model_len=served)
    assert torch.equal(inv_freq, expected)
    assert factor == attention_factor


def test_yarn_without_factor_takes_the_ratio_of_lengths_as_transformers_does():
    given = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 4096}
    expected, attention_factor = transformers_frequencies({**given, "factor": None}, 64, 16384)
    inv_freq, factor = rope_frequencies(given, 64, 16384)
    assert torch.equal(inv_freq, expected) and factor == attention_factor


# Hand-worked: types that transformers does not have.


def test_ntk_stretches_the_base_and_divides_every_lane():
    inv_freq, factor = rope_frequencies(parameters("ntk"), HEAD, 64)
    close(inv_freq, [1 / ((4 * 10000.0) ** (2 * i / HEAD) * 4 ** (2 / HEAD)) for i in range(HEAD // 2)])
    assert factor == 1.0


def test_mixed_ntk_divides_the_last_lane_by_the_factor():
    inv_freq, _ = rope_frequencies(parameters("ntk mixed"), HEAD, 64)
    slope = math.log(4.0) / 8**0.625
    plain = [10000.0 ** (-2 * i / HEAD) for i in range(8)]
    close(inv_freq, [plain[i] / math.exp(slope * (i + 1) ** 0.625) for i in range(8)])
    assert inv_freq[-1].item() == pytest.approx(plain[-1] / 4, rel=2e-6)


def test_alpha_stretches_the_base_whatever_length_is_served():
    inv_freq, _ = rope_frequencies(parameters("dynamic alpha"), 128, 32768)
    base = 10000.0 * 1000.0 ** (128 / 126)
    assert base == pytest.approx(1.1159e7, rel=1e-4)
    close(inv_freq, [base ** (-2 * i / 128) for i in range(64)])
    for served in (16, 32768):
        assert torch.equal(rope_frequencies(parameters("dynamic alpha"), 128, 32768, max_model_len=served)[0], inv_freq)


def test_longrope_magnitudes_of_the_vendors_win_over_the_formula():
    given = parameters("longrope", short_mscale=1.25, long_mscale=1.5)
    assert rope_frequencies(given, HEAD, 64, max_model_len=16)[1] == 1.25
    assert rope_frequencies(given, HEAD, 64, max_model_len=17)[1] == 1.5


def test_proportional_rows_turn_the_whole_head_with_still_lanes():
    rope = get_rope(HEAD, 64, rope_parameters=parameters("proportional"), dtype=torch.float32)
    assert rope.rotary_dim == HEAD and rope.inv_freq.shape == (8,)
    close(rope.inv_freq, [1.0, 10000.0 ** (-2 / 16), 0.0, 0.0])
    cos, sin = rope.cos_sin_cache.chunk(2, dim=-1)
    assert (cos[:, 2:] == 1).all() and (sin[:, 2:] == 0).all() and (sin[1:, :2] != 0).all()
    query = torch.randn(4, HEAD)
    rotated, _ = rope(torch.tensor([0, 3, 9, 63]), query)
    assert torch.equal(rotated[:, 2:8], query[:, 2:8]) and not torch.equal(rotated[:, :2], query[:, :2])


def test_llama3_with_equal_bounds_has_no_blend():
    given = parameters("llama3", low_freq_factor=2.0, high_freq_factor=2.0)
    plain = [10000.0 ** (-2 * i / HEAD) for i in range(8)]
    expected = [f / 8 if 2 * math.pi / f > 16 else f for f in plain]
    close(rope_frequencies(given, HEAD, 64)[0], expected)


# Reports.


@pytest.mark.parametrize(
    ("case", "drop"),
    [("yarn", True), ("dynamic", False), ("longrope", True), ("llama3", True)],
)
def test_rows_never_enter_a_formula_R01(case, drop):
    given = parameters(case)
    if drop:
        given.pop("original_max_position_embeddings")
    bounded = get_rope(HEAD, 64, rope_parameters=given, dtype=torch.float32, cache_max_position=8)
    whole = get_rope(HEAD, 64, rope_parameters=given, dtype=torch.float32, cache_max_position=64)
    assert bounded.cos_sin_cache.shape == (8, HEAD)
    assert torch.equal(bounded.inv_freq, whole.inv_freq)
    assert torch.equal(bounded.cos_sin_cache, whole.cos_sin_cache[:8])
    if case == "yarn":
        close(
            bounded.inv_freq,
            [1, 0.237171, 0.05, 0.007906, 0.0025, 0.000791, 0.00025, 0.000079],
            rel=1e-3,
        )


def test_the_yarn_magnitude_is_read_under_every_name_R17():
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 64.0, "original_max_position_embeddings": 16}
    told = get_rope(HEAD, 1024, rope_parameters={**yarn, "attention_factor": 1.0}, dtype=torch.float32)
    assert (told.cos_sin_cache[0, :8] == 1.0).all()
    assert rope_frequencies(yarn, HEAD, 1024)[1] == pytest.approx(1.415888, abs=1e-6)
    for mscale, all_dim, expected in ((1.0, 0.707, 1.085726), (1.0, 1.0, 1.0)):
        given = {**yarn, "factor": 40.0, "mscale": mscale, "mscale_all_dim": all_dim}
        assert rope_frequencies(given, HEAD, 1024)[1] == pytest.approx(expected, abs=1e-6)
    assert rope_frequencies({**yarn, "attn_factor": 2.0}, HEAD, 1024)[1] == pytest.approx(2 * 1.415888, abs=2e-6)
    assert rope_frequencies({**yarn, "apply_yarn_scaling": False}, HEAD, 1024)[1] == 1.0


def test_no_parameter_is_dropped_without_a_word_R17():
    given = parameters("yarn", betta_fast=16)
    with pytest.warns(UserWarning, match="'yarn' does not read the rope parameter.s. 'betta_fast'; it reads .*beta_f"):
        rope_frequencies(given, HEAD, 64)
    with pytest.warns(UserWarning, match="only where both are given and not zero, got mscale 0.5 and mscale_all_dim 0"):
        rope_frequencies(parameters("yarn", mscale=0.5), HEAD, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for case in PARAMETERS:
            rope_frequencies(parameters(case), HEAD, 64)


def test_dynamic_below_the_trained_length_is_plain_R20():
    plain = [10000.0 ** (-2 * i / HEAD) for i in range(8)]
    tables = {}
    for rows in (16, 64, 128):
        rope = get_rope(HEAD, 64, rope_parameters=parameters("dynamic"), dtype=torch.float32, cache_max_position=rows)
        tables[rows] = rope.cos_sin_cache
        assert rope.cos_sin_cache.abs().max() <= 1 and rope.cos_sin_cache.shape == (rows, HEAD)
        close(rope.inv_freq, plain if rows <= 64 else [1, 0.270296, 0.07306, 0.019748], rel=2e-5)
    assert torch.equal(tables[16], tables[64][:16])
    assert not torch.equal(tables[64], tables[128][:64])
    unbounded = get_rope(HEAD, 64, rope_parameters=parameters("dynamic"), dtype=torch.float32)
    assert torch.equal(unbounded.cos_sin_cache, tables[128])


def test_each_type_has_one_rule_for_its_longest_length_R21():
    longest = {
        "default": 64,
        "linear": 192,
        "ntk": 256,
        "ntk mixed": 256,
        "dynamic": 128,
        "dynamic alpha": 64,
        "yarn": 64,
        "llama3": 64,
        "longrope": 64,
        "proportional": 64,
    }
    assert longest.keys() == PARAMETERS.keys()
    for case, rows in longest.items():
        rope = get_rope(HEAD, 64, rope_parameters=parameters(case))
        assert (case, rope.legacy_rows, rope.cos_sin_cache.shape[0]) == (case, rows, rows)
    with pytest.raises(ValueError, match="'dynamic' is defined for at most 128 positions, .* got a length of 129"):
        get_rope(HEAD, 64, rope_parameters=parameters("dynamic"), cache_max_position=129)
    alias = get_rope(HEAD, 64, rope_parameters=parameters("yarn") | {"rope_type": "deepseek_yarn"})
    assert alias.legacy_rows == 64
    assert alias is get_rope(HEAD, 64, rope_parameters=parameters("yarn"))
    linear = get_rope(HEAD, 64, rope_parameters=parameters("linear", factor=4.0))
    assert linear.legacy_rows == 256


@pytest.mark.parametrize("rows", [64, 16, 8])
def test_a_shorter_table_never_turns_yarn_off_R23(rows):
    rope = get_rope(HEAD, 64, rope_parameters=parameters("yarn"), dtype=torch.float32, cache_max_position=rows)
    close(rope.inv_freq, [1, 0.079057, 0.025, 0.007906], rel=1e-4)
    assert rope.attention_factor == pytest.approx(1.138629, abs=1e-6)
    whole = get_rope(HEAD, 64, rope_parameters=parameters("yarn"), dtype=torch.float32)
    assert torch.equal(rope.cos_sin_cache, whole.cos_sin_cache[:rows])


def test_four_sections_in_every_spelling_make_four_axes_R28():
    base = 10000.0 * 1000.0 ** (8 / 6)
    spellings = [
        {"type": "xdrope", "alpha": 1000.0, "xdrope_section": [1, 1, 1, 1]},
        {"type": "dynamic", "alpha": 1000.0, "mrope_section": [1, 1, 1, 1]},
        {"type": "default", "mrope_section": [1, 1, 1, 1]},
        {"type": "xdrope", "xdrope_section": [1, 1, 1, 1]},
    ]
    for spelling in spellings:
        rope = get_rope(8, 9, rope_parameters={"rope_theta": 10000.0, **spelling}, dtype=torch.float32)
        assert isinstance(rope, MRotaryEmbedding) and rope.axis_map == (0, 1, 2, 3)
        theta = base if "alpha" in spelling else 10000.0
        close(rope.inv_freq, [theta ** (-2 * i / 8) for i in range(4)])
        # Cos replaced by the row's number, sin by 0: a rotation of ones shows which row each lane has read.
        rows = torch.arange(rope.cos_sin_cache.shape[0], dtype=torch.float32)[:, None].expand(-1, 4)
        rope.cos_sin_cache = torch.cat((rows, torch.zeros_like(rows)), dim=-1)
        rotated, _ = rope(torch.tensor([[5], [6], [7], [8]]), torch.ones(1, 8))
        assert rotated.tolist() == [[5, 6, 7, 8, 5, 6, 7, 8]]
    with pytest.raises(ValueError, match="mrope_section must sum to rotary_dim // 2 = 4"):
        get_rope(8, 9, rope_parameters={"rope_theta": 1e4, "mrope_section": [1, 1, 1]})


def test_xd_rope_has_one_row_a_position():
    given = {"rope_theta": 1e4, "rope_type": "dynamic", "alpha": 1000.0, "mrope_section": [2, 2, 2, 2]}
    assert get_rope(HEAD, 64, rope_parameters=given).legacy_rows == 64
    assert get_rope(HEAD, 64, rope_parameters=given | {"rope_type": "default", "alpha": None}).legacy_rows == 256


def test_requests_that_differ_in_one_parameter_never_alias_R41():
    base = parameters("yarn", mrope_section=[4, 2, 2])
    variants = [
        {},
        {"rope_theta": 20000.0},
        {"factor": 2.0},
        {"original_max_position_embeddings": 32},
        {"mrope_section": [2, 3, 3]},
        {"attention_factor": 1.0},
        {"truncate": False},
        {"beta_fast": 16},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
    ]
    ropes = [get_rope(HEAD, 64, rope_parameters={**base, **variant}) for variant in variants]
    others = [
        get_rope(HEAD, 64, rope_parameters=parameters("longrope")),
        get_rope(HEAD, 64, rope_parameters=parameters("longrope", long_factor=[2.0] * 8)),
        get_rope(HEAD, 64, rope_parameters=parameters("longrope"), max_model_len=16),
        get_rope(HEAD, 64, rope_parameters=base, axis_map=[1, 2, 1, 2, 0, 0, 0, 0]),
        get_rope(HEAD, 64, rope_parameters=parameters("linear", factor=[1.0, 4.0])),
        get_rope(HEAD, 64, rope_parameters=parameters("linear", factor=[4.0, 1.0])),
    ]
    for one, two in itertools.combinations(ropes + others, 2):
        assert one is not two


def test_equal_requests_share_one_module_whatever_their_spelling_R41():
    given = parameters("longrope")
    rope = get_rope(HEAD, 64, rope_parameters=given)
    assert get_rope(HEAD, 64, rope_parameters=dict(reversed(given.items()))) is rope
    assert get_rope(HEAD, 64, rope_parameters={**given, "rope_theta": 10000}) is rope
    assert get_rope(HEAD, 64, rope_parameters={**given, "rope_type": "su"}) is rope
    assert get_rope(HEAD, 64, rope_parameters={**given, "long_factor": torch.tensor(LONG)}) is rope
    before = rope.cos_sin_cache.clone()
    given["long_factor"] = list(given["long_factor"])
    caller = {**given, "long_factor": [9.0] * 8}
    changed = get_rope(HEAD, 64, rope_parameters=caller)
    caller["long_factor"][0] = 1e9
    assert changed.rope_parameters["long_factor"][0] == 9.0
    assert torch.equal(rope.cos_sin_cache, before)
    # The length served is part of no other type's key.
    default = get_rope(HEAD, 64, rope_parameters=parameters("default"), max_model_len=7)
    assert default is get_rope(HEAD, 64, rope_parameters=parameters("default"))


# Bounds.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", PARAMETERS)
def test_a_bounded_table_is_a_bitwise_prefix_for_the_same_length_served(case, dtype):
    given = parameters(case)
    legacy = get_rope(HEAD, 64, rope_parameters=given, dtype=dtype)
    expected = reference.build_cos_sin_cache(legacy.inv_freq, legacy.legacy_rows, legacy.attention_factor, dtype)
    assert torch.equal(legacy.cos_sin_cache, expected)
    served = legacy.legacy_rows
    for rows in (1, 17, 63, served + 3):
        bounded = get_rope(HEAD, 64, rope_parameters=given, dtype=dtype, cache_max_position=rows, max_model_len=served)
        shared = min(rows, served)
        assert bounded.cos_sin_cache.shape[0] == rows
        assert torch.equal(bounded.cos_sin_cache[:shared], expected[:shared])


def test_types_that_choose_by_length_are_two_and_say_so():
    assert {name for name, rope_type in ROPE_TYPES.items() if rope_type.chooses_by_length} == {"dynamic", "longrope"}
    for case, served in (("dynamic", (64, 128)), ("longrope", (16, 64))):
        short, long = (
            get_rope(HEAD, 64, rope_parameters=parameters(case), dtype=torch.float32, max_model_len=length)
            for length in served
        )
        assert short.cos_sin_cache.shape == long.cos_sin_cache.shape
        assert not torch.equal(short.cos_sin_cache, long.cos_sin_cache)


@pytest.mark.parametrize("case", ["dynamic", "longrope"])
def test_a_certified_model_keeps_its_legacy_rows_where_values_follow_the_length(case):
    from rope_ops.examples import ExampleModel

    config = {"head_dim": HEAD, "max_position_embeddings": 64, "rope_parameters": parameters(case)}
    bounded = ModelConfig.from_hf(config, model_cls=ExampleModel, max_model_len=20, dtype=torch.float32)
    assert bounded.mrope_cache_max_position is None
    assert "chooses its values by the length served" in bounded.no_bound_reason
    rope = bounded.get_rope()
    assert rope.cos_sin_cache.shape[0] == bounded.legacy_rows
    expected, _ = rope_frequencies(parameters(case), HEAD, 64, max_model_len=20)
    assert torch.equal(rope.inv_freq, expected) and torch.equal(bounded.rope_frequencies()[0], expected)
    with pytest.raises(ValueError, match="is defined for at most"):
        ModelConfig.from_hf(config, max_model_len=1000)
    alpha = {**config, "rope_parameters": parameters("dynamic alpha")}
    assert ModelConfig.from_hf(alpha, model_cls=ExampleModel, max_model_len=20).mrope_cache_max_position == 20


def test_only_yarn_takes_the_positions_factor_of_serving_engines():
    for case in PARAMETERS:
        plain = rope_frequencies(parameters(case), HEAD, 64)
        engines = semantic_frequencies(parameters(case), HEAD, 64, 4)
        assert torch.equal(plain[0], engines[0]) == (case != "yarn"), case
    # Original length 64 = 4 x 16, and no other change.
    expected = rope_frequencies(parameters("yarn", original_max_position_embeddings=64), HEAD, 256)
    assert torch.equal(semantic_frequencies(parameters("yarn"), HEAD, 64, 4)[0], expected[0])


# Several factors.


@pytest.mark.parametrize("bound", [None, 10])
def test_several_linear_factors_stack_one_table_each(bound):
    given = parameters("linear", factor=[1.0, 4.0, 2.5])
    rope = get_rope(HEAD, 64, rope_parameters=given, dtype=torch.float32, cache_max_position=bound)
    assert isinstance(rope, LinearScalingRotaryEmbedding)
    rows = [64, 256, 160] if bound is None else [bound] * 3
    assert rope.cos_sin_cache.shape == (sum(rows), HEAD)
    assert rope.legacy_rows == 480
    assert list(rope.scaling_factor_to_offset.items()) == [(1.0, 0), (4.0, rows[0]), (2.5, rows[0] + rows[1])]
    query = torch.randn(3, HEAD)
    positions = torch.tensor([0, 7, 9])
    for factor, count in zip((1.0, 4.0, 2.5), rows, strict=True):
        single = get_rope(HEAD, 64, rope_parameters=parameters("linear", factor=factor), dtype=torch.float32)
        start = rope.scaling_factor_to_offset[factor]
        assert torch.equal(rope.cos_sin_cache[start : start + count], single.cos_sin_cache[:count])
        assert torch.equal(rope(positions + start, query)[0], single(positions, query)[0])
    with pytest.raises(ValueError, match="factor must be one number, got .*; several factors make several tables"):
        rope_frequencies(given, HEAD, 64)
    with pytest.raises(ValueError, match="several factors"):
        get_rope(HEAD, 64, rope_parameters={**given, "mrope_section": [4, 2, 2]})
    with pytest.raises(ValueError, match=r"a list of at least one, got \[\]"):
        get_rope(HEAD, 64, rope_parameters=parameters("linear", factor=[]))


@pytest.mark.parametrize("case", ["linear", "dynamic", "longrope"])
def test_a_module_made_on_meta_is_built_when_it_gets_a_device(case):
    given = parameters(case, **({"factor": [1.0, 4.0]} if case == "linear" else {}))
    expected = get_rope(HEAD, 64, rope_parameters=given, dtype=torch.float32, cache_max_position=60)
    rope = get_rope(HEAD, 64, rope_parameters=given, dtype=torch.float32, cache_max_position=60, device="meta")
    assert rope.cos_sin_cache.is_meta and rope.cos_sin_cache.shape == expected.cos_sin_cache.shape
    rope = rope.to_empty(device="cpu")
    assert torch.equal(rope.cos_sin_cache, expected.cos_sin_cache) and torch.equal(rope.inv_freq, expected.inv_freq)


# Errors.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_type": "yam"}, "rope_type must be one of default, dynamic, linear, .* got 'yam'"),
        ({"rope_type": 3}, "rope_type must be a string, got 3"),
        ({"rope_theta": None}, "'yarn' needs 'rope_theta' in rope_parameters, got only factor, original"),
        ({"rope_theta": "1e4"}, "rope_theta must be a finite number, got '1e4'"),
        ({"rope_theta": -1.0}, "rope_theta must be positive, got -1.0"),
        ({"factor": math.nan}, "factor must be a finite number, got nan"),
        ({"factor": True}, "factor must be a finite number, got True"),
        ({"factor": [1.0, 4.0]}, r"factor must be a finite number, got \[1.0, 4.0\]"),
        ({"truncate": "no"}, "truncate must be true or false, got 'no'"),
        ({"factor": None, "original_max_position_embeddings": None}, "'yarn' needs 'factor'"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings must be positive, got 0"),
        ({"type": "linear"}, "rope_type and type must name one rope type, got 'yarn' and 'linear'"),
        ({"partial_rotary_factor": 0.0}, r"partial_rotary_factor must be in \(0, 1\], got 0.0"),
        ({"partial_rotary_factor": "half"}, r"partial_rotary_factor must be in \(0, 1\], got 'half'"),
    ],
)
def test_unusable_parameters_raise_one_clear_error(change, message):
    with pytest.raises(ValueError, match=message):
        get_rope(HEAD, 64, rope_parameters={**parameters("yarn"), **change})


def test_unusable_parameters_of_the_other_types_raise():
    with pytest.raises(ValueError, match="long_factor must be a list of rotary_dim // 2 = 8 numbers, got 3 values"):
        get_rope(HEAD, 64, rope_parameters=parameters("longrope", long_factor=[1.0, 2.0, 3.0]), max_model_len=8)
    with pytest.raises(ValueError, match="short_factor must be positive, got 0"):
        get_rope(HEAD, 64, rope_parameters=parameters("longrope", short_factor=[0] * 8))
    with pytest.raises(ValueError, match="high_freq_factor must not be below low_freq_factor, got 1.0 and 4.0"):
        get_rope(HEAD, 64, rope_parameters=parameters("llama3", low_freq_factor=4.0, high_freq_factor=1.0))
    with pytest.raises(ValueError, match="'dynamic' needs 'factor'"):
        get_rope(HEAD, 64, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4})
    with pytest.raises(ValueError, match="must have a rotary_dim above 2, got 2"):
        get_rope(2, 64, rope_parameters=parameters("dynamic alpha"))
    with pytest.raises(ValueError, match="RotaryEmbedding: max_model_len must be a positive integer, got 0"):
        RotaryEmbedding(HEAD, HEAD, 64, rope_parameters=parameters("dynamic"), max_model_len=0)
    with pytest.raises(ValueError, match="get_rope: axis_map must come with an mrope_section"):
        get_rope(HEAD, 64, rope_parameters=parameters("default"), axis_map=[0] * 8)
    with pytest.raises(ValueError, match="axis_map must give each frequency one of 3 axes"):
        get_rope(
            HEAD, 64, rope_parameters=parameters("default", mrope_section=[4, 2, 2]), axis_map=[0, 1, 2, 0, 0, 0, 1, 1]
        )


@pytest.mark.parametrize("case", PARAMETERS)
def test_normalizing_twice_changes_nothing(case):
    once = normalize_rope_parameters(parameters(case))
    assert normalize_rope_parameters(once) == once
