"""Bounded construction: what is bounded, what is left and says why, and that no stand-in is ever seen."""

import contextlib
import copy
import functools
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

import rope_ops
from rope_ops.construct import bound_buffers, report_of, sequence_bound
from rope_ops.construct.standin import StandIn
from rope_ops.measure import _build_and_peak
from rope_ops.passes.report import Outcome, Reason

ROWS, DIM, BOUND = 300, 16, 50
INV = 1.0 / (1e4 ** (torch.arange(0, DIM, 2) / DIM))


def angles(rows=ROWS, device=None):
    return torch.outer(torch.arange(rows, dtype=torch.float32, device=device), INV.to(device or "cpu"))


def certified(build, base=nn.Module, **options):
    """A certified class whose constructor calls ``build(self)``, and the same class without a certificate."""

    def make():
        class Model(base):
            def __init__(self, *args):
                super().__init__()
                build(self, *args)

        return Model

    return rope_ops.sequence_bounded_mrope(**options)(make()), make()


def both(build, *args, **options):
    bounded, legacy = certified(build, **options)
    with sequence_bound(BOUND) as report:
        model = bounded(*args)
    return model, legacy(*args), report


def stand_ins():
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is StandIn]


@pytest.fixture(autouse=True)
def no_stand_in_survives():
    yield
    assert not stand_ins()


def reasons(report):
    return [str(table.reason or table.outcome) for table in report.tables]


# The context ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, -1, True, 2.5, None, "8"])
def test_bad_bounds(bad):
    with pytest.raises(ValueError, match=r"sequence_bound: max_model_len must be a positive integer, got"):
        with sequence_bound(bad):
            pass


def test_the_instance_keeps_the_bound_as_bind_does():
    def build(self):
        self.rotary, self.visual = nn.Identity(), type("Tower", (nn.Module,), {"forward": lambda self, x: x})()
        self.text = type("Text", (nn.Module,), {"forward": lambda self, x: x})()

    made, _ = certified(build, exclude=("visual",))
    with sequence_bound(BOUND):
        model = made()
    bound = rope_ops.certify.bind(made(), BOUND)
    for one, other in zip(model.modules(), bound.modules(), strict=True):
        names = ("_rope_ops_bound", "_rope_ops_owner")
        assert [vars(one).get(name) for name in names] == [vars(other).get(name) for name in names]
    assert vars(model)["_rope_ops_bound"] == BOUND
    assert "_rope_ops_bound" not in vars(made())


def test_only_the_very_class_inside_the_context_is_deferred():
    def build(self):
        self.table = angles().cos()

    bounded, plain = certified(build)
    derived = type("Derived", (bounded,), {})
    with sequence_bound(BOUND) as report:
        assert plain().table.shape[0] == derived().table.shape[0] == ROWS
        assert angles().shape[0] == ROWS
        assert not report.tables
        assert bounded().table.shape[0] == BOUND
    assert bounded().table.shape[0] == ROWS


def test_the_report_names_the_place_the_rows_and_the_bytes():
    def build(self):
        self.register_buffer("cos_sin_cache", torch.cat((angles().cos(), angles().sin()), -1).to(torch.bfloat16))
        self.max_seq_len_cached = ROWS

    _, _, report = both(build)
    assert str(report).splitlines() == [
        "Model.cos_sin_cache: cos sin cat: bounded, rows 300 -> 50, bytes 9,600 -> 1,600",
        "rope_ops: 1 tables, 1 rewritten, 0 left",
        "note: Model.max_seq_len_cached = 300 is the row count of a table that now has 50 rows",
        "note: reads of bounded tables in Python, outside of compiled graphs, are not checked",
    ]


# What is bounded -----------------------------------------------------------------------------------------------------


