"""Classes whose forward reads what no probe varies, and near relatives that read nothing of the kind."""

import collections
import dataclasses
import enum
import functools
import types
import weakref

import numpy as np
import torch
from crafted import Case, Crafted, N, plain, rms
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
        self.weight = nn.Parameter(torch.ones(N))
        self.register_buffer("mask", None)


# Swapped; and once the attribute is set, their own forward runs.
CHANGED = [
    Case("an attribute with a default", gained, change=setting("gain", 2.0)),
    Case("an attribute that a helper reads", in_a_helper, change=setting("gain", 2.0)),
    Case("an attribute that is asked for", asked_for, change=setting("gain", 2.0)),
    Case("a tensor for a default", gained, change=setting("gain", torch.full((N,), 2.0))),
    Case("a parameter that is asked for", gained, change=lambda m: m.register_parameter("gain", nn.Parameter(
         torch.full((N,), 2.0)))),
    Case("a buffer that is asked for", gained, change=lambda m: m.register_buffer("gain", torch.full((N,), 2.0))),
    Case("a private name", private, own={"_gain": None}, change=setting("_gain", 2.0)),
    Case("a private tensor", private, own={"_gain": None}, change=setting("_gain", torch.full((N,), 2.0))),
    Case("a private name of the class", private, members={"_gain": None}, change=setting("_gain", 2.0)),
    Case("an attribute of the class", of_the_class, members={"gain": None}, change=setting("gain", 2.0)),
    Case("a buffer that is filled", masked, base=Masked, change=setting("mask", torch.zeros(N))),
    Case("a buffer that is registered again", masked, base=Masked,
         change=lambda m: m.register_buffer("mask", torch.zeros(N))),
    Case("a function that is replaced", lambda s, x: s.post(plain(s, x)), own={"post": same},
         change=setting("post", doubled)),
]  # fmt: skip


class Kind(enum.Enum):
    PLAIN = 1
    DOUBLE = 2


@dataclasses.dataclass(slots=True)
class Slots:
    gain: float = 1.0
    eps: float = 1e-6


class Thing:
    gain = 1.0


THING = Thing()
TENSOR = torch.ones(N)
TENSORS = {"gain": TENSOR}


def helper(y):
    return y * helper.gain


helper.gain = 1.0


def run_all(held, y):
    for function in held:
        y = function(y)
    return y


def if_none(held, y):
    return y if held.gain is None else y * held.gain


def reading(use):
    return lambda s, x: use(s.held, plain(s, x))


def case_of(name, held, use, change):
    """A norm whose result `use` makes of what it holds and of its output, until `change` of what it holds."""
    return Case(name, reading(use), "'held' holds, which is not watched", own={"held": held},
                change=lambda m: change(m.held))  # fmt: skip


def filled(tensor):
    with torch.no_grad():
        tensor.fill_(3.0)


def doubled_if(asked):
    return lambda held, y: doubled(y) if asked(held) else y


