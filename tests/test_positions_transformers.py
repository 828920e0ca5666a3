"""The families' rules against the functions of transformers 5.23, whose rule they name."""

from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch

from rope_ops.positions import Image, PositionVariant, Text, Video, position_variant, rules

transformers = pytest.importorskip("transformers", exc_type=ImportError)
if not transformers.__version__.startswith("5.23."):
    pytest.skip("the rule is that of transformers 5.23", allow_module_level=True)

MERGE = 2


def theirs(family, class_name, prompt, *, vision=None, sections=None, tokens=None):
    """Positions and delta of a prompt from a model class's own function, without building the model."""
    module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=[class_name])
    cls = getattr(module, class_name)
    config = SimpleNamespace(
        vision_config=SimpleNamespace(spatial_merge_size=MERGE, **(vision or {})),
        text_config=SimpleNamespace(rope_parameters={"mrope_section": sections}),
    )
    model = SimpleNamespace(config=config)
    model.get_vision_position_ids = MethodType(cls.get_vision_position_ids, model)
    tokens = tokens or (lambda block: (block.t if isinstance(block, Video) else 1) * block.h * block.w)
    kinds, images, videos, seconds = [], [], [], []
    for block in prompt:
        if isinstance(block, Text):
            kinds += [0] * block.num_tokens
        elif isinstance(block, Image):
            kinds += [1] * tokens(block)
            images.append((1, MERGE * block.h, MERGE * block.w))
        else:
            kinds += [2] * tokens(block)
            videos.append((block.t, MERGE * block.h, MERGE * block.w))
            seconds.append(block.seconds_per_step)
    options = {"image_grid_thw": torch.tensor(images)} if images else {}
    if videos:
        options |= {"video_grid_thw": torch.tensor(videos), "second_per_grid_ts": torch.tensor(seconds)}
    ids = torch.zeros((1, len(kinds)), dtype=torch.int64)
    positions, delta = cls.get_rope_index(model, ids, mm_token_type_ids=torch.tensor([kinds]), **options)
    return positions[:, 0].tolist(), int(delta)


def ours(result):
    segments, delta = result
    return segments.to_dense().tolist(), delta


def prompts(media, count=25, frames=5):
    """Random prompts that end in text, with text between grids."""
    rng = np.random.default_rng(7)
    for _ in range(count):
        prompt = [Text(int(rng.integers(0, 4)))]
        for _ in range(rng.integers(1, 5)):
            h, w = (int(n) for n in rng.integers(1, 7, 2))
            if rng.choice(media) == "image":
                prompt.append(Image(h, w))
            else:
                prompt.append(Video(int(rng.integers(1, frames + 1)), h, w, round(float(rng.uniform(0.1, 9)), 2)))
            prompt.append(Text(int(rng.integers(1, 5))))
        yield prompt


@pytest.mark.parametrize("media", [("image",), ("image", "video")])
def test_qwen2_vl(media):
    for prompt in prompts(media):
        got = ours(rules.qwen2_vl(prompt, rule="transformers-5.23"))
        assert got == theirs("qwen2_vl", "Qwen2VLModel", prompt)


@pytest.mark.parametrize("tokens_per_second", [2, 4])
def test_qwen2_5_vl(tokens_per_second):
    vision = {"tokens_per_second": tokens_per_second}
    for prompt in prompts(("image", "video"), frames=40):
        got = ours(rules.qwen2_5_vl(prompt, tokens_per_second=tokens_per_second, rule="transformers-5.23"))
        assert got == theirs("qwen2_5_vl", "Qwen2_5_VLModel", prompt, vision=vision)


@pytest.mark.parametrize(
    ("family", "class_name"),
    [
        ("qwen3_vl", "Qwen3VLModel"),
        ("qwen3_5", "Qwen3_5Model"),
        ("glm4v", "Glm4vModel"),
        ("glm4v_moe", "Glm4vMoeModel"),
    ],
)
def test_per_frame_grids(family, class_name):
    """Frames separated by text, as the processors write them."""
    rule = rules.glm4v if family.startswith("glm4v") else rules.qwen3_vl
    for prompt in prompts(("image", "video"), frames=1):
        assert ours(rule(prompt)) == theirs(family, class_name, prompt)


def test_ernie4_5_vl():
    for prompt in prompts(("image", "video")):
        prompt = [Video(2 * b.t, b.h, b.w) if isinstance(b, Video) else b for b in prompt]
        tokens = lambda b: (b.t // 2 if isinstance(b, Video) else 1) * b.h * b.w  # noqa: E731
        want = theirs(
            "ernie4_5_vl_moe", "Ernie4_5_VLMoeModel", prompt, vision={"temporal_merge_size": 2}, tokens=tokens
        )
        assert ours(rules.ernie4_5_vl(prompt, rule="transformers-5.23")) == want


@pytest.mark.parametrize("num_dims", [3, 4])
def test_hunyuan_vl(num_dims):
    for prompt in prompts(("image",)):
        tokens = lambda b: b.h * (b.w + 1)  # noqa: E731
        want = theirs("hunyuan_vl", "HunYuanVLModel", prompt, sections=[1] * num_dims, tokens=tokens)
        assert ours(rules.hunyuan_vl(prompt, num_dims=num_dims)) == want


@pytest.mark.parametrize(
    ("family", "class_name", "parameters", "variant"),
    [
        ("llama", "LlamaConfig", None, (PositionVariant.PLAIN, 1)),
        ("qwen2_vl", "Qwen2VLConfig", {"type": "mrope", "mrope_section": [16, 24, 24]}, (PositionVariant.MROPE, 3)),
        (
            "qwen3_5",
            "Qwen3_5Config",
            {"rope_type": "default", "mrope_section": [11, 11, 10], "mrope_interleaved": True},
            (PositionVariant.MROPE, 3),
        ),
        (
            "hunyuan_vl",
            "HunYuanVLConfig",
            {"type": "xdrope", "xdrope_section": [16] * 4, "alpha": 1000.0, "factor": 1.0},
            (PositionVariant.XDROPE, 4),
        ),
    ],
)
def test_configs(family, class_name, parameters, variant):
    """transformers rewrites what a config.json says; the object and its dictionary still tell the variant."""
    module = __import__(f"transformers.models.{family}.configuration_{family}", fromlist=[class_name])
    options = {} if parameters is None else {"text_config": {"rope_scaling": parameters}}
    config = getattr(module, class_name)(**options)
    assert position_variant(config) == position_variant(config.to_dict()) == variant