def test_buffers_attributes_lists_dictionaries_views_and_aliases_stay_consistent():
    def build(self):
        f = angles()
        table = torch.cat((f.cos(), f.sin()), -1)
        self.register_buffer("table", table)
        self.register_buffer("again", table)
        self.cos, self.box = table[:, : DIM // 2], {"sin": [table[:, DIM // 2 :]]}
        self.twin = torch.cat((f.cos(), f.sin()), -1)
        self.parameter = nn.Parameter(f.sin(), requires_grad=False)
        self.buffer = nn.Buffer(f.cos(), persistent=False)
        self.buffer.note = "kept"

    model, legacy, report = both(build)
    assert set(reasons(report)) == {"bounded"}
    for name in ("table", "again", "cos", "twin", "parameter", "buffer"):
        one, other = getattr(model, name), getattr(legacy, name)
        assert type(one) is type(other) and torch.equal(one, other[:BOUND]) and one.shape[0] == BOUND, name
        assert one.stride() == other.stride(), name
    assert torch.equal(model.box["sin"][0], legacy.box["sin"][0][:BOUND])
    assert model.table is model.again and model.buffer.note == "kept"
    assert model._non_persistent_buffers_set == legacy._non_persistent_buffers_set
    model.table.zero_()
    assert not model.cos.any() and not model.box["sin"][0].any()
    assert model.twin.any()  # equal values, memory of its own


def test_writes_into_deferred_tensors_are_part_of_the_formula():
    def build(self):
        t = torch.arange(ROWS, dtype=torch.float32)
        t /= 2
        before = torch.outer(t, INV)
        t += 1
        after = torch.outer(t, INV)
        self.sin = after.sin()
        self.sin[..., 1::2] *= -1
        view = before[:, :4]
        view.mul_(3)
        self.before, self.filled = before.cos(), torch.zeros_like(before)
        self.filled[:, 0::2] = before[:, 0::2].sin()
        torch.cos(before, out=before)
        self.out = before

    model, legacy, report = both(build)
    assert set(reasons(report)) == {"bounded"}
    for name in ("sin", "before", "filled", "out"):
        assert torch.equal(getattr(model, name), getattr(legacy, name)[:BOUND]), name


def test_a_later_change_of_an_operand_does_not_reach_the_table():
    def build(self):
        inv = INV.clone()
        f = torch.outer(torch.arange(ROWS).float(), inv)
        inv.zero_()
        self.table, self.inv = f.cos(), inv

    model, legacy, _ = both(build)
    assert torch.equal(model.table, legacy.table[:BOUND]) and not model.inv.any()


def test_a_view_that_the_bounded_table_cannot_have_keeps_the_table_whole():
    def build(self):
        self.table = angles().cos()
        self.first = self.table[:4]

    model, legacy, report = both(build)
    assert reasons(report) == ["shared"] and torch.equal(model.table, legacy.table)
    model.table.zero_()
    assert not model.first.any()


def test_rows_read_in_the_constructor_are_real_at_once():
    def build(self):
        f = angles()
        self.first, self.some = f[:3].clone(), f[torch.tensor([5, 7, -1, 200])]
        self.kind = type(self.some)
        self.top = float(f[:4].max())

    model, legacy, report = both(build)
    assert model.kind is torch.Tensor and model.top == legacy.top
    assert torch.equal(model.first, legacy.first) and torch.equal(model.some, legacy.some)
    assert not report.tables


def test_deepcopied_layers_each_have_a_bounded_table_of_their_own():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", angles().cos(), persistent=False)

    def build(self):
        layer = Layer()
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))

    model, legacy, report = both(build)
    tables = [layer.table for layer in model.layers]
    assert all(torch.equal(table, legacy.layers[0].table[:BOUND]) for table in tables)
    assert len({table.data_ptr() for table in tables}) == 3
    assert reasons(report) == ["bounded"] * 3


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
        functools.partial(torch.device, "cpu"),
    ],
)
def test_contexts_around_the_constructor(context):
    def build(self):
        self.table = torch.cat((angles().cos(), angles().sin()), -1)
        self.product = (angles()[:, :, None] * INV[None, None]).sum(-1)

    bounded, plain = certified(build)
    with context():
        legacy = plain()
        with sequence_bound(BOUND) as report:
            model = bounded()
    assert torch.equal(model.table, legacy.table[:BOUND]) and model.table.dtype == legacy.table.dtype
    assert model.table.is_inference() == legacy.table.is_inference()
    assert torch.equal(model.product, legacy.product) and "bounded" in reasons(report)


def test_default_dtype():
    def build(self):
        self.table = torch.outer(torch.arange(float(ROWS)), INV.double()).cos()

    torch.set_default_dtype(torch.float64)
    try:
        model, legacy, _ = both(build)
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.table.dtype == torch.float64 and torch.equal(model.table, legacy.table[:BOUND])


