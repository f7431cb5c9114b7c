"""Compares the gradients of patched norms and fused layers, and of each fused piece of a
layer, with float64, by the error of the originals. `parts.py` asks, behind the check of
the outputs, where gradients were asked for.
"""

from collections import defaultdict
from dataclasses import replace

import torch
from torch import nn

from ..fused.norm import recipe_of
from ..paths import error_line
from .calls import Call
from .checks import Check
from .noise import NoiseFloor, noise_floor
from .pieces import pieces_of
from .quantised import quantised_modules
from .tolerance import ulp

CALLS = 4  # whose largest eager error counts: with few rows the error varies
Tensors = dict[int | str, torch.Tensor]


def check_gradients(call: Call) -> list[Check]:
    """Check the gradients of the input of a patched norm or fused layer, and of the
    parameters of its norms: each error at most 1.5 times the original's, plus a
    rounding step.

    The pieces of a layer are checked one by one too: its other operators hide a wrong
    gradient behind their own roundings, and that of q behind that of v. None are
    checked of a layer with quantised weights, whose backward has no float64.
    """
    if quantised_modules(call.module):
        return []
    call = replace(call, reference=None)
    checks = _check(call, {call.place: call.x})
    if not all(check.compared for check in checks):
        return checks  # it raises
    for piece in pieces_of(call):
        checks += _check(piece, piece.arguments)
    return checks


def _check(call: Call, inputs: Tensors) -> list[Check]:
    """Check the gradients of these inputs, and of the parameters of the norms.

    The original's error is the largest on these inputs and on three similar ones.
    """
    module = call.module
    parameters = _norm_parameters(module)
    with torch.no_grad(), call.original() as original:
        cotangents = _cotangents_of(call.again().outputs(original, {}, {}))
    try:
        ours = _gradients(call.again(), module, inputs, parameters, cotangents)
    except Exception as error:  # whatever a broken backward raises is the verdict on it
        return [Check(f"{call.path}, gradients", False, f"raises {error_line(error)}")]
    floors = defaultdict(list)
    for number in range(CALLS):
        factor = 1 + number / 16
        similar = {place: x * factor for place, x in inputs.items()}
        with call.original() as original:
            again = call.again()
            theirs = _gradients(again, original, similar, parameters, cotangents)
        with call.exactly() as again:
            exact = _gradients(again, module, similar, parameters, cotangents)
        for name, gradient in ours.items():
            floor = noise_floor([theirs[name]], [gradient], [exact[name]])
            floors[name].append(floor)
    checks = []
    for name, found in floors.items():
        checks.append(_judged(f"{call.path}, {name}", found, ours[name]))
    return checks


def _judged(path: str, floors: list[NoiseFloor], gradient: torch.Tensor) -> Check:
    """The check of a gradient, by the first of these errors and the largest of the
    original.
    """
    first = floors[0]
    # a sum over rows is rounded in float32 more than once
    largest = gradient.abs().max()
    summed = ulp(largest, torch.float32).item()
    floor = replace(
        first,
        reference_max=max(floor.reference_max for floor in floors),
        reference_rms=max(floor.reference_rms for floor in floors),
        rms_slack=max(first.rms_slack, summed),
    )
    return Check(path, floor.passed, floor.text, gradient.numel())


def _norm_parameters(module: nn.Module) -> Tensors:
    """The parameters of the patched norms in a module, by name, as far as they are here."""
    parameters = {}
    for path, norm in module.named_modules():
        if recipe_of(norm) is not None:
            parameters |= norm.named_parameters(path, recurse=False)
    return {name: p for name, p in parameters.items() if not p.is_meta}


def _gradients(
    call: Call,
    module: nn.Module,
    inputs: Tensors,
    parameters: Tensors,
    cotangents: list[torch.Tensor],
) -> Tensors:
    """The gradients of inputs and parameters by name, by one backward of a module's
    outputs; zeros where the outputs do not depend on it.
    """
    with torch.enable_grad():
        inputs = _leaves(inputs)
        parameters = _leaves(parameters)
        returned = call.outputs(module, inputs, parameters)
        outputs = []
        dys = []
        for y, dy in zip(returned, cotangents, strict=True):
            if y.requires_grad:
                outputs.append(y)
                dys.append(dy.to(y.dtype))
        leaves = {call.name_of(place): x for place, x in inputs.items()} | parameters
        found = torch.autograd.grad(
            outputs, [*leaves.values()], dys, materialize_grads=True
        )
    return dict(zip(leaves, found, strict=True))


def _leaves(tensors: Tensors) -> Tensors:
    # a clone is wide in a float64 run
    return {
        name: tensor.detach().clone().requires_grad_()
        for name, tensor in tensors.items()
    }


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
