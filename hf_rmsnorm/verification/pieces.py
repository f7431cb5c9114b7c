"""What a candidate computes, piece by piece: recorded while models run, with what the original makes of the same.

Every changed module is a piece, recorded in the reference's run. In the candidate's run so is what patched layers
compute in one launch: a norm with the sum that it reads, in the layer before its own maybe, or with another norm and a
rotary embedding.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..fused.layer import observing
from ..fused.norm import fused_part, recipe_of
from ..fused.sums import add_and_norm
from ..ops import use_backend


@dataclass
class Expected:
    """One output of the original, and how near to it another one can be."""

    y: torch.Tensor
    dtype: torch.dtype  # of the input
    largest_term: torch.Tensor  # per row, the size of what y's elements are sums of
    amplification: torch.Tensor  # per row, by how much rounding errors of the input grow: 1 + |mean|/std if centred
    rounded_terms: torch.Tensor | None = None  # per element, the size of the rounded terms that it is a sum of


@dataclass
class Piece:
    """One thing that the candidate computes. A module's call with no floating tensor to compare has only its names."""

    path: str  # of the module, and what of its forward this is
    class_name: str
    operands: tuple = ()  # as the model gave them, copied, strides included, down to some rows
    run: Callable | None = None  # the candidate's own code on such operands; returns all outputs
    original: Callable | None = None  # the same by the reference's modules; norms= takes others for `norms`
    formula: Callable | None = None  # what `run` is to compute where the norm rounds otherwise; None: `run` itself
    expects: Callable[..., list[Expected]] | None = None  # of the original's outputs; nothing where they are no norm's
    norms: tuple[nn.Module, ...] = ()  # of the candidate, those that take part
    # For each operand and for each output, the dimension along which they are many of the same; None if there is none.
    rows: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    expected: list[Expected] = field(default_factory=list)  # set by `run_originals`


@torch.no_grad()
def run_originals(pieces: Iterable[Piece]) -> None:
    """Set what is expected of pieces, while the reference's modules are as they are to be taken.

    Of a norm that rounds as a server does it is what plain torch makes of that order, once the norm is patched.
    """
    for piece in pieces:
        if piece.original is not None:
            stated = any(rounds_otherwise(norm) for norm in piece.norms)
            with use_backend("reference") if stated else nullcontext():
                run = (piece.formula or piece.run) if stated else piece.original
                piece.expected = piece.expects(*run(*piece.operands))


@contextmanager
def recording_modules(
    reference: nn.Module, candidate: nn.Module, paths: Iterable[str], rows: int
) -> Iterator[dict[str, list[Piece]]]:
    """Record, per path, calls of the reference's module until about ``rows`` rows of its last dimension were seen."""
    pieces: dict[str, list[Piece]] = {path: [] for path in paths}
    seen = dict.fromkeys(pieces, 0)

    def record(path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        x = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), None)
        if x is None or not x.is_floating_point() or x.dim() == 0 or x.numel() == 0:
            if not pieces[path]:
                pieces[path].append(Piece(path, type(module).__name__))
        elif seen[path] < rows:
            lead = _first_rows(x, getattr(module, "weight", None), rows - seen[path])
            seen[path] += math.prod(lead) * math.prod(x.shape[len(lead) : -1])
            values, structure = tree_flatten((args, kwargs))
            at = next(i for i, value in enumerate(values) if value is x)
            cut = tuple(_cut(value, x.shape, lead) for value in values)
            pieces[path].append(_module_piece(path, module, candidate.get_submodule(path), cut, structure, at))

    with ExitStack() as stack:
        for path in pieces:
            module = reference.get_submodule(path)
            stack.callback(module.register_forward_pre_hook(partial(record, path), with_kwargs=True).remove)
        yield pieces


def _module_piece(path: str, module: nn.Module, other: nn.Module, operands: tuple, structure, at: int) -> Piece:
    def call(module, *operands):
        args, kwargs = tree_unflatten(list(operands), structure)
        return (module(*args, **kwargs),)

    def expects(y):
        x = operands[at]
        if not isinstance(y, torch.Tensor) or y.shape != x.shape:
            return []
        return [_norm_expects(lambda x: call(module, *operands[:at], x, *operands[at + 1 :])[0], x, y, x.dtype)]

    def formula(*operands):
        args, kwargs = tree_unflatten(list(operands), structure)
        return (fused_part(type(other)).forward(other, *args, **kwargs),)

    run, original = partial(call, other), partial(call, module)
    return Piece(path, type(module).__name__, operands, run, original, formula, expects, (other,))


