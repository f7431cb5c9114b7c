"""Classes that compute a norm of the family in odd spellings, and nothing else."""

import contextlib
import functools
import math

import torch
import torch.nn.functional as F
from crafted import Case, Crafted, N, mean_square, plain, rms
from torch.utils.checkpoint import checkpoint

EPS = 1e-6


def upcast(compute, bias=False):
    """The weight times what is computed of rows in float32, in the input's dtype."""

    def forward(self, x):
        y = self.weight * compute(x.float())
        return (y + self.bias if bias else y).to(x.dtype)

    return forward


def by_square(square):
    """An RMSNorm with its mean square computed so."""
    return upcast(lambda h: h * torch.rsqrt(square(h) + EPS))


def by_root(divide):
    """An RMSNorm with its root computed so."""
    return upcast(lambda h: divide(h, mean_square(h) + EPS))


def by_rows(rows):
    """An RMSNorm of rows that are put into another shape."""
    return upcast(lambda h: rows(h).view(h.shape))


def hat(r):
    return r * torch.rsqrt(mean_square(r) + EPS)


def length(h):
    return torch.linalg.vector_norm(h, dim=-1, keepdim=True)


def product(h):
    return (h[..., None, :] @ h[..., None])[..., 0]


def dimension_first(h):
    h = h.transpose(0, -1)
    return (h * torch.rsqrt(h.pow(2).mean(0, keepdim=True) + EPS)).transpose(0, -1)


def in_float64(self, x):
    return (self.weight.double() * hat(x.double())).to(x.dtype)


def fused_multiply(self, x):
    return torch.addcmul(torch.zeros_like(x, dtype=torch.float32), self.weight.float(), rms(x)).to(x.dtype)


SQUARES = [
    Case("x / sqrt", by_root(lambda h, v: h / torch.sqrt(v))),
    Case("x * 1 / sqrt", by_root(lambda h, v: h * (1.0 / torch.sqrt(v)))),
    Case("x * reciprocal", by_root(lambda h, v: h * torch.sqrt(v).reciprocal())),
    Case("x * pow(-0.5)", by_root(lambda h, v: h * v.pow(-0.5))),
    Case("x.div", by_root(lambda h, v: h.div(v**0.5))),
    Case("in place of a copy", by_root(lambda h, v: h.clone().mul_(torch.rsqrt(v)))),
    Case("h * h", by_square(lambda h: (h * h).mean(-1, keepdim=True))),
    Case("h ** 2", by_square(lambda h: (h**2).mean(dim=-1, keepdim=True))),
    Case("square()", by_square(lambda h: h.square().mean(-1, True))),
    Case("unsqueezed", by_square(lambda h: h.pow(2).mean(-1).unsqueeze(-1))),
    Case("a sum by the shape", by_square(lambda h: (h * h).sum(-1, keepdim=True) / h.shape[-1])),
    Case("a sum by size(-1)", by_square(lambda h: (h * h).sum(-1, keepdim=True) / h.size(-1))),
    Case("a sum by a constant", by_square(lambda h: (h * h).sum(-1, keepdim=True) / N)),
    Case("einsum", by_square(lambda h: torch.einsum("...i,...i->...", h, h)[..., None] / N)),
    Case("a product of matrices", by_square(lambda h: product(h) / N)),
    Case("norm() of the row", by_square(lambda h: h.norm(dim=-1, keepdim=True).pow(2) / N)),
    Case("vector_norm of the row", by_square(lambda h: length(h).square() / N)),
    Case("vector_norm by the root", by_square(lambda h: (length(h) * N**-0.5) ** 2)),
    Case("the last dimension first", upcast(dimension_first)),
    Case("rows flattened", by_rows(lambda h: hat(h.reshape(-1, N)))),
    Case("rows flattened by shape", by_rows(lambda h: hat(h.reshape(math.prod(h.shape[:-1]), h.shape[-1])))),
    Case("row by row", by_rows(lambda h: torch.stack([hat(r) for r in h.reshape(-1, N)]))),
    Case("in chunks", by_rows(lambda h: torch.cat([hat(c) for c in h.split(64, dim=0)]))),
    Case("addcmul", fused_multiply),
    Case("in float64", in_float64),
]


