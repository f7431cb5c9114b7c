"""Compares the gradients of patched norms and fused layers with float64, by the error of
the originals.
"""

from collections import defaultdict
from dataclasses import replace

import torch
from torch import nn

from ..fused.norm import recipe_of
from .calls import Call
from .checks import Check
from .context import one_line
from .noise import noise_floor
from .quantised import quantised_modules

CALLS = 4  # whose largest eager error counts: with few rows the error varies by chance
INPUT = "input"  # its name among the parameters


def check_gradients(call: Call) -> list[Check]:
    """Check the gradients of the input of a patched norm or fused layer, and of the
    parameters of its norms: each error at most 1.5 times the original's, plus an ulp of
    the largest value.

    The original's error is the largest on this input and on three similar ones. None
    are checked of a layer with quantised weights, whose backward knows no float64.
    """
    module = call.module
    if quantised_modules(module):
        return []
    call = replace(call, reference=None)
    leaves = {INPUT: call.x} | _norm_parameters(module)
    with torch.no_grad(), call.original() as original:
        cotangents = _cotangents_of(call.again().outputs(original, call.x, {}))
    try:
        ours = _gradients(call.again(), module, leaves, cotangents)
    except Exception as error:  # whatever a broken backward raises is the verdict on it
        return [Check(f"{call.path}, gradients", False, f"raises {one_line(error)}")]
    floors = defaultdict(list)
    for number in range(CALLS):
        leaves[INPUT] = call.x * (1 + number / 16)
        with call.original() as original:
            theirs = _gradients(call.again(), original, leaves, cotangents)
        with call.exactly() as again:
            exact = _gradients(again, module, leaves, cotangents)
        for name, *gradients in zip(leaves, theirs, ours, exact, strict=True):
            floors[name].append(noise_floor(*([dx] for dx in gradients)))
    checks = []
    for gradient, (name, found) in zip(ours, floors.items(), strict=True):
        floor = replace(
            found[0],
            reference_max=max(floor.reference_max for floor in found),
            reference_rms=max(floor.reference_rms for floor in found),
            # of what is added up over rows no rounding is the last
            rms_slack=found[0].max_slack,
        )
        path = f"{call.path}, {name}"
        checks.append(Check(path, floor.passed, floor.text, gradient.numel()))
    return checks


def _norm_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of the patched norms in a module, by name, as far as they are here."""
    return {
        name: parameter
        for path, norm in module.named_modules()
        if recipe_of(norm) is not None
        for name, parameter in norm.named_parameters(path, recurse=False)
        if not parameter.is_meta
    }


def _gradients(
    call: Call, module: nn.Module, leaves: dict, cotangents: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The gradients of the input and the parameters, by one backward of a module's
    outputs; zeros for what the outputs do not depend on.
    """
    with torch.enable_grad():
        # a clone is wide in a float64 run
        clones = [leaf.detach().clone().requires_grad_() for leaf in leaves.values()]
        parameters = dict(zip(leaves, clones, strict=True))
        returned = call.outputs(module, parameters.pop(INPUT), parameters)
        outputs = []
        dys = []
        for y, dy in zip(returned, cotangents, strict=True):
            if y.requires_grad:
                outputs.append(y)
                dys.append(dy.to(y.dtype))
        return torch.autograd.grad(outputs, clones, dys, materialize_grads=True)


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
