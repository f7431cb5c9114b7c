"""The mean of each norm's input on real text, and the cost of dropping it.

LayerNorm subtracts the mean of its input, RMSNorm does not. If the mean is small
compared with the RMS, the two nearly agree. If it is not, a model whose LayerNorms are
merely replaced by RMSNorm is another model.
"""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from ..fused.norm import recipe_of
from ..patching import patched
from ..patching.swap import set_recipe
from .calls import unpatched
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
        model: any model that `patch_model` takes; it is run without its patch, in
            evaluation mode, and left unchanged.
        inputs: token ids (batch, tokens), or keyword arguments.

    Returns:
        An `Inspection`. Perplexity and the naive swap need logits over a vocabulary and
        ``input_ids``; they are None
        elsewhere, and `naive` also where the model has no LayerNorm.
    """
    arguments = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    ids = arguments.get("input_ids")
    with evaluating(model), torch.no_grad(), unpatched(*model.modules()):
        with patched(model, fuse_residual=False) as report:
            records = {record.path: record for record in report.swapped}
            recipes = {path: recipe_of(model.get_submodule(path)) for path in records}
        means: dict[str, list[torch.Tensor]] = {path: [] for path in recipes}

        def note(path: str, args: tuple, output) -> None:
            x = next(filter(torch.is_tensor, args)).double().flatten(0, -2)
            rms = x.square().mean(-1).sqrt().clamp_min(torch.finfo(x.dtype).tiny)
            means[path].append((x.mean(-1).abs() / rms).cpu())

        with hooked(model, recipes, note):
            logits = getattr(model(**arguments), "logits", None)
        norms, layer_norms = [], {}
        for path, record in records.items():
            if means[path]:
                centered = record.formula.centered or record.converted
                norms.append(_norm_input(record, centered, torch.cat(means[path])))
                if centered:
                    layer_norms[path] = recipes[path]
        if logits is None or ids is None:
            return Inspection(tuple(norms), 0 if ids is None else ids.numel())
        naive = None
        if layer_norms:
            naive = _swapped_naively(model, arguments, layer_norms, logits)
    return Inspection(tuple(norms), ids.numel(), _perplexity(logits, ids), naive)


def _norm_input(record, centered: bool, ratios: torch.Tensor) -> NormInput:
    return NormInput(
        record.path,
        record.class_name,
        centered,
        len(ratios),
        ratios.median().item(),
        ratios.max().item(),
    )


def _swapped_naively(
    model: nn.Module, arguments: dict, recipes: dict, logits: torch.Tensor
) -> NaiveSwap:
    """The model whose LayerNorms, by path, do not subtract the mean."""
    with ExitStack() as stack:
        for path, recipe in recipes.items():
            norm = model.get_submodule(path)
            spec = replace(recipe.spec, centered=False)
            set_recipe(norm, replace(recipe, spec=spec, as_rms=True))
            stack.callback(set_recipe, norm, None)
        swapped = model(**arguments).logits
    rows, others = logits.flatten(0, -2), swapped.flatten(0, -2)
    difference, _ = compare_logits([rows], [others], [rows.double()])
    perplexity = _perplexity(swapped, arguments["input_ids"])
    return NaiveSwap(difference.kl_mean, difference.top1_agreement, perplexity)


def _perplexity(logits: torch.Tensor, ids: torch.Tensor) -> float:
    predicted = logits[:, :-1].flatten(0, 1).double()
    target = ids[:, 1:].flatten().to(logits.device)
    loss = nn.functional.cross_entropy(predicted, target).item()
    return math.exp(loss) if loss < 700 else math.inf
