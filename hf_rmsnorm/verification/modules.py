"""Norm by norm: every changed module on inputs of the reference run, against its original."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType, MethodType

import torch
from accelerate.hooks import AlignDevicesHook
from accelerate.utils import align_module_device
from torch import nn
from torch.utils._pytree import tree_map

from ..formula import HALF_DTYPES
from .tolerance import ulp

MAX_OFF_HALF = 1e-3
MAX_OFF_FLOAT = 1e-2
MAX_ULP = 2.0
WORST_ULP = 4.0
NOT_REACHED = "not reached by these inputs"
_ROWS = 4096  # of a parameter at a time between devices: bounds the memory a large vocabulary needs
_MAX_AMPLIFIED = 0.05  # of elements in rows nearly constant; a wrong rounding order changes five times as many


@dataclass(frozen=True)
class NormCheck:
    """Verdict (b) for one module: its output against the original's on the same input.

    At most 0.1 % of the elements in half precision and 1 % in float32 (or one element) may be off, and none by more
    than 4 ulp.

    - In bfloat16 and float16 an element is off if it differs at all. Two correct norms disagree only where float32
      noise tips the rounding, which happens to 1 element in 10,000; the wrong rounding order changes a quarter. A
      centred norm loses a factor 1 + |mean|/std of float32 before anything is rounded, so the share grows by that.
    - In float32 an element is off beyond 2 ulp, where an ulp is 2^-23 of the largest term in the element's row. The
      terms of an element are weight * xhat and bias; xhat in turn is rstd * x less rstd * mean if the norm is centred.
      That is the scale at which sums round: an element that comes out near zero cannot be more accurate than its
      terms. Each of two correct norms is up to 2 such ulp from float64, to either side, and a whole row at once,
      hence the few that may be off. Nothing hides behind that scale: a wrong eps moves the largest element of a row
      by the same fraction as all others.

    Args:
        dtype: the coarser dtype of input and output, which is where the original rounds.
        elements: compared; 0 if the inputs did not reach the module or it does not map a tensor to one like it.
        differing: how many of them are not equal.
        off: how many are off, as defined above.
        allowed: how many may be.
        worst_ulp: the largest difference, in ulp of half precision of the element or of float32 as defined above.
        reason: why it failed, or why nothing was compared; empty otherwise.
    """

    path: str
    class_name: str
    dtype: str
    elements: int
    differing: int
    off: int
    allowed: int
    worst_ulp: float
    passed: bool
    reason: str = ""

    @property
    def reached(self) -> bool:
        """Whether the inputs ran the module at all."""
        return self.reason != NOT_REACHED


@dataclass
class NormSample:
    """One recorded call of a module in the reference run, and what its original makes of it.

    ``y`` is its output. Per row, ``largest_term`` is the size of what y's elements are sums of, and ``amplification``
    by how much rounding errors of x grow: 1 + |mean|/std if the norm is centred, else 1. A call that has no floating
    tensor to compare is kept without its arguments.
    """

    args: tuple
    kwargs: dict
    y: torch.Tensor | None = None
    largest_term: torch.Tensor | None = None
    amplification: torch.Tensor | None = None

    @property
    def x(self) -> torch.Tensor | None:
        return next((v for v in (*self.args, *self.kwargs.values()) if isinstance(v, torch.Tensor)), None)


def changed_modules(reference: nn.Module, candidate: nn.Module) -> list[str]:
    """Paths of the leaf modules that may compute something else.

    They are of another class, or differ in a plain attribute, in the forward that runs, in a forward (pre-)hook, or in
    the value of a parameter or buffer. In doubt a module counts as changed: it is compared then, not condemned.
    """
    others = dict(candidate.named_modules())
    return [
        path
        for path, module in reference.named_modules()
        if path in others and next(module.children(), None) is None and _differ(module, others[path])
    ]


_OF_MODULES = {*vars(nn.Module()), "forward", "_hf_hook", "_old_forward"}  # `training` is among them
_PLAIN = (bool, int, float, complex, str, tuple, list, torch.dtype, type(None))


def _differ(a: nn.Module, b: nn.Module) -> bool:
    if type(a) is not type(b) or not _same_functions(a, b):
        return True
    ours, theirs = ({k: v for k, v in vars(m).items() if k not in _OF_MODULES} for m in (a, b))
    if ours.keys() != theirs.keys() or not all(_same_attribute(v, theirs[k], a, b) for k, v in ours.items()):
        return True
    with _present(a), _present(b):
        return not all(
            mine.keys() == other.keys() and all(_same_tensor(v, other[k]) for k, v in mine.items())
            for mine, other in ((a._parameters, b._parameters), (a._buffers, b._buffers))
        )


def _same_functions(a: nn.Module, b: nn.Module) -> bool:
    """Whether both run the same forward between the same hooks."""
    ours, theirs = (
        [_forward(m), *m._forward_pre_hooks.values(), None, *m._forward_hooks.values(), None, *_accelerate_hooks(m)]
        for m in (a, b)
    )
    return len(ours) == len(theirs) and all(_same_function(f, g, a, b) for f, g in zip(ours, theirs, strict=True))


def _forward(module: nn.Module):
    """What `module` calls; behind an accelerate hook, what the hook calls."""
    return vars(module).get("_old_forward" if "_hf_hook" in vars(module) else "forward", module.forward)


def _accelerate_hooks(module: nn.Module) -> list:
    """All but those that only move tensors."""
    hook = vars(module).get("_hf_hook")
    hooks = getattr(hook, "hooks", (hook,))
    return [hook for hook in hooks if hook is not None and type(hook) is not AlignDevicesHook]


def _same_function(f, g, a: nn.Module, b: nn.Module) -> bool:
    if isinstance(f, MethodType) and isinstance(g, MethodType) and f.__self__ is a and g.__self__ is b:
        f, g = f.__func__, g.__func__
    return f is g


def _same_attribute(v, w, a: nn.Module, b: nn.Module) -> bool:
    if isinstance(v, torch.Tensor) and isinstance(w, torch.Tensor):
        return _same_tensor(v, w)
    if isinstance(v, _PLAIN) or isinstance(w, _PLAIN):
        return type(v) is type(w) and v == w
    if isinstance(v, (FunctionType, MethodType)) or isinstance(w, (FunctionType, MethodType)):
        return _same_function(v, w, a, b)
    return True  # a config, say: what a forward reads from it is not known


def _same_tensor(v: torch.Tensor | None, w: torch.Tensor | None) -> bool:
    if v is None or w is None or v is w:
        return v is w
    if v.shape != w.shape or v.dtype != w.dtype or v.is_meta or w.is_meta:
        return False
    if v.device == w.device or v.dim() == 0:
        return torch.equal(v, w.to(v.device))
    return all(torch.equal(x, y.to(x.device)) for x, y in zip(v.split(_ROWS), w.split(_ROWS), strict=True))


def _present(module: nn.Module):
    """Has the parameters that accelerate keeps elsewhere on the module."""
    return align_module_device(module) if any(p.is_meta for p in module.parameters()) else nullcontext()


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
            if x is None or not x.is_floating_point() or x.dim() == 0 or x.numel() == 0:
                if not samples[path]:
                    samples[path].append(NormSample((), {}))
                return
            if seen[path] >= rows:
                return
            lead = _first_rows(x.shape, _free(x, getattr(module, "weight", None)), rows - seen[path])
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


def _free(x: torch.Tensor, weight) -> int:
    """How many leading dimensions are many of the same: those before the ones that a weight spans."""
    if not isinstance(weight, torch.Tensor):
        return x.dim() - 1
    if weight.shape != x.shape[-weight.dim() :] or weight.shape[:1] == x.shape[1:2]:
        return 1  # the weight spans another dimension, or it may: images with their channels first
    return x.dim() - weight.dim()


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
        for call in (call for call in calls if call.x is not None):
            y = module(*call.args, **call.kwargs)
            if isinstance(y, torch.Tensor) and y.shape == call.x.shape:
                call.y = y
                call.largest_term, call.amplification = terms_of(_of_input(module, call), call.x, y)


def _of_input(module: nn.Module, call: NormSample) -> Callable:
    """The module as a function of the call's input alone."""

    def run(x):
        swap = {id(call.x): x}
        args, kwargs = tree_map(lambda v: swap.get(id(v), v), (call.args, call.kwargs))
        return module(*args, **kwargs)

    return run


