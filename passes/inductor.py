"""The Inductor hook: stage 2 as a custom pass with a cache key that holds all that it reads."""

from __future__ import annotations

import functools
import hashlib
import pathlib
from collections.abc import Sequence

from torch import fx

import rope_ops
from rope_ops.passes import _private
from rope_ops.passes.printer import canonical
from rope_ops.passes.report import Report
from rope_ops.passes.rewrite import Options, rewrite

HOOK = "joint_custom_pre_pass"

_CustomGraphPass: type = _private.custom_graph_pass()


class BoundedRopePass(_CustomGraphPass):
    """Rewrites the tables of a graph whose ranges :func:`rope_ops.passes.mark` has replaced; otherwise does nothing.

    For the hook ``joint_custom_pre_pass`` of Inductor's configuration, or of a backend of your own::

        def backend(gm, example_inputs):
            gm = rope_ops.passes.mark(gm, max_model_len)
            return compile_fx(gm, example_inputs, config_patches={"joint_custom_pre_pass": BoundedRopePass()})

    Args:
        max_model_len: the bound given to ``mark``; only for the cache key, the graph itself carries it.
        form: "auto" or "bounded".
        opaque_readers: custom operators read rows only, at the positions they are given.
        report: gets a record for each table.
    """

    def __init__(
        self,
        max_model_len: int | None = None,
        *,
        form: str = "auto",
        opaque_readers: bool = False,
        report: Report | None = None,
    ):
        self._key = (max_model_len, form, opaque_readers)
        self._options = Options(form, opaque_readers)
        self._report = Report() if report is None else report
        self.calls = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.calls += 1
        before = canonical(graph) if self._report.keep_graphs else ""
        rewrite(graph, self._options, self._report)
        if self._report.keep_graphs:
            self._report.graphs.append((before, canonical(graph)))

    def uuid(self):
        return ("rope_ops", rope_ops.__version__, source_hash(), *self._key)


class Passes(_CustomGraphPass):
    """Several passes in a hook that holds one: ours first, so that the others see the graph it leaves."""

    def __init__(self, passes: Sequence):
        self._passes = tuple(passes)

    def __call__(self, graph: fx.Graph) -> None:
        for one in self._passes:
            one(graph)

    def uuid(self):
        # One pass without a key leaves the whole without a key: compiled, and not cached.
        keys = [one.uuid() if hasattr(one, "uuid") else None for one in self._passes]
        return None if None in keys else tuple(keys)


def composed(own: BoundedRopePass, others) -> BoundedRopePass | Passes:
    """``own`` and what the hook holds already: nothing, one pass or a list of passes."""
    others = [] if others is None else list(others) if isinstance(others, (list, tuple)) else [others]
    return Passes([own, *others]) if others else own


@functools.cache
def source_hash() -> str:
    """Of every source file of the package: compiled code of another version of it is never reused."""
    digest = hashlib.sha256()
    root = pathlib.Path(rope_ops.__file__).parent
    files = {path for folder in (root, root / "passes") for path in folder.rglob("*.py")}
    for path in sorted(files):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
