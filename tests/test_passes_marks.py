"""Stage 1: which ranges a certificate covers, and where their bound comes from. R02, R44."""

import copy

import pytest
import torch
from passes_helpers import BOUND, POSITIONS, ROWS, certified, check, compiled, inv_freq, outcomes, table
from torch import nn
from torch.utils.checkpoint import checkpoint

import rope_ops
from rope_ops.certify import bind
from rope_ops.passes import Report, mark

ROWS_OUTCOME = [("rows", None)]


def gather(self, positions):
    return table(self)[positions]


class Rope(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv", inv_freq())

    forward = gather


class Outer(nn.Module):
    """A certified entry class whose table is built by an uncertified module inside."""

    def __init__(self, inner=Rope):
        super().__init__()
        self.rope = inner()

    def forward(self, positions):
        return self.rope(positions)


def fresh(base, name="Fresh", **members):
    return type(name, (base,), members)


def certify(cls, **options):
    return rope_ops.sequence_bounded_mrope(**options)(cls)


def own(cls):
    """A certified class of its own, so that tests do not certify each other's."""
    return certify(type(cls.__name__, (cls,), {}))


# What is covered


def test_root_and_nested_modules_are_covered():
    assert outcomes(check(certified(gather), POSITIONS)[0]) == ROWS_OUTCOME

    @rope_ops.sequence_bounded_mrope
    class Model(Outer):
        def __init__(self):
            super().__init__()

        def forward(self, positions):
            return super().forward(positions) * 2

    assert outcomes(check(Model(), POSITIONS)[0]) == ROWS_OUTCOME


def test_forward_called_directly_or_from_a_free_function_is_covered():
    model = certified(gather)
    for call in (lambda p: model.forward(p), lambda p: type(model).forward(model, p), lambda p: model(p) + 1):
        assert outcomes(check(call, POSITIONS)[0]) == ROWS_OUTCOME


def test_a_checkpointed_body_is_covered():
    def forward(self, positions, x):
        return checkpoint(lambda q: q * table(self)[positions], x, use_reentrant=False)

    report, _ = check(certified(forward), POSITIONS, torch.randn(5, 8))
    assert outcomes(report) == ROWS_OUTCOME


def test_branches_of_cond_are_covered():
    def forward(self, positions, x):
        return torch.cond(x.sum() > 0, lambda p: table(self)[p], lambda p: table(self)[p] * 2, (positions,))

    report, _ = check(certified(forward), POSITIONS, torch.ones(3))
    assert outcomes(report) == ROWS_OUTCOME * 2


def test_after_a_graph_break_the_mark_is_lost_unless_bound():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.rope = Rope()

        def forward(self, positions):
            torch._dynamo.graph_break()
            return self.rope(positions)

    model = own(Broken)()
    report, _ = check(model, POSITIONS, fullgraph=False)
    assert outcomes(report) == [("left", "unmarked")]
    bind(model, BOUND)
    report, _ = check(model, POSITIONS, fullgraph=False)
    assert outcomes(report) == ROWS_OUTCOME


def test_an_inner_module_compiled_alone_needs_bind():
    model = own(Outer)()
    assert outcomes(check(model.rope, POSITIONS)[0]) == [("left", "unmarked")]
    bind(model, BOUND)
    assert outcomes(check(model.rope, POSITIONS, max_model_len=None)[0]) == ROWS_OUTCOME


def test_a_method_other_than_forward_needs_bind():
    class Encoder(Outer):
        def __init__(self):
            super().__init__()

        def encode(self, positions):
            return self.rope(positions) + 1

    model = own(Encoder)()
    assert outcomes(check(model.encode, POSITIONS)[0]) == [("left", "unmarked")]
    assert outcomes(check(bind(model, BOUND).encode, POSITIONS)[0]) == ROWS_OUTCOME


def test_torch_wrappers_keep_the_certificate():
    class Scaled(Rope):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

        def forward(self, positions):
            return table(self)[positions] * self.scale

    class Double(nn.Module):
        def forward(self, x):
            return 2 * x

    model = own(Scaled)()
    nn.utils.parametrize.register_parametrization(model, "scale", Double())
    assert type(model).__name__ == "ParametrizedScaled"
    assert outcomes(check(model, POSITIONS)[0]) == ROWS_OUTCOME

    # FSDP2 swaps the class for one of its own, with its mixin first.
    model = own(Rope)()
    mixin = type("FSDPModule", (), {"__module__": "torch.distributed.fsdp"})
    model.__class__ = type("FSDPRope", (mixin, type(model)), {"__module__": "torch.distributed.fsdp"})
    assert outcomes(check(model, POSITIONS)[0]) == ROWS_OUTCOME

    inner = own(Rope)()
    wrapped = nn.Sequential(torch.compile(inner, backend="eager"))
    assert outcomes(check(wrapped, POSITIONS)[0]) == ROWS_OUTCOME
    bind(wrapped, BOUND)
    assert outcomes(check(wrapped, POSITIONS, max_model_len=None)[0]) == ROWS_OUTCOME


def test_ddp_keeps_the_certificate():
    class Trained(Rope):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, positions):
            return table(self)[positions] * self.scale

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        inner = own(Trained)()
        model = nn.parallel.DistributedDataParallel(inner)
        assert outcomes(check(model, POSITIONS, fullgraph=False)[0]) == ROWS_OUTCOME
        bind(model, BOUND)
        assert outcomes(check(model, POSITIONS, max_model_len=None, fullgraph=False)[0]) == ROWS_OUTCOME
    finally:
        torch.distributed.destroy_process_group()


