"""Every private or unstable torch interface that the pass needs, each behind a function.

Gated by feature, not by version; present in torch 2.11, 2.12, 2.13 and 2.14 unless a function says otherwise.

- ``torch._dynamo.utils.counters`` (report.py), ``torch._dynamo.backends.common.aot_autograd``
- ``torch._inductor.compile_fx.compile_fx(gm, inputs, config_patches=)``, ``list_options``, ``list_mode_options``
- ``torch._inductor.custom_graph_pass.CustomGraphPass`` and the hook ``joint_custom_pre_pass``, which may hold a list
  of passes from 2.13 on
- ``torch._inductor.lowering.register_lowering``, ``torch._inductor.decomposition.select_decomp_table``
- ``torch.fx.traceback.annotate``, the attribute ``_dynamo_marked_constant`` (certify.py)
- ``functorch.compile.min_cut_rematerialization_partition``, ``make_boxed_func``
"""

from __future__ import annotations

import functools


def compile_fx(gm, example_inputs, config_patches):
    from torch._inductor.compile_fx import compile_fx as inductor

    return inductor(gm, example_inputs, config_patches=config_patches)


def inductor_options() -> set[str]:
    import torch._inductor

    return set(torch._inductor.list_options())


def inductor_mode(mode: str) -> dict:
    import torch._inductor

    return dict(torch._inductor.list_mode_options(mode))


def inductor_hook(name: str):
    """The pass or passes that the user's configuration has in a hook now, in effect for this thread."""
    import torch._inductor.config as config

    return getattr(config, name)


def custom_graph_pass() -> type:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


def decompositions() -> dict:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def aot_backend(**compilers):
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(**compilers)


def partition():
    from functorch.compile import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition


def boxed(function):
    from functorch.compile import make_boxed_func

    return make_boxed_func(function)


@functools.cache
def lower_rows_once() -> bool:
    """Teach Inductor ``rope_ops::rows_once``: store the operand instead of inlining it into every reader.

    Without the registry the operator stays a copy of the rows: right, and slower.
    """
    import torch

    try:
        from torch._inductor.lowering import clone, register_lowering
    except ImportError:
        return False

    def store(rows):
        rows.realize()
        return clone(rows)

    register_lowering(torch.ops.rope_ops.rows_once.default, type_promotion_kind=None)(store)
    return True


def size_hint(size) -> int | None:
    """An int as it is; of a symbolic size the example that it was traced with, without a guard."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if isinstance(hint, int) else None


def trace(function, fake_mode):
    """The graph of a function of no arguments, past Inductor's decompositions."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with fake_mode:
        return make_fx(function, decomposition_table=decompositions())()


def calls(gm, name: str) -> int:
    """How often a graph and its nested graphs call an operator."""
    import torch

    return sum(
        isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == name
        for module in gm.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
    )
