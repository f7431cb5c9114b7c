"""Classes whose forward reads what no probe varies, and near relatives that read nothing of the kind."""

import torch
from crafted import Case, plain
from torch import nn


def setting(name, value):
    return lambda module: setattr(module, name, value)


def private(self, x):
    return plain(self, x) if self._gain is None else plain(self, x) * self._gain


def of_the_class(self, x):
    return plain(self, x) if self.gain is None else plain(self, x) * self.gain


def masked(self, x):
    return plain(self, x) if self.mask is None else plain(self, x) * self.mask


def asked_for(self, x):
    return plain(self, x) * self.gain if hasattr(self, "gain") else plain(self, x)


def gained(self, x):
    return plain(self, x) * getattr(self, "gain", 1.0)


def in_a_helper(self, x):
    return plain(self, x) * gain_of(self)


def gain_of(module):
    return getattr(module, "gain", 1.0)


def same(y):
    return y


def doubled(y):
    return 2 * y


class Masked(nn.Module):
    """A norm with a buffer that is not there yet."""

    def __init__(self, **own):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.register_buffer("mask", None)


# Swapped; and once the attribute is set, their own forward runs.
CHANGED = [
    Case("an attribute with a default", gained, change=setting("gain", 2.0)),
    Case("an attribute that a helper reads", in_a_helper, change=setting("gain", 2.0)),
    Case("an attribute that is asked for", asked_for, change=setting("gain", 2.0)),
    Case("a tensor for a default", gained, change=setting("gain", torch.full((32,), 2.0))),
    Case("a parameter that is asked for", gained, change=lambda m: m.register_parameter("gain", nn.Parameter(
         torch.full((32,), 2.0)))),
    Case("a buffer that is asked for", gained, change=lambda m: m.register_buffer("gain", torch.full((32,), 2.0))),
    Case("a private name", private, own={"_gain": None}, change=setting("_gain", 2.0)),
    Case("a private tensor", private, own={"_gain": None}, change=setting("_gain", torch.full((32,), 2.0))),
    Case("a private name of the class", private, members={"_gain": None}, change=setting("_gain", 2.0)),
    Case("an attribute of the class", of_the_class, members={"gain": None}, change=setting("gain", 2.0)),
    Case("a buffer that is filled", masked, base=Masked, change=setting("mask", torch.zeros(32))),
    Case("a buffer that is registered again", masked, base=Masked,
         change=lambda m: m.register_buffer("mask", torch.zeros(32))),
    Case("a function that is replaced", lambda s, x: s.post(plain(s, x)), own={"post": same},
         change=setting("post", doubled)),
]  # fmt: skip
