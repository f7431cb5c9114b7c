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
from ..fused.hooks import why_called
from ..fused.norm import call_of, patch_of, recipe_of
from ..kernels.counting import counting_into
from ..operands import present
from ..ops import chosen_backend
from ..ops.backend import device_refusal
from ..ops.first_use import equal_kernels, summary
from ..ops.limits import why_not
from ..paths import fitted
from .api import check_module
from .report import alike, calls_not_fused, group_lines
from .swap import layer_part, why_not_run

NOT_CALLED = "not called from Python: not part of this forward, or inside torch.compile or a CUDA graph"
UNKNOWN = "these inputs are computed one operator after the other"


@dataclass
class Piece:
    """One fused piece of a model, counted over all its calls.

    Attributes:
        path: of the norm; of q/k norms or a rotary embedding, the module that has them.
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

    def __init__(self, counts=()):
        super().__init__(counts)
        self._parts: dict[Module, str] = {}  # what `_parts_of` finds in the model
        self._uncalled: dict[Module, str] = {}  # those of them that were not called
        self._noted: dict[tuple[str, str], Piece] = {}
        self._launched_before = 0

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """A record for each fused piece of the model; empty without one. Those that
        were called, in the order of their calls; then those that were not.
        """
        uncalled = []
        for part, path in self._uncalled.items():
            what, reason = watch.NORM, NOT_CALLED
            if recipe_of(part) is None:
                what, reason = watch.ROTARY, _cpu_refusal(part) or NOT_CALLED
            uncalled.append(Piece(path, what, reason=reason))
        return (*self._noted.values(), *uncalled)

    def note(
        self, what: str, norms: tuple[Module, ...], x, fused: bool, reason: str
    ) -> None:
        """Count a call of a piece: by a kernel if it is fused, and one was launched since
        the last call.
        """
        norms = [norm for norm in norms if norm in self._parts]
        if not norms:  # of another model
            return
        for norm in norms:
            self._uncalled.pop(norm, None)
        path = self._parts[norms[0]]
        if what == watch.QK:
            path = path.rpartition(".")[0]
        piece = self._noted.setdefault((path, what), Piece(path, what))
        launched = sum(self[name] for name in self if name.endswith("_forward"))
        if fused and launched > self._launched_before:
            piece.launched += 1
        else:
            piece.missed += 1
            piece.reason = reason or _why_not_launched(what, norms, x)
        self._launched_before = launched

    def __str__(self) -> str:
        kernels = [f"{count} {name}" for name, count in sorted(self.items())]
        names = ", ".join(kernels) or "none"
        if not self._parts:
            return f"kernels launched: {names}"
        pieces = self.pieces
        fused = sum(piece.has_run and not piece.missed for piece in pieces)
        head = f"{fused} of" if fused < len(pieces) else "all"
        lines = [f"{head} {len(pieces)} pieces ran as fused kernels"]
        for (what, _, _), group in alike(pieces, "what", "has_run", "reason"):
            lines += _lines(what, group)
        lines.append(f"  kernels   {names}")
        for device in equal_kernels:
            lines.append(f"  compared  {summary(device)}")
        return fitted("\n".join(lines), 10)


@contextmanager
def count_launches(model: Module | None = None) -> Iterator[LaunchCount]:
    """Count this package's kernel launches while the context is open, and list which
    pieces of a model ran fused.

    Args:
        model: a patched model. Each norm, residual add + norm, pair of q/k norms +
            rotary embedding, rotary embedding alone, and norm + scale and shift is
            listed: how often a kernel computed it, or the reason if none did. None:
            only kernels are counted.

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
            launches._parts = _parts_of(model)
            launches._uncalled = dict(launches._parts)
            watch.watchers.append(launches.note)
            stack.callback(watch.watchers.remove, launches.note)
        yield launches


def _parts_of(model: Module) -> dict[Module, str]:
    """The patched norms of a model, its modules that rotate without norms, and their
    paths.
    """
    check_module("count_launches", model)
    parts = {}
    for path, module in model.named_modules():
        layer = layer_part(type(module))
        rotates = layer is not None and layer._hf_rmsnorm_fusion.rotates_alone
        if rotates or recipe_of(module) is not None:
            parts[module] = path
    if not parts:
        what = f"no norm of this {type(model).__name__} is patched"
        raise ValueError(f"{what}: call patch_model(model) first")
    return parts


def _cpu_refusal(part: Module) -> str:
    """Why no kernel serves a module on a CPU, where its own forward runs; or ""."""
    if all(parameter.is_cpu for parameter in part.parameters()):
        return device_refusal("cpu") or ""
    return ""


def _why_not_launched(what: str, norms: list[Module], x) -> str:
    """Why no kernel was launched for a piece with these patched norms, of x."""
    if chosen_backend() == "reference":
        return "use_backend('reference') is in force"
    norm = norms[0]
    recipe = recipe_of(norm)
    if recipe is None:  # of a rotary embedding
        return UNKNOWN
    changed = why_not_run(norm, recipe)
    if changed is not None:
        return changed.reason
    reason = ""
    if what != watch.NORM:  # else it was called as a module
        reason = next(filter(None, map(why_called, norms)), "")
    if not reason and isinstance(x, Tensor):
        reason = _why_not_served(norm, x)
    return reason or calls_not_fused(recipe) or UNKNOWN


def _why_not_served(norm: Module, x: Tensor) -> str:
    """Why the kernels do not serve a norm of x; "" if they do, or its recipe does not."""
    patch = patch_of(norm)
    held = patch.held_by(norm)
    if held is None:
        return ""
    gate = None if patch.recipe.gate is None else x
    call = call_of(patch, held, x, gate)
    if call is None:
        return ""
    launches, operands = call
    dtypes = {str(t.dtype) for t in present(*operands)}
    reason = why_not(launches.spec, operands)
    if reason or len(dtypes) == 1 or launches.suits is None:
        return reason
    if launches.suits(*operands[:3]):
        return ""
    mixture = " and ".join(sorted(dtypes))
    return f"x and its parameters are {mixture}, which is left to torch here"


def _lines(what: str, group: list[Piece]) -> list[str]:
    """The lines for pieces of a kind with the same result, with their paths below."""
    launched = sum(piece.launched for piece in group)
    missed = sum(piece.missed for piece in group)
    reason = group[0].reason
    if not launched:
        times = f" ({missed}x)" if missed else ""
        return group_lines("not fused", what, f"{reason}{times}", group)
    rest = f"; not fused {missed}x: {reason}" if missed else ""
    return group_lines("fused", what, f"launched {launched}x{rest}", group)
