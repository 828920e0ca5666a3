"""The certificate fails closed: only a class's own statement counts."""

import pytest
from torch import nn

from rope_ops import sequence_bounded_mrope, supports_sequence_bounded_mrope
from rope_ops.certify import excluded_submodules


@sequence_bounded_mrope
class Dense(nn.Module):
    """Stands for a dense Qwen3.5, which is certified."""


class MixtureOfExperts(Dense):
    """Stands for its MoE sibling, which only inherits."""


def test_decorated_class_is_certified():
    assert supports_sequence_bounded_mrope(Dense)


def test_subclass_that_only_inherits_is_not_certified():
    """R44"""
    assert MixtureOfExperts.supports_sequence_bounded_mrope is True  # by inheritance, which does not count
    assert not supports_sequence_bounded_mrope(MixtureOfExperts)


def test_subclass_can_be_certified_itself_and_the_base_opt_out():
    class Base(nn.Module):
        supports_sequence_bounded_mrope = False

    @sequence_bounded_mrope
    class Child(Base):
        pass

    assert supports_sequence_bounded_mrope(Child) and not supports_sequence_bounded_mrope(Base)


def test_class_attribute_certifies_only_when_it_is_true():
    for value in (False, None, 1, "yes"):
        assert not supports_sequence_bounded_mrope(type("C", (), {"supports_sequence_bounded_mrope": value}))
    assert supports_sequence_bounded_mrope(type("C", (), {"supports_sequence_bounded_mrope": True}))


def test_instance_mixin_and_metaclass_do_not_certify():
    """R44"""

    class Meta(type):
        supports_sequence_bounded_mrope = True
        __dict__ = {"supports_sequence_bounded_mrope": True}

        def __getattribute__(cls, name):
            return {"supports_sequence_bounded_mrope": True} if name == "__dict__" else super().__getattribute__(name)

    class Mixin:
        supports_sequence_bounded_mrope = True

    class Model(Mixin, metaclass=Meta):
        pass

    instance = nn.Linear(1, 1)
    instance.supports_sequence_bounded_mrope = True
    assert not supports_sequence_bounded_mrope(Model)
    assert not supports_sequence_bounded_mrope(instance)
    assert not supports_sequence_bounded_mrope(Dense())
    assert not supports_sequence_bounded_mrope(None)


def test_works_as_a_call_on_a_class_that_cannot_be_edited():
    class ThirdParty(nn.Module):
        pass

    assert sequence_bounded_mrope(exclude=("visual",))(ThirdParty) is ThirdParty
    assert supports_sequence_bounded_mrope(ThirdParty) and excluded_submodules(ThirdParty) == ("visual",)


def test_exclusion_is_not_inherited():
    base = sequence_bounded_mrope(exclude=["visual"])(type("Base", (nn.Module,), {}))
    child = sequence_bounded_mrope(type("Child", (base,), {}))
    assert excluded_submodules(base) == ("visual",) and excluded_submodules(child) == ()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sequence_bounded_mrope(nn.Linear(1, 1)), "certifies a class, got Linear"),
        (lambda: sequence_bounded_mrope(exclude="visual"), "exclude must be an iterable of submodule names, got 'vis"),
        (lambda: sequence_bounded_mrope(exclude=[1]), r"exclude must be an iterable of submodule names, got \[1\]"),
    ],
)
def test_bad_arguments_say_what_must_hold(call, message):
    with pytest.raises(TypeError, match=f"sequence_bounded_mrope: {message}"):
        call()
