"""Which modules of a float64 model are LayerNorms, by what they compute and not by what they are called."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .twin import MISFITS, in_double, run

TOLERANCE = 1e-9  # of the largest output; a wrong formula or eps is off by 1e-6 and more
USUAL_EPS = (1e-5, 1e-6, 1e-12)  # what a module that holds none as an attribute may have in its code


@dataclass(frozen=True)
class LayerNorm:
    """``(x - mean) / sqrt(var + eps) * gain + bias`` over the last dimension.

    Args:
        hidden_size: length of its rows.
        gain, bias: tensors that broadcast to its input from the right, or None.
        eps: under the root.
        calls: how often the run called it.
    """

    hidden_size: int
    gain: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    calls: int

    def __call__(self, x: torch.Tensor, centred: bool = True) -> torch.Tensor:
        """The norm of x, or, with ``centred=False``, the RMSNorm of x with the same gain, bias and eps."""
        x = x - x.mean(-1, keepdim=True) if centred else x
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        y = y if self.gain is None else y * self.gain
        return y if self.bias is None else y + self.bias


@contextmanager
def hooked(model: torch.nn.Module, paths, hook):
    """Inside, ``hook(path, args, output)`` is called after each forward of the modules at `paths`.

    What the hook returns, where it is not None, becomes the output.
    """
    handles = [
        model.get_submodule(path).register_forward_hook(
            lambda module, args, kwargs, output, path=path: hook(path, (*args, *kwargs.values()), output),
            with_kwargs=True,
        )
        for path in paths
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def find_layer_norms(model: torch.nn.Module, inputs: dict) -> tuple[dict[str, LayerNorm], list[str]]:
    """(path -> norm, in the order they run; paths of norms that were not called).

    Every module without children whose output has the shape of its input is given new rows of several sizes and means
    and compared with the formula; one that was not called, with rows of the length of its parameters.
    """
    leaves = [path for path, m in model.named_modules() if path and next(m.children(), None) is None]
    seen: dict[str, tuple[int, tuple]] = {}

    def note(path, args, output):
        x = args[0] if args else None
        if torch.is_tensor(x) and torch.is_tensor(output) and x.shape == output.shape and x.is_floating_point():
            seen[path] = (seen.get(path, (0,))[0] + 1, args)

    with hooked(model, leaves, note):
        run(model, inputs)
    found: dict[str, LayerNorm] = {}
    for path, (calls, args) in seen.items():
        norm = _recognise(model.get_submodule(path), args, calls)
        if norm is not None:
            found[path] = norm
    silent = [path for path in leaves if path not in seen and _is_layer_norm(model.get_submodule(path))]
    return found, silent


def _is_layer_norm(module: torch.nn.Module) -> bool:
    """Whether a module that was not called computes a LayerNorm of rows as long as its parameters, or its shape."""
    own = {p.shape for p in module.parameters(recurse=False)}
    shape = getattr(module, "normalized_shape", None)
    own |= {torch.Size(shape)} if isinstance(shape, (tuple, list)) else set()
    rows = (torch.zeros(2, 3, *shape, dtype=torch.float64) for shape in own if 0 < len(shape) < 3)
    return any(_recognise(module, (x,), 0) is not None for x in rows)


def _recognise(module: torch.nn.Module, args: tuple, calls: int) -> LayerNorm | None:
    x = args[0].detach()
    if not x.ndim or x.shape[-1] < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(x.shape, generator=generator, dtype=torch.float64) + 0.5
    rows = rows * 10.0 ** torch.randint(-3, 1, (*x.shape[:-1], 1), generator=generator)
    try:
        with in_double():
            y = module(rows, *args[1:])
    except MISFITS:  # a module of another kind, whose inputs have to be of another kind too
        return None
    if not torch.is_tensor(y) or y.shape != x.shape:
        return None
    own = [p.detach().double() for p in module.parameters(recurse=False) if p.shape == x.shape[x.ndim - p.ndim :]]
    numbers = [v for v in vars(module).values() if isinstance(v, float) and 0 <= v < 0.1]
    bound = TOLERANCE * y.abs().max().clamp_min(1e-30)
    for eps in dict.fromkeys((*numbers, *USUAL_EPS)):
        for gain in (None, *own, *(1 + p for p in own)):
            for bias in (None, *own):
                norm = LayerNorm(x.shape[-1], gain, bias, eps, calls)
                if bool(((norm(rows) - y).abs() <= bound).all()):
                    return norm
    return None
