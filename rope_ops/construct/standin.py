"""Stand-ins: tensors with sizes, a dtype and a device, whose values are a recording of how to make them.

While a certified constructor runs, a long position range is answered by a stand-in, and an operator on a stand-in is
run on fake tensors and recorded, so that no table exists yet. Two ways lead back to real tensors:

- ``settle.py`` builds what is left when the constructor ends, at the bounded size where that is proven right;
- whatever needs values before (``.item()``, numpy, a write into a real tensor, an operator that is not recorded)
  gets the whole legacy tensor, made by running the recorded operators in order, and the report says so.

So a stand-in is never wrong: at worst it costs what the legacy construction costs.

Private interfaces, in torch 2.11 to 2.14: ``Tensor._make_wrapper_subclass``, ``TorchDispatchMode``,
``_disable_current_modes``, ``FakeTensorMode``, ``torch._C._ExcludeDispatchKeyGuard``, ``torch._C._DisableAutocast``,
``torch._C.DisableTorchFunctionSubclass``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten

# An operand from outside the recording is copied, so that a later change of it cannot reach the tables. Larger than
# this it is no frequency but data.
_LARGEST_OPERAND = 1 << 20

# A tensor that is taken apart into more parts than this is iterated over by its rows.
_MOST_VIEWS = 64

_RANGES = frozenset((aten.arange.default, aten.arange.start, aten.arange.start_step))


@dataclasses.dataclass(frozen=True)
class Value:
    """The result of a recorded operator, by its place in :attr:`Recorder.values`."""

    index: int


@dataclasses.dataclass(frozen=True)
class Call:
    """A recorded operator: its arguments with tensors as :class:`Value`, and its tensor results, in order.

    ``bound`` is that of a position range, 0 for any other operator.
    """

    func: torch._ops.OpOverload
    args: tuple
    kwargs: dict
    results: tuple[int, ...]
    written: frozenset[int]
    bound: int = 0


# A stand-in's own attributes; all others are the user's and move to the tensor that takes its place.
OWN = ("_recorder", "_fake", "_real", "_trainable", "_is_param")


class StandIn(torch.Tensor):
    """A tensor without values. ``_real`` is the legacy tensor once something has needed it."""

    _recorder: Recorder
    _fake: torch.Tensor
    _real: torch.Tensor | None
    _trainable: bool

    @staticmethod
    def __new__(cls, recorder: Recorder, fake: torch.Tensor, real: torch.Tensor | None = None):
        self = torch.Tensor._make_wrapper_subclass(
            cls, fake.shape, strides=fake.stride(), dtype=fake.dtype, device=fake.device, requires_grad=False
        )
        self._recorder, self._fake, self._real, self._trainable = recorder, fake, real, False
        return self

    def __init__(self, *_):
        pass

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        stand_ins = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StandIn)]
        recorder = stand_ins[0]._recorder
        if func is torch.Tensor.requires_grad_ and args[0] is stand_ins[0]:
            # Parameter() asks this of its new tensor and wants the same object back.
            args[0]._trainable = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            return args[0]
        if func is torch.Tensor.detach and (cls := _parameter_subclass(sys._getframe(1))) is not None:
            return recorder.parameter(stand_ins[0], cls)
        if func is torch.Tensor.__deepcopy__ and (copy := recorder.deepcopy(*args)) is not None:
            return copy
        with torch._C.DisableTorchFunctionSubclass():
            if func in _LOOKS or any(s._trainable for s in stand_ins):
                return recorder.run_for_real(func, args, kwargs, func in _LOOKS)
            if _wants_gradient(args, kwargs):
                return recorder.run_with_gradient(func, args, kwargs, stand_ins)
            mark = len(recorder.tape)
            try:
                # Views of views would otherwise be tied together below Python, and could not be swapped.
                with _no_view_tracking():
                    return func(*args, **kwargs)
            except Exception:
                if recorder.closed or all(s._real is not None for s in stand_ins):
                    raise
                # Something between here and the dispatcher wanted a real tensor. If the call is wrong, this says so.
                del recorder.tape[mark:]
                return recorder.run_for_real(func, args, kwargs, True)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        recorder = next(leaf._recorder for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StandIn))
        return recorder.call(func, args, kwargs or {})


def _parameter_subclass(frame) -> type | None:
    """The class that ``nn.Parameter.__new__`` is making, if it is a subclass that the user wrote."""
    if frame.f_code is not nn.Parameter.__new__.__code__:
        return None
    cls = frame.f_locals.get("cls")
    return cls if isinstance(cls, type) and cls is not nn.Parameter else None


def _wants_gradient(args, kwargs) -> bool:
    leaves = tree_leaves((args, kwargs))
    return torch.is_grad_enabled() and any(
        isinstance(leaf, torch.Tensor) and not isinstance(leaf, StandIn) and leaf.requires_grad for leaf in leaves
    )


def _no_view_tracking():
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView))


with torch.inference_mode(False), torch._C._DisableAutocast():
    _KEYS = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@contextlib.contextmanager
def plain():
    """Run real operators, as if at top level: no mode, no autocast (what is recorded is past it), no gradients."""
    with _disable_current_modes(), torch._C._ForceDispatchKeyGuard(*_KEYS), torch._C._DisableAutocast():
        with torch.no_grad(), _no_view_tracking():
            yield


# What reaches past the dispatcher for values or memory.
_LOOKS = frozenset(
    getattr(member, "__get__", member) if isinstance(member, property) else member
    for name in (
        "item tolist numpy __array__ data_ptr storage untyped_storage _typed_storage __repr__ __format__ __bool__ "
        "__int__ __float__ __complex__ __index__ __iter__ __contains__ __reduce_ex__ __deepcopy__ __dlpack__ "
        "share_memory_ pin_memory register_hook backward set_ resize_ resize_as_ map_ map2_ apply_ is_set_to "
        "retain_grad to_sparse"
    ).split()
    if (member := getattr(torch.Tensor, name, None)) is not None
) | {
    torch.Tensor.data.__set__,
    torch.Tensor.requires_grad.__set__,
    torch.Tensor.grad.__set__,
    torch.Tensor.__cuda_array_interface__.__get__,
}


class Recorder:
    """The recording of one constructor, the outermost certified one of its thread.

    Args:
        looked: told, once for each memory that was needed whole: which stand-in and by what.
    """

    def __init__(self, looked: Callable[[StandIn, str], None]):
        self.tape: list[Call] = []
        self.values: list[torch.Tensor] = []
        # Tensors from outside that recorded operators read: copies, by value index.
        self.operands: dict[int, torch.Tensor] = {}
        self.notes: list[str] = []
        self.closed = False
        self._least_bound = 1 << 62
        self._index: dict[int, int] = {}
        self._alive: list[weakref.ref] = []
        self._reclassed: list[tuple[torch.Tensor, type]] = []
        self._looked = looked
        self._lock = threading.RLock()

    @functools.cached_property
    def fake_mode(self):
        # Late: it imports Dynamo, which takes seconds, and most constructors make no long range.
        from torch._subclasses.fake_tensor import FakeTensorMode

        return FakeTensorMode()

    # Recording -------------------------------------------------------------------------------------------------------

    def range(self, func, args, kwargs, bound: int):
        """The stand-in of a 1-D range that is longer than its bound; None for any other call of ``torch.arange``."""
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs))) or kwargs.get("pin_memory"):
            return None
        if kwargs.get("layout") not in (None, torch.strided):
            return None
        with plain():
            length = func(*args, **{**kwargs, "device": torch.device("meta")}).shape[0]
        if length <= bound:
            return None
        with self._lock, self.fake_mode:
            fake = func(*args, **kwargs)
        return self._made(func, args, kwargs, fake, bound, bound)

    def zeros(self, func, args, kwargs, bound: int):
        """The stand-in of a matrix of zeros with more rows than the bound, which a table may be written into."""
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        unusual = kwargs.get("layout") not in (None, torch.strided) or kwargs.get("pin_memory")
        sizes = [size for size in args[0] if size != 1]
        if unusual or not dtype.is_floating_point or len(sizes) < 2 or sum(size > bound for size in sizes) != 1:
            return None
        with self._lock, self.fake_mode:
            fake = func(*args, **kwargs)
        return self._made(func, args, kwargs, fake, 0, bound)

    def _made(self, func, args, kwargs, fake, range_bound: int, bound: int):
        self._least_bound = min(self._least_bound, bound)
        return self._record(func, args, {**kwargs, "dtype": fake.dtype, "device": fake.device}, fake, range_bound)

    def call(self, func, args, kwargs):
        """An operator of which an operand is a stand-in."""
        with self._lock:
            args, kwargs = tree_map(_real_of, (args, kwargs))
            deferred = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StandIn)]
            if not deferred:
                return func(*args, **kwargs)
            if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
                # Not taken apart yet where autograd is off, as in inference mode.
                result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            if self._refuses(func, args, kwargs, deferred):
                return self.run_for_real(func, args, kwargs, True)
            if func._schema.name.startswith("aten::new_"):
                args, kwargs = tree_map(_without_values, (args, kwargs))
                return func(*args, **kwargs)
            reads = not _written(func, args, kwargs) and not _aliases(func)
            if reads and not any(self._is_long(stand_in._fake) for stand_in in deferred):
                # Short views of a table, read: their rows are enough.
                return self._run_on_rows(func, args, kwargs, deferred)
            mark = len(self.tape)
            fake_args, fake_kwargs = self._fakes_of((args, kwargs))
            try:
                with self.fake_mode:
                    result = func(*fake_args, **fake_kwargs)
            except Exception:
                del self.tape[mark:]
                return self.run_for_real(func, args, kwargs, True)
            fakes = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            written = _written(func, args, kwargs)
            if (not fakes and not written) or len(fakes) > _MOST_VIEWS:
                return self.run_for_real(func, args, kwargs, True)
            same = {id(stand_in._fake): stand_in for stand_in in deferred}
            memories = {_memory(stand_in._fake) for stand_in in deferred}
            view = all(_memory(fake) in memories for fake in fakes)
            out = self._record(
                func, fake_args, fake_kwargs, result, written={_memory(s._fake) for s in written}, same=same
            )
            if written or view or any(self._is_long(fake) for fake in fakes):
                return out
            # Small and with memory of its own: real at once, so that nothing but tables is ever deferred.
            from rope_ops.construct.settle import small_values

            small = [leaf for leaf in tree_leaves(out) if isinstance(leaf, StandIn)]
            reals = dict(zip(map(id, small), small_values(self, small), strict=True))
            self.tape.pop()
            return tree_map(lambda leaf: reals.get(id(leaf), leaf), out)

    def _record(self, func, args, kwargs, result, bound=0, written=frozenset(), same=None):
        indices = []

        def wrap(leaf):
            if not isinstance(leaf, torch.Tensor):
                return leaf
            indices.append(self._index_of(leaf))
            if same and id(leaf) in same:
                return same[id(leaf)]
            stand_in = StandIn(self, leaf)
            self._alive.append(weakref.ref(stand_in))
            return stand_in

        wrapped = tree_map(wrap, result)
        args, kwargs = tree_map(self._value_of, (args, kwargs))
        self.tape.append(Call(func, args, kwargs, tuple(indices), frozenset(written), bound))
        return wrapped

    def _refuses(self, func, args, kwargs, deferred) -> bool:
        if self.closed or any(stand_in._recorder is not self for stand_in in deferred):
            return True
        tags = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.inplace_view)
        if func.namespace not in ("aten", "prims") or any(tag in func.tags for tag in tags):
            return True
        if any(not isinstance(operand, StandIn) for operand in _written(func, args, kwargs)):
            return True  # what is written is real, so must be what is written into it
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, StandIn):
                if leaf.untyped_storage().nbytes() > _LARGEST_OPERAND and leaf.nbytes > _LARGEST_OPERAND:
                    return True
                if leaf.layout is not torch.strided or type(leaf) not in _PLAIN:
                    return True
        return False

    def _is_long(self, fake: torch.Tensor) -> bool:
        return any(size > self._least_bound for size in fake.shape)

    def _index_of(self, fake: torch.Tensor) -> int:
        if id(fake) not in self._index:
            self._index[id(fake)] = len(self.values)
            self.values.append(fake)
        return self._index[id(fake)]

    def _value_of(self, leaf):
        return Value(self._index_of(leaf)) if isinstance(leaf, torch.Tensor) else leaf

    def _fakes_of(self, tree):
        """Fake operands: a stand-in's own; of a tensor from outside one that remembers a copy of its values."""
        known: dict[int, torch.Tensor] = {}

        def fake_of(leaf):
            if isinstance(leaf, StandIn):
                return leaf._fake
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in known:
                known[id(leaf)] = self._operand(leaf)
            return known[id(leaf)]

        return tree_map(fake_of, tree)

    def _operand(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a copy; of an expanded tensor, of what was expanded, so that the graph sees one row for all."""
        shape, expanded = (
            tensor.shape,
            [size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)],
        )
        with plain():
            for dim, repeats in enumerate(expanded):
                tensor = tensor.detach().narrow(dim, 0, 1) if repeats else tensor.detach()
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            copy.copy_(tensor)
        with self.fake_mode:
            fake = torch.empty_strided(copy.shape, copy.stride(), dtype=copy.dtype, device=copy.device)
            self.operands[self._index_of(fake)] = copy
            if not any(expanded):
                return fake
            whole = fake.expand(shape)
        arguments = (self._value_of(fake), list(shape))
        self.tape.append(Call(aten.expand.default, arguments, {}, (self._index_of(whole),), frozenset()))
        return whole

    def _run_on_rows(self, func, args, kwargs, deferred):
        from rope_ops.construct.settle import small_values

        real = dict(zip(map(id, deferred), small_values(self, deferred), strict=True))
        args, kwargs = tree_map(lambda leaf: real.get(id(leaf), leaf), (args, kwargs))
        return func(*args, **kwargs)

    # Real values -----------------------------------------------------------------------------------------------------

    def run_for_real(self, func, args, kwargs, looks: bool):
        """Run ``func`` on whole legacy tensors in place of stand-ins."""
        stand_ins = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StandIn)]
        for stand_in in stand_ins:
            stand_in._recorder.materialise(stand_in, getattr(func, "__name__", str(func)) if looks else "a gradient")
        back = {id(stand_in._real): stand_in for stand_in in stand_ins}
        args, kwargs = tree_map(_real_of, (args, kwargs))
        result = func(*args, **kwargs)
        return tree_map(lambda leaf: back.get(id(leaf), leaf), result)

    def parameter(self, stand_in: StandIn, cls: type) -> torch.Tensor:
        """What a subclass of Parameter is made of: real at once, as its constructor wants an instance of its own.

        ``Parameter.__new__`` compares the types of its operand and of what it gets here; ``reclass`` undoes that.
        """
        if stand_in._real is None:
            self.materialise(stand_in, cls.__name__)
        self.forget([stand_in])
        with plain(), torch._C.DisableTorchFunctionSubclass():
            made = torch.Tensor._make_subclass(cls, stand_in._real, False)
            attributes = {name: value for name, value in vars(stand_in).items() if name not in OWN}
            fresh = stand_in._real.detach()
            vars(fresh).update(attributes)
            torch.utils.swap_tensors(stand_in, fresh)
        stand_in.__class__ = cls
        self._reclassed += [(stand_in, torch.Tensor), (made, cls)]
        return made

    def reclass(self) -> None:
        for tensor, cls in self._reclassed:
            tensor.__class__ = cls
            vars(tensor).pop("_is_param", None)
        self._reclassed = []

    def deepcopy(self, stand_in: StandIn, memo: dict) -> StandIn | None:
        """A copy of the same values in other memory; None where other tensors share the memory, and so must copies."""
        memory = _memory(stand_in._fake)
        alone = sum(_memory(other._fake) == memory for other in self.alive()) == 1
        if id(stand_in) in memo or self.closed or stand_in._real is not None or stand_in._trainable or not alone:
            return None
        memo[id(stand_in)] = copy = stand_in.clone()
        vars(copy).update((name, value) for name, value in vars(stand_in).items() if name not in OWN)
        return copy

    def run_with_gradient(self, func, args, kwargs, stand_ins):
        """A gradient flows through the other operands: rows that are only read are constants of it."""
        short = not any(self._is_long(stand_in._fake) for stand_in in stand_ins)
        if short and not self.closed and all(s._real is None and s._recorder is self for s in stand_ins):
            if not getattr(func, "__name__", "").endswith("_"):
                return self._run_on_rows(func, args, kwargs, stand_ins)
        return self.run_for_real(func, args, kwargs, False)

    def materialise(self, stand_in: StandIn, by: str) -> None:
        """Give a stand-in, and all that share its memory, the values of the legacy construction."""
        with self._lock:
            if stand_in._real is not None:
                return
            memory = _memory(stand_in._fake)
            others = [other for other in self.alive() if other is not stand_in and other._real is None]
            group = [stand_in, *(other for other in others if _memory(other._fake) == memory)]
            for other, real in zip(group, self.replay([other._fake for other in group]), strict=True):
                other._real = real.requires_grad_() if other._trainable and real.is_floating_point() else real
        if any(call.bound for call in self.needed([stand_in._fake])):
            self._looked(stand_in, by)

    def note(self, text: str) -> None:
        text = f"{caller()}: {text}"
        if text not in self.notes:
            self.notes.append(text)

    def alive(self) -> list[StandIn]:
        found = [stand_in for ref in self._alive if (stand_in := ref()) is not None]
        self._alive = [ref for ref in self._alive if ref() is not None]
        return found

    def forget(self, stand_ins: Sequence[StandIn]) -> None:
        """Drop the weak references to these, which ``swap_tensors`` refuses."""
        gone = set(map(id, stand_ins))
        self._alive = [ref for ref in self._alive if id(ref()) not in gone]

    def needed(self, fakes: Sequence[torch.Tensor]) -> list[Call]:
        """The recorded calls that the values of these tensors depend on."""
        wanted = {_memory(fake) for fake in fakes}
        calls = []
        for call in reversed(self.tape):
            made = {_memory(self.values[index]) for index in call.results} | call.written
            if made & wanted:
                calls.append(call)
                read = [leaf.index for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Value)]
                wanted |= {_memory(self.values[index]) for index in read}
        return calls[::-1]

    def replay(self, fakes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The legacy values: the recorded operators, in order, on real tensors of the whole size."""
        calls = self.needed(fakes)
        wanted = [self._index_of(fake) for fake in fakes]
        last: dict[int, int] = {}
        for number, call in enumerate(calls):
            for leaf in tree_leaves((call.args, call.kwargs)):
                if isinstance(leaf, Value):
                    last[leaf.index] = number
        real: dict[int, torch.Tensor] = {}
        with plain():
            for number, call in enumerate(calls):
                args, kwargs = tree_map(lambda leaf: self._lookup(real, leaf), (call.args, call.kwargs))
                result = call.func(*args, **kwargs)
                results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
                real.update(zip(call.results, results, strict=True))
                del args, kwargs, result, results
                for index in [index for index in real if last.get(index, -1) <= number and index not in wanted]:
                    del real[index]
            return [real[index] for index in wanted]

    def _lookup(self, real, leaf):
        if not isinstance(leaf, Value):
            return leaf
        return real[leaf.index] if leaf.index in real else self.operands[leaf.index]


_PLAIN = frozenset((torch.Tensor, nn.Parameter, nn.Buffer))


def _real_of(leaf: Any):
    return leaf._real if isinstance(leaf, StandIn) and leaf._real is not None else leaf


def _memory(fake: torch.Tensor) -> int:
    return fake.untyped_storage()._cdata


def _without_values(leaf):
    """In place of a stand-in a tensor of its dtype and device, for an operator that asks no more."""
    return torch.empty((), dtype=leaf.dtype, device=leaf.device) if isinstance(leaf, StandIn) else leaf


def _aliases(func) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns)


def _written(func, args, kwargs) -> list[torch.Tensor]:
    """The operands that an operator writes."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def caller() -> str:
    """``file:line in function`` of the innermost frame that belongs neither to torch nor to this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch", "rope_ops.construct", "numpy")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "unknown source"


class Deferral(TorchDispatchMode):
    """Answers long ranges and matrices of zeros with stand-ins, and hands the recorder every operator on one."""

    def __init__(self, recorder: Recorder, bound: Callable[[], int]):
        super().__init__()
        self._recorder, self._bound = recorder, bound

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _RANGES or func is aten.zeros.default:
            make = self._recorder.range if func in _RANGES else self._recorder.zeros
            stand_in = make(func, args, kwargs, self._bound())
            if stand_in is not None:
                return stand_in
        if any(isinstance(leaf, StandIn) for leaf in tree_leaves((args, kwargs))):
            return self._recorder.call(func, args, kwargs)
        if func is torch.ops.rope_ops.build_cos_sin_cache.default and args[1] > self._bound():
            self._recorder.note(f"rope_ops.build_cos_sin_cache made {args[1]} rows, as asked: pass cache_max_position")
        return func(*args, **kwargs)