def _first_rows(x: torch.Tensor, weight, rows: int) -> tuple[int, ...]:
    """Sizes of the first (at most two) dimensions such that what is kept has about ``rows`` rows.

    They are of those that are many of the same, which lie before the ones that a weight spans.
    """
    free = x.dim() - 1
    if isinstance(weight, torch.Tensor):
        # The weight spans another dimension, or it may: images with their channels first.
        other = weight.shape != x.shape[-weight.dim() :] or weight.shape[:1] == x.shape[1:2]
        free = 1 if other else x.dim() - weight.dim()
    lead = list(x.shape[: min(free, 2)])
    inner = math.prod(x.shape[len(lead) : -1])
    for i in range(len(lead)):
        lead[i] = max(1, min(lead[i], rows // (math.prod(lead[i + 1 :]) * inner)))
    return tuple(lead)


def _cut(value, shape: torch.Size, lead: tuple[int, ...]):
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape[: len(lead)] == shape[: len(lead)]:
        value = value[tuple(slice(n) for n in lead)]
    return value.detach().clone()


def _norm_expects(norm: Callable, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> Expected:
    """Of y = norm(x). Found by asking for the output of constant rows, not by knowing the norm's class."""

    def constant(value: float) -> torch.Tensor:
        return norm(torch.full_like(x, value)).double().nan_to_num()

    bias = constant(0.0)  # xhat is 0 there
    amplification = torch.ones_like(x[..., :1], dtype=torch.float64)
    if torch.equal(constant(1.0), bias):  # xhat is 0 there too: centred
        spread, mean = torch.std_mean(x.double(), -1, correction=0, keepdim=True)
        amplification += mean.abs() / spread.clamp_min(1e-30)
    terms = (y.double() - bias).abs() * amplification + bias.abs()
    return Expected(y, dtype, terms.amax(-1, keepdim=True), amplification)


@contextmanager
def recording_fused(model: nn.Module, rows: int) -> Iterator[list[Piece]]:
    """Record each fused piece that this thread runs: about ``rows`` rows of its first call of one row, and of several.

    What it yields is filled while the model, which is patched, runs.
    """
    paths = {module: path for path, module in model.named_modules()}
    seen: set[tuple] = set()
    pieces: list[Piece] = []
    thread = threading.get_ident()

    def observe(module: nn.Module, kind: str, which: tuple, operands: tuple) -> None:
        key = module, which, operands[0].shape[:-1].numel() > 1
        if threading.get_ident() != thread or module not in paths or key in seen:
            return
        if (piece := _sum_piece(paths[module], module, which, operands, rows)) is not None:
            seen.add(key)
            pieces.append(piece)

    with observing(observe):
        yield pieces


def _sum_piece(path: str, norm: nn.Module, _: tuple, operands: tuple, rows: int) -> Piece | None:
    left, right = operands
    if not _is_comparable(norm) or left.shape != right.shape or left.dim() < 2:
        return None

    def run(left, right):
        return add_and_norm(left, right, norm)

    def original(left, right, norms=(norm,)):
        total = left + right
        return total, _own_forward(norms[0], total)

    def expects(total, y):
        rounded_once = Expected(total, _coarsest(operands), total.double().abs(), torch.ones(1))
        return [rounded_once, _norm_expects(partial(_own_forward, norm), total, y, _coarsest(operands))]

    keep = max(1, rows // max(1, math.prod(left.shape[1:-1]))), max(1, rows)
    operands = tuple(_copied(t[: keep[0]] if t.dim() == 2 else t[: keep[0], : keep[1]]) for t in operands)
    along = (left.dim() - 2,) * 2
    layer, _, name = path.rpartition(".")
    kept = (norm,), (along, along)
    return Piece(f"{layer}: + {name}", type(norm).__name__, operands, run, original, None, expects, *kept)


def _first(t: torch.Tensor, shape: torch.Size, lead: tuple[int, ...]) -> torch.Tensor:
    """A copy of the part of t that belongs to the first rows of what it broadcasts to; its own strides are kept."""
    sizes = (1,) * (len(shape) - t.dim()) + tuple(t.shape)
    cut = tuple(slice(n if size > 1 else 1) for n, size in zip(lead, sizes, strict=False))
    return _copied(t[cut[len(shape) - t.dim() :]])


def alone(norm: nn.Module, calls: list[Piece]) -> Piece | None:
    """The first of a patched norm's calls, by its forward without hooks; None unless it takes one tensor of rows."""
    operands = calls[0].operands if calls else ()
    if len(operands) != 1 or operands[0].dim() < 2 or not _is_comparable(norm):
        return None

    def original(x, norms=(norm,)):
        return (_own_forward(norms[0], x),)

    along = (operands[0].dim() - 2,)
    rows = (along, along) if type(norm)._hf_rmsnorm_recipe.layout == "last" else None
    name = type(norm).__name__

    def run(x):
        return (type(norm).forward(norm, x),)

    return Piece(calls[0].path, name, operands, run, original, norms=(norm,), rows=rows)


def keeps_formula(cls: type) -> bool:
    """Whether this is a patched norm that computes what its own class does; a converted checkpoint's does not."""
    recipe = getattr(cls, "_hf_rmsnorm_recipe", None)
    return recipe is not None and not recipe.as_rms


def rounds_otherwise(norm: nn.Module) -> bool:
    """Whether this is a patched norm that rounds as a server does, not as its own class."""
    recipe = recipe_of(norm)
    return recipe is not None and recipe.numerics != "model"


def _is_comparable(norm: nn.Module) -> bool:
    """Whether the norm's own forward is what it computes, with weights that are here."""
    return keeps_formula(type(norm)) and not any(p.is_meta for p in norm.parameters())


def _own_forward(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return getattr(type(norm), "_hf_rmsnorm_base", type(norm)).forward(norm, x)


def _copied(t: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of a view, so that the same launch serves it."""
    t = t.detach()
    if 0 in t.stride():
        return t.clone()
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def _coarsest(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    return max((t.dtype for t in tensors), key=lambda dtype: torch.finfo(dtype).eps)
