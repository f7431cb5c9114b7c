"""Compares the gradients of patched norms and layers with float64, by the error of the
unpatched modules.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .context import one_line
from .float64 import Float64Mode
from .noise import Sizes
from .tolerance import ulp, within

CALLS = 4  # whose largest eager error counts: with few rows the error varies by chance


@dataclass(frozen=True)
class GradientCheck:
    """One gradient against float64: each error at most 1.5 times eager's, plus an ulp
    of the largest value.

    Eager's error is the largest on this input and on three similar ones. For a fused
    layer, eager is the unfused layer.
    """

    path: str
    gradient: str  # of what: the input, or a parameter by its name
    dtype: str = ""
    ours_max: float = math.inf
    ours_rms: float = math.inf
    eager_max: float = math.inf
    eager_rms: float = math.inf
    ulp: float = 0.0  # of the largest gradient, in its dtype
    reason: str = ""  # why it failed

    @property
    def passed(self) -> bool:
        """Whether both errors are finite and within the limit."""
        both = within(self.ours_max, self.eager_max, self.ulp) and within(
            self.ours_rms, self.eager_rms, self.ulp
        )
        return both and not self.reason

    @property
    def words(self) -> str:
        """The line of a report."""
        return (
            self.reason
            or f"error {self.ours_max:.3g}, the original's {self.eager_max:.3g}"
        )


def check_norm_gradients(
    path: str, norm: nn.Module, x: torch.Tensor
) -> list[GradientCheck]:
    """Check the gradients of a patched norm, called without its hooks, on rows x."""
    cls = type(norm)
    parameters = dict(norm.named_parameters(recurse=False))
    names = ["input", *parameters]
    twin = _in_double(norm)

    def fused(x):
        return [cls.forward(norm, x)]

    def eager(x):
        return [cls._hf_rmsnorm_base.forward(norm, x)]

    def exact(x):
        return [type(twin).forward(twin, x)]

    with torch.no_grad():
        cotangents = cotangents_of(eager(x))
    try:
        ours = gradients(fused, x, parameters.values(), cotangents)
    except Exception as error:  # whatever a broken backward raises is the verdict on it
        return [GradientCheck(path, "all", reason=f"raises {one_line(error)}")]
    theirs, right = [], []
    for number in range(CALLS):
        rows, dy = _reordered(
            cls._hf_rmsnorm_recipe.layout, number, alike(x, number), *cotangents
        )
        theirs.append(gradients(eager, rows, parameters.values(), [dy]))
        with Float64Mode():  # the casts to float32 in the norm's own forward included
            right.append(
                gradients(
                    exact, rows.double(), twin.parameters(recurse=False), [dy.double()]
                )
            )
    return list(judged(path, names, ours, theirs, right))


def judged(
    path: str, names: list[str], ours: list, theirs: list[list], exact: list[list]
) -> Iterator[GradientCheck]:
    """The verdict on each gradient; None is one that is not there.

    Args:
        ours: of one call.
        theirs, exact: eager's and float64's, of that call and of others like it.
    """
    for at, name in enumerate(names):
        right = exact[0][at]
        if ours[at] is None and right is None:
            continue
        if ours[at] is None or right is None:
            yield GradientCheck(path, name, reason="is missing on one side")
            continue
        pairs = [(a[at], b[at]) for a, b in zip(theirs, exact, strict=True)]
        errors = [
            Sizes(a.double() - b) for a, b in pairs if a is not None and b is not None
        ]
        error = Sizes(ours[at].double() - right)
        dtype = ours[at].dtype
        yield GradientCheck(
            path,
            name,
            dtype=str(dtype).removeprefix("torch."),
            ours_max=error.max,
            ours_rms=error.rms,
            eager_max=max(each.max for each in errors),
            eager_rms=max(each.rms for each in errors),
            ulp=ulp(right.abs().max(), dtype).item(),
        )


def gradients(
    function: Callable, x: torch.Tensor, parameters: Sequence, cotangents: list
) -> list:
    """Those of x and of the parameters, by one backward of ``function(x)``, a list of
    outputs.
    """
    x = x.detach().clone()
    wanted = [x, *parameters]
    with requiring_gradients(wanted), torch.enable_grad():
        pairs = zip(function(x), cotangents, strict=True)
        pairs = [(y, dy) for y, dy in pairs if y.requires_grad]
        outputs, cotangents = zip(*pairs, strict=True)
        return list(torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True))


@contextmanager
def requiring_gradients(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Inside, all of these leaves require gradients; afterwards those that did before."""
    frozen = [t for t in tensors if not t.requires_grad]
    try:
        for t in frozen:
            t.requires_grad_()
        yield
    finally:
        for t in frozen:
            t.requires_grad_(False)


def cotangents_of(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Random gradients of outputs: with a mean, and a part along y.

    Without these a norm's backward would have nothing to subtract.
    """
    generator = torch.Generator().manual_seed(0)
    cotangents = []
    for y in outputs:
        noise = torch.randn(y.shape, generator=generator).to(y.device)
        cotangents.append((noise + 0.5 + 0.5 * y.sign()).to(y.dtype))
    return cotangents


def alike(x: torch.Tensor, number: int) -> torch.Tensor:
    """An input like x, a little larger; 0: x itself."""
    return x * (1 + number / 16)


def _reordered(layout: str, number: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Each tensor with its rows in the same other order; unchanged for 0, or if rows
    are not the last dimension.
    """
    if not number or layout != "last":
        return list(tensors)
    count = tensors[0].shape[-2]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(number))
    return [t.index_select(-2, order.to(t.device)) for t in tensors]


def _in_double(norm: nn.Module) -> nn.Module:
    """The unpatched module with parameters in float64, sharing all else."""
    twin = copy.copy(norm)
    twin.__class__ = type(norm)._hf_rmsnorm_base
    doubles = {
        name: p if p is None else nn.Parameter(p.detach().double())
        for name, p in norm._parameters.items()
    }
    vars(twin)["_parameters"] = doubles
    return twin
