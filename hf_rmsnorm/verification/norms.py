"""Norm by norm: every changed module on inputs of the reference run, against its original."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..formula import HALF_DTYPES
from .compare import ulp

MAX_DIFFERING = 1e-3
MAX_ULP = 2.0


@dataclass(frozen=True)
class NormCheck:
    """Verdict (b) for one module.

    Every element must lie within 2 ulp of the original's, and in bfloat16 and float16 at most 0.1 % of the elements
    (one, if there are fewer than 1000) may differ at all. ``worst_ulp`` is counted where the arithmetic happened: an
    element's ulp is that of the larger of |y| and the typical size, in its row, of the terms it is the sum of, as
    float32 rounds each of those. Those are weight * xhat and bias; xhat in turn is rstd * x less rstd * mean if the
    norm is centred. So an element that happens to be near zero is not asked to have relative accuracy that no order
    of summation gives, while a wrong eps (which moves the largest elements too) or a wrong rounding order (which
    changes a quarter of all elements) has nowhere to hide.

    Args:
        dtype: the coarser dtype of input and output, which is where the original rounds.
        elements: compared; 0 if the inputs did not reach the module or it does not map a tensor to one like it.
        differing: how many of them are not equal.
        worst_ulp: the largest difference.
        reason: why it failed, or why nothing was compared; empty otherwise.
    """

    path: str
    class_name: str
    dtype: str
    elements: int
    differing: int
    worst_ulp: float
    passed: bool
    reason: str = ""

    @property
    def differing_fraction(self) -> float:
        return self.differing / self.elements if self.elements else 0.0


@dataclass
class NormSample:
    """One recorded call of a module in the reference run, and what its original makes of it (float64 terms)."""

    args: tuple
    kwargs: dict
    y: torch.Tensor | None = None
    term_size: torch.Tensor | None = None


def changed_modules(reference: nn.Module, candidate: nn.Module) -> list[str]:
    """Paths of the leaf modules that compute something else: of another class, or with another plain attribute."""
    others = dict(candidate.named_modules())
    return [
        path
        for path, module in reference.named_modules()
        if path in others
        and next(module.children(), None) is None
        and (type(module) is not type(others[path]) or _settings(module) != _settings(others[path]))
    ]


def _settings(module: nn.Module) -> dict:
    return {k: v for k, v in vars(module).items() if k != "training" and isinstance(v, (bool, int, float))}


@contextmanager
def recording(model: nn.Module, paths: Iterable[str], rows: int):
    """Record, per path, calls of the module until about ``rows`` rows of its last dimension were seen.

    Yields:
        dict of path to list of :class:`NormSample`, filled while the model runs; the tensors are copies.
    """
    samples: dict[str, list[NormSample]] = {path: [] for path in paths}
    seen = dict.fromkeys(samples, 0)

    def hook_for(path):
        def hook(module, args, kwargs):
            x = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), None)
            if x is None or not x.is_floating_point() or x.dim() == 0 or x.numel() == 0 or seen[path] >= rows:
                return
            weight = getattr(module, "weight", None)
            # the dimensions a weight spans belong together; the ones before them are many of the same
            free = x.dim() - (weight.dim() if isinstance(weight, torch.Tensor) else 1)
            lead = _first_rows(x.shape, free, rows - seen[path])
            args, kwargs = tree_map(lambda v: _cut(v, x.shape, lead), (args, kwargs))
            seen[path] += math.prod(lead) * math.prod(x.shape[len(lead) : -1])
            samples[path].append(NormSample(args, kwargs))

        return hook

    handles = []
    try:
        for path in samples:
            module = model.get_submodule(path)
            handles.append(module.register_forward_pre_hook(hook_for(path), with_kwargs=True))
        yield samples
    finally:
        for handle in handles:
            handle.remove()


def _first_rows(shape: torch.Size, free: int, rows: int) -> tuple[int, ...]:
    """Sizes of the first (at most two) free dimensions such that what is kept has about ``rows`` rows."""
    lead = list(shape[: min(free, 2)])
    inner = math.prod(shape[len(lead) : -1])
    for i in range(len(lead)):
        lead[i] = max(1, min(lead[i], rows // (math.prod(lead[i + 1 :]) * inner)))
    return tuple(lead)


def _cut(value, shape: torch.Size, lead: tuple[int, ...]):
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape[: len(lead)] == shape[: len(lead)]:
        value = value[tuple(slice(n) for n in lead)]
    return value.detach().clone()


def run_originals(model: nn.Module, samples: dict[str, list[NormSample]]) -> None:
    """Fill in what the original modules return for the recorded calls, and the size of the terms behind it."""
    for path, calls in samples.items():
        module = model.get_submodule(path)
        for call in calls:
            x = next(v for v in (*call.args, *call.kwargs.values()) if isinstance(v, torch.Tensor))
            y = module(*call.args, **call.kwargs)
            if isinstance(y, torch.Tensor) and y.shape == x.shape:
                call.y, call.term_size = y, _term_size(module, call, x, y)


def _term_size(module: nn.Module, call: NormSample, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Typical size, per row, of the terms each element is the sum of; found by asking the module, not its class."""

    def at(value: float) -> torch.Tensor:
        swap = {id(x): torch.full_like(x, value)}
        args, kwargs = tree_map(lambda v: swap.get(id(v), v), (call.args, call.kwargs))
        return module(*args, **kwargs).double().nan_to_num()

    bias = at(0.0)  # xhat is 0 there
    size = (y.double() - bias).square().mean(-1, keepdim=True).sqrt()
    if torch.equal(at(1.0), bias):  # centred: a constant row has xhat = 0
        spread, mean = torch.std_mean(x.double(), -1, correction=0, keepdim=True)
        size = size * (1 + mean.abs() / spread.clamp_min(1e-30))
    return size + bias.abs()