# What is not


def test_r44_a_subclass_is_not_certified_until_decorated_itself():
    parent = own(Rope)
    child = type("Child", (parent,), {"forward": lambda self, p: parent.forward(self, p + 1) + table(self)[p]})
    assert outcomes(check(child(), POSITIONS)[0]) == [("left", "unmarked")] * 2
    assert outcomes(check(certify(child)(), POSITIONS)[0]) == ROWS_OUTCOME * 2


def test_r44_a_wrapper_with_a_certified_part_covers_that_part_only():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.text, self.vision = own(Rope)(), Rope()

        def forward(self, positions):
            return self.text(positions), self.vision(positions)

    assert sorted(outcomes(check(Both(), POSITIONS)[0])) == [("left", "unmarked"), ("rows", None)]


def test_r44_a_mark_on_an_instance_a_mixin_or_a_metaclass_certifies_nothing():
    flag = {"supports_sequence_bounded_mrope": True}
    instance = Rope()
    instance.supports_sequence_bounded_mrope = True
    mixed = type("Mixed", (type("Mixin", (), flag), Rope), {})()
    made = type("Meta", (type,), flag)("Made", (Rope,), {})()
    for model in (instance, mixed, made):
        assert outcomes(check(model, POSITIONS)[0]) == [("left", "unmarked")]


class Tower(nn.Module):
    """A model with a vision tower, reached in three ways."""

    def __init__(self, call="call", tower=Rope):
        super().__init__()
        self.rope, self.visual, self.how = Rope(), tower(), call

    def forward(self, positions):
        seen = self.visual(positions) if self.how == "call" else self.visual.forward(positions)
        return self.rope(positions), seen


@pytest.mark.parametrize("call", ["call", "forward"])
def test_an_excluded_tower_is_left(call):
    model = certify(fresh(Tower), exclude=("visual",))(call)
    assert sorted(outcomes(check(model, POSITIONS)[0])) == [("left", "excluded"), ("rows", None)]
    assert sorted(outcomes(check(copy.deepcopy(bind(model, BOUND)), POSITIONS)[0])) == [
        ("left", "excluded"),
        ("rows", None),
    ]
    # Put in place after construction: seen on the module stack, or once bound.
    model.visual = Rope()
    if call == "forward":
        bind(model, BOUND)
    assert sorted(outcomes(check(model, POSITIONS)[0])) == [("left", "excluded"), ("rows", None)]


