"""The verdict on a piece: its outputs bit by bit against the original's, its gradients against float64."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ..formula import HALF_DTYPES
from .context import one_line
from .float64 import Float64Mode
from .noise import Sizes
from .pieces import Piece
from .tolerance import ulp, within

MAX_OFF_HALF = 1e-3
MAX_OFF_FLOAT = 1e-2
MAX_ULP = 2.0
WORST_ULP = 4.0
NOT_REACHED = "not reached by these inputs"
NOT_COMPARED = "not compared: it does not map a tensor to one of the same shape"
_MAX_AMPLIFIED = 0.05  # of elements in rows nearly constant; a wrong rounding order changes five times as many
_DIFFERENTIABLE = 2  # operands at most: the tables of a rotary embedding come behind q and k
_ALIKE = 4  # inputs on which eager's error is taken: on a single one luck decides how near it is


@dataclass(frozen=True)
class NormCheck:
    """Verdict (b) for one module: its output against the original's on the same input.

    At most 0.1 % of the elements in half precision and 1 % in float32 (or one element) may be off, and none by more
    than 4 ulp. In half precision an element is off if it differs at all, and 0.1 % grows by 1 + |mean|/std of the rows
    that a centred norm reads. In float32 it is off beyond 2 ulp, where an ulp is 2^-23 of the largest term in its row:
    weight * rstd * x, weight * rstd * mean if the norm is centred, or bias. ``docs/proof.md`` says why.
    """

    path: str
    class_name: str
    dtype: str = ""  # the coarser dtype of input and output, which is where the original rounds
    elements: int = 0  # compared; 0 if the inputs did not reach the module or it does not map a tensor to one like it
    differing: int = 0  # how many of them are not equal
    off: int = 0  # how many are off, as defined above
    allowed: int = 0  # how many may be
    worst_ulp: float = 0.0  # the largest difference, in ulp of half precision of the element, or of the products that a
    # rotation adds up to it, or of float32 as above
    passed: bool = True
    reason: str = ""  # why it failed, or why nothing was compared

    @property
    def reached(self) -> bool:
        """Whether the inputs ran the module at all."""
        return self.reason != NOT_REACHED


@dataclass(frozen=True)
class GradientCheck:
    """One gradient of a piece against float64: each error at most 1.5 times eager's own, and an ulp of the largest.

    Eager's own is its largest on that input and on three like it.
    """

    path: str
    gradient: str  # of what: an operand by its number, or a parameter by its name
    dtype: str = ""
    ours_max: float = math.inf
    ours_rms: float = math.inf
    eager_max: float = math.inf
    eager_rms: float = math.inf
    ulp: float = 0.0  # of the largest gradient, in its dtype
    reason: str = ""  # why it failed

    @property
    def passed(self) -> bool:
        """Whether both errors are finite and within what is allowed."""
        both = within(self.ours_max, self.eager_max, self.ulp) and within(self.ours_rms, self.eager_rms, self.ulp)
        return both and not self.reason


def check_fused(pieces: list[Piece]) -> tuple[NormCheck, ...]:
    """One `NormCheck` for each piece, as in generation and as in training, of whichever output and mode is worst."""
    modes = ((check(piece.path, piece.class_name, [piece], grad) for grad in (False, True)) for piece in pieces)
    return tuple(min(checks, key=lambda check: (check.passed, -check.off, -check.worst_ulp)) for checks in modes)


def check(path: str, class_name: str, pieces: list[Piece], grad: bool = False) -> NormCheck:
    """Run pieces on what was recorded, as in training where `grad` says so, and judge all their outputs together."""
    compared: list[tuple] = []
    for piece in (piece for piece in pieces if piece.expected):
        operands = [t.detach() if isinstance(t, torch.Tensor) else t for t in piece.operands]
        for t in operands:
            if grad and t.is_floating_point():
                t.requires_grad_()
        try:
            with torch.set_grad_enabled(grad):
                pairs = zip(piece.run(*operands), piece.expected, strict=True)
                compared += [(y, expected) for y, expected in pairs if expected.y.numel()]
        except Exception as error:  # whatever a broken kernel or forward raises is the verdict on it
            return _failed(path, class_name, f"raises {one_line(error)}")
    if not compared:
        return NormCheck(path, class_name, reason=NOT_COMPARED if pieces else NOT_REACHED)
    return _judge(path, class_name, compared)


def _failed(path: str, class_name: str, reason: str, dtype: str = "") -> NormCheck:
    return NormCheck(path, class_name, dtype, worst_ulp=math.inf, passed=False, reason=reason)


@torch.no_grad()
def _judge(path: str, class_name: str, compared: list[tuple]) -> NormCheck:
    """Judge outputs, each paired with what is expected of it."""
    elements = differing = off = 0
    worst = amplified = 0.0
    for y, expected in compared:
        theirs = expected.y
        dtype = max(expected.dtype, theirs.dtype, key=lambda d: torch.finfo(d).eps)
        name = str(dtype).removeprefix("torch.")
        kinds = f"a {type(y).__name__}, the original a tensor"
        if isinstance(y, torch.Tensor):
            kinds = f"{y.dtype} {tuple(y.shape)}, the original {theirs.dtype} {tuple(theirs.shape)}"
        if not isinstance(y, torch.Tensor) or y.dtype != theirs.dtype or y.shape != theirs.shape:
            return _failed(path, class_name, f"returns {kinds}", name)
        half, rounds_last = dtype in HALF_DTYPES, y.dtype in HALF_DTYPES
        y, theirs = y.double(), theirs.double()
        unequal = (y != theirs) & ~(y.isnan() & theirs.isnan())
        difference = torch.where(unequal, (y - theirs).abs(), 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
        fine = expected.largest_term * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        sized = theirs if expected.rounded_terms is None else expected.rounded_terms.double().maximum(theirs.abs())
        coarse = torch.maximum(ulp(sized, dtype), fine) if half else fine
        worst = max(worst, (difference / coarse.clamp_min(1e-300)).max().item())
        # half-precision output is rounded last; any other may be multiplied by the weight after what was rounded
        off += (unequal if rounds_last else difference > MAX_ULP * fine).sum().item()
        differing += unequal.sum().item()
        elements += y.numel()
        amplified += expected.amplification.mean().item() * y.numel()
    share = min(MAX_OFF_HALF * amplified / elements, _MAX_AMPLIFIED) if half else MAX_OFF_FLOAT
    allowed, reason = max(1, int(share * elements)), ""
    if worst > WORST_ULP:
        reason = f"an element is {worst:.3g} ulp away, {WORST_ULP:g} are allowed"
    elif off > allowed:
        kind = "differ" if half else f"are more than {MAX_ULP:g} ulp away"
        reason = f"{off} of {elements} elements {kind}, {allowed} are allowed"
    return NormCheck(path, class_name, name, elements, differing, off, allowed, worst, not reason, reason)


def check_gradients(pieces: list[Piece]) -> tuple[GradientCheck, ...]:
    """One backward of each piece: gradients of its operands and parameters, ours and eager's, against float64.

    Of calls of one piece the one with the most rows: of a single row, luck decides how near eager is.
    """
    largest: dict[str, Piece] = {}
    for piece in pieces:
        largest[piece.path] = max(largest.get(piece.path, piece), piece, key=lambda each: each.operands[0].numel())
    return tuple(check for piece in largest.values() for check in _gradients(piece))


def _gradients(piece: Piece) -> Iterator[GradientCheck]:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        outputs = piece.original(*piece.operands)
    # With a mean, and a part along y: of neither, what a norm's backward takes off would be nothing.
    noise = [torch.randn(y.shape, generator=generator).to(y.device) for y in outputs]
    cotangents = [(t + 0.5 + 0.5 * y.sign()).to(y.dtype) for t, y in zip(noise, outputs, strict=True)]
    try:
        ours = _grads(piece.run, piece.norms, piece.operands, cotangents)
    except Exception as error:  # whatever a broken backward raises is the verdict on it
        yield GradientCheck(piece.path, "all", reason=f"raises {one_line(error)}")
        return
    theirs: list[list[Sizes | None]] = []
    exact: list = []
    twins = [_double(norm) for norm in piece.norms]
    for number in range(_ALIKE):
        operands, given = _alike(piece, cotangents, number)
        eager = _grads(piece.original, piece.norms, operands, given)
        with Float64Mode():  # the unpatched modules, their own casts to float32 included
            doubles = ([t.double() for t in tensors] for tensors in (operands, given))
            found = _grads(partial(piece.original, norms=twins), twins, *doubles)
        exact = exact or found
        both = zip(eager, found, strict=True)
        theirs.append([None if a is None or b is None else Sizes(a.double() - b) for a, b in both])
    names = [f"operand {at}" for at, _ in enumerate(piece.operands[:_DIFFERENTIABLE])]
    names += [name if len(piece.norms) == 1 else f"{at}: {name}" for at, name, _ in _parameters(piece.norms)]
    for at, (name, grad, right) in enumerate(zip(names, ours, exact, strict=True)):
        if grad is None or right is None:
            if grad is not right:
                yield GradientCheck(piece.path, name, reason="is missing on one side")
            continue
        error, eager = Sizes(grad.double() - right), [each[at] for each in theirs if each[at] is not None]
        largest, rms = max(each.max for each in eager), max(each.rms for each in eager)
        dtype, step = str(grad.dtype).removeprefix("torch."), ulp(right.abs().max(), grad.dtype).item()
        yield GradientCheck(piece.path, name, dtype, error.max, error.rms, largest, rms, step)


def _parameters(norms: Iterable[nn.Module]) -> list[tuple[int, str, nn.Parameter]]:
    return [(at, name, p) for at, norm in enumerate(norms) for name, p in norm.named_parameters(recurse=False)]


def _grads(function: Callable, norms: Iterable[nn.Module], operands, cotangents: list) -> list:
    operands = [t.detach() for t in operands]
    wanted = [*operands[:_DIFFERENTIABLE], *(p for _, _, p in _parameters(norms))]
    frozen = [p for p in wanted if not p.requires_grad]
    try:
        for p in frozen:
            p.requires_grad_()
        with torch.enable_grad():
            return list(torch.autograd.grad(function(*operands), wanted, cotangents, allow_unused=True))
    finally:
        for p in frozen:
            p.requires_grad_(False)


def _alike(piece: Piece, cotangents: list, number: int) -> tuple[list, ...]:
    """Operands and cotangents like those of a piece: a little larger, rows in another order; 0: as they are."""
    operands = [t.detach() * (1 + number / 16) if at < _DIFFERENTIABLE else t for at, t in enumerate(piece.operands)]
    if piece.rows is None:
        return operands, cotangents
    count = operands[0].shape[piece.rows[0][0]]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(number)) if number else torch.arange(count)
    return tuple(
        [t if t is None else t.index_select(dim, order.to(t.device)) for t, dim in zip(tensors, dims, strict=True)]
        for tensors, dims in zip((operands, cotangents), piece.rows, strict=True)
    )


def _double(norm: nn.Module) -> nn.Module:
    """The unpatched module with parameters in float64, sharing all else."""
    twin = object.__new__(getattr(type(norm), "_hf_rmsnorm_base", type(norm)))
    doubles = {name: p if p is None else nn.Parameter(p.detach().double()) for name, p in norm._parameters.items()}
    twin.__dict__.update(vars(norm), _parameters=doubles)
    return twin
