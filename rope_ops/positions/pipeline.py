"""The inputs of one step's model call, on the first pipeline rank and on later ones."""

from __future__ import annotations

from typing import Any

import torch


def model_inputs(
    *,
    is_first_rank: bool,
    input_ids: torch.Tensor | None,
    positions: torch.Tensor,
    inputs_embeds: torch.Tensor | None = None,
    intermediate_tensors: Any = None,
) -> dict[str, Any]:
    """Keyword arguments for the model, the same keys on every rank.

    A graph is captured with the keys it is later called with, so ``intermediate_tensors`` is always among them: None
    on the first rank, in its capture too. A later rank embeds nothing: it continues from what the rank before it sent,
    so its ``input_ids`` and ``inputs_embeds`` are None, whatever the engine holds for the step.

    Args:
        is_first_rank: whether this is the first pipeline rank.
        input_ids: ``[num_tokens]``.
        positions: ``[num_dims, num_tokens]`` or ``[num_tokens]``; every rank needs them.
        inputs_embeds: ``[num_tokens, hidden]`` in place of ``input_ids``, as for multimodal prompts.
        intermediate_tensors: what the rank before sent.

    Raises:
        ValueError: a later rank without ``intermediate_tensors``, a first rank with them, or a first rank with neither
            ``input_ids`` nor ``inputs_embeds``.
    """
    if is_first_rank:
        if intermediate_tensors is not None:
            raise ValueError("model_inputs: the first pipeline rank must get no intermediate_tensors, got some")
        if input_ids is None and inputs_embeds is None:
            raise ValueError("model_inputs: the first pipeline rank needs input_ids or inputs_embeds, got neither")
    else:
        if intermediate_tensors is None:
            raise ValueError(
                "model_inputs: a pipeline rank after the first needs the intermediate_tensors of the rank before it, "
                "got None"
            )
        input_ids = inputs_embeds = None
    return {
        "input_ids": input_ids,
        "positions": positions,
        "inputs_embeds": inputs_embeds,
        "intermediate_tensors": intermediate_tensors,
    }