def test_meta_then_to_empty_then_a_state_dict():
    def build(self):
        self.register_buffer("table", torch.outer(torch.arange(ROWS).float(), INV.to(torch.ones(()).device)).cos())

    bounded, plain = certified(build)
    legacy = plain()
    with torch.device("meta"), sequence_bound(BOUND):
        model = bounded()
    assert model.table.is_meta and model.table.shape == (BOUND, DIM // 2)
    model.to_empty(device="cpu").table.fill_(float("nan"))
    model.load_state_dict(legacy.state_dict())
    assert torch.equal(model.table, legacy.table[:BOUND])


def test_state_dicts():
    def build(self):
        self.register_buffer("table", angles().cos())
        self.linear = nn.Linear(2, 2)

    model, legacy, _ = both(build)
    whole = legacy.state_dict()
    for one in (model, copy.deepcopy(model)):
        one.table.zero_()
        one.load_state_dict(whole)
        assert torch.equal(one.table, legacy.table[:BOUND])
        assert whole["table"].shape[0] == ROWS  # the caller's dictionary is as it was
        one.load_state_dict(one.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch for table"):
        legacy.load_state_dict(model.state_dict())


def test_the_standard_form_holds_no_larger_table_even_for_a_moment():
    rows, bound, dim = 1 << 20, 1 << 18, 64
    inv = 1.0 / (1e7 ** (torch.arange(0, dim, 2) / dim))

    def build(self):
        f = torch.einsum("i,j -> ij", torch.arange(rows, dtype=torch.float32), inv)
        self.register_buffer("table", torch.cat((f.cos(), f.sin()), -1).to(torch.bfloat16), persistent=False)

    bounded, _ = certified(build)
    with sequence_bound(8):
        bounded()  # imports

    def construct():
        with sequence_bound(bound):
            return bounded().table

    table, peak = _build_and_peak(construct, torch.device("cpu"))
    assert table.shape == (bound, dim)
    assert peak <= table.nbytes + (3 << 20)  # two scratch buffers of 1 MiB on CPU
    assert torch.equal(table, rope_ops.build_cos_sin_cache(inv, bound, 1.0, torch.bfloat16))


@pytest.mark.parametrize(
    "factor", [torch.arange(1.0, 1 + len(INV)), torch.tensor(0.5), 0.5], ids=["lane", "tensor", "number"]
)
def test_a_factor_of_cos_and_sin_is_part_of_the_table(factor):
    """A number is the standard form's attention factor; a tensor is not, and must not get lost."""

    def build(self):
        f = angles()
        self.register_buffer("table", torch.cat((f.cos() * factor, f.sin() * factor), -1))

    model, legacy, report = both(build)
    assert [str(table.outcome) for table in report.tables] == ["bounded"]
    assert torch.equal(model.table, legacy.table[:BOUND])


def test_another_formula_holds_intermediate_results_of_the_bounded_size_only():
    rows, bound = 1 << 20, 1 << 14

    def build(self):
        f = torch.outer(torch.arange(rows, dtype=torch.float32) / 2, INV)
        e = torch.cat((f, f), -1)
        self.cos, self.sin = e.cos()[None, None], e.sin()[None, None]

    bounded, _ = certified(build)

    def construct():
        with sequence_bound(bound):
            return bounded().cos

    table, peak = _build_and_peak(construct, torch.device("cpu"))
    assert peak < 6 * table.nbytes < rows * DIM * 4


# What is left, and says why ------------------------------------------------------------------------------------------

LOOKS = {
    "item": lambda t: t[7, 1].item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy().copy(),
    "array": lambda t: __import__("numpy").asarray(t).copy(),
    "data_ptr": lambda t: t.data_ptr() != 0,
    "storage": lambda t: t.untyped_storage().nbytes(),
    "repr": lambda t: repr(t),
    "format": lambda t: f"{t}",
    "iterate": lambda t: [row.sum().item() for row in t],
    "save": lambda t: torch.save(t, io.BytesIO()),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)).sum().item(),
    "branch": lambda t: 1 if (t > 0.5).any() else 2,
    "equal": lambda t: torch.equal(t, torch.zeros(ROWS, DIM // 2)),
    "reduction": lambda t: float(t.sum()),
    "random": lambda t: (torch.manual_seed(0), t.normal_().sum().item())[1],
    "nonzero": lambda t: len(t.nonzero()),
    "mask": lambda t: t[t > 0.5].numel(),
    "contains": lambda t: 0.5 in t,
}


@pytest.mark.parametrize("look", LOOKS)
def test_whatever_looks_inside_sees_the_whole_legacy_tensor(look):
    def build(self):
        self.seen, self.table = None, angles().cos()
        self.seen = LOOKS[look](self.table)

    model, legacy, report = both(build)
    if look not in ("data_ptr", "array", "numpy"):
        assert model.seen == legacy.seen
    rows = model.table.shape[0]
    assert torch.equal(model.table, legacy.table[:rows])
    assert rows == ROWS and "looked_inside" in reasons(report) or rows == BOUND
    assert report.tables and (rows == ROWS or look in ("item", "branch", "reduction", "nonzero", "mask", "contains"))
    if rows == BOUND and look not in ("item",):
        assert any("read whole" in note for note in report.notes) or "looked_inside" in reasons(report)


def test_a_write_into_a_real_tensor_is_never_silently_lost():
    def build(self):
        pe = torch.empty(ROWS, DIM)
        pe[:, 0::2] = torch.sin(angles())
        pe[:, 1::2] = torch.cos(angles())
        self.register_buffer("pe", pe.unsqueeze(0))

    model, legacy, report = both(build)
    assert torch.equal(model.pe, legacy.pe) and reasons(report) == ["looked_inside"] * 2


def test_zeros_that_a_table_is_written_into():
    def build(self):
        pe = torch.zeros(ROWS, DIM)
        position = torch.arange(ROWS).unsqueeze(1)
        pe[:, 0::2] = torch.sin(position * INV)
        pe[:, 1::2] = torch.cos(position * INV)
        self.register_buffer("pe", pe.unsqueeze(0))
        self.part = torch.zeros(ROWS, DIM // 2)
        self.part[: ROWS - 3] = angles()[: ROWS - 3]

    model, legacy, report = both(build)
    assert torch.equal(model.pe, legacy.pe[:, :BOUND]) and model.pe.shape[1] == BOUND
    assert torch.equal(model.part, legacy.part)
    assert reasons(report) == ["bounded", "rows_joined"]


def test_zeros_that_are_no_table_are_real_in_the_end_and_not_reported():
    class Special(nn.Parameter):
        def __new__(cls, data, extra):
            return super().__new__(cls, data, requires_grad=False)

        def __init__(self, data, extra):
            self.extra = extra

    def build(self):
        self.cache, self.mask = torch.zeros(2, ROWS, 3), torch.zeros(ROWS, 2).fill_(1)
        self.cache[0, 5] = 1.0
        self.weight, self.lora = nn.Parameter(torch.zeros(ROWS, 4)), nn.Parameter(torch.zeros(ROWS, 3))
        nn.init.normal_(self.weight)
        self.data = torch.zeros(ROWS, 5)
        self.special = Special(self.data, extra=7)
        self.raw = torch.zeros(ROWS, 2)
        self.raw.numpy()[3] = 5
        self.linear, self.embedding = nn.Linear(ROWS, 2), nn.Embedding(ROWS, 3, padding_idx=0)

    bounded, plain = certified(build)
    torch.manual_seed(0)
    with sequence_bound(BOUND) as report:
        model = bounded()
    torch.manual_seed(0)
    legacy = plain()
    assert [table.location for table in report.tables] == ["Model.data"] and model.special.extra == 7
    own = [tensor for tensor in vars(model).values() if isinstance(tensor, torch.Tensor)]
    for one, other in zip(
        [*model.parameters(), *own],
        [*legacy.parameters(), *(tensor for tensor in vars(legacy).values() if isinstance(tensor, torch.Tensor))],
        strict=True,
    ):
        assert type(one) is type(other) and one.requires_grad == other.requires_grad
        assert torch.equal(one, other) and vars(one) == vars(other)


def test_a_write_of_real_data_into_a_stand_in():
    def build(self):
        self.table = angles().cos()
        self.table.copy_(torch.ones(ROWS, DIM // 2).cumsum(0))
        self.row = angles().sin()
        self.row[3] = 7.0

    model, legacy, report = both(build)
    for name in ("table", "row"):
        rows = getattr(model, name).shape[0]
        assert rows == ROWS and torch.equal(getattr(model, name), getattr(legacy, name)), name
    assert len(report.tables) == 2


def test_values_that_depend_on_the_row_count_keep_it():
    def build(self):
        t = torch.arange(ROWS, dtype=torch.float32)
        self.scaled = torch.outer(t / t.shape[0], INV).cos()
        self.normed = torch.outer(t / t.max(), INV).cos()
        self.summed = torch.outer(t, INV).cumsum(0)
        self.flipped = torch.outer(t.flip(0), INV).cos()
        self.tail = torch.outer(t, INV)[-5:].clone()

    model, legacy, report = both(build)
    for name in ("scaled", "normed", "summed", "flipped", "tail"):
        one, other = getattr(model, name), getattr(legacy, name)
        assert torch.equal(one, other[: one.shape[0]]), name
    assert model.scaled.shape[0] == BOUND and model.summed.shape[0] == model.flipped.shape[0] == ROWS
    assert {"rows_reduced", "rows_reordered"} <= set(reasons(report))


def test_ranges_that_are_no_positions():
    def build(self):
        self.position_ids = torch.arange(ROWS)
        self.descending = torch.outer(torch.arange(ROWS - 1, -1, -1.0), INV).cos()
        self.centred = torch.outer(torch.arange(-ROWS // 2, ROWS // 2).float(), INV).cos()
        self.bias = torch.arange(ROWS)[None] - torch.arange(ROWS)[:, None]

    model, legacy, report = both(build)
    for name in ("position_ids", "descending", "centred", "bias"):
        assert torch.equal(getattr(model, name), getattr(legacy, name)), name
    assert reasons(report) == ["not_a_table", "not_positions", "not_positions", "not_a_table"]


def test_tables_that_no_range_leads_to_are_reported():
    def build(self):
        t = torch.linspace(0, ROWS - 1, ROWS)
        self.table, self.weight = torch.outer(t, INV).cos(), nn.Parameter(torch.ones(ROWS, 2))
        self.rope = rope_ops.RotaryEmbedding(DIM, DIM, ROWS, rope_parameters={"rope_theta": 1e4})

    model, legacy, report = both(build)
    assert torch.equal(model.table, legacy.table) and torch.equal(model.rope.cos_sin_cache, legacy.rope.cos_sin_cache)
    assert sorted((table.location, str(table.reason)) for table in report.tables) == [
        ("Model.rope.cos_sin_cache", "no_range"),
        ("Model.table", "no_range"),
    ]
    assert any("made 300 rows, as asked: pass cache_max_position" in note for note in report.notes)


def test_trainable_tables_and_frequencies():
    def build(self):
        self.table = nn.Parameter(angles().cos())
        self.inv = nn.Parameter(INV.clone())
        self.learned = torch.outer(torch.arange(ROWS).float(), self.inv)

    model, legacy, report = both(build)
    assert type(model.table) is nn.Parameter and model.table.requires_grad and torch.equal(model.table, legacy.table)
    model.learned.sum().backward()
    legacy.learned.sum().backward()
    assert torch.equal(model.inv.grad, legacy.inv.grad)
    assert set(reasons(report)) == {"trainable"}


def test_a_weak_reference_forbids_the_swap():
    kept = []

    def build(self):
        self.table = angles().cos()
        kept.append(weakref.ref(self.table))

    model, legacy, report = both(build)
    assert torch.equal(model.table, legacy.table) and type(model.table) is torch.Tensor
    assert reasons(report) == ["not_swapped"]


# Caches --------------------------------------------------------------------------------------------------------------

REGISTRY = {}
WEAK = weakref.WeakValueDictionary()


@functools.lru_cache
def cached_table(rows):
    return angles(rows).cos()


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", angles().sin(), persistent=False)


def shared():
    if "rotary" not in REGISTRY:
        REGISTRY["rotary"] = Shared()
    return REGISTRY["rotary"]


KINDS = ["lru_cache", "registry of modules", "weak registry of modules", "registry of tensors", "closure"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_cache_outside_the_model_holds_is_whole(kind):
    cached_table.cache_clear()
    REGISTRY.clear()
    closures = []

    def build(self):
        if kind == "lru_cache":
            self.table = cached_table(ROWS)
        elif kind == "registry of modules":
            self.rotary = shared()
        elif kind == "weak registry of modules":
            self.rotary = WEAK.setdefault("rotary", Shared())
        elif kind == "registry of tensors":
            self.table = REGISTRY.setdefault("table", angles().cos())
        else:
            self.table = table = angles().cos()
            closures.append(lambda: table)

    model, legacy, report = both(build)
    assert reasons(report) == ["held_outside"]
    tensor, whole = (m.rotary.table if hasattr(m, "rotary") else m.table for m in (model, legacy))
    assert type(tensor) is torch.Tensor and torch.equal(tensor, whole)
    if kind == "lru_cache":
        assert cached_table(ROWS) is tensor
    REGISTRY.clear()
    cached_table.cache_clear()


def test_a_cache_inside_the_model_is_bounded_and_shared():
    def build(self):
        self.cache = {}

        def table(key):
            return self.cache.setdefault(key, angles().cos())

        self.layers = nn.ModuleList(nn.Identity() for _ in range(3))
        for layer in self.layers:
            layer.table = table("cos")

    model, legacy, report = both(build)
    assert reasons(report) == ["bounded"]
    assert all(layer.table is model.cache["cos"] for layer in model.layers)
    assert torch.equal(model.cache["cos"], legacy.cache["cos"][:BOUND])


def test_an_exception_leaves_nothing_behind():
    cached_table.cache_clear()
    REGISTRY.clear()

    def build(self):
        self.table = cached_table(ROWS)
        self.rotary, self.other = shared(), angles().cos()
        raise RuntimeError("the constructor failed")

    bounded, _ = certified(build)
    with sequence_bound(BOUND), pytest.raises(RuntimeError, match="the constructor failed"):
        bounded()
    assert not stand_ins()
    assert type(cached_table(ROWS)) is torch.Tensor and torch.equal(cached_table(ROWS), angles().cos())
    assert torch.equal(REGISTRY["rotary"].table, angles().sin())
    REGISTRY.clear()
    cached_table.cache_clear()
    test_only_the_very_class_inside_the_context_is_deferred()


def test_a_tensor_that_a_traceback_holds_still_has_its_values():
    def build(self):
        local = angles().cos()
        raise RuntimeError(local.shape)

    bounded, _ = certified(build)
    with sequence_bound(BOUND), pytest.raises(RuntimeError) as caught:
        bounded()
    frame = caught.tb
    while frame.tb_next:
        frame = frame.tb_next
    local = frame.tb_frame.f_locals["local"]
    assert torch.equal(local + 0, angles().cos()) and repr(local) == repr(angles().cos())
    del local, frame, caught


# Scope ---------------------------------------------------------------------------------------------------------------


def table_module(name="Rotary", **attributes):
    def init(self):
        nn.Module.__init__(self)
        self.register_buffer("table", angles().cos(), persistent=False)

    return type(name, (nn.Module,), {"__init__": init, **attributes})


def test_excluded_and_opted_out_submodules_are_as_they_were():
    def build(self):
        self.rotary, self.visual = table_module()(), table_module("Visual")()
        self.opted = table_module("Opted", supports_sequence_bounded_mrope=False)()
        self.inner = nn.Module()
        self.inner.visual = nn.Sequential(table_module()())
        self.mixed = self.visual.mixed = angles().sin()  # one covered holder, one that is not

    model, legacy, report = both(build, exclude=("visual",))
    assert model.rotary.table.shape[0] == BOUND
    for one, other in (
        (model.visual.table, legacy.visual.table),
        (model.opted.table, legacy.opted.table),
        (model.inner.visual[0].table, legacy.inner.visual[0].table),
        (model.mixed, legacy.mixed),
    ):
        assert torch.equal(one, other)
    assert sorted(reasons(report)) == ["bounded", *["excluded"] * 4]


def test_nested_constructors_of_certified_and_other_models():
    inner, _ = certified(lambda self: setattr(self, "table", angles().sin()))
    other = table_module("OtherModel")

    def build(self):
        self.inner, self.other = inner(), other()
        with sequence_bound(20):
            self.tight = inner()
        self.table = angles().cos()

    model, legacy, report = both(build)
    assert [model.inner.table.shape[0], model.other.table.shape[0], model.table.shape[0]] == [BOUND] * 3
    assert model.tight.table.shape[0] == 20
    assert vars(model.tight)["_rope_ops_bound"] == 20 and vars(model.inner)["_rope_ops_bound"] == BOUND
    assert torch.equal(model.tight.table, angles().sin()[:20])
    assert set(reasons(report)) == {"bounded"}


def test_an_uncertified_model_that_builds_a_certified_one():
    inner, _ = certified(lambda self: setattr(self, "table", angles().sin()))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.inner, self.more = angles().cos(), inner(), [inner() for _ in range(2)]

    with sequence_bound(BOUND):
        model = Outer()
    assert model.own.shape[0] == ROWS
    assert [one.table.shape[0] for one in (model.inner, *model.more)] == [BOUND] * 3


def test_two_threads_with_bounds_of_their_own():
    bounded, legacy = certified(lambda self: setattr(self, "table", angles(3000).cos()))
    results, errors = {}, []
    barrier = threading.Barrier(3)

    def run(bound):
        try:
            barrier.wait()
            with sequence_bound(bound) if bound else contextlib.nullcontext():
                results[bound] = [bounded().table for _ in range(3)]
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(bound,)) for bound in (40, 60, None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    whole = legacy().table
    for bound, tables in results.items():
        assert all(torch.equal(table, whole[:bound]) for table in tables)


def test_under_another_dispatch_mode_everything_is_as_it_was():
    from torch._subclasses.fake_tensor import FakeTensorMode

    bounded, _ = certified(lambda self: setattr(self, "table", torch.outer(torch.arange(ROWS), torch.ones(4)).cos()))
    with sequence_bound(BOUND) as report, FakeTensorMode():
        model = bounded()
    assert model.table.shape[0] == ROWS
    assert report.notes == ["Model was built under another dispatch mode: its tables are left as they were"]


def test_models_of_many_layers_pickle_deepcopy_and_compile():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.rotary = nn.Linear(DIM, DIM), Rotary()

        def forward(self, positions, x):
            return self.rotary(positions, self.linear(x))

    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.cat((angles().cos(), angles().sin()), -1))

        def forward(self, positions, x):
            return x * self.table[positions]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, positions, x):
            for layer in self.layers:
                x = layer(positions, x)
            return x

    torch.manual_seed(0)
    legacy = Model()
    rope_ops.sequence_bounded_mrope(Model)
    torch.manual_seed(0)
    with sequence_bound(BOUND):
        model = Model()
    positions, x = torch.randint(0, BOUND, (20,)), torch.randn(20, DIM)
    expected = legacy(positions, x)
    assert torch.equal(copy.deepcopy(model)(positions, x), expected)
    assert torch.equal(torch.compile(model, backend="aot_eager")(positions, x), expected)
    assert torch.equal(model(positions, x), expected)
    with pytest.raises(IndexError):
        model(positions + BOUND, x)  # past the certificate: an error, never another row


# Lazy tables ---------------------------------------------------------------------------------------------------------


class Lazy(nn.Module):
    def __init__(self, maximum=256):
        super().__init__()
        self.maximum, self.length = maximum, 0

    def forward(self, positions, q):
        need = int(positions.max()) + 1
        if need > self.length:
            self.length = max(2 * need, self.maximum)
            f = angles(self.length)
            self.cos, self.sin = torch.cat((f, f), -1).cos(), torch.cat((f, f), -1).sin()
        return q * self.cos[positions] + q.flip(-1) * self.sin[:need][positions]


def lazy(certify=True):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rotary, self.linear = Lazy(), nn.Linear(DIM, DIM)

        def forward(self, positions, q):
            return self.rotary(positions, self.linear(q))

    torch.manual_seed(0)
    if not certify:
        return Model()
    rope_ops.sequence_bounded_mrope(Model)
    with sequence_bound(BOUND):
        return Model()


def test_a_lazy_table_starts_at_the_bound_and_grows_with_legacy_values():
    model, legacy = lazy(), lazy(certify=False)
    q, positions = torch.randn(30, DIM, requires_grad=True), torch.randint(0, BOUND, (30,))
    one, other = model(positions, q), legacy(positions, q)
    assert torch.equal(one, other)
    grads = [torch.autograd.grad(out.sum(), q)[0] for out in (one, other)]
    assert torch.equal(*grads)
    assert type(model.rotary.cos) is torch.Tensor and model.rotary.cos.shape[0] == BOUND == model.rotary.length
    assert reasons(report_of(model)) == ["bounded", "bounded"]
    assert torch.equal(model(positions, q), other)
    past = positions + 100  # between the bound and the length that the model had asked for
    with pytest.warns(RuntimeWarning, match="a request past max_model_len = 50 made the model grow rotary.cos"):
        assert torch.equal(model(past, q), legacy(past, q))
    assert model.rotary.cos.shape[0] > BOUND
    assert torch.equal(model(past, q), legacy(past, q))
    copy.deepcopy(model)


def test_a_lazy_table_under_compile_is_right():
    model, legacy = lazy(), lazy(certify=False)
    q, positions = torch.randn(30, DIM), torch.randint(0, BOUND, (30,))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(compiled(positions, q), legacy(positions, q))
    assert torch.equal(compiled(positions + 100, q), legacy(positions + 100, q))


def test_an_error_in_the_first_forward_is_the_users_own():
    model = lazy()
    with pytest.raises(RuntimeError):
        model(torch.arange(3), torch.randn(3, DIM + 1))
    positions, ones = torch.arange(3), torch.ones(3, DIM)
    assert torch.equal(model(positions, ones), lazy(certify=False)(positions, ones))


# Models that are built already ---------------------------------------------------------------------------------------


def existing(**changes):
    def build(self):
        self.rotary = nn.Module()
        self.rotary.register_buffer("inv_freq", INV.clone(), persistent=False)
        f = angles()
        self.rotary.register_buffer("table", torch.cat((f.cos(), f.sin()), -1).bfloat16())
        self.rotary.angles = f
        self.weights = nn.Embedding(ROWS, 4)
        self.rotary.other = torch.randn(ROWS, DIM)
        for name, change in changes.items():
            setattr(self.rotary, name, change(self.rotary))

    return certified(build)[0]()


def test_bound_buffers_cuts_what_is_proven_and_nothing_else():
    model = existing()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    table, cached = model.rotary.table, model.rotary.angles
    report = bound_buffers(model, BOUND)
    assert model.rotary.table is table and table.shape[0] == cached.shape[0] == BOUND
    assert table.untyped_storage().nbytes() == BOUND * DIM * 2
    assert torch.equal(table, before["rotary.table"][:BOUND]) and torch.equal(cached, angles()[:BOUND])
    assert model.weights.weight.shape[0] == model.rotary.other.shape[0] == ROWS
    assert sorted(reasons(report)) == ["bounded", "bounded", "unproven"]
    assert vars(model)["_rope_ops_bound"] == BOUND
    model.load_state_dict(before)
    assert torch.equal(table, before["rotary.table"][:BOUND])


def test_bound_buffers_needs_every_sampled_row():
    def spoil(rotary):
        rotary.table[ROWS - 1, 3] += 1
        return None

    model = existing(spoiled=spoil)
    report = bound_buffers(model, BOUND)
    assert model.rotary.table.shape[0] == ROWS and "unproven" in reasons(report)


def test_bound_buffers_leaves_shared_and_outside_tensors():
    outside = []

    def share(rotary):
        outside.append(rotary.angles)
        return rotary.table[:, :8]

    model = existing(half=share)
    report = bound_buffers(model, BOUND)
    assert model.rotary.table.shape[0] == ROWS == outside[0].shape[0]
    assert sorted(reasons(report)) == ["held_outside", "shared", "unproven"]


def test_bound_buffers_refuses_bad_input():
    with pytest.raises(ValueError, match="bind: max_model_len must be a positive integer"):
        bound_buffers(existing(), 0)
    with pytest.raises(ValueError, match="no module of Linear is certified"):
        bound_buffers(nn.Linear(2, 2), 8)
    with pytest.raises(TypeError, match="must be a torch.nn.Module"):
        bound_buffers(torch.zeros(3), 8)


def test_explain_covers_the_tables_of_the_constructor(capsys):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", angles().cos())

        def forward(self, positions):
            return self.table[positions]

    rope_ops.sequence_bounded_mrope(Model)
    with sequence_bound(BOUND):
        model = Model()
    from rope_ops.passes import explain

    report = explain(model, torch.arange(4))
    assert [table.outcome for table in report.tables] == [Outcome.BOUNDED]
    assert "Model.table: cos: bounded, rows 300 -> 50" in capsys.readouterr().out
    assert Reason.HELD_OUTSIDE.value == "held_outside"


def test_figures_of_an_ordinary_constructor():
    from rope_ops.construct.measure import measure_constructor
    from rope_ops.examples import EXAMPLES, ExampleModel

    config = rope_ops.ModelConfig.from_hf(EXAMPLES["qwen2-vl"], model_cls=ExampleModel, max_model_len=8192)
    legacy, bounded = measure_constructor(config, torch.device("cpu"))
    assert (legacy.rows, bounded.rows) == (1 << 17, 8192) and bounded.bitwise_prefix
    assert bounded.peak_bytes <= bounded.resident_bytes + (3 << 20)