def check_norms(model: nn.Module, samples: dict[str, list[NormSample]], originals: dict[str, str]) -> tuple:
    """Run the candidate's modules on the recorded inputs and judge them.

    Args:
        model: the candidate.
        samples: from :func:`recording`, completed by :func:`run_originals`.
        originals: path to class name.

    Returns:
        One :class:`NormCheck` per path.
    """
    return tuple(_check(path, originals[path], model.get_submodule(path), calls) for path, calls in samples.items())


def _check(path: str, class_name: str, module: nn.Module, calls: list[NormSample]) -> NormCheck:
    if not calls:
        return NormCheck(path, class_name, "", 0, 0, 0.0, True, "not reached by these inputs")
    calls = [call for call in calls if call.y is not None]
    if not calls:
        return NormCheck(path, class_name, "", 0, 0, 0.0, True, "does not map a tensor to one of the same shape")
    elements = differing = flipped = 0
    worst = 0.0
    dtype = calls[0].y.dtype
    for call in calls:
        x = next(v for v in (*call.args, *call.kwargs.values()) if isinstance(v, torch.Tensor))
        y = module(*call.args, **call.kwargs)
        if y.dtype != call.y.dtype or y.shape != call.y.shape:
            reason = f"returns {y.dtype} {tuple(y.shape)}, the original {call.y.dtype} {tuple(call.y.shape)}"
            return NormCheck(path, class_name, str(dtype), 0, 0, math.inf, False, reason)
        dtype = max(x.dtype, y.dtype, key=lambda d: torch.finfo(d).eps)
        d = (y.double() - call.y.double()).abs()
        d = torch.where(y.isnan() == call.y.isnan(), torch.where(y.isnan() | (y == call.y), 0.0, d), math.inf)
        # float32 rounds the terms; only what comes out is rounded to half precision
        fine = ulp(torch.maximum(call.term_size, call.y.double().abs()), torch.float32)
        step = torch.maximum(ulp(call.y, dtype), fine)
        worst = max(worst, (d / step).nan_to_num(nan=math.inf, posinf=math.inf).max().item())
        differing += (d > 0).sum().item()
        flipped += (d > (MAX_ULP * fine if y.dtype == torch.float32 else 0.0)).sum().item()
        elements += d.numel()
    reason = ""
    if worst > MAX_ULP:
        reason = f"an element is {worst:.3g} ulp away, {MAX_ULP:g} are allowed"
    if dtype in HALF_DTYPES and flipped > max(1, MAX_DIFFERING * elements):
        reason = f"{flipped / elements:.2%} of the elements differ, {MAX_DIFFERING:.1%} are allowed"
    name = str(dtype).removeprefix("torch.")
    return NormCheck(path, class_name, name, elements, differing, worst, not reason, reason)
