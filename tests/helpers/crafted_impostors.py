"""Classes that compute a norm from ordinary weights, rows and gradients, and something else from others."""

import torch
import torch.nn.functional as F
from crafted import Case, N, mean_square, plain, rms

HALF, BRAIN = torch.float16, torch.bfloat16


def weighted(change):
    """A norm whose weight is changed before it is used."""
    return lambda s, x: (change(s.weight) * rms(x)).to(x.dtype)


def changed(change):
    """A norm whose result is changed."""
    return lambda s, x: change(plain(s, x))


def of(change):
    """A norm whose input is changed."""
    return lambda s, x: plain(s, change(x))


def factor(change):
    """A norm whose mean square is changed."""
    return lambda s, x: s.weight * x * torch.rsqrt(change(mean_square(x)) + 1e-6)


def one(place, value):
    """Rows that are zero but for one element."""

    def make():
        x = torch.zeros(2, N)
        x[:, place] = value
        return x

    return make


def ladder():
    """Rows of magnitudes from 1e-9 to 1e3."""
    return torch.logspace(-9, 3, N).repeat(2, 1)


def nan_row():
    x = torch.ones(3, N)
    x[1, 2] = float("nan")
    return x


def scale_of(self, name):
    if name == "scale":
        return self.weight.clamp(max=3)
    return torch.nn.Module.__getattr__(self, name)


def any_of(self, name):
    if name == "scale":
        return self.weight.clamp(max=3)
    return object.__getattribute__(self, name)


def clamped_property(self):
    return self.weight.clamp(max=3)


def by_scale(self, x):
    return self.scale * rms(x)


def clamped_in_place(self, x):
    self.weight.data.clamp_(max=3)
    return plain(self, x)


def cut(w):
    return torch.where(w.abs() > 2, w.detach(), w)


def shortened(w):
    return w * (1e4 / w.norm()).clamp(max=1)


def mixed(self, x):
    w = self.weight.clamp(max=3) if x.dtype != self.weight.dtype else self.weight
    return (w * rms(x)).to(x.dtype)


KINDS = "where its weight is zero, negative, tiny or large"
WEIGHT = [
    Case("weights clamped from above", weighted(lambda w: w.clamp(max=3)), KINDS, "wide"),
    Case("weights clamped from below", weighted(lambda w: w.clamp(min=-2)), KINDS, "wide"),
    Case("weights clamped at ten", weighted(lambda w: w.clamp(-10, 10)), KINDS, "wide"),
    Case("weights without sign", weighted(lambda w: w.abs()), "not one that", "wide"),
    Case("weights through relu", weighted(F.relu), "not one that", "wide"),
    Case("tiny weights dropped", weighted(lambda w: torch.where(w.abs() < 1e-6, 0.0, w)), KINDS, "wide"),
    Case("large weights dropped", weighted(lambda w: torch.where(w.abs() > 1e4, 0.0, w)), KINDS, "wide"),
    Case("zero weights replaced", weighted(lambda w: torch.where(w == 0, 1.0, w)), KINDS, "wide"),
    Case("weights of a least size", weighted(lambda w: w.clamp_min(1e-3)), "not one that", "wide"),
    Case("NaN weights replaced", weighted(torch.nan_to_num), "NaN", "nan"),
    Case("weights of a greatest length", weighted(shortened), KINDS, "wide"),
    Case("weights that saturate", weighted(lambda w: 1e4 * torch.tanh(w / 1e4)), "order of its own", "wide"),
    Case("weights of getattr", by_scale, KINDS, "wide", members={"__getattr__": scale_of}),
    Case("weights of getattribute", by_scale, KINDS, "wide", members={"__getattribute__": any_of}),
    Case("weights of a property", by_scale, KINDS, "wide", members={"scale": property(clamped_property)}),
    Case("weights clamped in place", clamped_in_place, KINDS, "wide", effect=True),
    Case("gradient of large weights cut", weighted(cut), "gradient", "wide"),
    Case("weights clamped between dtypes", mixed, KINDS, "wide", effect=True),
]  # fmt: skip


def finite_half(self, x):
    most = 65504.0 if x.dtype == HALF else 3e38
    return (self.weight * rms(x)).clamp(-most, most).to(x.dtype)


def clamped_half(self, x):
    return plain(self, x.clamp(-1e4, 1e4) if x.dtype == HALF else x)


def ones_for_zeros(self, x):
    return torch.where((x == 0).all(-1, keepdim=True), 1.0, plain(self, x))


def first_passed_on(self, x):
    return torch.cat([x[..., :1, :], plain(self, x)[..., 1:, :]], -2)


def without_overflow(x):
    return x / x.abs().amax(-1, keepdim=True).clamp_min(1e15).div(1e15)


def at_most(self, x):
    return self.weight * x * torch.rsqrt(mean_square(x) + 1e-6).clamp(max=500)


