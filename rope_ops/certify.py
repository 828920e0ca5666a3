"""The certificate: a model class states that its positions stay below the sequence length.

It fails closed. The statement is read from the class's **own** ``__dict__``: a subclass that inherits it has stated
nothing, and nothing set on an instance, a mixin or a metaclass counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar, overload

_CAPABILITY = "supports_sequence_bounded_mrope"
_EXCLUDED = "_sequence_bounded_mrope_exclude"

_Class = TypeVar("_Class", bound=type)


@overload
def sequence_bounded_mrope(cls: _Class, /) -> _Class: ...
@overload
def sequence_bounded_mrope(*, exclude: Iterable[str] = ()) -> Callable[[_Class], _Class]: ...
def sequence_bounded_mrope(cls=None, /, *, exclude=()):
    """Certify that every rotary position of a model class is below the number of tokens of its sequence.

    For such a class no request reads a row at or past ``max_model_len`` (speculative tokens included), so its tables
    need no more rows. Use it as a decorator, or as a call on a class you cannot edit::

        @sequence_bounded_mrope
        class Model(nn.Module): ...

        sequence_bounded_mrope(exclude=("visual",))(ThirdPartyModel)

    The certificate covers what the class traces or constructs, submodules included, except those named in
    ``exclude`` and those whose class sets ``supports_sequence_bounded_mrope = False``. Subclasses are not covered:
    decorate each.

    Args:
        cls: the model class.
        exclude: attribute names or dotted paths of submodules whose indices are not sequence positions, such as a
            vision tower.

    Returns:
        The class itself, or a decorator when called with keywords only.

    Raises:
        TypeError: ``cls`` is not a class, or ``exclude`` is not an iterable of strings.
    """
    # A lone string is an iterable of strings too, of its letters.
    names = (None,) if isinstance(exclude, str) else tuple(exclude)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"sequence_bounded_mrope: exclude must be an iterable of submodule names, got {exclude!r}")

    def certify(target):
        if not isinstance(target, type):
            raise TypeError(f"sequence_bounded_mrope: certifies a class, got {target!r}")
        setattr(target, _CAPABILITY, True)
        setattr(target, _EXCLUDED, names)
        return target

    return certify if cls is None else certify(cls)


def supports_sequence_bounded_mrope(cls: object) -> bool:
    """Whether this very class is certified: its own ``__dict__`` holds the capability, and it is ``True``.

    Anything else, an instance included, is not certified.
    """
    return _own(cls).get(_CAPABILITY) is True


def excluded_submodules(cls: object) -> tuple[str, ...]:
    """The submodule names that the certificate of this very class leaves out; empty where it has none."""
    return _own(cls).get(_EXCLUDED, ())


def _own(cls: object) -> dict:
    # Through `type` itself, so that no metaclass can answer in its place.
    return dict(type.__dict__["__dict__"].__get__(cls)) if isinstance(cls, type) else {}
