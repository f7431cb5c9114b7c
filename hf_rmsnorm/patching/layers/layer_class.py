"""The class of a module whose forward was compiled again: `swap.fuse` puts it on."""

from collections.abc import Callable
from functools import cache

from ...fused.layer import guarded
from ...fused.subclass import derive, marked
from ..source import CannotRewrite, wrapper_codes


def fused_layer_class(base: type, fusion) -> type:
    """A subclass of base, with base's name and module, whose forward is base's own but
    for a fusion.

    Args:
        fusion: hashable; its ``rewrite(base)`` makes the forward.

    Raises:
        CannotRewrite: the forward cannot be compiled again, or is wrapped by what its
            source does not show.
        TypeError: base cannot be subclassed.
    """
    return _made(base, base.forward, fusion)


@cache
def _made(base: type, own: Callable, fusion) -> type:
    marks = {"_hf_rmsnorm_layer_base": base, "_hf_rmsnorm_fusion": fusion}
    owner: list[type] = []
    forward = guarded(fusion.rewrite(base), base, owner)
    cls = derive(base, forward, marks, fused_layer_class, fusion)
    owner.append(cls)
    if wrapper_codes(cls.forward) != wrapper_codes(own):
        raise CannotRewrite(
            "something has wrapped its forward that its source does not show"
        )
    return cls


def layer_part(cls: type) -> type | None:
    """The class in cls's ancestry that `fused_layer_class` made, or None."""
    return marked(cls, "_hf_rmsnorm_fusion")
