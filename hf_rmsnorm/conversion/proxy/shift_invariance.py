"""The shift-invariance test: which blocks of which parameters write to the residual
stream.

Only LayerNorms read these parameters: a constant added along a block of one leaves the
model's outputs as they are, and moves the mean that those norms remove. Both are read
off one backward pass each, summed along the block. In float64 the sums that vanish do
so to 1e-15 of their terms; in float32 they would not stand out.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...converted.record import centre_, rows_of
from .layer_norms import ModelNorm
from .run import run

# |sum| / sum of |terms|: 5e-16 at most where it vanishes, mostly 1e-4 at least where it
# does not; 1e-8 where attention hardly depends on its queries
INVARIANT = 1e-11
WRITES = 1e-9  # of the largest derivative of a norm's mean
# |mean| / RMS of a row in float64; 1e-13 in deep models once all that writes is centred
ZERO_MEAN = 1e-10

Blocks = dict[str, dict]  # parameter -> its blocks, as the arguments of `centre_`


@dataclass(frozen=True)
class ShiftTest:
    """The result of the test.

    Args:
        residual_weights: parameter -> what to centre of it: the arguments of `centre_`.
        undetermined: parameters that no output depends on.
        unreached: those of them on which no input of a norm depends either.
    """

    residual_weights: Blocks
    undetermined: list[str]
    unreached: list[str]


def shift_invariance_test(
    model: torch.nn.Module, inputs: dict, norms: dict[str, ModelNorm]
) -> ShiftTest:
    """Try every axis of every parameter of a float64 model; the model is not changed."""
    entered = defaultdict(list)  # means of rows, by their length

    def note(path, args, output):
        width = norms[path].hidden_size
        entered[width].append(args[0].mean(-1))

    model.requires_grad_()
    parameters = dict(model.named_parameters())
    with torch.enable_grad():
        outputs = run(model, inputs, norms, note)
    reached = set()  # parameters on which a mean depends
    # Parameter -> (length, axis, which of the blocks write). The gradients of the means
    # take as much memory as the model and are not kept.
    writing = defaultdict(list)
    for width, means in sorted(entered.items()):
        gradients = _gradients(means, parameters, seed=2)
        here = {name for name, gradient in gradients.items() if gradient.any()}
        largest = max((gradients[name].abs().max() for name in here), default=0.0)
        for name, gradient in gradients.items():
            for axis, rows in rows_by_axis(gradient, width):
                blocks = _largest_sum(rows) > WRITES * largest
                writing[name].append((width, axis, blocks))
        reached |= here
        del gradients
    weights = {}
    undetermined = []
    for name, gradient in _gradients(outputs, parameters, seed=1).items():
        if not gradient.any():
            undetermined.append(name)
            continue
        for width, axis, blocks in writing[name]:
            rows = rows_of(gradient, axis, width)
            chosen = chosen_blocks(axis, width, blocks & are_balanced(rows))
            if chosen is not None:
                weights[name] = chosen
                break
    unreached = [name for name in undetermined if name not in reached]
    return ShiftTest(weights, undetermined, unreached)


def _gradients(tensors, parameters, seed: int) -> dict[str, torch.Tensor]:
    """Parameter -> gradient of a random sum of all elements."""
    generator = torch.Generator().manual_seed(seed)
    # which gives each a gradient, of zeros where nothing depends on it
    total = sum(0 * parameter.sum() for parameter in parameters.values())
    for tensor in tensors:
        factors = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        total = total + (factors * tensor).sum()
    wanted = list(parameters.values())
    gradients = torch.autograd.grad(total, wanted, retain_graph=True)
    return dict(zip(parameters, gradients, strict=True))


def rows_by_axis(tensor: torch.Tensor, n: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Each axis that blocks of n elements make up, and its `rows_of` such blocks."""
    for axis, size in enumerate(tensor.shape):
        if size % n == 0 and tensor.numel():
            yield axis, rows_of(tensor, axis, n)


def are_balanced(rows: torch.Tensor) -> torch.Tensor:
    """Which blocks have rows that sum to 0, and not of zeros alone."""
    rows = rows.double()
    return _largest_sum(rows) < INVARIANT * _largest_sum(rows.abs())


def _largest_sum(rows: torch.Tensor) -> torch.Tensor:
    """The largest |sum| of a row in each block."""
    sums = rows.reshape(-1, *rows.shape[-2:]).sum(-1)
    return sums.abs().amax(0)


def chosen_blocks(axis: int, block: int, chosen: torch.Tensor) -> dict | None:
    """The chosen blocks, as `centre_` takes them; None if there are none."""
    if not chosen.any():
        return None
    blocks = None if chosen.all() else chosen.nonzero().flatten().tolist()
    return {"axis": axis, "block": block, "blocks": blocks}


def centre(model: torch.nn.Module, residual_weights: Blocks) -> None:
    """Subtract its mean from each block, in place."""
    for name, how in residual_weights.items():
        centre_(model.get_parameter(name), **how)


@torch.no_grad()
def input_means(model: torch.nn.Module, inputs: dict, norms) -> dict[str, float]:
    """path -> the largest |mean| / RMS of a row that enters the norm there."""
    largest = {}

    def note(path, args, output):
        x = args[0].double()
        rms = x.square().mean(-1).sqrt()
        ratio = x.mean(-1).abs() / rms.clamp_min(1e-300)
        largest[path] = max(largest.get(path, 0.0), float(ratio.max()))

    run(model, inputs, norms, note)
    return largest
