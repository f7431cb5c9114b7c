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
from .float64 import in_float64

MAX_DIFFERING = 1e-3
MAX_ULP = 2.0
_MAX_AMPLIFIED = 0.05  # of elements in rows nearly constant; a wrong rounding order changes five times as many


@dataclass(frozen=True)
class NormCheck:
    """Verdict (b) for one module.

    Every element must lie within 2 ulp of the original's, and in bfloat16 and float16 at most 0.1 % of the elements
    (one, if there are fewer than 1000) may differ at all; times 1 + |mean|/std of the rows if the norm is centred,
    since subtracting a mean loses that much of float32 before anything is rounded. How the 2 ulp are counted:

    - An ulp of float32 is 2^-23 of the largest term in the element's row, where the terms of an element are
      weight * xhat and bias, and xhat in turn is rstd * x less rstd * mean if the norm is centred. That is the scale
      at which float32 rounds sums: an element that comes out near zero cannot have more accuracy than its terms. An
      ulp of half precision, to which only the result is rounded, is that of the element itself.
    - From the span between what the original returns and what it returns in float64. The original in float32 is off
      by up to 2 ulp too; a candidate that errs to the other side is not charged for both.

    Nothing hides behind that scale: a wrong eps moves the largest element of a row by the same fraction as all others,
    and a wrong rounding order changes a quarter of all elements in half precision.

    Args:
        dtype: the coarser dtype of input and output, which is where the original rounds.
        elements: compared; 0 if the inputs did not reach the module or it does not map a tensor to one like it.
        differing: how many of them are not equal.
        allowed_fraction: of elements that may differ, in half precision.
        worst_ulp: the largest distance, counted as above.
        reason: why it failed, or why nothing was compared; empty otherwise.
    """

    path: str
    class_name: str
    dtype: str
    elements: int
    differing: int
    allowed_fraction: float
    worst_ulp: float
    passed: bool
    reason: str = ""

    @property
    def differing_fraction(self) -> float:
        return self.differing / self.elements if self.elements else 0.0


@dataclass
class NormSample:
    """One recorded call of a module in the reference run, and what its original makes of it.

    ``y`` is its output, ``exact`` the same in float64, ``largest_term`` (one per row) the size of what they are
    sums of, ``amplification`` (one per row) by how much rounding errors of x's size grow: 1 + |mean|/std if centred.
    """

    args: tuple
    kwargs: dict
    y: torch.Tensor | None = None
    exact: torch.Tensor | None = None
    largest_term: torch.Tensor | None = None
    amplification: torch.Tensor | None = None

    @property
    def x(self) -> torch.Tensor:
        return next(v for v in (*self.args, *self.kwargs.values()) if isinstance(v, torch.Tensor))


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
    """Complete the recorded calls with what the model's own modules return for them."""
    for path, calls in samples.items():
        module = model.get_submodule(path)
        for call in calls:
            y = module(*call.args, **call.kwargs)
            if isinstance(y, torch.Tensor) and y.shape == call.x.shape:
                with in_float64(module):
                    exact = module(*call.args, **call.kwargs)
                call.y, call.exact = y, exact
                call.largest_term, call.amplification = _terms(module, call)


def _terms(module: nn.Module, call: NormSample) -> tuple[torch.Tensor, torch.Tensor]:
    """Found by asking the module for the output of constant rows, not by knowing its class."""
    x = call.x

    def constant(value: float) -> torch.Tensor:
        swap = {id(x): torch.full_like(x, value)}
        args, kwargs = tree_map(lambda v: swap.get(id(v), v), (call.args, call.kwargs))
        return module(*args, **kwargs).double().nan_to_num()

    bias = constant(0.0)  # xhat is 0 there
    amplification = torch.ones_like(x[..., :1], dtype=torch.float64)
    if torch.equal(constant(1.0), bias):  # xhat is 0 there too: centred
        spread, mean = torch.std_mean(x.double(), -1, correction=0, keepdim=True)
        amplification += mean.abs() / spread.clamp_min(1e-30)
    terms = (call.exact - bias).abs() * amplification + bias.abs()
    return terms.amax(-1, keepdim=True), amplification


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
        return NormCheck(path, class_name, "", 0, 0, 0.0, 0.0, True, "not reached by these inputs")
    calls = [call for call in calls if call.y is not None]
    if not calls:
        return NormCheck(path, class_name, "", 0, 0, 0.0, 0.0, True, "does not map a tensor to one of the same shape")
    elements = differing = flipped = 0
    worst = 0.0
    dtype = calls[0].y.dtype
    for call in calls:
        y = module(*call.args, **call.kwargs)
        if y.dtype != call.y.dtype or y.shape != call.y.shape:
            reason = f"returns {y.dtype} {tuple(y.shape)}, the original {call.y.dtype} {tuple(call.y.shape)}"
            return NormCheck(path, class_name, str(dtype).removeprefix("torch."), 0, 0, 0.0, math.inf, False, reason)
        dtype = max(call.x.dtype, y.dtype, key=lambda d: torch.finfo(d).eps)
        ours, theirs = y.double(), call.y.double()
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        off = torch.maximum(torch.minimum(theirs, call.exact) - ours, ours - torch.maximum(theirs, call.exact))
        fine = call.largest_term * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        step = torch.maximum(ulp(theirs, dtype), fine) if dtype in HALF_DTYPES else fine.clamp_min(1e-300)
        distance = torch.where(same, 0.0, off.clamp_min(0.0) / step).nan_to_num(nan=math.inf, posinf=math.inf)
        worst = max(worst, distance.max().item())
        differing += (~same).sum().item()
        # a float32 output of half-precision input holds rounded values times float32 weights
        flipped += ((ours - theirs).abs() > MAX_ULP * fine if y.dtype == torch.float32 else ~same).sum().item()
        elements += y.numel()
    amplification = sum(c.amplification.mean().item() * c.y.numel() for c in calls) / elements
    allowed = min(MAX_DIFFERING * amplification, _MAX_AMPLIFIED)
    reason = ""
    if worst > MAX_ULP:
        reason = f"an element is {worst:.3g} ulp away, {MAX_ULP:g} are allowed"
    if dtype in HALF_DTYPES and flipped > max(1, allowed * elements):
        reason = f"{flipped / elements:.2%} of the elements differ, {allowed:.2%} are allowed"
    name = str(dtype).removeprefix("torch.")
    return NormCheck(path, class_name, name, elements, differing, allowed, worst, not reason, reason)
