"""Means that no weight holds and nothing but LayerNorms sees: where to take each off while the model runs."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from ...patching.centring import centre_at, input_name
from ...verification.context import is_float
from .gauge import GAUGE, ZERO_MEAN, gradients, input_means
from .layer_norms import Norms
from .prove import difference
from .run import MISFITS, run

LEAST = 2  # norms that become RMSNorms by one subtraction: for fewer it does not pay
Place = tuple[str, str]  # path of a module, and "input" or "output"


def same_mean(mean: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether these are the means of the rows of x."""
    wanted, size = x.mean(-1), x.square().mean(-1).sqrt().max()
    pairs = zip(mean.shape[::-1], wanted.shape[::-1], strict=False)
    if mean.ndim > wanted.ndim or any(a not in (1, b) for a, b in pairs):
        return False
    return bool(((mean - wanted).abs() <= ZERO_MEAN * size).all())


def centre_at_run_time(work: torch.nn.Module, inputs: dict, norms: Norms) -> dict[str, str]:
    """Module path -> "input" or "output": what is to lose its mean in the run, from the earliest on; it does in `work`.

    Taking it off there changes no output, and leaves `LEAST` norms or more without a mean in their inputs that had one.
    """
    chosen: dict[str, str] = {}
    tried: set[Place] = set()
    expected = [y.detach() for y in run(work, inputs)]
    bad = with_mean(work, inputs, norms)
    while len(bad) >= LEAST and (untried := [p for p in _places(work, inputs, norms, bad) if p not in tried]):
        for path, where in untried:
            tried.add((path, where))
            centre_at(work, {path: where}, undo := ExitStack())
            left = _left(work, inputs, norms, expected)
            if left is not None and len(left) <= len(bad) - LEAST:
                chosen[path], bad = where, left
                break
            undo.close()
    return chosen


@torch.no_grad()
def _left(work: torch.nn.Module, inputs: dict, norms: Norms, expected: list[torch.Tensor]) -> list[str] | None:
    """Paths of the norms whose input has a mean; None where the outputs are no longer those expected."""
    try:
        return with_mean(work, inputs, norms) if difference(expected, run(work, inputs)) <= GAUGE else None
    except MISFITS:  # other durations, say, of a length that memory does not hold
        return None


def with_mean(model: torch.nn.Module, inputs: dict, norms: Norms) -> list[str]:
    """Paths of the norms whose input has a mean."""
    return [path for path, mean in input_means(model, inputs, norms).items() if mean > ZERO_MEAN]


def _places(work: torch.nn.Module, inputs: dict, norms: Norms, bad: list[str]) -> list[Place]:
    """What has the mean of the input of one of these norms before it reads it, in the order of the norms.

    Left out is where the gradient of the outputs tells already that they depend on the mean.
    """
    widths = {norms[path].hidden_size for path in bad}
    values: dict[Place, torch.Tensor] = {}
    found: dict[Place, None] = {}

    def note(path: str, where: str, x) -> None:
        x = next(iter(x), None) if isinstance(x, tuple) else x
        if is_float(x) and x.ndim and x.shape[-1] in widths:
            if where == "output" or path not in bad:  # nothing but that norm reads a norm's own input
                values[path, where] = x
            else:
                found.update(dict.fromkeys(place for place, other in values.items() if same_mean(other.mean(-1), x)))

    with ExitStack() as stack, torch.enable_grad():
        for path, module in work.named_modules():
            if path:
                name = input_name(type(module))
                before = lambda _, args, kwargs, path=path, name=name: note(path, "input", args or kwargs.get(name))  # noqa: E731
                after = lambda _, args, output, path=path: note(path, "output", output)  # noqa: E731
                stack.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(after))
        outputs = run(work, inputs)
    followed = {place: values[place] for place in found if values[place].requires_grad}
    slopes = gradients(outputs, followed, torch.Generator().manual_seed(1)) if followed else {}
    return [place for place in found if (slope := slopes.get(place)) is None or _is_gauge(slope)]


def _is_gauge(slope: torch.Tensor) -> bool:
    return bool((slope.sum(-1).abs() <= GAUGE * slope.abs().sum(-1).max()).all())
