"""What a model's ordinary constructor costs, legacy and under a bound: rows for the report's table."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from rope_ops import reference
from rope_ops.certify import sequence_bounded_mrope
from rope_ops.config import ModelConfig
from rope_ops.construct import sequence_bound
from rope_ops.measure import Construction, _build_and_peak, milliseconds


@sequence_bounded_mrope
class OrdinaryModel(nn.Module):
    """A model that knows nothing of bounds: its constructor builds the legacy table as serving engines do."""

    def __init__(self, config: ModelConfig, device: torch.device):
        super().__init__()
        inv_freq, attention_factor = config.rope_frequencies(device)
        table = reference.build_cos_sin_cache(inv_freq, config.legacy_rows, attention_factor, config.dtype)
        self.register_buffer("cos_sin_cache", table, persistent=False)


def measure_constructor(config: ModelConfig, device: torch.device) -> Iterator[Construction]:
    """``constructor`` and ``constructor, sequence_bound``: the same class, outside and inside of the context.

    Without a bound (no certified class, or pruning) there is only the first.
    """
    bound = config.mrope_cache_max_position

    def legacy() -> torch.Tensor:
        return OrdinaryModel(config, device).cos_sin_cache

    def bounded() -> torch.Tensor:
        with sequence_bound(bound):
            return OrdinaryModel(config, device).cos_sin_cache

    whole, peak = _build_and_peak(legacy, device)
    yield Construction("constructor", whole.shape[0], whole.nbytes, peak, milliseconds(legacy, device), True)
    if bound is None:
        return
    with sequence_bound(1):
        OrdinaryModel(config, device)  # the first deferral imports; the first kernel on a device is compared
    table, peak = _build_and_peak(bounded, device)
    exact = torch.equal(table, whole[: table.shape[0]])
    time = milliseconds(bounded, device)
    yield Construction("constructor, sequence_bound", table.shape[0], table.nbytes, peak, time, exact)
