"""A norm made by hand, and what is put to it: the parts of the crafted classes of tests/unit/patching/formula."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

N = 32
ODD_WEIGHTS = [1e6, -1e6, 1e3, -40.0, 7.0, -3.5, 1e-4, -1e-7]
WEIGHTS = {
    "mild": torch.linspace(0.5, 1.5, N),
    "wide": torch.cat([torch.linspace(0.5, 1.5, N // 2), torch.tensor(ODD_WEIGHTS), torch.zeros(N // 2 - 8)]),
    "nan": torch.cat([torch.ones(N - 2), torch.tensor([float("nan"), float("inf")])]),
}


def mean_square(h):
    return h.pow(2).mean(-1, keepdim=True)


def rms(x, eps=1e-6):
    h = x.float()
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)


def plain(self, x):
    return (self.weight * rms(x)).to(x.dtype)


class Crafted(nn.Module):
    def __init__(self, **own):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(N)), nn.Parameter(torch.zeros(N))
        self.eps = 1e-6
        for name, value in own.items():
            setattr(self, name, copy.deepcopy(value))


@dataclass
class Case:
    """One crafted class, and a call of it.

    Args:
        name: what it does. forward: its forward.
        why: words of the reason that the report gives, where it is to be refused.
        weight: one of `WEIGHTS`. x: shape of the input, or what makes it. scale: what normal input is multiplied with.
        dy: what a normal gradient of the output is multiplied with. dtype: of input and module.
        context: what the call is made in. train: in train mode.
        members: further members of the class. own: attributes of its instance. base: its base class.
        change: what is done to the module after it was patched.
        effect: what it does besides shows in no result, or not here; so the call need not tell it from `like`.
        like: the forward that it could be taken for.
    """

    name: str
    forward: Any
    why: str = ""
    weight: str = "mild"
    x: Any = (2, 3, N)
    scale: float = 1.0
    dy: float = 1.0
    dtype: torch.dtype = torch.float32
    context: Any = torch.enable_grad
    train: bool = False
    members: dict = field(default_factory=dict)
    own: dict = field(default_factory=dict)
    base: type = Crafted
    change: Any = None
    effect: bool = False
    like: Any = plain

    def make(self):
        module = type("CraftedRMSNorm", (self.base,), {"forward": self.forward, **self.members})(**self.own)
        with torch.no_grad():
            module.weight.copy_(WEIGHTS[self.weight])
        return module

    def imitated(self):
        """The norm that it could be taken for."""
        return replace(self, forward=self.like).make()

    def ready(self, module):
        """A copy of the module as it is when it is called."""
        module = copy.deepcopy(module).to(self.dtype).train(self.train)
        if self.change is not None:
            self.change(module)
        return module

    def run(self, module):
        """[output, gradients of input and weight], or [output] where there are no gradients."""
        generator = torch.Generator().manual_seed(5)
        x = self.x() if callable(self.x) else self.scale * torch.randn(self.x, generator=generator)
        with self.context():
            # A view of what was given, so that its strides and its place in memory count.
            x = x.to(self.dtype).detach().clone() if x.storage_offset() == 0 else x.detach()
            if not torch.is_grad_enabled():
                return [module(x)]
            y = module(x.requires_grad_())
            if not y.requires_grad:
                return [y]
            module.weight.grad = None
            y.backward(self.dy * torch.randn(y.shape, generator=generator).to(y.dtype))  # hooks on leaves count too
            return [y.detach(), x.grad, module.weight.grad]


def equal(ours, theirs):
    """Whether dtype and every element are equal, NaN to NaN."""
    return len(ours) == len(theirs) and all(map(_equal, ours, theirs))


def _equal(a, b):
    if a is None or b is None:
        return a is b
    same = torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    return a.dtype == b.dtype and same