Space = types.SimpleNamespace
NOT_OWN = "a tensor that is not its own"
HELD = [
    case_of("a word of a config", Space(mode="plain"), doubled_if(lambda h: h.mode != "plain"), setting("mode", "x")),
    case_of("a None of a config", Space(gain=None), if_none, setting("gain", 2.0)),
    case_of("a kind of a config", Space(kind=Kind.PLAIN), doubled_if(lambda h: h.kind is Kind.DOUBLE),
            setting("kind", Kind.DOUBLE)),
    case_of("an absent name of a config", Space(), lambda h, y: y * getattr(h, "gain", 1.0), setting("gain", 2.0)),
    case_of("a config in a config", Space(inner=Space(mode="plain")), doubled_if(lambda h: h.inner.mode != "plain"),
            lambda h: setattr(h.inner, "mode", "x")),
    case_of("a table in a config", Space(inner={}), lambda h, y: y * h.inner.get("gain", 1.0),
            lambda h: h.inner.update(gain=2.0)),
    case_of("a dataclass with slots", Slots(), lambda h, y: y * h.gain, setting("gain", 2.0)),
    case_of("an empty table", {}, lambda h, y: y * h.get("gain", 1.0), lambda h: h.update(gain=2.0)),
    case_of("an empty list", [], run_all, lambda h: h.append(doubled)),
    case_of("the length of a list", [], doubled_if(len), lambda h: h.append(1)),
    case_of("the truth of a list", [], doubled_if(bool), lambda h: h.append(1)),
    case_of("a set", set(), doubled_if(lambda h: "double" in h), lambda h: h.add("double")),
    case_of("a deque", collections.deque([1.0]), lambda h, y: y * h[0], lambda h: h.__setitem__(0, 2.0)),
    case_of("an array", np.ones(1), lambda h, y: y * float(h[0]), lambda h: h.__setitem__(0, 2.0)),
    case_of("a tensor in a list", [torch.ones(N)], lambda h, y: y * h[0], lambda h: filled(h[0])),
    case_of("a tensor in a tuple", (torch.ones(N),), lambda h, y: y * h[0], lambda h: filled(h[0])),
    case_of("a parameter in a list", [nn.Parameter(torch.ones(N))], lambda h, y: y * h[0], lambda h: filled(h[0])),
    case_of("a tensor in a table", {"w": torch.ones(N)}, lambda h, y: y * h["w"], lambda h: filled(h["w"])),
    case_of("a tensor in an object", Space(w=torch.ones(N)), lambda h, y: y * h.w, lambda h: filled(h.w)),
    Case("a weak reference", reading(lambda h, y: y * h().gain), "'held'", own={"held": weakref.ref(THING)},
         effect=True),
    case_of("a method of another", functools.partial(if_none, Space(gain=None)), lambda h, y: h(y),
            lambda h: setattr(h.args[0], "gain", 2.0)),
    Case("a number of a function", lambda s, x: helper(plain(s, x)), "an attribute of a function", effect=True),
    Case("a tensor of the module's file", lambda s, x: plain(s, x) * TENSOR, NOT_OWN, effect=True),
    Case("a table of tensors", lambda s, x: plain(s, x) * TENSORS["gain"], NOT_OWN, effect=True),
    Case("a tensor of the class", lambda s, x: plain(s, x) * s.gain, NOT_OWN, members={"gain": TENSOR}, effect=True),
    Case("a tensor by default", lambda s, x, gain=TENSOR: plain(s, x) * gain, NOT_OWN, effect=True),
    Case("all that it holds", lambda s, x: plain(s, x) * vars(s).get("gain", 1.0), "not by name",
         change=setting("gain", 2.0)),
]  # fmt: skip


def eps_of(held, find, **members):
    return {"forward": lambda s, x: (s.weight * rms(x, find(s.held))).to(x.dtype), "own": {"held": held}, **members}


NEAR = [
    Case("eps of a config with other things", **eps_of(Space(eps=1e-5, mode="plain", w=[torch.ones(N)]),
         lambda h: h.eps)),
    Case("eps of a config in a config", **eps_of(Space(inner=Space(eps=1e-5)), lambda h: h.inner.eps)),
    Case("eps of a table", **eps_of({"eps": 1e-5, "mode": "plain"}, lambda h: h["eps"])),
    Case("eps of a table with a default", **eps_of({"eps": 1e-5}, lambda h: h.get("eps", 1e-6))),
    Case("eps of a list", **eps_of([1e-5, None], lambda h: h[0])),
    Case("eps of a dataclass with slots", **eps_of(Slots(), lambda h: h.eps)),
    Case("a config that is there", lambda s, x: plain(s, x) if s.held is not None else x, own={"held": Space()}),
    Case("a config that is not read", plain, own={"held": Space(mode="plain"), "tensors": [torch.ones(N)]}),
    Case("a kind of its own", lambda s, x: plain(s, x) if s.kind is Kind.PLAIN else x, own={"kind": Kind.PLAIN}),
    Case("names of its own", lambda s, x: x if "x" in s.names else plain(s, x), own={"names": frozenset("a")}),
    Case("a function of its own", lambda s, x: s.post(plain(s, x)), own={"post": torch.clone}),
]  # fmt: skip


def holding(tensor):
    class Holding(Crafted):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", tensor.clone())

    return Holding


def deciding(name, tensor, use, value, why="'b'"):
    return Case(name, lambda s, x: use(s.b, plain(s, x)), why, base=holding(tensor), change=lambda m: m.b.fill_(value))


