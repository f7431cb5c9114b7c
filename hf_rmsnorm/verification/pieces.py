"""What patched layers compute in one launch, run again as the model runs it, against the original's own arithmetic.

A norm that is called by itself is one launch. Called in a patched model, the same norm may be computed with the sum
that it reads, in the layer before its own, or with another norm and a rotary embedding. So the operands of these are
recorded while the model runs, and its own code runs on them once more, with gradients and without.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from ..fused.attention import norm_and_rotate, norm_later
from ..fused.layer import add, reader_of
from ..fused.observe import observing
from .float64 import Float64Mode
from .modules import NormCheck, NormSample, judge, terms_of
from .tolerance import FACTOR, ulp

_ORDERS = 4  # in which eager's sums over rows are taken: which adds up best is luck


@dataclass
class Piece:
    """One thing that a patched layer computes together.

    Args:
        path: of the module, and what of its forward this is.
        class_name: of the module.
        norms: the patched norms that take part.
        operands: as the model gave them, copied, strides included, down to some rows.
        run: the model's own code on such operands; returns all outputs.
        original: the same by the unpatched modules, ``original(*operands, norms=...)``.
        rows: for each operand and output, the dimension along which they are many of the same, or None.
    """

    path: str
    class_name: str
    norms: tuple[nn.Module, ...]
    operands: tuple[torch.Tensor, ...]
    run: Callable
    original: Callable
    rows: tuple[tuple[int | None, ...], tuple[int | None, ...]]


@dataclass(frozen=True)
class GradientCheck:
    """The gradients of one piece against float64: each error at most 1.5 times eager's own, and an ulp of the largest.

    Args:
        path: of the piece.
        gradient: of what: an operand by its number, or a parameter by its name.
        dtype: of the gradient.
        ours_max, ours_rms, eager_max, eager_rms: errors against float64.
        ulp: of the largest gradient, in its dtype.
        reason: why it failed; empty otherwise.
    """

    path: str
    gradient: str
    dtype: str
    ours_max: float
    ours_rms: float
    eager_max: float
    eager_rms: float
    ulp: float
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether both errors are finite and within what is allowed."""
        within = self.ours_max <= FACTOR * self.eager_max + self.ulp and self.ours_rms <= (
            FACTOR * self.eager_rms + self.ulp
        )
        return not self.reason and within and math.isfinite(self.ours_max)


@contextmanager
def recording_pieces(model: nn.Module, rows: int) -> Iterator[list[Piece]]:
    """Record each fused piece that this thread runs: its first call, and its first of another shape.

    Args:
        model: patched; the paths are in it.
        rows: about how many rows to keep of each.

    Yields:
        The pieces, a list that fills while the model runs.
    """
    paths = {module: path for path, module in model.named_modules()}
    found: dict[tuple, Piece] = {}
    thread = threading.get_ident()

    def observe(module: nn.Module, kind: str, which: tuple, operands: tuple) -> None:
        key = module, which
        if threading.get_ident() != thread or module not in paths:
            return
        several = operands[0].shape[:-1].numel() > 1
        if (*key, several) in found:
            return
        make = _sum_piece if kind == "sum" else _pair_piece
        piece = make(paths[module], module, which, operands, rows)
        if piece is not None:
            found[(*key, several)] = piece
            pieces.append(piece)

    pieces: list[Piece] = []
    with observing(observe):
        yield pieces