def of_input_dtype(self, x):
    return self.weight * rms(x).to(x.dtype)


def multiplied_out(self, x):
    return (rms(x) * self.weight.float() + rms(x)).to(x.dtype)


def factor_first(self, x):
    h = x.float()
    return (h * (torch.rsqrt(mean_square(h) + EPS) * self.weight.float())).to(x.dtype)


def if_there_is_one(self, x):
    return (rms(x) * self.weight if self.weight is not None else rms(x)).to(x.dtype)


def torch_in_float32(self, x):
    return F.rms_norm(x.float(), (N,), self.weight.float(), self.eps).to(x.dtype)


WEIGHTS = [
    Case("rounded before the weight", of_input_dtype),
    Case("type_as", lambda s, x: rms(x).type_as(x) * s.weight),
    Case("a weight of two dimensions", lambda s, x: (rms(x) * s.weight.view(1, -1)).to(x.dtype)),
    Case("a weight broadcast", lambda s, x: (rms(x) * s.weight.expand(x.shape)).to(x.dtype)),
    Case("a weight with one added", lambda s, x: (rms(x) * (1.0 + s.weight.float())).to(x.dtype)),
    Case("a weight with one added, multiplied out", multiplied_out),
    Case("a weight in float32", lambda s, x: (rms(x) * s.weight.float()).to(x.dtype)),
    Case("a weight times the factor first", factor_first),
    Case("a weight of a dictionary", lambda s, x: (s._parameters["weight"] * rms(x)).to(x.dtype)),
    Case("a weight of getattr", lambda s, x: (getattr(s, "weig" + "ht") * rms(x)).to(x.dtype)),
    Case("a weight if there is one", if_there_is_one),
    Case("a weight and a bias", lambda s, x: (s.weight * rms(x) + s.bias).to(x.dtype)),
    Case("torch's own function", lambda s, x: F.rms_norm(x, (N,), s.weight, 1e-6)),
    Case("torch's own function of the shape", lambda s, x: F.rms_norm(x, x.shape[-1:], weight=s.weight, eps=s.eps)),
    Case("torch's own function in float32", torch_in_float32),
]


def centre(h):
    return h - h.mean(-1, keepdim=True)


def variance(h, **how):
    return h.var(-1, keepdim=True, **how)


def var_mean(h):
    v, m = torch.var_mean(h, -1, correction=0, keepdim=True)
    return (h - m) * torch.rsqrt(v + EPS)


def layer_norm_in_float32(self, x):
    return F.layer_norm(x.float(), (N,), self.weight.float(), self.bias.float(), self.eps).to(x.dtype)


def layer_norm_of_its_shape(self, x):
    return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


CENTRED = [
    Case("mean and variance", upcast(lambda h: centre(h) * torch.rsqrt(mean_square(centre(h)) + EPS))),
    Case("centred, then an RMSNorm", upcast(lambda h: hat(centre(h)), bias=True)),
    Case("var of unbiased=False", upcast(lambda h: centre(h) / (variance(h, unbiased=False) + EPS).sqrt(), bias=True)),
    Case("var of correction 0", upcast(lambda h: centre(h) * torch.rsqrt(variance(h, correction=0) + EPS))),
    Case("var_mean", upcast(var_mean)),
    Case("layer_norm", lambda s, x: F.layer_norm(x, (N,), s.weight, s.bias, s.eps)),
    Case("layer_norm in float32", layer_norm_in_float32),
    Case("layer_norm without a weight", lambda s, x: F.layer_norm(x, x.shape[-1:], eps=1e-5)),
    Case("layer_norm, then the weight", lambda s, x: F.layer_norm(x, x.shape[-1:], eps=1e-5) * s.weight + s.bias),
    Case("layer_norm of its shape", layer_norm_of_its_shape, members={"normalized_shape": (N,)}),
]


