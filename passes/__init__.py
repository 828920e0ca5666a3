"""Graph rewriting, imported as ``rope_ops.passes``. Nothing here is imported by ``import rope_ops``.

``marks.py`` puts the bound into Dynamo's graph, ``rows.py`` analyses, ``replay.py`` computes rows alone, ``rewrite.py``
decides, ``inductor.py``, ``backend.py`` and ``exported.py`` are where it is called, ``report.py`` says what happened.
"""

import importlib

_EXPORTS = {
    "mark": "marks",
    "BoundedRopePass": "inductor",
    "rope_bounded": "backend",
    "explain": "backend",
    "register": "backend",
    "bound_exported": "exported",
    "Outcome": "report",
    "Reason": "report",
    "Report": "report",
    "Table": "report",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str):
    # Late, because the hook's base class is Inductor's, whose import takes seconds.
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
