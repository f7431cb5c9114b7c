"""Reports each fused piece that a forward computes to `count_launches` and other
watchers. Without a watcher it does nothing.
"""

from collections.abc import Callable

from torch.compiler import is_compiling
from torch.nn import Module

NORM = "norm"
SUM = "residual add + norm"
QK = "q/k norms + rotary embedding"
ROTARY = "rotary embedding"
MODULATION = "norm + scale and shift"
MODULATED_SUM = "residual add + norm + scale and shift"

# a caller asks first whether there are any, so that others pay nothing
watchers: list[Callable] = []


def note(
    piece: str, norms: tuple[Module, ...], x, fused: bool, reason: str = ""
) -> None:
    """Tell each watcher that a piece is computed, fused or not.

    Args:
        piece: one of the names above.
        norms: the patched norms in it; of a rotary embedding alone, the attention.
        x: the input of the first, or a summand of it.
        fused: whether the backend in force computes it, not the model's own code.
        reason: why it was not one launch, where that does not follow from the norms and
            x.
    """
    if is_compiling():
        return
    for watcher in list(watchers):
        watcher(piece, norms, x, fused, reason)
