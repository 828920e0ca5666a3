"""Registration of ``torch.ops.rope_ops.*``: one library, defined once a process.

Importing this costs torch and nothing else. Kernels that need Triton are imported by the CUDA implementation when
it first runs.
"""

from __future__ import annotations

from collections.abc import Callable

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
        setup_context, backward: the autograd formula, as for :func:`torch.library.register_autograd`.
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
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_library)
    if vmap is not None:
        torch.library.register_vmap(qualified, vmap, lib=_library)
