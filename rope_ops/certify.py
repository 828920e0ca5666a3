"""The certificate: a model class states that its positions stay below the sequence length.

Three things follow from it. While torch.compile traces a forward of that very class, what it traces is *marked*; the
graph pass rewrites marked tables only. ``bind`` gives an instance the bound of its tables. ``exclude=`` and the classes
that opt out are marked as not covered.

It fails closed. The statement is read from the class's **own** ``__dict__``: a subclass that inherits it has stated
nothing, and nothing set on an instance, a mixin or a metaclass counts.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, overload

import torch
from torch import nn

_CAPABILITY = "supports_sequence_bounded_mrope"
_EXCLUDED = "_sequence_bounded_mrope_exclude"

# Keys of a traced node's annotations: the certified class it was traced in ("" where one excludes it), its bound (0
# where the instance has none), and the names that the class excludes, joined by commas.
MARK = "rope_ops"
MARK_BOUND = "rope_ops_bound"
MARK_EXCLUDED = "rope_ops_excluded"

# Plain attributes of a module instance, so that they survive deepcopy and pickle, and so that Dynamo guards on them.
_BOUND = "_rope_ops_bound"
_OWNER = "_rope_ops_owner"
_FORWARD = "_rope_ops_forward"
# Of an instance built under a bound: None until its first eager forward, then the lazy tables that may grow.
_LAZY = "_rope_ops_lazy"

# What Dynamo does with frames that this thread runs: None where it does nothing. A C function, which it cannot trace.
_dynamo_runs = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)

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
        first = not supports_sequence_bounded_mrope(target)
        setattr(target, _CAPABILITY, True)
        setattr(target, _EXCLUDED, names)
        if first and issubclass(target, nn.Module):
            _mark_class(target)
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


def checked_bound(function: str, name: str, bound: object) -> int:
    """``bound`` itself if it is a positive integer; otherwise a ``ValueError`` that names the function."""
    if isinstance(bound, bool) or not isinstance(bound, int) or bound <= 0:
        raise ValueError(f"{function}: {name} must be a positive integer, got {bound!r}")
    return bound


def bind(model: nn.Module, max_model_len: int) -> nn.Module:
    """Give every certified module inside ``model`` the bound of its tables, and mark all that its certificate covers.

    A certified class is marked in its own ``forward``. Binding also marks the forwards of the submodules it covers, so
    that they are still covered after a graph break, when compiled alone, or when called from a method other than
    ``forward``. Binding again replaces the bound.

    Args:
        model: any module; wrappers such as DDP or a compiled module are looked through.
        max_model_len: no position of a sequence reaches it; tokens drafted ahead of the sequence count.

    Returns:
        The model itself.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``max_model_len`` is not a positive integer, or no module of ``model`` is certified.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"bind: model must be a torch.nn.Module, got {type(model).__name__}")
    checked_bound("bind", "max_model_len", max_model_len)
    roots = [module for module in model.modules() if supports_sequence_bounded_mrope(model_class(type(module)))]
    if not roots:
        raise ValueError(
            f"bind: no module of {type(model).__name__} is certified; decorate its class with "
            "rope_ops.sequence_bounded_mrope (a subclass does not inherit it)"
        )
    for root in roots:
        cls = model_class(type(root))
        paths = [path for path, _ in _scope(root)]
        for name in excluded_submodules(cls):
            if not any(_matches(path, name) for path in paths):
                warnings.warn(
                    f"bind: {cls.__name__} excludes {name!r}, which is no submodule of it", UserWarning, stacklevel=2
                )
        _bind_root(root, max_model_len)
    return model


def _bind_root(root: nn.Module, max_model_len: int) -> None:
    cls = model_class(type(root))
    setattr(root, _BOUND, max_model_len)
    for _, (module, covered) in list(_scope(root)):
        _mark_instance(module, cls.__qualname__ if covered else "", max_model_len if covered else 0)