@pytest.mark.parametrize("call", ["call", "forward"])
def test_a_tower_whose_class_opts_out_is_left(call):
    out = fresh(Rope, supports_sequence_bounded_mrope=False)
    model = certify(fresh(Tower))(call, out)
    assert sorted(outcomes(check(model, POSITIONS)[0])) == [("left", "excluded"), ("rows", None)]


def test_a_name_that_excludes_nothing_is_named_when_bound():
    model = certify(fresh(Outer, "Model"), exclude=("vision",))()
    with pytest.warns(UserWarning, match="Model excludes 'vision', which is no submodule of it"):
        bind(model, BOUND)


def test_a_body_shared_by_several_callers_is_left():
    gm = torch.fx.GraphModule({"body": nn.Identity()}, torch.fx.Graph())
    body = torch.fx.Graph()
    t = body.call_function(torch.arange, (ROWS,), {"dtype": torch.float32})
    t.meta = {"example_value": torch.arange(ROWS, dtype=torch.float32), "custom": {"rope_ops": "Model"}}
    c = body.call_function(torch.cos, (t,))
    body.output(c)
    gm.body = torch.fx.GraphModule({}, body)
    callers = [gm.graph.get_attr("body") for _ in range(2)]
    gm.graph.output([gm.graph.call_function(torch.ops.higher_order.invoke_subgraph, (one, "body")) for one in callers])
    report = Report()
    mark(gm, BOUND, report=report)
    assert outcomes(report) == [("left", "shared_body")]
    assert "position_range" not in gm.body.code


# Bounds


def test_the_option_overrides_the_instance_and_the_instance_is_enough():
    model = bind(certified(gather), BOUND)
    _, report, _ = compiled(model, None)
    assert outcomes(check(model, POSITIONS, max_model_len=None)[0]) == ROWS_OUTCOME
    assert outcomes(check(model, POSITIONS, max_model_len=ROWS)[0]) == [("left", "within_bound")]
    bind(model, ROWS)
    assert outcomes(check(model, POSITIONS, max_model_len=None)[0]) == [("left", "within_bound")]
    assert outcomes(check(copy.deepcopy(model), POSITIONS, max_model_len=BOUND)[0]) == ROWS_OUTCOME


def test_without_any_bound_there_is_one_clear_error():
    function, _, _ = compiled(certified(gather), None)
    with pytest.raises(Exception, match=r"Model is certified but nothing says how long.*max_model_len.*rope_ops.bind"):
        function(POSITIONS)


@pytest.mark.parametrize("bound", [0, -1, 2.0, True, "8"])
def test_a_bad_bound_raises(bound):
    with pytest.raises(ValueError, match="bind: max_model_len must be a positive integer, got"):
        bind(certified(gather), bound)
    with pytest.raises(ValueError, match="mark: max_model_len must be a positive integer, got"):
        mark(torch.fx.symbolic_trace(nn.Identity()), bound)


def test_bind_needs_a_certified_module():
    with pytest.raises(ValueError, match="bind: no module of Rope is certified"):
        bind(Rope(), BOUND)
    with pytest.raises(TypeError, match="bind: model must be a torch.nn.Module, got int"):
        bind(3, BOUND)


def test_multimodal_pruning_rewrites_nothing():
    assert outcomes(check(certified(gather), POSITIONS, pruning=True)[0]) == [("left", "multimodal_pruning")]


def test_a_symbolic_length_is_left_and_adds_no_guard():
    def forward(self, positions, x):
        return torch.outer(torch.arange(x.shape[0], dtype=torch.float32), self.inv).cos()[positions]

    model = certified(forward)
    function, report, _ = compiled(model, dynamic=True)
    for size in (40, 50, 60):
        assert torch.equal(function(POSITIONS, torch.ones(size)), model(POSITIONS, torch.ones(size)))
    assert outcomes(report) == [("left", "symbolic_length")]


def test_eager_calls_are_untouched():
    model = bind(certified(gather), BOUND)
    assert torch.equal(model(POSITIONS), gather(model, POSITIONS))
    assert type(model).forward.__name__ == "gather"
