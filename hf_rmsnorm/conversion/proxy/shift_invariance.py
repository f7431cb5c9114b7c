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
from torch.overrides import TorchFunctionMode

from ...record import centre_
from .keys import ResidualWeight
from .layer_norms import ModelNorm
from .run import linear_paths, run, weight_axis

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
        margins: the largest ratio of a residual weight's blocks, and the smallest of
            other blocks that write.
    """

    residual_weights: list[ResidualWeight] = field(default_factory=list)
    undetermined: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)
    margins: dict = field(
        default_factory=lambda: {"invariant_max": 0.0, "dependent_min": 1.0}
    )


def shift_invariance_test(
    model: torch.nn.Module, inputs: dict, norms: dict[str, ModelNorm]
) -> ShiftTest:
    """Try every axis of every parameter of a float64 model; the model is not changed."""
    entered: dict[int, list[torch.Tensor]] = defaultdict(list)

    def note(path, args, output):
        entered[norms[path].hidden_size].append(args[0])

    parameters = dict(model.requires_grad_().named_parameters())
    with torch.enable_grad():
        outputs = run(model, inputs, norms, note)
    generator = torch.Generator().manual_seed(1)
    of_outputs = gradients(outputs, parameters, generator)
    of_means = {}
    least = {}
    for width, tensors in sorted(entered.items()):
        of_means[width] = gradients(
            [x.mean(-1) for x in tensors], parameters, generator
        )
        sizes = [
            float(means.abs().max())
            for means in of_means[width].values()
            if means is not None
        ]
        least[width] = WRITES * max(sizes, default=0.0)
    result = ShiftTest()
    for name, gradient in of_outputs.items():
        if gradient is None or not bool(gradient.any()):
            result.undetermined.append(name)
            if gradient is None and all(
                means[name] is None for means in of_means.values()
            ):
                result.unreached.append(name)
            continue
        for width, means in of_means.items():
            if means[name] is not None and _try(
                result, name, width, gradient, means[name], least[width]
            ):
                break
    return result


def gradients(
    tensors, parameters: dict[str, torch.Tensor], generator
) -> dict[str, torch.Tensor | None]:
    """Parameter -> gradient of a random sum of all elements; None where it does not depend on the parameter."""
    total = 0
    for tensor in tensors:
        factors = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        total = total + (factors * tensor).sum()
    if not total.requires_grad:
        return dict.fromkeys(parameters)
    grads = torch.autograd.grad(
        total, list(parameters.values()), retain_graph=True, allow_unused=True
    )
    return dict(zip(parameters, grads, strict=True))


def _try(
    result: ShiftTest,
    name: str,
    n: int,
    gradient: torch.Tensor,
    means: torch.Tensor,
    least: float,
) -> bool:
    """Whether blocks of n elements along an axis of a parameter write to the stream,
    and may lose their mean.
    """
    for axis in range(gradient.ndim):
        if gradient.shape[axis] % n:
            continue
        rows = _rows(gradient, axis, n)
        total = rows.sum(-1).abs().amax(0)
        size = rows.abs().sum(-1).amax(0)
        ratio = total / size.clamp_min(1e-300)
        writes = _rows(means, axis, n).sum(-1).abs().amax(0) > least
        free = writes & (ratio < INVARIANT) & (size > 0)
        kept = writes & ~free
        margins = result.margins
        if bool(kept.any()):
            margins["dependent_min"] = min(
                margins["dependent_min"], float(ratio[kept].min())
            )
        if bool(free.any()):
            margins["invariant_max"] = max(
                margins["invariant_max"], float(ratio[free].max())
            )
            result.residual_weights.append(
                ResidualWeight(name, axis, n, tuple(free.nonzero().flatten().tolist()))
            )
            return True
    return False


def _rows(tensor: torch.Tensor, axis: int, n: int) -> torch.Tensor:
    """(other elements, blocks, n)"""
    return tensor.movedim(axis, -1).reshape(-1, tensor.shape[axis] // n, n)


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


class _Products(TorchFunctionMode):
    """Notes each product of a vector parameter with the output of a linear module:
    (module, parameter).
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        vectors = [
            (name, p)
            for name, p in model.named_parameters()
            if p.ndim == 1 and p.numel() > 1
        ]
        self.vectors = {id(p): name for name, p in vectors}
        # storage -> path of the module that returned it
        self.returned: dict[int, str] = {}
        # a storage that is freed may be given to another tensor
        self.kept: list[torch.Tensor] = []
        self.products: list[tuple[str, str]] = []

    def note(self, path, args, output):
        """A hook on linear modules."""
        if torch.is_tensor(output):
            self.kept.append(output)
            self.returned[output.untyped_storage().data_ptr()] = path

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if (
            func.__name__ in ("mul", "__mul__", "__rmul__", "multiply")
            and len(args) == 2
        ):
            self._product(*args)
            self._product(*args[::-1])
        return func(*args, **(kwargs or {}))

    def _product(self, vector, x) -> None:
        if id(vector) not in self.vectors or not torch.is_tensor(x):
            return
        path = self.returned.get(x.untyped_storage().data_ptr())
        if path is not None and x.shape[-1] == vector.numel():
            self.products.append((path, self.vectors[id(vector)]))


@torch.no_grad()
def find_layer_scales(
    model: torch.nn.Module, inputs: dict
) -> list[tuple[str, int, str]]:
    """(parameter of a linear module, axis, parameter that its output is multiplied by)
    of each such product.
    """
    with _Products(model) as noted:
        run(model, inputs, linear_paths(model), noted.note)
    scales = []
    for path, by in dict.fromkeys(noted.products):
        module = model.get_submodule(path)
        scales.append((f"{path}.weight", weight_axis(module), by))
        if module.bias is not None:
            scales.append((f"{path}.bias", 0, by))
    return scales


@torch.no_grad()
def fold_layer_scales(
    model: torch.nn.Module, scales: list[tuple[str, int, str]]
) -> None:
    """Move layer scales into the linear modules before them, in place."""
    for name, axis, by in scales:
        parameter = model.get_parameter(name)
        view = [-1 if a == axis else 1 for a in range(parameter.ndim)]
        parameter.mul_(model.get_parameter(by).reshape(view))
    for by in {by for _, _, by in scales}:
        model.get_parameter(by).fill_(1.0)
