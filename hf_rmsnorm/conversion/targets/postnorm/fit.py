"""Least squares for post-norm models: the mean that a norm removes, as a linear function of what its writer reads."""

from collections.abc import Iterable

import torch

from ...twin.layer_norms import TwinNorm
from ...twin.prove import run_as_rms
from ...twin.run import hooked, run, weight_axis
from .trace import Sum

RIDGE = 1e-6  # of the mean diagonal of the normal equations


def _masked(x: torch.Tensor, inputs: dict) -> torch.Tensor:
    """The rows of x, without those that an attention mask among the inputs marks as padding."""
    rows = x.flatten(0, -2)
    masks = [v for k, v in inputs.items() if k.endswith("attention_mask") and torch.is_tensor(v) and v.ndim == 2]
    masks = [m for m in masks if m.numel() == len(rows) and (x.ndim == 2 or m.shape == x.shape[:-1])]
    if x.ndim == 3 and inputs.get("decoder_input_ids") is not None and len(masks) != 1:
        return rows  # which of the two stacks it belongs to is not known
    return rows[masks[0].flatten().bool()] if masks else rows


@torch.no_grad()
def fit_means(model, batches: Iterable[dict], sums: list[Sum], norms) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Norm -> (w, a) with mean(input of the norm) = w . (input of its writer) + a, as near as may be.

    Rows count by the inverse of their variance: that is how the norm scales what is left of the mean; those that an
    attention mask excludes do not count. The model is in float64, its writers centred.
    """
    by_path = {s.norm: s for s in sums}
    last: dict[str, torch.Tensor] = {}
    grams: dict[str, torch.Tensor] = {}
    inputs: dict = {}

    def note(path, args, output):
        if path not in by_path:
            last[path] = args[0]
            return
        x = args[0]
        h = last[by_path[path].writer].reshape(*x.shape[:-1], -1)
        rows = torch.cat([h, torch.ones_like(x[..., :1]), x.mean(-1, keepdim=True)], -1)
        rows = _masked(rows * (x.var(-1, unbiased=False, keepdim=True) + norms[path].spec.eps).rsqrt(), inputs)
        grams[path] = grams.get(path, 0.0) + rows.T @ rows

    with hooked(model, [*by_path, *{s.writer for s in sums}], note):
        for inputs in batches:
            run(model, inputs)
    found = {}
    for path, gram in grams.items():
        a, b = gram[:-1, :-1], gram[:-1, -1]
        damping = torch.diag(a).mean() * RIDGE * torch.eye(len(a), dtype=a.dtype)
        damping[-1, -1] = 0.0  # the average is taken off whole
        w = torch.linalg.solve(a + damping, b)
        found[path] = w[:-1], w[-1]
    return found


@torch.no_grad()
def subtract(model: torch.nn.Module, fits: dict[Sum, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Take ``w . h + a`` off every feature that a writer gives, in place."""
    for s, (w, a) in fits.items():
        writer = model.get_submodule(s.writer)
        reads = 1 - weight_axis(writer)
        writer.weight -= w if reads else w[:, None]
        if writer.bias is not None:
            writer.bias -= a


def measure(model, batches, expected, norms: dict[str, TwinNorm]) -> dict:
    """How far a model with these norms as RMSNorms is from what was expected, in rows that no attention mask excludes:
    how many ``rows``, ``cosine_mean`` and ``cosine_min`` of them, and ``relative_rms``, the error over the original."""
    cosines, error, size = [], 0.0, 0.0
    for inputs, outputs in zip(batches, expected, strict=True):
        for e, o in zip(outputs, run_as_rms(model, inputs, norms, norms), strict=True):
            if e.ndim < 2 or not e.numel():
                continue
            e, o = _masked(e, inputs), _masked(o, inputs)
            cosines.append(torch.cosine_similarity(e, o, dim=-1))
            error += float((e - o).square().sum())
            size += float(e.square().sum())
    rows = torch.cat(cosines)
    return {
        "rows": rows.numel(),
        "cosine_mean": float(rows.mean()),
        "cosine_min": float(rows.min()),
        "relative_rms": (error / max(size, 1e-300)) ** 0.5,
    }
