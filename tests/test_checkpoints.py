"""The rope fields of 15 public checkpoints: rows, rotary_dim, frequencies and layout, worked out by hand."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import pytest
import torch

from rope_ops import ModelConfig, reference
from rope_ops.__main__ import main
from rope_ops.examples import ExampleModel

FIXTURES = Path(__file__).parent / "fixtures"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())
CHECKPOINTS = sorted(path.stem for path in (FIXTURES / "checkpoints").glob("*.json"))


def path_of(checkpoint: str) -> Path:
    return FIXTURES / "checkpoints" / f"{checkpoint}.json"


def read(checkpoint: str, **options) -> ModelConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ModelConfig.from_hf(path_of(checkpoint), **options)


def find(config: dict, key: str):
    """The first value of a key in a nested config, the language model's parts before others."""
    for part in ("thinker_config", "text_config"):
        if part in config:
            return find(config[part], key)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get(key, config.get(key))


def by_hand(checkpoint: str) -> tuple[int, float, float]:
    """Legacy rows, last frequency and attention factor in Python floats, from the fixture's own fields."""
    config = json.loads(path_of(checkpoint).read_text())
    head = find(config, "head_dim") or find(config, "hidden_size") // find(config, "num_attention_heads")
    dim = int(head * (find(config, "partial_rotary_factor") or 1))
    theta, factor = find(config, "rope_theta"), 1.0
    rows = 4 * find(config, "max_position_embeddings")
    if find(config, "alpha"):
        theta, rows = theta * find(config, "alpha") ** (dim / (dim - 2)), rows // 4
    if find(config, "rope_type") == "yarn":
        # The last lane is far past the blend: divided by the factor.
        factor = find(config, "factor")
        rows = int(4 * find(config, "original_max_position_embeddings") * factor)
    return rows, theta ** (-(dim - 2) / dim) / factor, 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def test_there_are_fifteen_checkpoints_and_each_has_expected_values():
    assert len(CHECKPOINTS) == 15 and set(CHECKPOINTS) == set(EXPECTED)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_expected_values_are_those_of_the_formula_in_plain_floats(checkpoint):
    rows, last, attention_factor = by_hand(checkpoint)
    expected = EXPECTED[checkpoint]
    assert expected["legacy_rows"] == rows and expected["first"] == 1.0
    assert expected["last"] == pytest.approx(last, rel=1e-8)
    assert expected["attention_factor"] == pytest.approx(attention_factor, abs=1e-6)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_checkpoint_is_read_as_expected(checkpoint):
    expected = EXPECTED[checkpoint]
    config = read(checkpoint)
    assert config.legacy_rows == expected["legacy_rows"]
    assert config.rotary_dim == expected["rotary_dim"]
    assert config.rope_parameters["mrope_section"] == expected["mrope_section"]
    assert config.rope_parameters.get("mrope_interleaved", False) == expected["mrope_interleaved"]
    assert config.is_neox_style == expected["is_neox_style"]
    assert config.axis_order == expected["axis_order"]
    assert config.num_dims == len(expected["mrope_section"])
    inv_freq, attention_factor = config.rope_frequencies()
    assert inv_freq.shape == (expected["rotary_dim"] // 2,) and inv_freq.dtype == torch.float32
    assert inv_freq[0].item() == expected["first"]
    assert inv_freq[-1].item() == pytest.approx(expected["last"], rel=3e-6)
    assert attention_factor == pytest.approx(expected["attention_factor"], abs=1e-6)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_certified_checkpoint_gets_the_first_rows_of_its_table(checkpoint):
    config = read(checkpoint, model_cls=ExampleModel, max_model_len=40)
    assert config.mrope_cache_max_position == 40 and config.no_bound_reason is None
    rope = config.get_rope()
    expected = reference.build_cos_sin_cache(rope.inv_freq, 64, rope.attention_factor, torch.bfloat16)[:40]
    assert torch.equal(rope.cos_sin_cache, expected)
    assert torch.equal(rope.inv_freq, config.rope_frequencies()[0])
    # What a frequency reads: cos replaced by the row's number shows it.
    half = rope.rotary_dim // 2
    assert rope.axis_map == config.axis_map and len(rope.axis_map) == half
    sections = EXPECTED[checkpoint]["mrope_section"]
    order = {"thw": [0, 1, 2, 3], "hwt": [1, 2, 0]}[config.axis_order]
    assert [rope.axis_map.count(axis) for axis in order[: len(sections)]] == sections


def test_layouts_of_the_families_differ_where_they_should():
    assert read("ernie-4.5-vl-28b-a3b").axis_map == (1, 2) * 22 + (0,) * 20
    assert read("qwen2-vl-7b").axis_map == (0,) * 16 + (1,) * 24 + (2,) * 24
    assert read("qwen3.5-35b-a3b").axis_map == (0, 1, 2) * 10 + (0, 1)
    assert read("hunyuan-ocr").axis_map == (0,) * 16 + (1,) * 16 + (2,) * 16 + (3,) * 16


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_transformers_reads_the_same_fields(checkpoint):
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    raw = json.loads(path_of(checkpoint).read_text())
    if raw["model_type"] not in auto.CONFIG_MAPPING:
        assert checkpoint in ("ernie-4.5-vl-28b-a3b", "keye-vl-8b")
        pytest.skip(f"transformers has no {raw['model_type']}")
    theirs = auto.CONFIG_MAPPING[raw["model_type"]].from_dict(raw).get_text_config()
    ours = read(checkpoint)
    for key, fall_back in (("rope_theta", None), ("mrope_section", None), ("partial_rotary_factor", 1.0)):
        assert theirs.rope_parameters.get(key, fall_back) == ours.rope_parameters.get(key, fall_back), key
    assert theirs.max_position_embeddings == ours.max_position_embeddings
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert head_dim == ours.head_size


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_report_reads_every_checkpoint(checkpoint, monkeypatch, capsys):
    # Measuring builds legacy tables of up to 512 MiB; what is under test is everything around it.
    monkeypatch.setattr("rope_ops.__main__.measure", lambda config, device: iter(()))
    model_class = "rope_ops.examples:ExampleModel"
    main([str(path_of(checkpoint)), "--max-model-len", "4096", "--model-class", model_class])
    text = capsys.readouterr().out
    assert "is certified: positions < max_model_len = 4,096" in text
    assert f"rotary_dim {EXPECTED[checkpoint]['rotary_dim']}" in text
    legacy = "as many rows as the model has positions" if checkpoint == "hunyuan-ocr" else "4 x max_position_embeddings"
    assert f"legacy: {legacy}" in text


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_report_measures_a_checkpoint(capsys):
    main([str(path_of("hunyuan-ocr")), "--max-model-len", "64", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert [one["rows"] for one in data["constructions"]] == [32768, 32768]
    assert all(one["bitwise_prefix"] for one in data["constructions"])
    assert data["config"]["no_bound_reason"] == "no model class given"
