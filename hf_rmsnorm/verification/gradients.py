"""Compares the gradients of patched norms and fused layers with float64, by the error of
the originals.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from ..fused.norm import recipe_of
from .calls import Call
from .checks import Check
from .context import one_line
from .noise import NoiseFloor, Sizes
from .quantised import quantised_modules
from .tolerance import ulp

CALLS = 4  # whose largest eager error counts: with few rows the error varies by chance


def check_gradients(call: Call) -> Iterator[Check]:
    """Check the gradients of the input of a patched norm or fused layer, and of the
    parameters of its norms: each error at most 1.5 times the original's, plus an ulp of
    the largest value.

    The original's error is the largest on this input and on three similar ones. None
    are checked of a layer with quantised weights, whose backward knows no float64.
    """
    if quantised_modules(call.module):
        return
    call = replace(call, reference=None)
    weights = _norm_parameters(call.module)
    doubles = {name: weight.double() for name, weight in weights.items()}
    with torch.no_grad(), call.original() as original:
        cotangents = _cotangents_of(call.again().outputs(original, call.x))
    wide = [dy.double() for dy in cotangents]
    try:
        ours = _gradients(call.again(), call.module, weights, cotangents)
    except Exception as error:  # whatever a broken backward raises is the verdict on it
        yield Check(f"{call.path}, gradients", False, f"raises {one_line(error)}")
        return
    theirs, exact = [], []
    for number in range(CALLS):
        x = call.x * (1 + number / 16)
        with call.original() as original:
            again = call.again(x)
            theirs.append(_gradients(again, original, weights, cotangents))
        again = call.again(x.double())
        with call.exactly():
            exact.append(_gradients(again, call.module, doubles, wide))
    for at, name in enumerate(["input", *weights]):
        others = [(a[at], b[at]) for a, b in zip(theirs, exact, strict=True)]
        check = _judge(f"{call.path}, {name}", ours[at], others)
        if check is not None:
            yield check


def _judge(path: str, ours: torch.Tensor | None, others: list[tuple]) -> Check | None:
    """The verdict on a gradient; None if there is none.

    Args:
        others: the original's and float64's, of this call and of others like it.
    """
    exact = others[0][1]
    if ours is None and exact is None:
        return None
    if ours is None or exact is None:
        return Check(path, False, "is missing on one side")
    error = Sizes(ours.double() - exact)
    errors = [Sizes(theirs.double() - right) for theirs, right in others]
    step = ulp(exact.abs().max(), ours.dtype).item()
    floor = NoiseFloor(
        reference_max=max(error.max for error in errors),
        reference_rms=max(error.rms for error in errors),
        candidate_max=error.max,
        candidate_rms=error.rms,
        max_slack=step,
        rms_slack=step,
    )
    return Check(path, floor.passed, floor.text, ours.numel())


def _norm_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of the patched norms in a module, by name, as far as they are here."""
    parameters = {}
    for path, norm in module.named_modules():
        if recipe_of(norm) is not None:
            for name, parameter in norm.named_parameters(path, recurse=False):
                if not parameter.is_meta:
                    parameters[name] = parameter.detach()
    return parameters


def _gradients(
    call: Call, module: nn.Module, parameters: dict, cotangents: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Those of the input and of the parameters, by one backward of a module's outputs."""
    with torch.enable_grad():
        x = call.x.detach().clone().requires_grad_()
        leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        outputs, dys = [], []
        for y, dy in zip(call.outputs(module, x, leaves), cotangents, strict=True):
            if y.requires_grad:
                outputs.append(y)
                dys.append(dy)
        wanted = [x, *leaves.values()]
        return list(torch.autograd.grad(outputs, wanted, dys, allow_unused=True))


def _cotangents_of(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Random gradients of outputs: with a mean, and a part along y.

    Without these a norm's backward would have nothing to subtract.
    """
    generator = torch.Generator().manual_seed(0)
    cotangents = []
    for y in outputs:
        noise = torch.randn(y.shape, generator=generator).to(y.device)
        cotangents.append((noise + 0.5 + 0.5 * y.sign()).to(y.dtype))
    return cotangents
