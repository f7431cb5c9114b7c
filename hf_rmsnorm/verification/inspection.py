"""The mean of each norm's input on real text, and what dropping it would cost: why a naive swap is no conversion.

LayerNorm subtracts the mean of its input, RMSNorm does not. Where the mean is small beside the RMS the two nearly
agree; where it is not, a LayerNorm that is merely replaced gives another model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import nn

from ..patching import patched
from .noise import compare_logits


@dataclass(frozen=True)
class NormInput:
    """The input of one norm over some text.

    Args:
        path, class_name: of the module.
        centered: whether it is a LayerNorm.
        rows: vectors seen.
        median, largest: of |mean| / RMS over those rows; 0 where a LayerNorm is an RMSNorm, at most 1.
    """

    path: str
    class_name: str
    centered: bool
    rows: int
    median: float
    largest: float


@dataclass(frozen=True)
class NaiveSwap:
    """The model with every LayerNorm replaced by an RMSNorm of the same weight, bias and eps, nothing else changed.

    ``kl`` is KL(model || swapped) per token in nats, ``top1`` the share of tokens whose likeliest word stays.
    """

    kl: float
    top1: float
    perplexity: float


@dataclass(frozen=True)
class Inspection:
    """`inspect_norms`' result: one `NormInput` per norm that ran, in the order of the model's modules."""

    norms: tuple[NormInput, ...]
    tokens: int
    perplexity: float | None = None
    naive: NaiveSwap | None = None

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return asdict(self)


def inspect_norms(model: nn.Module, inputs: Mapping | torch.Tensor) -> Inspection:
    """Run model on inputs and measure the mean of every norm's input, and the cost of swapping norms naively.

    Args:
        model: any model that `patch_model` takes; it is run as it is, in evaluation mode, and left unchanged.
        inputs: token ids (batch, tokens), or keyword arguments.

    Returns:
        An `Inspection`. Perplexity and the naive swap need logits over a vocabulary and ``input_ids``; they are None
        elsewhere, and `naive` also where the model has no LayerNorm.
    """
    given = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    with patched(model) as report:
        formulas = {record.path: record.formula for record in report.swapped}
        layer_norms = {record.path for record in report.swapped if record.formula.centered or record.converted}
    training, ids = model.training, given.get("input_ids")
    ratios: dict[str, list[torch.Tensor]] = {path: [] for path in formulas}

    def record(path):
        return lambda module, args, kwargs: ratios[path].append(_mean_over_rms(_first_tensor(args, kwargs)))

    try:
        model.eval()
        with _hooks(model, {path: record(path) for path in formulas}, before=True):
            logits = _logits(model, given)
        naive = None
        centered = {path: formulas[path].eps for path in formulas if path in layer_norms and ratios[path]}
        if logits is not None and ids is not None and centered:
            with _hooks(model, {path: _as_rms(model.get_submodule(path), eps) for path, eps in centered.items()}):
                swapped = _logits(model, given)
            rows, others = logits.flatten(0, -2), swapped.flatten(0, -2)
            difference, _ = compare_logits([rows], [others], [rows.double()])
            naive = NaiveSwap(difference.kl_mean, difference.top1_agreement, _perplexity(swapped, ids))
    finally:
        model.train(training)
    norms = tuple(
        NormInput(
            path, type(model.get_submodule(path)).__name__, path in layer_norms, len(seen),
            seen.median().item(), seen.max().item(),
        )
        for path, seen in ((path, torch.cat(found)) for path, found in ratios.items() if found)
    )  # fmt: skip
    perplexity = None if logits is None or ids is None else _perplexity(logits, ids)
    return Inspection(norms, 0 if ids is None else ids.numel(), perplexity, naive)


@contextmanager
def _hooks(model: nn.Module, hooks: Mapping, before: bool = False):
    handles = [
        model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)
        if before
        else model.get_submodule(path).register_forward_hook(hook, with_kwargs=True)
        for path, hook in hooks.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_tensor(args: Sequence, kwargs: Mapping) -> torch.Tensor:
    return next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))


def _mean_over_rms(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().double().flatten(0, -2)
    return (x.mean(-1).abs() / x.square().mean(-1).sqrt().clamp_min(torch.finfo(torch.float64).tiny)).cpu()


def _as_rms(module: nn.Module, eps: float):
    """A hook that gives the output the module would have without centring; weight and bias are read from its output."""

    def hook(module, args, kwargs, output):
        x = _first_tensor(args, kwargs)
        probe = torch.zeros((2, x.shape[-1]), dtype=x.dtype, device=x.device)
        probe[1, 0::2], probe[1, 1::2] = 1.0, -1.0
        probe[1] *= 64.0  # so large that eps is nothing, and of zero mean where the size is even
        forward = type(module).forward
        bias, scaled = forward(module, probe).double()
        h = probe[1].double()
        h = h - h.mean()
        weight = (scaled - bias) / (h * (h.square().mean() + eps).rsqrt())
        x = x.double()
        y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight + bias
        return y.to(output.dtype)

    return hook


@torch.no_grad()
def _logits(model: nn.Module, given: dict) -> torch.Tensor | None:
    return getattr(model(**given), "logits", None)


def _perplexity(logits: torch.Tensor, ids: torch.Tensor) -> float:
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten().to(logits.device))
    return math.exp(loss.item()) if loss.item() < 700 else math.inf
