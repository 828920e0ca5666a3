"""Registration of ``torch.ops.rope_ops.*``: one library, defined once a process.

Importing this costs torch and nothing else. Kernels that need Triton are imported by the CUDA implementation when
it first runs.

Private torch names, in 2.11 to 2.14: ``torch._C._after_autograd_keyset``, ``_after_ADInplaceOrView_keyset``,
``_AutoDispatchBelowAutograd``, ``_AutoDispatchBelowADInplaceOrView``, all as ``torch.library.custom_op`` uses them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import torch

NAMESPACE = "rope_ops"

# A fragment, not a definition: a second copy of the package in the process (vendored, or reloaded) must not abort.
# Kept at module level because a library that is collected takes its operators with it.
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(
    schema: str,
    *,
    fake: Callable,
    cpu: Callable | None = None,
    cuda: Callable | None = None,
    anywhere: Callable | None = None,
    tags: tuple[torch.Tag, ...] = (torch.Tag.pt2_compliant_tag,),
    setup_context: Callable | None = None,
    backward: Callable | None = None,
    vmap: Callable | None = None,
) -> None:
    """Define one operator with all of its implementations, unless this process has it already.

    Args:
        schema: the operator's schema, ``name(args) -> returns``.
        cpu, cuda: implementations for the two dispatch keys.
        anywhere: one implementation for every device instead, for an operator made of others or without tensors.
        fake: shapes, dtypes and strides of the result, with the same argument checks.
        setup_context, backward: the autograd formula of an operator that writes to no argument. One that does is
            refused where a gradient would be lost, and tells autograd what it wrote to. The formula is
            given as for :func:`torch.library.register_autograd`.
        vmap: the batching rule, as for :func:`torch.library.register_vmap`.
    """
    name = schema.split("(", 1)[0]
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        return
    _library.define(schema, tags=tags)
    for key, implementation in (("CPU", cpu), ("CUDA", cuda), ("CompositeExplicitAutograd", anywhere)):
        if implementation is not None:
            _library.impl(name, implementation, key)
    qualified = f"{NAMESPACE}::{name}"
    torch.library.register_fake(qualified, fake, lib=_library)
    if getattr(getattr(torch.ops, NAMESPACE), name).default._schema.is_mutable:
        _guard_writes(name)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_library)
    if vmap is not None:
        torch.library.register_vmap(qualified, vmap, lib=_library)


def kernels(module: str, operator: str) -> ModuleType:
    """The module of a Triton kernel; RuntimeError that names the operator where Triton cannot be imported."""
    try:
        return importlib.import_module(f"rope_ops.kernels.{module}")
    except ImportError as error:
        raise RuntimeError(
            f"{operator}: a CUDA tensor needs Triton, which cannot be imported (pip install triton)"
        ) from error


def _guard_writes(name: str) -> None:
    """Make an operator that writes to its arguments safe under autograd.

    Left alone, the dispatcher runs it below autograd without a word: a gradient that flows through the written tensor
    is then wrong, and so is one whose formula saved that tensor before the write.
    """
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    arguments = operator._schema.arguments
    written = [i for i, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write]

    def refuse(keyset, *args):
        if torch.is_grad_enabled():
            for argument, value in zip(arguments, args, strict=False):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    raise RuntimeError(
                        f"{name}: {argument.name} requires grad, but {name} writes in place and has no gradient; use "
                        "the functional form, or call it under torch.no_grad()"
                    )
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def bump_versions(keyset, *args):
        for i in written:
            if args[i] is not None:
                torch.autograd.graph.increment_version(args[i])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return operator.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    _library.impl(name, refuse, "Autograd", with_keyset=True)
    _library.impl(name, bump_versions, "ADInplaceOrView", with_keyset=True)