def model_class(cls: type) -> type:
    """The user's class behind a class that torch itself made from it, as FSDP2 and parametrizations do."""
    while cls.__module__.partition(".")[0] == "torch":
        own = [base for base in cls.__bases__ if base.__module__.partition(".")[0] != "torch"]
        if len(own) != 1:
            break
        cls = own[0]
    return cls


# Dynamo then calls this while tracing instead of tracing it (what torch.compiler.assume_constant_result sets, without
# the import of Dynamo): the class of a module is guarded anyway.
model_class._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _mark_class(cls: Any) -> None:
    """Wrap ``forward``, to mark what is traced in it, and ``__init__``, to mark what the certificate leaves out."""
    forward, init = cls.forward, cls.__init__
    excluded = ",".join(excluded_submodules(cls))

    @functools.wraps(forward)
    def marked_forward(self, *args, **kwargs):
        # The exact class: a subclass that calls super().forward() has stated nothing.
        if model_class(type(self)) is not cls:
            return forward(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            # Not where Dynamo runs this frame itself, after a graph break: it would trace what is deferred.
            if _LAZY not in self.__dict__ or _dynamo_runs():
                return forward(self, *args, **kwargs)
            from rope_ops import construct  # (it needs this module)

            with construct.first_forward(self) if type(self) is cls else contextlib.nullcontext():  # type: ignore[arg-type]
                return forward(self, *args, **kwargs)
        mark = {MARK: cls.__qualname__, MARK_EXCLUDED: excluded}
        if _BOUND in self.__dict__:
            mark[MARK_BOUND] = self.__dict__[_BOUND]
        with torch.fx.traceback.annotate(mark):
            return forward(self, *args, **kwargs)

    @functools.wraps(init)
    def marked_init(self, *args, **kwargs):
        if type(self) is not cls:
            return init(self, *args, **kwargs)
        from rope_ops import construct  # (it needs this module)

        bound = construct.active_bound()
        with construct.deferred(self) if bound is not None else contextlib.nullcontext():
            init(self, *args, **kwargs)
        if bound is not None:
            _bind_root(self, bound)
            setattr(self, _LAZY, None)
        for _, (module, covered) in _scope(self):
            if not covered:
                _mark_instance(module, "", 0)

    cls.forward, cls.__init__ = marked_forward, marked_init


def _scope(root: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, bool]]]:
    """``(path, (module, covered))`` for the submodules of a certified module, but not those certified themselves."""
    excluded = excluded_submodules(model_class(type(root)))

    def walk(module, prefix, covered):
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            cls = model_class(type(child))
            if supports_sequence_bounded_mrope(cls):
                continue
            inside = covered and _own(cls).get(_CAPABILITY) is not False
            inside = inside and not any(_matches(path, name) for name in excluded)
            yield path, (child, inside)
            yield from walk(child, f"{path}.", inside)

    return walk(root, "", True)


def _matches(path: str, name: str) -> bool:
    """A dotted name is a path; a bare one is an attribute at any depth."""
    return path == name or ("." not in name and path.rpartition(".")[2] == name)


def _mark_instance(module: nn.Module, owner: str, bound: int) -> None:
    if model_class(type(module)).__module__.startswith("torch.nn."):
        return  # torch's own layers build no tables
    setattr(module, _OWNER, owner)
    setattr(module, _BOUND, bound)
    if getattr(module.__dict__.get("forward"), "__func__", None) is not _marked_forward:
        setattr(module, _FORWARD, module.__dict__.get("forward"))
        module.forward = types.MethodType(_marked_forward, module)


def _marked_forward(self, *args, **kwargs):
    forward = self.__dict__[_FORWARD]
    if forward is None:
        forward = functools.partial(type(self).forward, self)
    if not torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    with torch.fx.traceback.annotate({MARK: self.__dict__[_OWNER], MARK_BOUND: self.__dict__[_BOUND]}):
        return forward(*args, **kwargs)


# Pickle stores a bound method as an attribute name: the copy then finds its own class's forward.
_marked_forward.__name__ = "forward"
