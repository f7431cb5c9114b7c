"""`count_launches`: the kernels that a forward launched, and the fused pieces that it
computed without one.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from ..fused import watch
from ..fused.layer import layer_part
from ..fused.norm import recipe_of
from ..fused.recipe import tensor_of
from ..kernels.counting import counting_into
from ..ops import chosen_backend
from ..ops.backend import why_not
from ..ops.direct import starts_kernels
from ..paths import compact_paths, fitted
from .report import in_words

NOT_CALLED = "not called from Python: not part of this forward, or inside torch.compile or a CUDA graph"
COMPILED = "inside torch.compile, which fuses norms itself"
UNKNOWN = "these inputs are computed one operator after the other"


@dataclass
class Piece:
    """One fused piece of a model, counted over all its calls.

    Attributes:
        path: of the norm; of two norms in one kernel, and of fusions that no call
            reached, the module that has them.
        what: ``"norm"``, ``"residual add + norm"``, ``"q/k norms + rotary embedding"``,
            ...
        launched: how often a kernel computed it.
        missed: how often it was computed without one.
        reason: the reason of the last such call; "" if there was none.
    """

    path: str
    what: str
    launched: int = 0
    missed: int = 0
    reason: str = ""


class LaunchCount(Counter):
    """Kernel name -> launches; for a model also its fused `pieces`. Printed, a short table."""

    _watched: "_Watched | None" = None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """A record for each fused piece of the model; empty without one."""
        return () if self._watched is None else tuple(self._watched.pieces())

    def __str__(self) -> str:
        kernels = [f"{count} {name}" for name, count in sorted(self.items())]
        names = ", ".join(kernels) or "none"
        if self._watched is None:
            return f"kernels launched: {names}"
        pieces = self.pieces
        fused = sum(piece.launched > 0 and not piece.missed for piece in pieces)
        head = f"all {fused}" if fused == len(pieces) else f"{fused} of {len(pieces)}"
        lines = [f"{head} pieces ran as fused kernels", *_rows(pieces)]
        return fitted("\n".join([*lines, f"  kernels   {names}"]), 10)


@contextmanager
def count_launches(model: nn.Module | None = None) -> Iterator[LaunchCount]:
    """Count this package's kernel launches while the context is open, and list which
    pieces of a model ran fused.

    Args:
        model: a patched model. Each norm, residual add + norm, pair of q/k norms +
            rotary embedding, and norm + scale and shift is listed: how often a kernel
            computed it, or the reason if none did. None: only kernels are counted.

    Yields:
        A `collections.Counter` by kernel name (``norm_forward``, ``norm_backward``,
        ...), for all threads. With a model
        it has `pieces`, and ``print(launches)`` shows them.

    Raises:
        TypeError: model is not a module.
        ValueError: no norm of the model is patched.

    Calls from compiled code and replays of CUDA graphs pass no Python: their kernels
    are counted at most, and the pieces are listed as not called.

    Example:
        >>> import torch
        >>> from hf_rmsnorm import count_launches, patch_model
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        >>> report = patch_model(model)
        >>> with torch.no_grad(), count_launches(model) as launches:
        ...     _ = model(torch.ones(2, 8, dtype=torch.float32))
        >>> piece = launches.pieces[0]
        >>> piece.path, piece.what, piece.launched + piece.missed
        ('1', 'norm', 1)
    """
    launches = LaunchCount()
    with counting_into(launches), ExitStack() as stack:
        if model is not None:
            launches._watched = _Watched(model, launches)
            watch.watchers.append(launches._watched.note)
            stack.callback(watch.watchers.remove, launches._watched.note)
        yield launches


class _Watched:
    """A model whose fused pieces are counted."""

    def __init__(self, model: nn.Module, launches: Counter):
        if not isinstance(model, nn.Module):
            what = f"count_launches needs a torch.nn.Module, got {type(model).__name__}"
            raise TypeError(f"{what}: load the model first")
        self.launches = launches
        self.norms: dict[nn.Module, str] = {}
        self.layers: dict[str, nn.Module] = {}
        self.not_called = NOT_CALLED
        for path, module in model.named_modules():
            if recipe_of(module) is not None:
                self.norms[module] = path
            if layer_part(type(module)) is not None:
                self.layers[path] = module
            if _is_compiled(module):
                self.not_called = COMPILED
        if not self.norms:
            what = f"no norm of this {type(model).__name__} is patched"
            raise ValueError(f"{what}: call patch_model(model) first")
        self.noted: dict[tuple[str, str], Piece] = {}
        self.called: set[str] = set()
        self._launched_before = 0

    def note(self, what: str, norms: tuple, x, reason: str) -> None:
        """Count a call of a piece: by a kernel if one was launched since the last call."""
        paths = [self.norms[norm] for norm in norms if norm in self.norms]
        if not paths:  # a norm of another model
            return
        self.called.update(paths)
        path = paths[0] if len(paths) == 1 else paths[0].rpartition(".")[0]
        piece = self.noted.setdefault((path, what), Piece(path, what))
        counts = [n for name, n in self.launches.items() if name.endswith("_forward")]
        launched = sum(counts)
        if launched > self._launched_before:
            piece.launched += 1
        else:
            piece.missed += 1
            piece.reason = reason or why_not_launched(norms[0], x, what)
        self._launched_before = launched

    def pieces(self) -> Iterator[Piece]:
        """Those that were called, in the order of their calls; then those that were
        not.
        """
        yield from self.noted.values()
        for path in self.norms.values():
            if path not in self.called:
                yield Piece(path, watch.NORM, reason=self.not_called)
        for path, layer in self.layers.items():
            yield from self._unreached(path, layer)

    def _unreached(self, path: str, layer: nn.Module) -> Iterator[Piece]:
        """The fused pieces of a layer whose norms were all called one by one."""
        inside = [norm for norm in layer.children() if norm in self.norms]
        places = [path, *(self.norms[norm] for norm in inside)]
        noted = [piece for piece in self.noted.values() if piece.path in places]
        if not noted or any(piece.what != watch.NORM for piece in noted):
            return
        what = in_words(str(layer_part(type(layer))._hf_rmsnorm_fusion))
        calls = max(piece.launched + piece.missed for piece in noted)
        reasons = [*(piece.reason for piece in noted), *map(_why_called, inside)]
        reason = next(filter(None, reasons), UNKNOWN)
        yield Piece(path, what, missed=calls, reason=reason)


def why_not_launched(norm: nn.Module, x, piece: str = watch.NORM) -> str:
    """Why no kernel was launched for a piece with a patched norm, of x."""
    if chosen_backend() == "reference":
        return "use_backend('reference') is in force"
    if not isinstance(x, torch.Tensor):
        return "it was called without a tensor"
    reason = _why_not_computed(norm, x)
    if reason is not None:
        return reason
    if not starts_kernels(x):
        return (
            f"a {type(x).__name__} under torch.func, forward-mode gradients or tracing"
        )
    if piece == watch.NORM:
        return recipe_of(norm).notes()
    return _why_called(norm) or UNKNOWN


def _why_not_computed(norm: nn.Module, x: torch.Tensor) -> str | None:
    """Why the kernels do not compute a patched norm of x as it stands, or None if they
    do.
    """
    recipe = recipe_of(norm)
    spec = recipe.spec_of(norm)
    if spec is None:
        return ", ".join(recipe.changes(norm)) or "its eps is no number any more"
    names = recipe.weight, recipe.bias
    tensors = [None if name is None else tensor_of(norm, name) for name in names]
    gate = x if spec.gate is not None else None
    rows = x.movedim(1, -1) if recipe.layout == "channels_first" and x.dim() > 1 else x
    return why_not(spec, rows, *tensors, gate)


def _why_called(norm: nn.Module) -> str:
    """Why a patched norm has to be called as a module; "" if nothing about the norm
    requires it.
    """
    hooks = (
        *norm._forward_hooks,
        *norm._forward_pre_hooks,
        *norm._backward_hooks,
        *norm._backward_pre_hooks,
    )
    if hooks:
        return "the norm has a hook, which sees what the norm is called with"
    if "forward" in norm.__dict__ or "_hf_hook" in norm.__dict__:
        return "the norm's forward is wrapped, by accelerate for example"
    return ""


def _is_compiled(module: nn.Module) -> bool:
    compiled = isinstance(module, torch._dynamo.OptimizedModule)
    return compiled or module._compiled_call_impl is not None


def _rows(pieces: tuple[Piece, ...]) -> Iterator[str]:
    """A line for all pieces of a kind with the same result, with their paths below."""
    alike: dict[tuple, list[Piece]] = {}
    for piece in pieces:
        key = piece.what, piece.launched > 0, piece.reason
        alike.setdefault(key, []).append(piece)
    for (what, is_launched, reason), group in alike.items():
        launched = sum(piece.launched for piece in group)
        missed = sum(piece.missed for piece in group)
        calls = f"{missed} {'call' if missed == 1 else 'calls'}"
        launches = f"{launched} {'launch' if launched == 1 else 'launches'}"
        if is_launched:
            result = f"{launches}; {calls} not fused: {reason}" if missed else launches
        else:
            result = f"{reason} ({calls})" if missed else reason
        kind = "fused" if is_launched else "not fused"
        yield f"  {kind:<9} {len(group)} x {what}: {result}"
        for path in compact_paths([piece.path for piece in group]):
            yield f"      {path}"