BUFFERS = [
    deciding("many steps", torch.tensor(0), lambda b, y: y * torch.where(b > 1000, 2.0, 1.0), 2000),
    deciding("a stage", torch.tensor(1), lambda b, y: y * (1.0 + (b == 2)), 2),
    deciding("a cap that is none yet", torch.tensor(float("inf")), lambda b, y: torch.minimum(y, b), 0.5),
    deciding("a long cap that is none yet", torch.full((N,), torch.inf), lambda b, y: torch.minimum(y, b), 0.5, ""),
    deciding("a mask that is compared", torch.ones(N), lambda b, y: torch.where(b > 0, y, 0.0), 0.0, ""),
    deciding("flags that are compared", torch.ones(N), lambda b, y: torch.where(b > 100, 2 * y, y), 200.0),
    deciding("a mask of flags", torch.ones(N, dtype=torch.bool), lambda b, y: torch.where(b, y, 0.0), False),
]
NEAR.append(Case("a count that is not read", plain, base=holding(torch.tensor(3))))
NEAR.append(Case("its weight with a count beside it", plain, base=holding(torch.ones(()))))


def scaled_by(asked):
    return lambda s, x: plain(s, x) * asked(x)


def by_position(x):
    at = torch.arange(x.shape[-2], device=x.device)
    return (torch.log1p(torch.floor(at / 8192)) * 0.1 + 1.0)[:, None]


def in_blocks(self, x):
    return torch.cat([plain(self, c) / (i + 1) for i, c in enumerate(x.split(8192, dim=-2))], -2)


def by_steps(x):
    scale = 1.0
    for _ in range(x.shape[-2] // 8192):
        scale *= 2
    return scale


def twice_if(asked):
    return lambda s, x: plain(s, x) * (2 if asked(x) else 1)


ROWS, ANOTHER, COUNTS = "rows its result", "another device", "counts its rows"
LENGTHS = [
    Case("a temperature by position", scaled_by(by_position), COUNTS, x=(1, 8200, N)),
    Case("positions by a sum", scaled_by(lambda x: 1 + torch.ones_like(x[..., :1]).cumsum(-2) // 8192), COUNTS,
         x=(1, 8200, N)),
    Case("the logarithm of a length", scaled_by(lambda x: torch.tensor(x.shape[-2] / 8192).log().clamp(min=0) + 1),
         ROWS, x=(1, 20000, N)),
    Case("blocks of positions", in_blocks, ROWS, x=(1, 8200, N)),
    Case("the bits of a length", twice_if(lambda x: x.shape[-2].bit_length() > 13), COUNTS, x=(1, 8200, N)),
    Case("steps by length", scaled_by(by_steps), ROWS, x=(1, 8200, N)),
]  # fmt: skip
DEVICES = [
    Case("a device as a word", twice_if(lambda x: "cuda" in str(x.device)), ANOTHER, effect=True),
    Case("a device that is shown", twice_if(lambda x: "cuda" in repr(x.device)), ANOTHER, effect=True),
    Case("the start of a word", twice_if(lambda x: x.device.type.startswith("cuda")), ANOTHER, effect=True),
    Case("a letter of a word", twice_if(lambda x: x.device.type[0] != "c"), ANOTHER, effect=True),
    Case("a type as a word", twice_if(lambda x: "cuda" in x.type()), ANOTHER, effect=True),
    Case("a device in a text", twice_if(lambda x: f"{x.device}" != "cpu"), ANOTHER, effect=True),
    Case("the number of a device", twice_if(lambda x: x.device.index is not None), ANOTHER, effect=True),
    Case("a device as a word, and a tensor there", lambda s, x: plain(s, x) * torch.ones((), device=x.device)
         * (2 if "cuda" in str(x.device) else 1), ANOTHER, effect=True),
]  # fmt: skip
NEAR += [
    Case("a tensor on its device", lambda s, x: plain(s, x) * torch.ones((), device=x.device)),
    Case("the halves of a row", lambda s, x: torch.cat(plain(s, x).chunk(2, dim=-1), -1)),
    Case("a tensor of a row's length", lambda s, x: (x * (x.square().sum(-1, keepdim=True)
         / torch.tensor(x.shape[-1]) + 1e-6).rsqrt()) * s.weight),
]  # fmt: skip
