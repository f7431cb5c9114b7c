"""The shift-invariance test: which blocks of which parameters write to the residual
stream.

If only LayerNorms read a parameter, a constant added along a block of it leaves the
model's outputs as they are, and moves the mean that those norms remove. Both are read
off one backward pass each, summed along the block. In float64 the sums that vanish do
so to 1e-15 of their terms; in float32 they would not stand out.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ...record import centre_, rows_of
from ..plan import Centre
from .layer_norms import ModelNorm
from .run import run

# |sum| / sum of |terms|: 5e-16 at most where it vanishes, mostly 1e-4 at least where it
# does not; 1e-8 where attention hardly depends on its queries
INVARIANT = 1e-11
WRITES = 1e-9  # of the largest derivative of a norm's mean
# |mean| / RMS of a row in float64; 1e-13 in deep models once all that writes is centred
ZERO_MEAN = 1e-10


@dataclass
class ShiftTest:
    """The result of the test.

    Args:
        undetermined: parameters that no output depends on.
        unreached: those of them on which no input of a norm depends either.
    """

    residual_weights: list[Centre] = field(default_factory=list)
    undetermined: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)


def shift_invariance_test(
    model: torch.nn.Module, inputs: dict, norms: dict[str, ModelNorm]
) -> ShiftTest:
    """Try every axis of every parameter of a float64 model; the model is not changed."""
    entered = defaultdict(list)  # means of rows, by their length

    def note(path, args, output):
        width = norms[path].hidden_size
        means = args[0].mean(-1)
        entered[width].append(means)

    model.requires_grad_()
    parameters = dict(model.named_parameters())
    with torch.enable_grad():
        outputs = run(model, inputs, norms, note)
    by_width = []
    for width, means in sorted(entered.items()):
        written = _Written.by(_gradients(means, parameters, seed=2), width)
        by_width.append(written)
    of_outputs = _gradients(outputs, parameters, seed=1)
    result = ShiftTest()
    for name, gradient in of_outputs.items():
        if not gradient.any():
            result.undetermined.append(name)
            if not any(name in written.reached for written in by_width):
                result.unreached.append(name)
            continue
        for written in by_width:
            weight = _writing(name, gradient, written)
            if weight is not None:
                result.residual_weights.append(weight)
                break
    return result


@dataclass(frozen=True)
class _Written:
    """What writes to the means of norms of one width, read off the gradients of those
    means: they take as much memory as the model and are not kept.
    """

    width: int
    reached: set[str]  # parameters on which a mean depends
    # (parameter, axis) -> which of its blocks of `width` elements write
    blocks: dict[tuple[str, int], torch.Tensor]

    @classmethod
    def by(cls, gradients: dict[str, torch.Tensor], width: int) -> "_Written":
        reached = {name for name, gradient in gradients.items() if gradient.any()}
        largest = max((gradients[name].abs().max() for name in reached), default=0.0)
        blocks = {}
        for name, gradient in gradients.items():
            for axis, rows in _rows_by_axis(gradient, width):
                blocks[name, axis] = _largest_sum(rows) > WRITES * largest
        return cls(width, reached, blocks)


def _gradients(tensors, parameters, seed: int) -> dict[str, torch.Tensor]:
    """Parameter -> gradient of a random sum of all elements."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for parameter in parameters.values():
        # which gives each a gradient, of zeros where nothing depends on it
        nothing = 0 * parameter.sum()
        total = total + nothing
    for tensor in tensors:
        factors = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        weighted = factors * tensor
        total = total + weighted.sum()
    wanted = list(parameters.values())
    gradients = torch.autograd.grad(total, wanted, retain_graph=True)
    named = zip(parameters, gradients, strict=True)
    return dict(named)


def _writing(name: str, gradient: torch.Tensor, written: _Written) -> Centre | None:
    """The blocks along an axis of a parameter that write to the stream, and may lose
    their mean; None if there are none.
    """
    n = written.width
    for axis, rows in _rows_by_axis(gradient, n):
        total = _largest_sum(rows)
        terms = _largest_sum(rows.abs())
        is_invariant = total < INVARIANT * terms
        is_free = is_invariant & written.blocks[name, axis]
        if is_free.all():
            return Centre(name, axis, n)
        if is_free.any():
            blocks = is_free.nonzero().flatten().tolist()
            return Centre(name, axis, n, tuple(blocks))
    return None


def _rows_by_axis(tensor: torch.Tensor, n: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Each axis that blocks of n elements make up, and the rows along it: (other
    elements, blocks, n).
    """
    for axis, size in enumerate(tensor.shape):
        if size % n:
            continue
        rows = rows_of(tensor, axis, n)
        yield axis, rows.reshape(-1, *rows.shape[-2:])


def _largest_sum(rows: torch.Tensor) -> torch.Tensor:
    """The largest |sum| of a row in each block."""
    sums = rows.sum(-1)
    return sums.abs().amax(0)


def centre(model: torch.nn.Module, residual_weights: list[Centre]) -> None:
    """Subtract its mean from each block, in place."""
    for weight in residual_weights:
        parameter = model.get_parameter(weight.key)
        centre_(parameter, **weight.how)


@torch.no_grad()
def input_means(model: torch.nn.Module, inputs: dict, norms) -> dict[str, float]:
    """path -> the largest |mean| / RMS of a row that enters the norm there."""
    largest = {}

    def note(path, args, output):
        x = args[0].double()
        rms = x.square().mean(-1).sqrt()
        size = x.mean(-1).abs()
        ratio = size / rms.clamp_min(1e-300)
        before = largest.get(path, 0.0)
        now = float(ratio.max())
        largest[path] = max(before, now)

    run(model, inputs, norms, note)
    return largest
