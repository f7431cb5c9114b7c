"""`count_launches`: the kernels that a forward launched, and the fused pieces that it
computed without one.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Module

from ..fused import watch
from ..fused.layer import why_called
from ..fused.norm import recipe_of
from ..fused.recipe import Recipe, parameters_of
from ..kernels.counting import counting_into
from ..ops import chosen_backend
from ..ops.backend import why_not
from ..paths import fitted
from .api import check_module
from .report import alike, group_lines
from .swap import why_not_run

NOT_CALLED = "not called from Python: not part of this forward, or inside torch.compile or a CUDA graph"
UNKNOWN = "these inputs are computed one operator after the other"


@dataclass
class Piece:
    """One fused piece of a model, counted over all its calls.

    Attributes:
        path: of the norm; of two norms in one kernel the module that has them.
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

    @property
    def has_run(self) -> bool:
        """Whether a kernel has computed it."""
        return self.launched > 0


class LaunchCount(Counter):
    """Kernel name -> launches; for a model also its fused `pieces`. Printed, a short table."""

    _watched: "_Watched | None" = None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """A record for each fused piece of the model; empty without one."""
        return () if self._watched is None else tuple(self._watched.pieces())

    def __str__(self) -> str:
        kernels = []
        for name, count in sorted(self.items()):
            kernels.append(f"{count} {name}")
        names = ", ".join(kernels) or "none"
        if self._watched is None:
            return f"kernels launched: {names}"
        pieces = self.pieces
        fused = sum(piece.has_run and not piece.missed for piece in pieces)
        head = f"{fused} of {len(pieces)}"
        if fused == len(pieces):
            head = f"all {fused}"
        lines = [f"{head} pieces ran as fused kernels"]
        for (what, _, _), group in alike(pieces, "what", "has_run", "reason"):
            lines += _lines(what, group)
        lines.append(f"  kernels   {names}")
        return fitted("\n".join(lines), 10)


@contextmanager
def count_launches(model: Module | None = None) -> Iterator[LaunchCount]:
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

    def __init__(self, model: Module, launches: Counter):
        check_module("count_launches", model)
        self.launches = launches
        self.norms: dict[Module, str] = {}
        for path, module in model.named_modules():
            if recipe_of(module) is not None:
                self.norms[module] = path
        if not self.norms:
            what = f"no norm of this {type(model).__name__} is patched"
            raise ValueError(f"{what}: call patch_model(model) first")
        self.noted: dict[tuple[str, str], Piece] = {}
        self.called: set[str] = set()
        self._launched_before = 0

    def note(self, what: str, norms: tuple, x, reason: str) -> None:
        """Count a call of a piece: by a kernel if one was launched since the last call."""
        norms = [norm for norm in norms if norm in self.norms]
        if not norms:  # of another model
            return
        paths = [self.norms[norm] for norm in norms]
        self.called.update(paths)
        path = paths[0] if len(paths) == 1 else paths[0].rpartition(".")[0]
        piece = self.noted.setdefault((path, what), Piece(path, what))
        launched = 0
        for name, count in self.launches.items():
            if name.endswith("_forward"):
                launched += count
        if launched > self._launched_before:
            piece.launched += 1
        else:
            piece.missed += 1
            piece.reason = reason or _why_not_launched(norms, x)
        self._launched_before = launched

    def pieces(self) -> Iterator[Piece]:
        """Those that were called, in the order of their calls; then those that were
        not.
        """
        yield from self.noted.values()
        for path in self.norms.values():
            if path not in self.called:
                yield Piece(path, watch.NORM, reason=NOT_CALLED)


def _why_not_launched(norms: list[Module], x) -> str:
    """Why no kernel was launched for a piece with these patched norms, of x."""
    if chosen_backend() == "reference":
        return "use_backend('reference') is in force"
    norm, recipe = norms[0], recipe_of(norms[0])
    changed = why_not_run(norm, recipe)
    if changed is not None:
        return changed[0]
    reason = _why_not_served(norm, recipe, x) if isinstance(x, Tensor) else ""
    called = next(filter(None, map(why_called, norms)), "")
    return reason or called or recipe.notes() or UNKNOWN


def _why_not_served(norm: Module, recipe: Recipe, x: Tensor) -> str:
    """Why the kernels do not serve a norm of x; "" if they do, or its recipe does not."""
    spec = recipe.spec_of(norm)
    rows = recipe.rows_of(x)
    parameters = parameters_of(norm, recipe)
    if rows is None or parameters is None:
        return ""
    gate = None if spec.gate is None else x
    return why_not(spec, rows, *parameters, gate) or ""


def _lines(what: str, group: list[Piece]) -> list[str]:
    """The lines for pieces of a kind with the same result, with their paths below."""
    launched = sum(piece.launched for piece in group)
    missed = sum(piece.missed for piece in group)
    reason = group[0].reason
    kind, result = "not fused", reason
    if launched:
        kind, result = "fused", f"launched {launched}x"
        if missed:
            result += f"; not fused {missed}x: {reason}"
    elif missed:
        result += f" ({missed}x)"
    return group_lines(kind, what, result, group)
