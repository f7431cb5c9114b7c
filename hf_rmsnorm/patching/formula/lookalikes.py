"""Names for what is nearly a norm of the family, so that a report can say why a module was left alone."""

from __future__ import annotations

import itertools

import torch

from .closeness import close
from .probe import Probe


def _statistics(x: torch.Tensor):
    centred = x - x.mean(-1, keepdim=True)
    return x, centred, x.pow(2).mean(-1, keepdim=True), centred.pow(2).mean(-1, keepdim=True)


def _variants(x: torch.Tensor):
    x, centred, square, variance = _statistics(x)
    unbiased = variance * x.shape[-1] / max(x.shape[-1] - 1, 1)
    length = x.pow(2).sum(-1, keepdim=True)
    yield "a LayerNorm with the unbiased variance, dividing by n - 1", centred * unbiased.rsqrt()
    yield "an L2 norm: it divides by the length of the row, without the mean", x * length.rsqrt()
    yield "a division by the standard deviation without centring", x * variance.rsqrt()
    yield "a division by the unbiased standard deviation without centring", x * unbiased.rsqrt()
    yield "a division by the variance without the root, centred", centred / variance
    yield "a division by the variance without the root or centring", x / variance
    yield "a division by the mean square without the root", x / square
    yield "centring alone", centred
    yield "a division by the mean magnitude", x / x.abs().mean(-1, keepdim=True)
    yield "an affine map", x


def describe(probe: Probe, x: torch.Tensor, y: torch.Tensor) -> str | None:
    """What the module computes on rows so large that eps is nothing, if it is one of the well-known look-alikes.

    Args:
        x: (rows, hidden_size) float32, the input.
        y: (rows, hidden_size), the module's output.
    """
    x, y = x.double(), y.double()
    tensors = [t.double() for name in probe.sizes if (t := getattr(probe.module, name)).shape == x.shape[-1:]]
    ones = [torch.ones((), dtype=torch.float64), *tensors]
    zeros = [torch.zeros((), dtype=torch.float64), *tensors]
    for scale, shift, offset in itertools.product(ones, zeros, (0.0, 1.0)):
        scale = scale + offset if scale.dim() else scale
        for name, hat in _variants(x):
            if close(hat * scale + shift, y, 1e-5):
                return f"it computes {name}"
    for scale, offset in itertools.product(tensors, (0.0, 1.0)):
        h = x * (scale + offset)
        if close(h * h.pow(2).mean(-1, keepdim=True).rsqrt(), y, 1e-5):
            return "it computes an RMSNorm of the weighted input: the weight is applied before the norm"
    return None
