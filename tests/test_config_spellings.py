"""Every way that a config spells its rope ends in the same table, or in one clear error."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from rope_ops import ModelConfig
from rope_ops.examples import ExampleModel
from rope_ops.frequencies import normalize_rope_parameters

SIZES = {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 256}
SECTIONS = [16, 24, 24]


def quiet(config, **options) -> ModelConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ModelConfig.from_hf(config, **options)


def test_old_and_new_spellings_of_theta_are_one_table_R18():
    spellings = [
        {**SIZES, "rope_theta": 500000, "rope_scaling": None},
        {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {**SIZES, "rope_parameters": {"type": "default", "rope_theta": 500000}},
        {**SIZES, "rope_scaling": {"rope_type": "default"}, "rope_theta": 500000},
        {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "rope_theta": 500000},
    ]
    ropes = [quiet(config).get_rope() for config in spellings]
    assert all(rope is ropes[0] for rope in ropes)
    assert ropes[0].inv_freq[1].item() == pytest.approx(500000 ** (-2 / 128), rel=1e-6)


@pytest.mark.parametrize(
    "spelled",
    [
        {"rope_scaling": {"type": "mrope", "mrope_section": SECTIONS}, "rope_theta": 1e6},
        {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": SECTIONS}, "rope_theta": 1e6},
        {"rope_scaling": {"rope_type": "mrope", "mrope_section": SECTIONS}, "rope_theta": 1e6},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": SECTIONS}},
        {"rope_parameters": {"rope_theta": 1e6, "mrope_section": SECTIONS, "mrope_interleaved": False}},
        {"rope_parameters": {"rope_theta": 1e6, "xdrope_section": SECTIONS, "type": "xdrope"}},
        {"rope_parameters": {"rope_theta": 1e6, "mrope_section": SECTIONS, "type": "ernie_3d"}},
        {"rope_scaling": {"mrope_section": SECTIONS}, "rope_parameters": {"rope_theta": 1e6}},
    ],
)
@pytest.mark.parametrize("nest", ["", "text_config", "thinker_config.text_config"])
def test_sections_are_found_wherever_and_however_they_are_spelled(spelled, nest):
    config = {**SIZES, **spelled}
    for part in reversed(nest.split(".") if nest else []):
        config = {"vision_config": {"hidden_size": 1, "rope_theta": 5.0}, part: config}
    read = quiet(config)
    assert read.rope_parameters == {"rope_type": "default", "rope_theta": 1e6, "mrope_section": SECTIONS}
    assert (read.num_dims, read.rotary_dim, read.legacy_rows) == (3, 128, 1024)


def test_fields_of_the_text_config_win_and_the_outer_ones_fill_in():
    config = {
        "model_type": "outer",
        "max_position_embeddings": 999,
        "head_dim": 64,
        "rope_theta": 5.0,
        "text_config": {"max_position_embeddings": 256, "rope_theta": 1e6, "head_dim": None},
    }
    read = quiet(config)
    assert (read.model_type, read.max_position_embeddings, read.head_size) == ("outer", 256, 64)
    assert read.rope_parameters["rope_theta"] == 1e6


def test_a_path_a_folder_and_a_mapping_are_one_config(tmp_path):
    config = {**SIZES, "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    hashes = {quiet(source).compute_hash() for source in (config, tmp_path, str(tmp_path / "config.json"))}
    assert len(hashes) == 1


# What the family decides, and the config leaves out.


@pytest.mark.parametrize(
    ("model_type", "head_dim", "expected"),
    [
        ("qwen2_vl", 128, [16, 24, 24]),
        ("qwen2_5_vl_text", 128, [16, 24, 24]),
        ("qwen3_vl_moe", 128, [24, 20, 20]),
        ("Keye", 128, [16, 24, 24]),
        ("ernie4_5_moe_vl", 128, [22, 22, 20]),
    ],
)
def test_missing_sections_are_the_familys_with_a_warning(model_type, head_dim, expected):
    config = {"model_type": model_type, "head_dim": head_dim, "max_position_embeddings": 64, "rope_theta": 1e6}
    with pytest.warns(UserWarning, match=r"the config has no mrope_section; its family's default \["):
        read = ModelConfig.from_hf(config)
    assert read.rope_parameters["mrope_section"] == expected


def test_a_missing_partial_rotary_factor_is_the_familys_with_a_warning():
    rope = {"rope_theta": 1e7, "mrope_section": [11, 11, 10]}
    config = {"model_type": "qwen3_5", "head_dim": 256, "max_position_embeddings": 64, "rope_parameters": rope}
    with pytest.warns(UserWarning, match="no partial_rotary_factor; its family's default 0.25"):
        read = ModelConfig.from_hf(config)
    assert read.rotary_dim == 64


def test_an_unknown_family_gets_nothing_that_its_config_does_not_say():
    read = quiet({**SIZES, "model_type": "new_model", "rope_theta": 1e4})
    assert (read.num_dims, read.is_neox_style, read.axis_order, read.rotary_dim) == (1, True, "thw", 128)


def test_the_familys_layout_is_filled_in_and_not_contradicted():
    rope = {"rope_theta": 1e6, "mrope_section": [24, 20, 20]}
    config = {"model_type": "qwen3_vl", "head_dim": 128, "max_position_embeddings": 64, "rope_parameters": rope}
    read = quiet(config)
    assert read.rope_parameters["mrope_interleaved"] is True and read.axis_map[:4] == (0, 1, 2, 0)
    config["rope_parameters"] = {**rope, "mrope_interleaved": False}
    with pytest.raises(ValueError, match="mrope_interleaved must be True in this family, got False"):
        ModelConfig.from_hf(config)


def test_the_text_configs_family_comes_before_the_outer_one():
    rope = {"rope_theta": 1e4, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
    text = {"head_dim": 128, "max_position_embeddings": 64, "rope_parameters": rope}
    dense = quiet({"model_type": "glm46v", "text_config": {"model_type": "glm4v_text", **text}})
    moe = quiet({"model_type": "glm46v", "text_config": {"model_type": "glm4v_moe_text", **text}})
    assert (dense.is_neox_style, moe.is_neox_style) == (False, True)
    assert quiet({"model_type": "glm46v", "text_config": text}, is_neox_style=True).is_neox_style is True


def test_ernies_own_spelling_of_its_sections_is_read():
    config = {"model_type": "ernie4_5_moe_vl", "head_dim": 128, "max_position_embeddings": 64, "rope_theta": 5e5}
    read = quiet({**config, "freq_allocation": 16})
    assert read.rope_parameters["mrope_section"] == [24, 24, 16]
    assert read.axis_map == (1, 2) * 24 + (0,) * 16
    inside = quiet({**config, "rope_scaling": {"type": "ernie_3d", "freq_allocation": 20}})
    assert inside.rope_parameters["mrope_section"] == [22, 22, 20]
    # The axis order reaches the module: h turns lane 0, not t.
    rope = inside.get_rope()
    query = torch.ones(1, 128)
    t_only, _ = rope(torch.tensor([[9], [0], [0]]), query)
    h_only, _ = rope(torch.tensor([[0], [9], [0]]), query)
    assert torch.equal(t_only[:, :88], query[:, :88]) and not torch.equal(t_only[:, 88:], query[:, 88:])
    assert not torch.equal(h_only[:, :2], query[:, :2]) and torch.equal(h_only[:, 88:], query[:, 88:])


# Several ropes.

GEMMA = {
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 1024,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        "no_rope": None,
    },
}


def test_a_rope_for_each_layer_type_is_two_ropes_R18():
    full, sliding = (quiet(GEMMA, layer_type=name) for name in ("full_attention", "sliding_attention"))
    assert (full.rope_parameters["rope_type"], full.head_size, full.rotary_dim) == ("proportional", 512, 512)
    assert (sliding.rope_parameters["rope_type"], sliding.head_size, sliding.rotary_dim) == ("default", 256, 256)
    assert full.get_rope() is not sliding.get_rope() and full.compute_hash() != sliding.compute_hash()
    for wrong in (None, "no_rope", "mamba"):
        with pytest.raises(ValueError, match=f"one of full_attention, sliding_attention, got {wrong!r}"):
            ModelConfig.from_hf(GEMMA, layer_type=wrong)
    with pytest.raises(ValueError, match="the config has one rope for all layers, got layer_type 'full_attention'"):
        ModelConfig.from_hf({**SIZES, "rope_theta": 1e4}, layer_type="full_attention")


def test_the_older_spelling_of_two_ropes_is_read_too():
    config = {
        "head_dim": 128,
        "max_position_embeddings": 1024,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    full, sliding = (quiet(config, layer_type=name) for name in ("full_attention", "sliding_attention"))
    assert full.rope_parameters == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert sliding.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="a rope for each layer type"):
        ModelConfig.from_hf(config)


# Disagreements.


def test_two_spellings_that_disagree_warn_or_raise():
    inner = {"rope_type": "default", "rope_theta": 1e6}
    with pytest.warns(UserWarning, match="rope_theta 10000.0 beside rope_theta 1000000.0 .*; 1000000.0 is used"):
        read = ModelConfig.from_hf({**SIZES, "rope_theta": 10000.0, "rope_parameters": inner})
    assert read.rope_parameters["rope_theta"] == 1e6
    with pytest.raises(ValueError, match="must name one rope type, got 'default' and 'yarn'"):
        normalize_rope_parameters({"rope_type": "default", "type": "yarn"})
    with pytest.raises(ValueError, match="mrope_section and xdrope_section must agree"):
        normalize_rope_parameters({"mrope_section": [1, 1], "xdrope_section": [2, 2]})
    with pytest.raises(ValueError, match="mrope_interleaved and interleaved must agree, got True and False"):
        normalize_rope_parameters({"mrope_interleaved": True, "interleaved": False})


def test_leftovers_that_say_nothing_are_dropped_and_others_are_named():
    assert normalize_rope_parameters({"rope_type": "yarn", "type": "default"}) == {"rope_type": "yarn"}
    assert normalize_rope_parameters({"rope_type": "longrope", "type": "su"}) == {"rope_type": "longrope"}
    assert normalize_rope_parameters({"mrope_interleaved": True, "interleaved": True}) == {
        "rope_type": "default",
        "mrope_interleaved": True,
    }
    with pytest.warns(UserWarning, match="does not read the rope parameter.s. 'interleaved'"):
        ModelConfig.from_hf({**SIZES, "rope_parameters": {"rope_theta": 1e4, "interleaved": True}})
    with pytest.warns(UserWarning, match="'default' does not read the rope parameter.s. 'factor'"):
        ModelConfig.from_hf({**SIZES, "rope_parameters": {"rope_theta": 1e4, "factor": 4.0}})


def test_the_original_length_outside_of_the_rope_wins_as_in_transformers():
    scaling = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [4.0] * 64}
    config = {**SIZES, "rope_theta": 1e4, "original_max_position_embeddings": 64, "rope_scaling": scaling}
    read = quiet(config)
    assert read.rope_parameters["original_max_position_embeddings"] == 64
    with pytest.warns(UserWarning, match="original_max_position_embeddings 64 beside .* 32 .*; 64 is used"):
        read = ModelConfig.from_hf({**config, "rope_scaling": {**scaling, "original_max_position_embeddings": 32}})
    assert read.rope_parameters["original_max_position_embeddings"] == 64
    # A type that does not read it takes no notice.
    assert "original_max_position_embeddings" not in quiet({**config, "rope_scaling": None}).rope_parameters


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**SIZES}, "the config must hold rope fields, rope_theta at least .*; got the keys hidden_size, max_pos"),
        ({}, "got the keys none|hidden_size must be a positive integer"),
        ({**SIZES, "rope_theta": 1e4, "rope_scaling": "yarn"}, "rope_scaling must be an object, got 'yarn'"),
        ({**SIZES, "rope_theta": 1e4, "max_position_embeddings": None}, "max_position_embeddings must be a positive"),
        ({**SIZES, "rope_theta": 1e4, "head_dim": 0}, "head_dim must be a positive integer, got 0"),
        ({**SIZES, "rope_theta": 1e4, "rope_scaling": {"type": "yam"}}, "rope_type must be one of .*, got 'yam'"),
        ({**SIZES, "rope_theta": 1e4, "rope_scaling": {"type": "yarn"}}, "'yarn' needs 'factor'"),
        (
            {**SIZES, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": [1.0, 2.0]}},
            "factor must be one number",
        ),
        (
            {**SIZES, "rope_theta": 1e4, "rope_scaling": {"mrope_section": [8, 8, 8]}},
            r"mrope_section must sum to rotary_dim // 2 = 64, got \[8, 8, 8\]",
        ),
    ],
)
def test_a_config_that_makes_no_table_is_an_error_at_once(config, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(config)


def test_the_bound_follows_the_certificate_and_says_why_not():
    config = {**SIZES, "rope_parameters": {"rope_theta": 1e6, "mrope_section": SECTIONS}}
    bounded = quiet(config, model_cls=ExampleModel, max_model_len=100)
    assert (bounded.mrope_cache_max_position, bounded.no_bound_reason) == (100, None)
    pruned = quiet(config, model_cls=ExampleModel, max_model_len=100, multimodal_pruning=True)
    assert pruned.mrope_cache_max_position is None and "pruning" in pruned.no_bound_reason
    other = quiet(config, model_cls=torch.nn.Linear)
    assert other.no_bound_reason == "torch.nn.modules.linear:Linear is not certified"
    assert quiet(config).no_bound_reason == "no model class given"
    hashes = {one.compute_hash() for one in (bounded, pruned, other, quiet(config))}
    assert len(hashes) == 4


def test_ernies_sections_must_fit_its_layout():
    config = {"model_type": "ernie4_5_moe_vl", "head_dim": 128, "max_position_embeddings": 64, "rope_theta": 5e5}
    with pytest.raises(ValueError, match=r"mrope_section must be \[h, w, t\] with h == w, got .*\[20, 22, 22\]"):
        ModelConfig.from_hf({**config, "rope_scaling": {"mrope_section": [20, 22, 22]}})
