"""Embedded model configurations and the certified class that stands for their models: no download, no weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rope_ops import reference
from rope_ops.certify import sequence_bounded_mrope

# Rope fields of the models' public configs.
EXAMPLES: dict[str, dict[str, Any]] = {
    "qwen3.5": {
        "model_type": "qwen3_5",
        "text_config": {
            "head_dim": 256,
            "max_position_embeddings": 262144,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
        },
    },
    "qwen2-vl": {
        "model_type": "qwen2_vl",
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
}


@sequence_bounded_mrope
class ExampleModel(nn.Module):
    """The certified class of the embedded examples: their families give each frame a grid of its own, or unit steps
    in time, so a token's position never passes its index.

    Its forward builds the legacy table and turns a query with it, which is what the graph pass rewrites.

    Args:
        config: a :class:`rope_ops.ModelConfig`.
        device: of its frequencies.
    """

    inv_freq: torch.Tensor
    axes: torch.Tensor | None

    def __init__(self, config, device: torch.device | str = "cpu"):
        super().__init__()
        inv_freq, self.attention_factor = config.rope_frequencies(device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        axes = None if config.axis_map is None else torch.tensor(config.axis_map, device=device)
        self.register_buffer("axes", axes, persistent=False)
        self.legacy_rows, self.dtype, self.is_neox_style = config.legacy_rows, config.dtype, config.is_neox_style

    def forward(self, positions: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        table = reference.build_cos_sin_cache(self.inv_freq, self.legacy_rows, self.attention_factor, self.dtype)
        cos, sin = reference.gather_cos_sin(table, positions, self.axes)
        return reference.rotate(query, cos, sin, self.is_neox_style)
