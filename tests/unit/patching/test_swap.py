"""A class made at run time passes for the one that it was made from, and is found again
by a pickle.
"""

import abc
import copy
import pickle

import pytest
from torch import nn

from hf_rmsnorm.patching.swap import derive

MADE = {}


def made(base, argument):
    if (base, argument) not in MADE:
        MADE[base, argument] = derive(
            base, lambda self, x: (argument, x), {"_mark": argument}, made, argument
        )
    return MADE[base, argument]


@pytest.mark.parametrize(
    "again",
    [
        copy.deepcopy,
        *(lambda m, p=p: pickle.loads(pickle.dumps(m, p)) for p in range(6)),
    ],
)
def test_instances_copy_and_pickle(again):
    norm = nn.LayerNorm(4)
    norm.__class__ = made(nn.LayerNorm, 2)
    other = again(norm)
    assert type(other) is type(norm) and other("x") == (2, "x")
    assert other.state_dict().keys() == norm.state_dict().keys()


class Meta(type):
    seen = []

    def __init__(cls, *arguments):
        super().__init__(*arguments)
        Meta.seen.append(cls)


class OfAMetaclass(nn.LayerNorm, metaclass=Meta):
    pass


class Registered(nn.LayerNorm):
    seen = []

    def __init_subclass__(cls, *, kind):
        cls.seen.append(cls)


class BelowRegistered(Registered, kind="norm"):
    pass


@pytest.mark.parametrize("cls", [OfAMetaclass, BelowRegistered])
def test_what_the_user_runs_for_each_subclass_is_not_run(cls):
    before = list(cls.seen)
    with pytest.raises(TypeError, match="would run for the patched class"):
        derive(cls, cls.forward, {}, made)
    assert cls.seen == before == [cls]


class Abstract(nn.LayerNorm, abc.ABC):
    pass


def test_an_abstract_class_keeps_its_own_account():
    norm = Abstract(4)
    norm.__class__ = derive(Abstract, Abstract.forward, {}, made)
    assert isinstance(norm, Abstract) and not isinstance(Abstract(4), type(norm))
