"""The rotation of transformers' own models: their queries and keys, turned by the operator with the family's layout.

Tiny random-weight text models run with positions of their own on each axis; what their attention layers pass to
``apply_rotary_pos_emb``, and what they get back, is the public answer.
"""

import importlib

import pytest
import torch

from rope_ops import get_rope
from rope_ops.axes import axis_map, spatial_first_axis_map
from rope_ops.ops import rotate

transformers = pytest.importorskip("transformers", minversion="5.0")

SIZES = dict(
    vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=4096,
)  # fmt: skip


class Family:
    """A text model of transformers, and the layout that reproduces it.

    Args:
        model: name of the package in ``transformers.models``.
        text_model, config: names of the classes.
        head_size, axes, style: of the rotation; the axis map covers ``rotary_dim // 2`` frequencies.
        rounding: how transformers rounds, and with what rows.
        sizes: what the configuration needs beside :data:`SIZES`.
    """

    def __init__(self, model, text_model, config, head_size, section, *, axes, style=True, rounding="cache", **sizes):
        self.model, self.text_model, self.config = model, text_model, config
        self.head_size, self.section, self.axes = head_size, section, axes
        self.style, self.rounding, self.sizes = style, rounding, sizes

    def run(self, dtype):
        """``(query, key, turned query, turned key, positions)``, as ``[batch, tokens, heads, head_size]``."""
        modeling = importlib.import_module(f"transformers.models.{self.model}.modeling_{self.model}")
        configuration = importlib.import_module(f"transformers.models.{self.model}.configuration_{self.model}")
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(self.section)}
        if 2 * len(self.axes) < self.head_size:
            rope["partial_rotary_factor"] = 2 * len(self.axes) / self.head_size
        sizes = {**SIZES, "head_dim": self.head_size, "rope_parameters": rope, **self.sizes}
        config = getattr(configuration, self.config)(**sizes)
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        # As from_pretrained does; .to(dtype) would round inv_freq as well.
        torch.set_default_dtype(dtype)
        try:
            model = getattr(modeling, self.text_model)(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)
        seen = []
        original = modeling.apply_rotary_pos_emb

        def record(q, k, cos, sin, *args, **kwargs):
            out = original(q, k, cos, sin, *args, **kwargs)
            seen.append([x.transpose(1, 2).clone() for x in (q, k, *out)])
            return out

        positions = torch.randint(0, 3000, (3, 2, 24))
        modeling.apply_rotary_pos_emb = record
        try:
            with torch.no_grad():
                model(inputs_embeds=torch.randn(2, 24, config.hidden_size).to(dtype), position_ids=positions)
        finally:
            modeling.apply_rotary_pos_emb = original
        return *seen[0], positions


