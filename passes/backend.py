"""The torch.compile backend ``rope_bounded``: both stages around Inductor, or around an eager executor."""

from __future__ import annotations

import dataclasses

from torch import fx

from rope_ops.certify import checked_bound
from rope_ops.construct import report_of
from rope_ops.passes import _private
from rope_ops.passes.inductor import HOOK, BoundedRopePass, composed
from rope_ops.passes.marks import mark
from rope_ops.passes.readers import bounded_buffers, unsafe_reads
from rope_ops.passes.report import Report

_OPTIONS = {
    "max_model_len": (None, "a positive integer"),
    "multimodal_pruning": (False, "a bool"),
    "form": ("auto", '"auto" or "bounded"'),
    "opaque_readers": (False, "a bool"),
    "inner": ("inductor", '"inductor" or "aot_eager"'),
}
_CHOICES = {"form": ("auto", "bounded"), "inner": ("inductor", "aot_eager")}


@dataclasses.dataclass
class Settings:
    """The backend's own options, checked, and the rest, which are Inductor's."""

    max_model_len: int | None
    multimodal_pruning: bool
    form: str
    opaque_readers: bool
    inner: str
    inductor: dict


def settings(options: dict | None, mode: str | None = None) -> Settings:
    """Check ``options=`` and ``mode=`` of torch.compile.

    Raises:
        ValueError: an unknown option, or a bad value for one of the backend's own.
    """
    given = dict(options or {})
    own = {name: given.pop(name, default) for name, (default, _) in _OPTIONS.items()}
    if own["max_model_len"] is not None:
        checked_bound("rope_bounded", "option max_model_len", own["max_model_len"])
    for name, (default, expected) in _OPTIONS.items():
        value = own[name]
        good = value in _CHOICES[name] if name in _CHOICES else default is None or isinstance(value, bool)
        if not good:
            raise ValueError(f"rope_bounded: option {name} must be {expected}, got {value!r}")
    inductor = {} if mode in (None, "default") else _private.inductor_mode(mode)
    known = _private.inductor_options()
    unknown = sorted(name for name in given if name.replace("-", "_") not in known)
    if unknown:
        raise ValueError(
            f"rope_bounded: unknown option {', '.join(unknown)}; its options are {', '.join(_OPTIONS)}, "
            "and any option of inductor (torch._inductor.list_options())"
        )
    inductor |= {name.replace("-", "_"): value for name, value in given.items()}
    return Settings(**own, inductor=inductor)


def rope_bounded(gm: fx.GraphModule, example_inputs, *, mode: str | None = None, options: dict | None = None):
    """Compile a graph with the rotary tables of certified classes bounded; all else as Inductor does it.

    Use it by name, ``torch.compile(model, backend="rope_bounded", options={"max_model_len": 8192})``.

    Options:
        max_model_len: no position of a sequence reaches it (drafted tokens count). None, as with ``mode=``: the bound
            of each instance, see :func:`rope_ops.bind`.
        multimodal_pruning: True rewrites nothing.
        form: "auto" leaves no table where that is possible and pays; "bounded" leaves bounded tables.
        opaque_readers: custom operators read rows only, at the positions they are given: they may get a bounded table.
        inner: "inductor", or "aot_eager" to run the rewritten graph with eager kernels.
        Any other name is an option of Inductor.
    """
    return compile_graph(gm, example_inputs, settings(options, mode), Report())


def register() -> None:
    """Make the name "rope_bounded" known to torch.compile where the package is used without being installed.

    An installed package needs no call: torch finds the backend through the entry point ``torch_dynamo_backends``.
    """
    import torch._dynamo

    if "rope_bounded" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(rope_bounded, name="rope_bounded")


def compile_graph(gm: fx.GraphModule, example_inputs, chosen: Settings, report: Report):
    mark(gm, chosen.max_model_len, multimodal_pruning=chosen.multimodal_pruning, report=report)
    own = BoundedRopePass(chosen.max_model_len, form=chosen.form, opaque_readers=chosen.opaque_readers, report=report)
    if chosen.inner == "aot_eager":
        return _aot_eager(own)(gm, example_inputs)
    marked = _private.calls(gm, "rope_ops::position_range")
    _private.lower_rows_once()
    hook = chosen.inductor.pop(HOOK) if HOOK in chosen.inductor else _private.inductor_hook(HOOK)
    compiled = _private.compile_fx(gm, example_inputs, {**chosen.inductor, HOOK: composed(own, hook)})
    if marked and not own.calls:
        report.note(
            f"compiled code came from the cache: {marked} position ranges were rewritten or left when it was compiled "
            "(rope_ops.explain looks again)"
        )
    return compiled


def _aot_eager(own: BoundedRopePass):
    """AOTAutograd with Inductor's decompositions, our pass where Inductor has its hook, and eager kernels."""

    def run(gm: fx.GraphModule) -> None:
        for module in gm.modules():
            if isinstance(module, fx.GraphModule):
                own(module.graph)
                module.recompile()

    def inference(gm, example_inputs):
        run(gm)
        return _private.boxed(gm.forward)

    def partition(joint, joint_inputs, **kwargs):
        run(joint)
        return _private.partition()(joint, joint_inputs, **kwargs)

    def compiled(gm, example_inputs):
        return _private.boxed(gm.forward)

    return _private.aot_backend(
        fw_compiler=compiled,
        bw_compiler=compiled,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=_private.decompositions(),
    )


def explain(model, *args, max_model_len: int | None = None, options: dict | None = None, **kwargs) -> Report:
    """Say what became of every table of a model, in its constructor and in the backend, and print it.

    Traces and runs the model once on the given arguments, with eager kernels and past every compile cache. What the
    model's forward stores on itself is stored by this run as well.

    Args:
        model: a module or a function; one that ``torch.compile`` returned is looked into.
        *args, **kwargs: its arguments.
        max_model_len: the bound; None takes that of each instance.
        options: further options of the backend.

    Returns:
        The report: ``.tables``, each with ``outcome``, ``reason``, rows and bytes before and after, and ``location``;
        ``.graphs``, the text of each graph before and after; ``.result``, what the model returned.

    Raises:
        ValueError: a bad option, or a certified class traced a range and neither argument nor instance has a bound.
    """
    import torch

    chosen = settings({**(options or {}), "max_model_len": max_model_len, "inner": "aot_eager"})
    report = Report(keep_graphs=True)
    model = getattr(model, "_orig_mod", model)

    bounded = bounded_buffers(model) if isinstance(model, torch.nn.Module) else {}

    def backend(gm, example_inputs):
        for line in unsafe_reads(gm, example_inputs, bounded):
            report.note(line)
        return compile_graph(gm, example_inputs, chosen, report)

    report.result = torch.compile(model, backend=backend)(*args, **kwargs)
    if isinstance(model, torch.nn.Module):
        built = report_of(model)
        report.tables[:0], report.notes[:0] = built.tables, built.notes
    print(report)
    return report
