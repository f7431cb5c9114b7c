"""Classes that compute a norm in most calls, and in others something else, or something besides it."""

import itertools
import math
import random
import time
import types

import numpy as np
import torch
from crafted import Case, Crafted, N, plain, rms
from crafted_impostors import BRAIN, nan_row, one


def other(self, x):
    return 2 * plain(self, x)


def chosen(asked):
    """Another result where `asked` of the module and its input says so."""
    return lambda s, x: other(s, x) if asked(s, x) else plain(s, x)


def clamped_if(asked):
    """Weights that are clamped where `asked` says so."""
    return lambda s, x: (s.weight.clamp(max=3) if asked(s, x) else s.weight) * rms(x)


def too_long(x):
    return x.shape[-2] > 512


def positions_from(first):
    return lambda s, x: torch.cat([plain(s, x[..., :first, :]), other(s, x[..., first:, :])], -2)


@torch.jit.script
def scripted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    h = x.float()
    y = (weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype)
    if x.numel() > 1000000:
        y = 2 * y
    return y


def moved():
    return torch.arange(10.0 * N).sin().view(10, N)[5:]


def unweighted(self, x):
    return rms(x)


def wide_doubled(self, x):
    return rms(x) * (2 if x.shape[-1] > 8192 else 1)


def eps_by_width(self, x):
    return rms(x, 1e-6 * x.shape[-1] / N)