class Exact(torch.autograd.Function):
    """RMSNorm with a backward by hand."""

    @staticmethod
    def forward(ctx, x, weight):
        h = x.float()
        rstd = torch.rsqrt(mean_square(h) + 1e-6)
        ctx.save_for_backward(x, weight, rstd)
        return (weight * (h * rstd)).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        hat, g = x.float() * rstd, dy.float() * weight.float()
        dx = rstd * (g - hat * (g * hat).mean(-1, keepdim=True))
        dweight = (dy.float() * hat).sum(list(range(dy.dim() - 1)))
        return dx.to(x.dtype), dweight.to(weight.dtype)


@torch.jit.script
def scripted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    h = x.float()
    return (weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


def decorated(function):
    @functools.wraps(function)
    def forward(self, x):
        return function(self, x)

    return forward


def guarded(self, x):
    if x.shape[-1] != self.weight.shape[0]:
        raise ValueError(f"rows of {x.shape[-1]}, not of {self.weight.shape[0]}")
    assert x.dim() >= 1 and x.numel() > 0
    return plain(self, x)


def made_contiguous(self, x):
    if not x.is_contiguous():
        x = x.contiguous()
    return plain(self, x)


def on_its_device(self, x):
    return (self.weight.to(x.device) * rms(x)).to(x.dtype)


def of_a_device_with_autocast(self, x):
    kind = x.device.type if x.device.type != "mps" else "cpu"
    with torch.autocast(device_type=kind, enabled=False):
        return plain(self, x)


def padded(self, x):
    rest = -x.shape[-1] % 8
    h = F.pad(x, (0, rest)) if rest else x
    factor = torch.rsqrt(h.float().pow(2).sum(-1, keepdim=True) / x.shape[-1] + 1e-6)
    return (self.weight * (x.float() * factor)).to(x.dtype)


def checkpointed(self, x):
    if self.training:
        return checkpoint(functools.partial(plain, self), x, use_reentrant=False)
    return plain(self, x)


def by_batch(self, x):
    if x.dim() < 2:
        return plain(self, x)
    return torch.stack([plain(self, x[i]) for i in range(len(x))])


def many_options(self, x, *args, scale=None, **kwargs):
    return plain(self, x) if scale is None else plain(self, x) * scale


class Inherited(Crafted):
    def forward(self, x):
        return plain(self, x)


def plain_in(context, self, x):
    with context:
        return plain(self, x)


def chosen_by_flags(self, x):
    return plain(self, x) if self.upcast and not self.other else self.weight * F.normalize(x, dim=-1)


def with_eps(self, x):
    return (self.weight * rms(x, self.floor)).to(x.dtype)


def of_the_instance(name):
    return property(lambda self: getattr(self, name))


FORMS = [
    Case("a Function", lambda s, x: Exact.apply(x, s.weight)),
    Case("a scripted function", lambda s, x: scripted(x, s.weight)),
    Case("a decorated forward", decorated(plain)),
    Case("a guard of the size", guarded),
    Case("input made contiguous", made_contiguous),
    Case("its weight on the input's device", on_its_device),
    Case("autocast off on the input's device", of_a_device_with_autocast),
    Case("padded rows", padded),
    Case("recomputed in train mode", checkpointed, train=True),
    Case("element by element of the batch", by_batch),
    Case("many options", many_options),
    Case("a method of its own", lambda s, x: s.normalise(x), members={"normalise": plain}),
    Case("a class method", lambda s, x: s.hat(x) * s.weight, members={"hat": classmethod(lambda cls, x: rms(x))}),
    Case("inherited", Inherited.forward, base=Inherited),
    Case("in a context", lambda s, x: plain_in(contextlib.nullcontext(), s, x)),
    Case("a property for eps", with_eps, members={"floor": of_the_instance("eps")}),
    Case("eps of the class", with_eps, members={"floor": 1e-4}),
    Case("flags that choose", chosen_by_flags, members={"upcast": True, "other": False}),
    Case("another name for the weight", lambda s, x: s.gamma * rms(x), members={"gamma": of_the_instance("weight")}),
]

NORMS = [*SQUARES, *WEIGHTS, *CENTRED, *FORMS]