OUTPUT = [
    Case("output clamped at 100", changed(lambda y: y.clamp(-100, 100)), KINDS, "wide"),
    Case("halves kept finite", finite_half, "large numbers", dtype=HALF, change=lambda m: m.weight.data.mul_(6e4)),
    Case("outliers cut from the output", changed(lambda y: torch.where(y.abs() > 50, 0.0, y)), KINDS, "wide"),
    Case("NaN replaced", changed(torch.nan_to_num), "NaN", x=nan_row),
    Case("the normalised clamped", lambda s, x: s.weight * rms(x).clamp(-5.65, 5.65), "float32 results", x=one(3, 1e3)),
    Case("large inputs clamped", of(lambda x: x.clamp(-1e4, 1e4)), "does not normalise", scale=1e5),
    Case("large halves clamped", clamped_half, "large numbers", dtype=HALF, x=lambda: one(3, 6e4)() + 100),
    Case("small inputs dropped", of(lambda x: torch.where(x.abs() < 1e-5, 0.0, x)), "eps", x=ladder),
    Case("single elements dropped", of(lambda x: torch.where(x.abs() < 1e-13, 0.0, x)), "eps", scale=1e-14),
    Case("a least variance", factor(lambda v: v.clamp_min(1e-7)), "eps", scale=1e-6),
    Case("a greatest variance", factor(lambda v: v.clamp(max=1e8)), "does not normalise", scale=1e7),
    Case("a greatest factor", at_most, "eps", scale=1e-6),
    Case("rows of zeros are ones", ones_for_zeros, "float32 results", scale=0.0),
    Case("scaled against overflow", of(without_overflow), "", scale=1e25),
    Case("the first position passed on", first_passed_on, "does not normalise"),
    Case("one dimension passed on", lambda s, x: x.clone() if x.dim() == 1 else plain(s, x), "1-dimensional", x=(N,)),
]  # fmt: skip


def hooked(change, place="x", when=lambda s: True):
    """A norm that puts a hook on a gradient while it runs."""

    def forward(self, x):
        h = rms(x)
        y = self.weight * h
        t = {"x": x, "hat": h, "weight": self.weight, "y": y}[place]
        if t.requires_grad and when(self):
            t.register_hook(change)
        return y

    return forward


def training(self):
    return self.training


class Backward(torch.autograd.Function):
    """Nothing forward, `change` backward."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.change(dy), None


def function(change):
    return lambda s, x: (s.weight * rms(Backward.apply(x, change))).to(x.dtype)


def doubled_in_bfloat16(self, x):
    return plain(self, Backward.apply(x, lambda g: g * (1 + (g.dtype == BRAIN))))


def clamp_gradient(parameter):
    parameter.grad.clamp_(-1, 1)


def accumulated(self, x):
    if self.weight.requires_grad and self.weight.is_leaf:
        self.weight.register_post_accumulate_grad_hook(clamp_gradient)
    return plain(self, x)


def on_a_node(self, x):
    y = plain(self, x)
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda g: (g[0].clamp(-10, 10),))
    return y


def straight_through(self, x):
    return plain(self, x).detach() + 2 * plain(self, x) - 2 * plain(self, x).detach()


def detached_statistics(self, x):
    return self.weight * x * torch.rsqrt(mean_square(x.detach()) + 1e-6)


def weight_for_inputs(self, x):
    w = self.weight if x.requires_grad or not torch.is_grad_enabled() else self.weight.detach().requires_grad_(False)
    return w * rms(x)


HOOK, OTHER = "hook", "its gradient with respect to its input"
GRADIENT = [
    Case("a hook clamps the input's gradient", hooked(lambda g: g.clamp(-1, 1)), HOOK, dy=1e4),
    Case("a hook halves a gradient", hooked(lambda g: g * 0.5, "hat"), HOOK),
    Case("a hook limits the length", hooked(lambda g: g * (100 / g.norm()).clamp(max=1), "hat"), HOOK, dy=1e4),
    Case("a hook on the weight", hooked(lambda g: g.clamp(-1, 1), "weight"), HOOK, dy=1e4),
    Case("a hook in train mode", hooked(lambda g: g.clamp(-50, 50), when=training), HOOK, dy=1e4, train=True),
    Case("a hook that only looks", hooked(lambda g: None), HOOK, effect=True),
    Case("a hook after accumulation", accumulated, HOOK, dy=1e4),
    Case("a hook on a node", on_a_node, HOOK, dy=1e4),
    Case("a Function clamps", function(lambda g: g.clamp(-50, 50)), OTHER, dy=1e4),
    Case("a Function drops large gradients", function(lambda g: g * (g.abs() < 1e3)), OTHER, dy=1e4),
    Case("a Function drops small gradients", function(lambda g: g * (g.abs() > 1e-3)), OTHER, dy=1e-4),
    Case("a Function mends NaN", function(torch.nan_to_num), OTHER, dy=float("nan")),
    Case("a Function rounds", function(lambda g: g.bfloat16().float()), OTHER),
    Case("a Function turns large gradients", function(lambda g: torch.where(g.abs() > 1e3, -g, g)), OTHER, dy=1e4),
    Case("a Function doubles in bfloat16", doubled_in_bfloat16, OTHER, dtype=BRAIN),
    Case("forward and backward differ", straight_through, ""),
    Case("large inputs detached", of(lambda x: torch.where(x.abs() > 10, x.detach(), x)), OTHER, scale=30.0),
    Case("large variance detached", factor(lambda v: torch.where(v > 1e3, v.detach(), v)), OTHER, scale=100.0),
    Case("statistics without gradients", detached_statistics, OTHER),
    Case("no gradients at all", torch.no_grad()(plain), "cut off from the gradient"),
    Case("inference inside", torch.inference_mode()(plain), "cut off from the gradient"),
    Case("a weight that learns beside its input only", weight_for_inputs, "gradient", effect=True),
]  # fmt: skip


def retained(self, x):
    if x.requires_grad and not x.is_leaf:
        x.retain_grad()
    return plain(self, x)


def scaled_by_gradient(self, x):
    return plain(self, x) * (1.0 if self.weight.grad is None else 2.0)


GRADIENT += [
    Case("the input's gradient kept", retained, "keep gradients", effect=True),
    Case("the weight's gradient read", scaled_by_gradient, "reads or steers gradients", effect=True),
]

IMPOSTORS = [*WEIGHT, *OUTPUT, *GRADIENT]
