"""Embedded model configurations and the certified class that stands for their models: no download, no weights."""

from __future__ import annotations

from typing import Any

from torch import nn

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
    in time, so a token's position never passes its index."""