def _sum_piece(path: str, layer: nn.Module, site: tuple, operands: tuple, rows: int) -> Piece | None:
    norm = reader_of(layer, site[0])
    if norm is None or not _is_comparable(norm):
        return None
    left, right = operands
    if left.shape != right.shape or left.dim() < 2:
        return None

    def run(left, right):
        total = add(layer, left, right, site)
        return total, type(norm).forward(norm, total)

    def original(left, right, norms=(norm,)):
        total = left + right
        return total, _own_forward(norms[0], total)

    keep = max(1, rows // max(1, math.prod(left.shape[1:-1]))), max(1, rows)
    operands = tuple(_copied(t[: keep[0]] if t.dim() == 2 else t[: keep[0], : keep[1]]) for t in operands)
    at = left.dim() - 2
    what = f"+ {site[0]}" if site[0] else "+ the norm behind it"
    return Piece(f"{path}: {what}", type(layer).__name__, (norm,), operands, run, original, ((at,) * 2, (at,) * 2))


def _pair_piece(path: str, attention: nn.Module, which: tuple, operands: tuple, rows: int) -> Piece | None:
    names, rotate = which
    norms = tuple(attention._modules[name] for name in names)
    if not all(map(_is_comparable, norms)):
        return None

    def run(q, k, *tables):
        held: dict = {}
        q, k = (norm_later(attention, held, name, x) for name, x in zip(names, (q, k), strict=True))
        return norm_and_rotate(attention, held, names, rotate, q, k, *tables)

    def original(q, k, *tables, norms=norms):
        q, k = (_own_forward(norm, x) for norm, x in zip(norms, (q, k), strict=True))
        return (q, k) if rotate is None else rotate(q, k, *tables)

    keep = max(1, rows // max(1, operands[0].shape[1]))
    cut = tuple(_copied(t[:, :, :keep] if t.dim() == 4 else t[:, :keep]) for t in operands)
    what = " and ".join(names) + ("" if rotate is None else f" with {getattr(rotate, '__name__', 'rotary')}")
    along = tuple(2 if t.dim() == 4 else 1 for t in operands)
    return Piece(f"{path}: {what}", type(attention).__name__, norms, cut, run, original, (along, (2, 2)))


def alone(model: nn.Module, samples: dict[str, list[NormSample]]) -> list[Piece]:
    """The first recorded call of each patched norm that takes one tensor of rows."""
    pieces = (_norm_piece(path, model.get_submodule(path), calls[0]) for path, calls in samples.items() if calls)
    return [piece for piece in pieces if piece is not None]


def _norm_piece(path: str, norm: nn.Module, sample: NormSample) -> Piece | None:
    x = sample.x
    if len(sample.args) != 1 or sample.kwargs or x is None or x.dim() < 2 or not _is_comparable(norm):
        return None

    def run(x):
        return (type(norm).forward(norm, x),)

    def original(x, norms=(norm,)):
        return (_own_forward(norms[0], x),)

    rows = (x.dim() - 2,)
    plain = type(norm)._hf_rmsnorm_recipe.layout == "last"
    return Piece(path, type(norm).__name__, (norm,), (x,), run, original, (rows, rows) if plain else ((None,), (None,)))


def _is_comparable(norm: nn.Module) -> bool:
    """Whether the norm's own forward is what it computes, with weights that are here: not a converted checkpoint's."""
    recipe = getattr(type(norm), "_hf_rmsnorm_recipe", None)
    return recipe is not None and not recipe.as_rms and not any(p.is_meta for p in norm.parameters())


def _own_forward(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return getattr(type(norm), "_hf_rmsnorm_base", type(norm)).forward(norm, x)


def _copied(t: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of a view, so that the same launch serves it."""
    t = t.detach()
    if 0 in t.stride():
        return t.clone()
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def check_pieces(pieces: list[Piece]) -> tuple[NormCheck, ...]:
    """Run each piece on what was recorded, as in generation and as in training, and judge all its outputs.

    Returns:
        One `NormCheck` for each piece, of whichever output and mode is worst.
    """
    return tuple(_check(piece) for piece in pieces)


def _check(piece: Piece) -> NormCheck:
    with torch.no_grad():
        expected = piece.original(*piece.operands)
        terms = [_terms(piece, at, y) for at, y in enumerate(expected)]
    checks = []
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            operands = [t.detach().requires_grad_(grad and t.is_floating_point()) for t in piece.operands]
            try:
                outputs = piece.run(*operands)
            except Exception as error:  # whatever a broken kernel or forward raises is the verdict on it
                return judge(piece.path, piece.class_name, [], f"raises {type(error).__name__}: {error}")
        narrow = max((t.dtype for t in piece.operands), key=lambda dtype: torch.finfo(dtype).eps)
        compared = [(y.detach(), right, narrow, *t) for y, right, t in zip(outputs, expected, terms, strict=True)]
        checks.append(judge(piece.path, piece.class_name, compared))
    return min(checks, key=lambda check: (check.passed, -check.off, -check.worst_ulp))


def _terms(piece: Piece, at: int, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(what y's elements are sums of, amplification of rounding), by row, as in `NormSample`."""
    if len(piece.operands) == 2 and at == 0 and len(piece.norms) == 1:  # a sum: rounded once
        return y.double().abs(), torch.ones_like(y[..., :1], dtype=torch.float64)
    if len(piece.norms) == 1:
        total = piece.operands[0] if len(piece.operands) == 1 else piece.operands[0] + piece.operands[1]
        return terms_of(lambda x: _own_forward(piece.norms[0], x), total, y)
    largest = y.double().abs().amax(-1, keepdim=True)  # two products of a row's elements
    return largest.expand_as(y), torch.ones_like(largest)


def check_gradients(pieces: list[Piece]) -> tuple[GradientCheck, ...]:
    """One backward of each piece: gradients of its operands and parameters, ours and eager's, against float64.

    Of calls of one piece the one with the most rows: of a single row, luck decides how near eager is.
    """
    largest: dict[str, Piece] = {}
    for piece in pieces:
        if piece.path not in largest or piece.operands[0].numel() > largest[piece.path].operands[0].numel():
            largest[piece.path] = piece
    return tuple(check for piece in largest.values() for check in _gradients(piece))


def _gradients(piece: Piece) -> Iterator[GradientCheck]:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        outputs = piece.original(*piece.operands)
    cotangents = [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in outputs]
    names = [f"operand {at}" for at in _differentiable(piece)]
    names += [name if len(piece.norms) == 1 else f"{at}: {name}" for at, name, _ in _parameters(piece.norms)]
    try:
        ours = _grads(piece.run, piece, cotangents)
    except Exception as error:  # whatever a broken backward raises is the verdict on it
        yield GradientCheck(piece.path, "all", "", *[math.inf] * 4, 0.0, f"raises {type(error).__name__}: {error}")
        return
    eager = [_grads(piece.original, piece, cotangents)]
    if None not in piece.rows[0] + piece.rows[1]:
        eager += [_reordered(piece, cotangents, seed) for seed in range(1, _ORDERS)]
    exact = _exact(piece, cotangents)
    for at, (name, grad, right) in enumerate(zip(names, ours, exact, strict=True)):
        if grad is None or right is None:
            if (grad is None) != (right is None):
                yield GradientCheck(piece.path, name, "", *[math.inf] * 4, 0.0, "is missing on one side")
            continue
        ours_max, ours_rms = _errors(grad, right)
        theirs = [_errors(grads[at], right) for grads in eager if grads[at] is not None]
        dtype = str(grad.dtype).removeprefix("torch.")
        step = ulp(right.abs().max(), grad.dtype).item()
        yield GradientCheck(piece.path, name, dtype, ours_max, ours_rms, *map(max, zip(*theirs, strict=True)), step)


def _parameters(norms) -> list[tuple[int, str, nn.Parameter]]:
    return [(at, name, p) for at, norm in enumerate(norms) for name, p in norm.named_parameters(recurse=False)]


def _differentiable(piece: Piece) -> list[int]:
    """Numbers of the operands that a model differentiates: not the tables of a rotary embedding."""
    return list(range(len(piece.operands) if len(piece.norms) == 1 else 2))


def _grads(function: Callable, piece: Piece, cotangents: list, operands: tuple | None = None) -> list:
    operands = [t.detach() for t in (piece.operands if operands is None else operands)]
    wanted = [operands[at].requires_grad_() for at in _differentiable(piece)]
    wanted += [p for _, _, p in _parameters(piece.norms)]
    frozen = [p for p in wanted if not p.requires_grad]
    try:
        for p in frozen:
            p.requires_grad_()
        with torch.enable_grad():
            return list(torch.autograd.grad(function(*operands), wanted, cotangents, allow_unused=True))
    finally:
        for p in frozen:
            p.requires_grad_(False)


def _reordered(piece: Piece, cotangents: list, seed: int) -> list:
    """Eager's gradients with the rows in another order, those of the operands put back in theirs."""
    ins, outs = piece.rows
    order = torch.randperm(piece.operands[0].shape[ins[0]], generator=torch.Generator().manual_seed(seed))

    def moved(tensors, dims, order):
        pairs = zip(tensors, dims, strict=True)
        return tuple(t if t is None else t.index_select(dim, order.to(t.device)) for t, dim in pairs)

    grads = _grads(piece.original, piece, moved(cotangents, outs, order), moved(piece.operands, ins, order))
    count = len(_differentiable(piece))
    return [*moved(grads[:count], ins[:count], order.argsort()), *grads[count:]]


def _exact(piece: Piece, cotangents: list) -> list:
    """The gradients by the unpatched modules in float64, their own casts to float32 included."""
    twins = [_double(norm) for norm in piece.norms]
    with Float64Mode(), torch.enable_grad():
        operands = [t.detach().double() for t in piece.operands]
        wanted = [operands[at].requires_grad_() for at in _differentiable(piece)]
        wanted += [p for _, _, p in _parameters(twins)]
        outputs = piece.original(*operands, norms=twins)
        return list(torch.autograd.grad(outputs, wanted, [c.double() for c in cotangents], allow_unused=True))


def _double(norm: nn.Module) -> nn.Module:
    """The unpatched module with parameters in float64, sharing all else."""
    base = getattr(type(norm), "_hf_rmsnorm_base", type(norm))
    twin = object.__new__(base)
    doubles = {
        name: p if p is None else nn.Parameter(p.detach().double()) for name, p in norm._parameters.items()
    }
    twin.__dict__.update(vars(norm), _parameters=doubles)
    return twin


def _errors(grad: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    error = (grad.double() - exact).abs().nan_to_num(nan=math.inf)
    return (error.max().item(), error.square().mean().sqrt().item()) if error.numel() else (0.0, 0.0)