QWEN3_SECTION, QWEN35_SECTION = (24, 20, 20), (11, 11, 10)
FAMILIES = {
    "Qwen2-VL": Family(
        "qwen2_vl", "Qwen2VLTextModel", "Qwen2VLTextConfig", 16, (2, 3, 3), axes=axis_map([2, 3, 3])
    ),
    "Qwen2.5-VL": Family(
        "qwen2_5_vl", "Qwen2_5_VLTextModel", "Qwen2_5_VLTextConfig", 128, (16, 24, 24), axes=axis_map([16, 24, 24]),
        hidden_size=512,
    ),
    "Qwen3-VL": Family(
        "qwen3_vl", "Qwen3VLTextModel", "Qwen3VLTextConfig", 128, QWEN3_SECTION, axes=axis_map(QWEN3_SECTION, True)
    ),
    "Qwen3.5": Family(
        "qwen3_5", "Qwen3_5TextModel", "Qwen3_5TextConfig", 256, QWEN35_SECTION, axes=axis_map(QWEN35_SECTION, True),
        layer_types=["full_attention"],
    ),
    "GLM-4V": Family(
        "glm4v", "Glm4vTextModel", "Glm4vTextConfig", 128, (8, 12, 12), axes=axis_map([8, 12, 12]), style=False,
        hidden_size=512, pad_token_id=0,
    ),
    "Ernie-4.5-VL": Family(
        "ernie4_5_vl_moe", "Ernie4_5_VLMoeTextModel", "Ernie4_5_VLMoeTextConfig", 128, (22, 22, 20),
        axes=spatial_first_axis_map([22, 22, 20]), style=False, rounding="float32",
        hidden_size=512, mlp_layer_types=["dense"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FAMILIES)
def test_bits_of_the_models_own_rotation(name, dtype):
    family = FAMILIES[name]
    query, key, turned_query, turned_key, positions = family.run(dtype)
    rotary_dim = 2 * len(family.axes)
    inv_freq = 1.0 / (1e6 ** (torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim))
    form = dict(axis_map=family.axes, is_neox_style=family.style, rounding=family.rounding)
    # Ernie rotates with float32 rows; the others cast rows to the model's dtype.
    form["cache_dtype"] = torch.float32 if family.rounding == "float32" else dtype
    assert query.shape[-1] == family.head_size and query.dtype == dtype
    for got, want in zip(rotate(query, key, positions, inv_freq, **form), (turned_query, turned_key), strict=True):
        assert torch.equal(got, want), f"{int((got != want).sum())} of {want.numel()} differ"
    assert not torch.equal(turned_query, query)


def test_a_table_is_not_what_ernie_computes():
    """In bfloat16 the rounding of serving engines is not Ernie's: near it, not equal."""
    family = FAMILIES["Ernie-4.5-VL"]
    query, _, turned, _, positions = family.run(torch.bfloat16)
    inv_freq = 1.0 / (1e6 ** (torch.arange(0, 128, 2, dtype=torch.float) / 128))
    got, _ = rotate(query, None, positions, inv_freq, axis_map=family.axes, is_neox_style=False)
    assert not torch.equal(got, turned)
    torch.testing.assert_close(got, turned, rtol=3e-2, atol=3e-2)


def test_modules_take_the_layout_of_a_family():
    family = FAMILIES["Ernie-4.5-VL"]
    query, key, turned_query, turned_key, positions = family.run(torch.bfloat16)
    rope = get_rope(
        128, 4096, False, {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [22, 22, 20]}, torch.float32,
        axis_map=family.axes, cache_max_position=3000,
    )  # fmt: skip
    got = rope(positions.flatten(1), query.flatten(0, 1), key.flatten(0, 1), rounding="float32")
    assert torch.equal(got[0], turned_query.flatten(0, 1)) and torch.equal(got[1], turned_key.flatten(0, 1))


def test_published_xdrope_turns_a_pair_with_one_axis():
    """HunyuanOCR as published: the sections are listed twice, so both lanes of a pair take their row's axis.

    transformers 5.23 splits the doubled row instead, which pairs two axes and is no rotation; the formula here is the
    published one, written out.
    """
    section, head_size = [16, 16, 16, 16], 128
    inv_freq = 1.0 / (1e4 ** (torch.arange(0, head_size, 2).float() / head_size))
    positions = torch.randint(0, 500, (4, 7))
    query = torch.randn(7, 3, head_size).bfloat16()
    freqs = positions.float()[..., None] * inv_freq
    doubled = torch.cat((freqs, freqs), dim=-1)
    cos, sin = (
        torch.cat([part[i % 4] for i, part in enumerate(f(doubled).bfloat16().split(section * 2, dim=-1))], dim=-1)
        for f in (torch.cos, torch.sin)
    )
    half = head_size // 2
    swapped = torch.cat((-query[..., half:], query[..., :half]), dim=-1)
    expected = query * cos[:, None] + swapped * sin[:, None]
    got, _ = rotate(query, None, positions, inv_freq, axis_map=axis_map(section))
    assert torch.equal(got, expected)
