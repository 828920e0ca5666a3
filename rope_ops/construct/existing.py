"""Bounding the tables of a model that is built already.

Safety: a tensor of a covered module is replaced only if it is proven to be a table of positions: some of its rows, the
first, the middle and the last one among them, are recomputed from the frequencies that its module holds (or from the
base that it holds) in one of the layouts below, and must be equal to the bit. Its first rows are then copied, so no
value is computed anew. What is not proven, or is held by anything outside the model, is untouched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from rope_ops import certify
from rope_ops.construct.constructor import REPORT, remember
from rope_ops.construct.holders import Holders
from rope_ops.passes.report import UNCHECKED_READS, Outcome, Reason, Report, Table


def bound_buffers(model: nn.Module, max_model_len: int) -> Report:
    """Bind a model (see :func:`rope_ops.bind`) and cut the tables of its certified modules to ``max_model_len`` rows.

    Args:
        model: any module that contains a certified one.
        max_model_len: no position of a sequence reaches it; tokens drafted ahead of the sequence count.

    Returns:
        The report: a record for each tensor with more rows than the bound that reads like a table. ``left`` are those
        that could not be proven.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``max_model_len`` is not a positive integer, or no module of ``model`` is certified.
    """
    certify.bind(model, max_model_len)
    report = Report()
    for root in model.modules():
        if certify.supports_sequence_bounded_mrope(certify.model_class(type(root))):
            own = vars(root).setdefault(REPORT, Report())
            for table in _bounded(root, max_model_len):
                own.tables.append(table)
                report.tables.append(table)
    if any(table.outcome is Outcome.BOUNDED for table in report.tables):
        report.note(UNCHECKED_READS)
    return report


def _bounded(root: nn.Module, bound: int) -> Iterator[Table]:
    sharing: dict[int, set[int]] = {}

    def wanted(tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return False
        sharing.setdefault(tensor.untyped_storage()._cdata, set()).add(id(tensor))
        return type(tensor) is torch.Tensor and _row_dim(tensor, bound) is not None

    holders = Holders(root, wanted)
    candidates = holders.found()
    outside = holders.held_outside(candidates) if candidates else {}
    for tensor in candidates:
        dim = _row_dim(tensor, bound)
        places = holders.of(tensor)
        formula = next((found for place in places if (found := _proof(_module(place, root), tensor, dim))), None)
        rows, size = tensor.shape[dim], tensor.untyped_storage().nbytes()
        where = ", ".join(sorted({place.path for place in places}))
        reason = None
        if not all(place.covered for place in places):
            reason = Reason.EXCLUDED, ""
        elif formula is None:
            reason = Reason.UNPROVEN, ""
        elif id(tensor) in outside:
            reason = Reason.HELD_OUTSIDE, outside[id(tensor)]
        elif len(sharing[tensor.untyped_storage()._cdata]) > 1:
            reason = Reason.SHARED, "other tensors of the model share its memory"
        if reason is not None:
            yield Table(Outcome.LEFT, reason[0], rows, rows, size, size, where, formula or "tensor", reason[1])
            continue
        with torch.no_grad():
            # The same object with less in it, so that all who hold it see the rows.
            tensor.data = tensor.detach().narrow(dim, 0, bound).clone(memory_format=torch.contiguous_format)
        for place in places:
            remember(place, root, dim, rows, bound)
        yield Table(Outcome.BOUNDED, None, rows, bound, size, tensor.untyped_storage().nbytes(), where, formula)


def _row_dim(tensor: torch.Tensor, bound: int) -> int | None:
    long = [dim for dim, size in enumerate(tensor.shape) if size > bound]
    number = tensor.is_floating_point() or tensor.is_complex()
    fits = number and len(long) == 1 and tensor.dim() > 1 and tensor.device.type != "meta" and tensor.is_contiguous()
    return long[0] if fits and not tensor.requires_grad else None


def _module(place, root: nn.Module) -> nn.Module:
    return next((link for link in reversed(place.chain) if isinstance(link, nn.Module)), root)


def _proof(module: nn.Module, table: torch.Tensor, dim: int) -> str | None:
    """The layout in which the rows of a table can be computed, or None."""
    rows = table.shape[dim]
    positions = torch.tensor(sorted({0, 1, rows // 3, rows // 2, rows - 2, rows - 1}), device=table.device)
    sample = table.index_select(dim, positions).movedim(dim, 0).flatten(1)
    for inv_freq in _frequencies(module, table):
        angle = positions.to(inv_freq.dtype)[:, None] * inv_freq
        for name, values in _layouts(angle, module):
            fits = values.shape == sample.shape and values.is_complex() == sample.is_complex()
            if fits and _same_bits(values.to(sample.dtype), sample):
                return name
    return None


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other.contiguous())
    return torch.equal(one, other)


def _frequencies(module: nn.Module, table: torch.Tensor) -> Iterator[torch.Tensor]:
    own = [*module._buffers.values(), *module._parameters.values(), *vars(module).values()]
    for tensor in own:
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 1 and tensor.is_floating_point():
            if tensor.device == table.device and 1 <= tensor.numel() <= 4096:
                yield tensor.detach()
    width = table.numel() // max(table.shape)
    bases = [value for value in _numbers(module) if value >= 100]
    for rotary_dim in {width, 2 * width, width // 2} - {0}:
        whole = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=table.device)
        for base in bases:
            yield 1.0 / (base ** (whole / rotary_dim))


def _numbers(module: nn.Module) -> list[float]:
    return sorted({float(v) for v in vars(module).values() if type(v) in (int, float) and math.isfinite(v)})


def _layouts(angle: torch.Tensor, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield "angles", angle
    yield "angles cat", torch.cat((angle, angle), -1)
    yield "angles interleaved", angle.repeat_interleave(2, -1)
    if angle.dtype in (torch.float32, torch.float64):
        yield "polar", torch.polar(torch.ones_like(angle), angle)
    for factor in [1.0, *(number for number in _numbers(module) if 0.1 < number < 10 and number != 1.0)]:
        c, s = angle.cos(), angle.sin()
        if factor != 1.0:
            c, s = c * factor, s * factor
        for name, one in (("cos", c), ("sin", s)):
            yield name, one
            yield f"{name} cat", torch.cat((one, one), -1)
            yield f"{name} interleaved", one.repeat_interleave(2, -1)
        yield "cos_sin_cache", torch.cat((c, s), -1)
        yield "sin cos cat", torch.cat((s, c), -1)
        yield "cos cos sin sin cat", torch.cat((c, c, s, s), -1)
        yield "cos sin stack", torch.stack((c, s), -1).flatten(1)
        yield "sin cos stack", torch.stack((s, c), -1).flatten(1)
        yield "cos sin interleaved cat", torch.cat((c.repeat_interleave(2, -1), s.repeat_interleave(2, -1)), -1)
        yield "rotation matrices", torch.stack((c, -s, s, c), -1).flatten(1)
