"""ModelConfig: the bound that follows from a config and a certificate, and the hash that holds it."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from rope_ops import ModelConfig, sequence_bounded_mrope
from rope_ops.examples import EXAMPLES, ExampleModel


class Uncertified(ExampleModel):
    pass


QWEN35 = EXAMPLES["qwen3.5"]


def test_certified_class_is_bounded_by_max_model_len():
    config = ModelConfig.from_hf(QWEN35, model_cls=ExampleModel, max_model_len=8192)
    assert config.mrope_cache_max_position == 8192 and config.legacy_rows == 1048576
    rope = config.get_rope()
    assert rope.cos_sin_cache.shape == (8192, 64) and rope.cos_sin_cache.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "arguments",
    [{}, {"model_cls": Uncertified}, {"model_cls": ExampleModel, "multimodal_pruning": True}],
    ids=["no class", "only inherits", "pruning"],
)
def test_without_a_certificate_or_with_pruning_the_legacy_rows_are_kept(arguments):
    small = {**EXAMPLES["qwen2-vl"], "max_position_embeddings": 64}
    config = ModelConfig.from_hf(small, max_model_len=8, **arguments)
    assert config.mrope_cache_max_position is None
    assert config.get_rope().cos_sin_cache.shape[0] == config.legacy_rows == 256


def test_max_model_len_defaults_to_the_length_of_the_config():
    assert ModelConfig.from_hf(QWEN35, model_cls=ExampleModel).max_model_len == 262144
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    config = {"head_dim": 16, "max_position_embeddings": 64, "rope_parameters": yarn}
    # R21 (b): the scaled maximum is not scaled again.
    assert ModelConfig.from_hf(config).max_model_len == 64


def test_head_size_is_derived_when_the_config_has_no_head_dim():
    assert ModelConfig.from_hf(EXAMPLES["qwen2-vl"]).head_size == 128


def test_hash_changes_with_the_bound_and_with_every_field():
    small = {**EXAMPLES["qwen2-vl"], "max_position_embeddings": 64}
    variants = [
        {},
        {"max_model_len": 32},
        {"model_cls": ExampleModel},
        {"model_cls": ExampleModel, "max_model_len": 32},
        {"model_cls": ExampleModel, "max_model_len": 32, "multimodal_pruning": True},
        {"dtype": torch.float16},
        {"is_neox_style": False},
        {"mrope_positions_factor": 4},
    ]
    hashes = [ModelConfig.from_hf(small, **variant).compute_hash() for variant in variants]
    assert len(set(hashes)) == len(variants)
    assert hashes == [
        ModelConfig.from_hf(dict(reversed(small.items())), **variant).compute_hash() for variant in variants
    ]


def test_hash_is_the_same_in_another_process():
    code = (
        "from rope_ops import ModelConfig; from rope_ops.examples import *;"
        "print(ModelConfig.from_hf(EXAMPLES['qwen3.5'], model_cls=ExampleModel).compute_hash())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == ModelConfig.from_hf(QWEN35, model_cls=ExampleModel).compute_hash()


def test_reads_a_file_and_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN35))
    expected = ModelConfig.from_hf(QWEN35)
    assert ModelConfig.from_hf(tmp_path) == expected == ModelConfig.from_hf(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must hold JSON, got"),
        ("[1]", "must hold a JSON object, got list"),
        ("{}", "must hold rope fields, rope_theta at least .* got the keys none"),
        ('{"rope_theta": 1.0}', "hidden_size must be a positive integer, got None"),
        ('{"rope_theta": 1.0, "head_dim": 8}', "max_position_embeddings must be a positive integer, got None"),
    ],
)
def test_bad_config_files_say_what_must_hold(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(path)


@pytest.mark.parametrize("bound", [0, -5, 1.5, True])
def test_bound_must_be_a_positive_integer(bound):
    with pytest.raises(ValueError, match="ModelConfig: max_model_len must be a positive integer, got"):
        ModelConfig.from_hf(QWEN35, max_model_len=bound)


def test_certificate_of_a_class_made_by_a_call():
    third_party = sequence_bounded_mrope(type("ThirdParty", (nn.Module,), {}))
    assert ModelConfig.from_hf(QWEN35, model_cls=third_party).mrope_cache_max_position == 262144