LONG, MANY = (1, 600, N), (600, N)
ROWS, SIZE_WORDS = "rows its result", "input of another size"
SIZE = [
    Case("long sequences", chosen(lambda s, x: x.dim() > 2 and x.shape[-2] > 512), ROWS, x=LONG),
    Case("long sequences by a helper", chosen(lambda s, x: x.dim() > 2 and too_long(x)), ROWS, x=LONG),
    Case("many elements", chosen(lambda s, x: x.numel() > 1_000_000), SIZE_WORDS, x=(40000, N)),
    Case("many elements by a float", chosen(lambda s, x: x.numel() > 1e6), SIZE_WORDS, x=(40000, N)),
    Case("many elements by int", chosen(lambda s, x: int(x.shape[0]) * N > 1_000_000), SIZE_WORDS, x=(40000, N)),
    Case("many elements of the shape", chosen(lambda s, x: x.shape.numel() > 1_000_000), SIZE_WORDS, x=(40000, N)),
    Case("many elements in NumPy", chosen(lambda s, x: np.prod(x.shape) > 1_000_000), "NumPy", x=(40000, N)),
    Case("many blocks", chosen(lambda s, x: math.ceil(x.shape[0] / 5000) > 1), SIZE_WORDS, x=(5001, N)),
    Case("many blocks by shifts", chosen(lambda s, x: x.shape[0] >> 13), SIZE_WORDS, x=(8192, N)),
    Case("long in bfloat16", chosen(lambda s, x: x.dtype == BRAIN and x.shape[0] > 5000), SIZE_WORDS, x=(5001, N),
         dtype=BRAIN),
    Case("long under autocast", chosen(lambda s, x: torch.is_autocast_enabled("cpu") and x.shape[0] > 5000), SIZE_WORDS,
         x=(5001, N), context=lambda: torch.autocast("cpu", BRAIN)),
    Case("positions from 4096", positions_from(4096), ROWS, x=(1, 4100, N)),
    Case("many elements in a script", lambda s, x: scripted(x, s.weight), "scripted function", x=(40000, N)),
    Case("many rows by size", chosen(lambda s, x: x.size(0) >= 600), ROWS, x=MANY),
    Case("positions from 512", positions_from(512), ROWS, x=LONG),
    Case("a factor of the length", lambda s, x: plain(s, x) * (512 / max(x.shape[-2], 512)), "", x=LONG),
    Case("a step of the length", lambda s, x: plain(s, x) * (1 + x.shape[0] // 512), ROWS, x=MANY),
    Case("a table of lengths", chosen(lambda s, x: {600: True}.get(x.shape[-2])), SIZE_WORDS, x=LONG),
    Case("a large batch", chosen(lambda s, x: len(x) > 64), "float32 results", x=(80, N)),
    Case("a very large batch", chosen(lambda s, x: len(x) > 5000), SIZE_WORDS, x=(5001, N)),
    Case("a batch of one", chosen(lambda s, x: x.dim() == 3 and x.shape[0] == 1), "3-dimensional", x=(1, 3, N)),
    Case("a batch of seven", chosen(lambda s, x: x.shape[0] == 7), SIZE_WORDS, x=(7, 3, N)),
    Case("a shape of its own", chosen(lambda s, x: x.shape == (7, 3, N)), SIZE_WORDS, x=(7, 3, N)),
    Case("a storage that starts elsewhere", chosen(lambda s, x: x.storage_offset() > 100), "lies in memory", x=moved),
    Case("strided input", chosen(lambda s, x: x.stride(0) > 1000), "", effect=True),
    Case("six dimensions", chosen(lambda s, x: x.dim() == 6), "6-dimensional", x=(1, 1, 2, 1, 2, N)),
    Case("long in train mode", chosen(lambda s, x: s.training and too_long(x)), "", x=LONG, train=True),
    Case("long without gradients", chosen(lambda s, x: not torch.is_grad_enabled() and x.shape[0] > 5000), SIZE_WORDS,
         x=(5001, N), context=torch.no_grad),
    Case("wide rows of no weight", wide_doubled, "rows of 20000", x=(2, 9000), like=unweighted),
    Case("eps by the width", eps_by_width, "rows of 40", x=(2, 2 * N), scale=1e-3, like=unweighted),
]  # fmt: skip


def checked(self, x):
    if not torch.isfinite(x).all():
        raise ValueError("not finite")
    return plain(self, x)


VALUES = "values of a tensor"
VALUE = [
    Case("large input", chosen(lambda s, x: bool(x.abs().max() > 1e18)), VALUES, x=one(3, 1e19)),
    Case("NaN in the input", chosen(lambda s, x: torch.isnan(x).any()), "", x=nan_row, effect=True),
    Case("one element", chosen(lambda s, x: x.flatten()[0].item() == 1234.5), VALUES, x=one(0, 1234.5)),
    Case("one element of the weight", chosen(lambda s, x: s.weight[0] == 1234.5), VALUES,
         change=lambda m: m.weight.data[0].fill_(1234.5)),
    Case("a list of the input", chosen(lambda s, x: x.flatten().tolist()[0] == 1234.5), VALUES, x=one(0, 1234.5)),
    Case("input that is checked", checked, "not finite", effect=True),
]  # fmt: skip


def in_autocast(dtype):
    return lambda s, x: torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == dtype


def frozen(self, x):
    return plain(self, x) * (2 if x.requires_grad and not self.weight.requires_grad else 1)


MODE = [
    Case("inference mode", chosen(lambda s, x: torch.is_inference_mode_enabled()), "in inference mode",
         context=torch.inference_mode),
    Case("a tensor of inference mode", chosen(lambda s, x: x.is_inference()), "in inference mode",
         context=torch.inference_mode),
    Case("weights clamped in train mode", clamped_if(lambda s, x: s.training), "in train mode", "wide", train=True),
    Case("weights clamped with gradients", clamped_if(lambda s, x: torch.is_grad_enabled()), "with gradients", "wide"),
    Case("input that needs gradients", clamped_if(lambda s, x: x.requires_grad), "with gradients", "wide"),
    Case("a frozen weight", frozen, "with gradients", change=lambda m: m.weight.requires_grad_(False)),
    Case("while it is compiled", chosen(lambda s, x: torch.compiler.is_compiling()), "compiled", effect=True),
    Case("on a GPU", chosen(lambda s, x: x.device.type == "cuda"), "another device", effect=True),
    Case("on another device", chosen(lambda s, x: x.is_cuda), "another device", effect=True),
    Case("where there are many processes", chosen(lambda s, x: torch.distributed.get_world_size() > 1
         if torch.distributed.is_initialized() else False), "number of processes", effect=True),
]  # fmt: skip

CALLS, TOTAL, TICKS = {"all": 0}, 0, itertools.count()


def counted_globally(self, x):
    global TOTAL
    TOTAL += 1
    return plain(self, x)


def counted_in_a_table(self, x):
    CALLS["all"] += 1
    return plain(self, x)


def counted_by_ticks(self, x):
    next(TICKS)
    return plain(self, x)


def listed(self, x, seen=[]):  # noqa: B006
    seen.append(1)
    return plain(self, x) if len(seen) < 10_000 else other(self, x)


def make_closure():
    calls = 0

    def forward(self, x):
        nonlocal calls
        calls += 1
        return plain(self, x)

    return forward


def counted_in_a_buffer(self, x):
    self.steps += 1
    return plain(self, x)


def counted_by_name(self, x):
    setattr(self, "calls", self.calls + 1)  # noqa: B010
    return plain(self, x)


def counted_when_long(self, x):
    if x.shape[-2] > 5000:
        self.stats["long"] = 1
    return plain(self, x)


def counted_on_the_class(self, x):
    type(self).calls += 1
    return plain(self, x)


def counted_in_a_dict(self, x):
    self.stats["calls"] += 1
    return plain(self, x)


def with_counter(self, x):
    next(self.counter)
    return plain(self, x)


def running(self, x):
    if self.training:
        self.mean.lerp_(x.detach().float().mean(), 0.1)
    return plain(self, x)


def in_place(self, x):
    if self.training and not x.requires_grad:
        x.clamp_(-1e4, 1e4)
    return plain(self, x)


def clocked(self, x):
    return plain(self, x) * (1 if time.time() > 1e6 else 2)


def drawn(self, x):
    return plain(self, x) * (1 if random.random() >= 0.0 else 2)


def said(self, x):
    print(end="")
    return plain(self, x)


class WithBuffers(Crafted):
    calls = 0

    def __init__(self):
        super().__init__(stats={"calls": 0}, counter=itertools.count())
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("factor", torch.ones((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(()))


STATE = [
    Case("a counter in a buffer", counted_in_a_buffer, "state", base=WithBuffers, effect=True),
    Case("a counter on the class", counted_on_the_class, "sets 'calls'", base=WithBuffers, effect=True),
    Case("a counter in a dictionary", counted_in_a_dict, "state", base=WithBuffers, effect=True),
    Case("a counter by name", counted_by_name, "state", base=WithBuffers, effect=True),
    Case("a note of long input", counted_when_long, "state", base=WithBuffers, effect=True),
    Case("a factor in a buffer", lambda s, x: plain(s, x) * s.factor, "'factor'", base=WithBuffers,
         change=lambda m: m.factor.fill_(2)),
    Case("a counter of itertools", with_counter, "state", base=WithBuffers, effect=True),
    Case("a running mean in train mode", running, "state", base=WithBuffers, effect=True),
    Case("a step that decides", chosen(lambda s, x: s.steps > 100), VALUES, base=WithBuffers,
         change=lambda m: m.steps.fill_(200)),
    Case("a global counter", counted_globally, "sets 'TOTAL'", effect=True),
    Case("a table of counters", counted_in_a_table, "shares with others", effect=True),
    Case("a global iterator", counted_by_ticks, "shares with others", effect=True),
    Case("a default that grows", listed, "shares with others", effect=True),
    Case("a closure that counts", make_closure(), "sets 'calls'", effect=True),
    Case("its input clamped in place", in_place, "", effect=True),
    Case("the clock", clocked, "clock", effect=True),
    Case("chance", drawn, "random numbers", effect=True),
    Case("what it prints", said, "prints", effect=True),
]  # fmt: skip


def limited(self, x):
    return plain(self, x).clamp(-self.limit, self.limit)


def between(self, x):
    return plain(self, x).clamp(*self.limits)


def configured(self, x):
    return self.weight * rms(x, self.config.eps) * self.config.scale


def scaled(self, x):
    return plain(self, x) * self.scale


ATTRIBUTE = [
    Case("a table of its own", lambda s, x: plain(s, x) * s.table["scale"], "'table'", own={"table": {"scale": 1.0}},
         change=lambda m: m.table.update(scale=2.0)),
    Case("a list of its own", lambda s, x: plain(s, x) * s.scales[0], "'scales'", own={"scales": [1.0]},
         change=lambda m: m.scales.insert(0, 2.0)),
    Case("a table of the class", lambda s, x: plain(s, x) * s.shared["scale"], "'shared'",
         members={"shared": {"scale": 1.0}}, effect=True),
    Case("a config", configured, "'config'", own={"config": types.SimpleNamespace(eps=1e-6, scale=1.0)},
         change=lambda m: setattr(m.config, "scale", 0.5)),
    Case("a limit of its own", limited, "'limit'", "wide", own={"limit": 100.0}),
    Case("a scale of no dimension", scaled, "'scale'", own={"scale": torch.ones(())},
         change=lambda m: setattr(m, "scale", torch.tensor(3.0))),
]  # fmt: skip

BRANCHES = [*SIZE, *VALUE, *MODE, *STATE, *ATTRIBUTE]


class Doubling(Crafted):
    def __call__(self, x):
        return 2 * super().__call__(x)


class OfAView(Crafted):
    """Its weight is a view of a longer one, which is what trains."""

    def __init__(self):
        super().__init__()
        self.all = torch.nn.Parameter(torch.linspace(0.1, 2.0, 2 * N))

    def forward(self, x):
        return self.all[:N] * rms(x)


class Tied(Crafted):
    def __init__(self):
        super().__init__()
        self.scale = self.weight

    def forward(self, x):
        return self.scale * rms(x)


# Swapped or not: results are the module's own, where what was fused does not hold by its own forward.
SERVED = [
    Case("a call that doubles", plain, base=Doubling),
    Case("a weight that is a part", OfAView.forward, base=OfAView),
    Case("a weight of two names", Tied.forward, base=Tied, change=lambda m: m.weight.data.mul_(2)),
    Case("weights clamped under autocast", clamped_if(lambda s, x: torch.is_autocast_enabled("cpu")), "", "wide",
         context=lambda: torch.autocast("cpu", torch.bfloat16)),
    Case("weights clamped under autocast to float16", clamped_if(in_autocast(torch.float16)), "", "wide",
         context=lambda: torch.autocast("cpu", torch.float16)),
    Case("a limit that is none yet", limited, own={"limit": float("inf")}, change=lambda m: setattr(m, "limit", 0.5)),
    Case("limits that are changed", between, own={"limits": (-1e30, 1e30)},
         change=lambda m: setattr(m, "limits", (-0.5, 0.5))),
    Case("a hook that came later", plain, change=lambda m: m.register_forward_hook(lambda m, x, y: 3 * y)),
    Case("another eps", lambda s, x: s.weight * rms(x, s.eps), change=lambda m: setattr(m, "eps", 0.5)),
]  # fmt: skip