def terms_of(norm: Callable, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``largest_term`` and ``amplification`` of y = norm(x), as in `NormSample`.

    Found by asking for the output of constant rows, not by knowing the norm's class.
    """

    def constant(value: float) -> torch.Tensor:
        return norm(torch.full_like(x, value)).double().nan_to_num()

    bias = constant(0.0)  # xhat is 0 there
    amplification = torch.ones_like(x[..., :1], dtype=torch.float64)
    if torch.equal(constant(1.0), bias):  # xhat is 0 there too: centred
        spread, mean = torch.std_mean(x.double(), -1, correction=0, keepdim=True)
        amplification += mean.abs() / spread.clamp_min(1e-30)
    terms = (y.double() - bias).abs() * amplification + bias.abs()
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
    measured = [call for call in calls if call.y is not None]
    if not measured:
        reason = "not compared: it does not map a tensor to one of the same shape" if calls else NOT_REACHED
        return NormCheck(path, class_name, "", 0, 0, 0, 0, 0.0, True, reason)
    compared = []
    for call in measured:
        try:
            y = module(*call.args, **call.kwargs)
        except (RuntimeError, TypeError) as error:  # weights of another dtype, or a forward with other arguments
            return judge(path, class_name, [], f"raises {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        compared.append((y, call.y, call.x.dtype, call.largest_term, call.amplification))
    return judge(path, class_name, compared)


def judge(path: str, class_name: str, compared: list[tuple], reason: str = "") -> NormCheck:
    """Judge outputs against those of originals.

    Args:
        path, class_name: of what computed them.
        compared: (output, the original's, dtype of the input, ``largest_term``, ``amplification``) of each call.
        reason: why it has failed already, if it has.
    """
    elements = differing = off = 0
    worst = amplified = 0.0
    name, share = "", 0.0
    for y, expected, x_dtype, largest_term, amplification in compared:
        dtype = max(x_dtype, expected.dtype, key=lambda d: torch.finfo(d).eps)
        name = str(dtype).removeprefix("torch.")
        if not isinstance(y, torch.Tensor):
            reason = f"returns a {type(y).__name__}, the original a tensor"
        elif y.dtype != expected.dtype or y.shape != expected.shape:
            reason = f"returns {y.dtype} {tuple(y.shape)}, the original {expected.dtype} {tuple(expected.shape)}"
        if reason:
            break
        ours, theirs = y.double(), expected.double()
        unequal = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
        difference = torch.where(unequal, (ours - theirs).abs(), 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
        fine = largest_term * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        coarse = torch.maximum(ulp(theirs, dtype), fine) if dtype in HALF_DTYPES else fine
        worst = max(worst, (difference / coarse.clamp_min(1e-300)).max().item())
        # half-precision output is rounded last; any other may be multiplied by the weight after what was rounded
        off += (unequal if y.dtype in HALF_DTYPES else difference > MAX_ULP * fine).sum().item()
        differing += unequal.sum().item()
        elements += y.numel()
        amplified += amplification.mean().item() * y.numel()
        share = min(MAX_OFF_HALF * amplified / elements, _MAX_AMPLIFIED) if dtype in HALF_DTYPES else MAX_OFF_FLOAT
    if reason:
        return NormCheck(path, class_name, name, 0, 0, 0, 0, math.inf, False, reason)
    allowed = max(1, int(share * elements))
    if worst > WORST_ULP:
        reason = f"an element is {worst:.3g} ulp away, {WORST_ULP:g} are allowed"
    elif off > allowed:
        kind = "differ" if dtype in HALF_DTYPES else f"are more than {MAX_ULP:g} ulp away"
        reason = f"{off} of {elements} elements {kind}, {allowed} are allowed"
    return NormCheck(path, class_name, name, elements, differing, off, allowed, worst, not reason, reason)
