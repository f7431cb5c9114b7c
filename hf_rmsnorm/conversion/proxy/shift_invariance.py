"""The shift-invariance test: which blocks of which parameters write to the residual
stream.

If only LayerNorms read a parameter, a constant added along a block of it leaves the
model's outputs as they are, and moves the mean that those norms remove. Both are read
off one backward pass each, summed along the block. In float64 the sums that vanish do
so to 1e-15 of their terms; in float32 they would not stand out.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from ...record import centre_
from .keys import ResidualWeight
from .layer_norms import ModelNorm
from .run import run

# |sum| / sum of |terms|: 5e-16 at most where it vanishes, 1e-4 at least where it does
# not
INVARIANT = 1e-8
WRITES = 1e-9  # of the largest derivative of a norm's mean
# |mean| / RMS of a row in float64; 1e-13 in deep models once all that writes is centred
ZERO_MEAN = 1e-10


@dataclass
class ShiftTest:
    """The result of the test.

    Args:
        undetermined: parameters that no output depends on.
        unreached: parameters that neither an output nor the input of a norm is computed
            with.
    """

    residual_weights: list[ResidualWeight] = field(default_factory=list)
    undetermined: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)


def shift_invariance_test(
    model: torch.nn.Module, inputs: dict, norms: dict[str, ModelNorm]
) -> ShiftTest:
    """Try every axis of every parameter of a float64 model; the model is not changed."""
    entered: dict[int, list[torch.Tensor]] = defaultdict(list)

    def note(path, args, output):
        entered[norms[path].hidden_size].append(args[0].mean(-1))

    parameters = dict(model.requires_grad_().named_parameters())
    with torch.enable_grad():
        outputs = run(model, inputs, norms, note)
    generator = torch.Generator().manual_seed(1)
    of_outputs = _gradients(outputs, parameters, generator)
    of_means, least = {}, {}  # by the length of the rows
    for width, means in sorted(entered.items()):
        of_means[width] = _gradients(means, parameters, generator)
        least[width] = WRITES * _largest(of_means[width])
    result = ShiftTest()
    for name, gradient in of_outputs.items():
        means = {}
        for width, gradients in of_means.items():
            if gradients[name] is not None:
                means[width] = gradients[name]
        if gradient is None and not means:
            result.unreached.append(name)
        if gradient is None or not bool(gradient.any()):
            result.undetermined.append(name)
            continue
        for width, mean in means.items():
            weight = _writing(name, width, gradient, mean, least[width])
            if weight is not None:
                result.residual_weights.append(weight)
                break
    return result


def _largest(gradients: dict[str, torch.Tensor | None]) -> float:
    largest = 0.0
    for gradient in gradients.values():
        if gradient is not None:
            largest = max(largest, float(gradient.abs().max()))
    return largest


def _gradients(
    tensors, parameters: dict[str, torch.Tensor], generator
) -> dict[str, torch.Tensor | None]:
    """Parameter -> gradient of a random sum of all elements; None where it does not depend on the parameter."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        factors = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        total = total + (factors * tensor).sum()
    if not total.requires_grad:
        return dict.fromkeys(parameters)
    grads = torch.autograd.grad(
        total, list(parameters.values()), retain_graph=True, allow_unused=True
    )
    return dict(zip(parameters, grads, strict=True))


def _writing(
    name: str, n: int, gradient: torch.Tensor, means: torch.Tensor, least: float
) -> ResidualWeight | None:
    """The blocks of n elements along an axis of a parameter that write to the stream,
    and may lose their mean; None if there are none.
    """
    for axis in range(gradient.ndim):
        if gradient.shape[axis] % n:
            continue
        rows = _rows(gradient, axis, n)
        total = rows.sum(-1).abs().amax(0)
        size = rows.abs().sum(-1).amax(0)
        written = _rows(means, axis, n).sum(-1).abs().amax(0)
        is_free = (total < INVARIANT * size) & (written > least)
        if bool(is_free.any()):
            blocks = tuple(is_free.nonzero().flatten().tolist())
            return ResidualWeight(name, axis, n, blocks)
    return None


def _rows(tensor: torch.Tensor, axis: int, n: int) -> torch.Tensor:
    """(other elements, blocks, n)"""
    count = tensor.shape[axis] // n
    return tensor.movedim(axis, -1).reshape(-1, count, n)


def centre(model: torch.nn.Module, residual_weights: list[ResidualWeight]) -> None:
    """Subtract its mean from each block, in place."""
    for weight in residual_weights:
        centre_(
            model.get_parameter(weight.parameter),
            weight.axis,
            weight.block,
            weight.blocks,
        )


@torch.no_grad()
def input_means(model: torch.nn.Module, inputs: dict, norms) -> dict[str, float]:
    """path -> the largest |mean| / RMS of a row that enters the norm there."""
    largest: dict[str, float] = {}

    def note(path, args, output):
        x = args[0].double()
        rms = x.square().mean(-1).sqrt()
        ratio = x.mean(-1).abs() / rms.clamp_min(1e-300)
        largest[path] = max(largest.get(path, 0.0), float(ratio.max()))

    run(model, inputs, norms, note)
    return largest


def with_mean(model: torch.nn.Module, inputs: dict, norms) -> list[str]:
    """Paths of the norms whose input has a mean."""
    return [
        path
        for path, mean in input_means(model, inputs, norms).items()
        if mean > ZERO_MEAN
    ]
