"""The mean of each norm's input on real text, and the cost of dropping it.

LayerNorm subtracts the mean of its input, RMSNorm does not. If the mean is small
compared with the RMS, the two nearly agree. If it is not, a model whose LayerNorms are
merely replaced by RMSNorm is another model.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from ..fused.norm import recipe_of
from ..fused.recipe import Recipe
from ..patching import patched
from ..reference import reference_norm
from .context import evaluating, hooked
from .noise import compare_logits


@dataclass(frozen=True)
class NormInput:
    """The input of one norm over some text.

    ``median`` and ``largest`` are of |mean| / RMS over the rows seen; 0 where a
    LayerNorm is an RMSNorm, at most 1.
    """

    path: str
    class_name: str
    centered: bool  # it is a LayerNorm
    rows: int
    median: float
    largest: float


@dataclass(frozen=True)
class NaiveSwap:
    """The model with every LayerNorm replaced by an RMSNorm of the same weight, bias
    and eps, nothing else changed.

    ``kl`` is KL(model || swapped) per token in nats, ``top1`` the share of tokens whose
    likeliest word stays.
    """

    kl: float
    top1: float
    perplexity: float


@dataclass(frozen=True)
class Inspection:
    """`inspect_norms`' result: one `NormInput` per norm that ran, in the order of the
    model's modules.
    """

    norms: tuple[NormInput, ...]
    tokens: int
    perplexity: float | None = None
    naive: NaiveSwap | None = None

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return asdict(self)


def inspect_norms(model: nn.Module, inputs: Mapping | torch.Tensor) -> Inspection:
    """Run model on inputs and measure the mean of every norm's input, and the cost of
    swapping norms naively.

    Args:
        model: any model that `patch_model` takes; it is run as it is, in evaluation
            mode, and left unchanged.
        inputs: token ids (batch, tokens), or keyword arguments.

    Returns:
        An `Inspection`. Perplexity and the naive swap need logits over a vocabulary and
        ``input_ids``; they are None
        elsewhere, and `naive` also where the model has no LayerNorm.
    """
    arguments = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    ids = arguments.get("input_ids")
    with patched(model, fuse_residual=False, numerics="model") as report:
        recipes = {
            record.path: recipe_of(model.get_submodule(record.path))
            for record in report.swapped
        }
        layer_norms = {
            record.path
            for record in report.swapped
            if record.formula.centered or record.converted
        }
    means = _Means(recipes)
    naive = perplexity = None
    with evaluating(model):
        logits = _logits(model, arguments, recipes, means.note)
        if logits is not None and ids is not None:
            perplexity = _perplexity(logits, ids)
            centered = {
                path: recipes[path]
                for path in recipes
                if path in layer_norms and means.of[path]
            }
            if centered:
                naive = _swapped_naively(model, arguments, centered, logits)
    norms = [
        _norm_input(model, path, path in layer_norms, parts)
        for path, parts in means.of.items()
        if parts
    ]
    return Inspection(
        tuple(norms), 0 if ids is None else ids.numel(), perplexity, naive
    )


def _norm_input(
    model: nn.Module, path: str, centered: bool, parts: list[torch.Tensor]
) -> NormInput:
    ratios = torch.cat(parts)
    name = type(model.get_submodule(path)).__name__
    return NormInput(
        path, name, centered, len(ratios), ratios.median().item(), ratios.max().item()
    )


class _Means:
    """|mean| / RMS of the rows that each norm reads, as parts by its path."""

    def __init__(self, paths: Iterable[str]):
        self.of: dict[str, list[torch.Tensor]] = {path: [] for path in paths}

    def note(self, path: str, args: tuple, output) -> None:
        x = _first_tensor(args).detach().double().flatten(0, -2)
        rms = x.square().mean(-1).sqrt().clamp_min(torch.finfo(torch.float64).tiny)
        self.of[path].append((x.mean(-1).abs() / rms).cpu())


def _swapped_naively(
    model: nn.Module, arguments: dict, recipes: dict[str, Recipe], logits: torch.Tensor
) -> NaiveSwap:
    """The model whose LayerNorms, by path, do not subtract the mean."""

    def as_rms(path: str, args: tuple, output: torch.Tensor) -> torch.Tensor:
        module, recipe = model.get_submodule(path), recipes[path]
        names = recipe.weight, recipe.bias
        parameters = (
            None if name is None else getattr(module, name).double() for name in names
        )
        spec = replace(recipe.spec_of(module), centered=False)
        return reference_norm(_first_tensor(args).double(), *parameters, spec).to(
            output.dtype
        )

    swapped = _logits(model, arguments, recipes, as_rms)
    rows, others = logits.flatten(0, -2), swapped.flatten(0, -2)
    difference, _ = compare_logits([rows], [others], [rows.double()])
    perplexity = _perplexity(swapped, arguments["input_ids"])
    return NaiveSwap(difference.kl_mean, difference.top1_agreement, perplexity)


def _logits(
    model: nn.Module, arguments: dict, paths: Iterable[str], hook: Callable
) -> torch.Tensor | None:
    """The model's logits with a hook after the modules at these paths; None if it
    returns none.
    """
    with torch.no_grad(), hooked(model, paths, hook):
        return getattr(model(**arguments), "logits", None)


def _first_tensor(args: tuple) -> torch.Tensor:
    return next(filter(torch.is_tensor, args))


def _perplexity(logits: torch.Tensor, ids: torch.Tensor) -> float:
    loss = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten().to(logits.device)
    )
    return math.exp(loss.item()) if loss.item() < 700 else math.inf
