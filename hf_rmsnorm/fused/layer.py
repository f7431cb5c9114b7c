"""The class of a module whose forward was compiled again, and what a norm needs to be computed by its surroundings."""

import threading

import torch

from .recipe import operands
from .source import CannotRewrite, guarded, wrapped_alike
from .subclass import derive, marked

_any_global_hook = torch.nn.modules.module._has_any_global_hook
_CALL = torch.nn.Module.__call__


def operands_ahead(norm, restricted: bool = False) -> tuple | None:
    """(weight, bias, formula) of a patched norm that may be computed before it is called.

    None where it is no such norm, or has to be called: it is patched to be computed by itself, has a `__call__` of its
    own or a hook, of a user or of what manages its weights, or needs more than its one input. Unless `restricted`, also
    where more than the shape of its input decides whether it is served.
    """
    if not isinstance(norm, torch.nn.Module) or type(norm).__call__ is not _CALL:
        return None
    state, cls = norm.__dict__, type(norm)
    patched = getattr(cls, "_hf_rmsnorm_norm", None)
    if (
        patched is None
        or not patched.is_ours(norm)
        or not ((recipe := cls._hf_rmsnorm_recipe).is_simple or (restricted and recipe.is_of_rows))
        or not recipe.fuse_residual
        or "parametrizations" in norm._modules  # a weight that is computed, once a call
        or _any_global_hook()
        or norm._forward_pre_hooks
        or norm._forward_hooks
        or norm._backward_hooks
        or norm._backward_pre_hooks
        or "forward" in state
        or "_hf_hook" in state
    ):
        return None
    return operands(norm, recipe)


_classes: dict[tuple, type] = {}
_classes_lock = threading.Lock()


def fused_layer_class(base: type, fusion) -> type:
    """A subclass of base, with base's name and module, whose forward is base's own but for a fusion.

    Args:
        fusion: hashable; its ``rewrite(base)`` makes the forward.

    Raises:
        CannotRewrite: the forward cannot be compiled again, or is wrapped by what its source does not show.
        TypeError: base cannot be subclassed.
    """
    key = (base, base.forward, fusion)
    with _classes_lock:
        if key not in _classes:
            marks = {"_hf_rmsnorm_layer_base": base, "_hf_rmsnorm_fusion": fusion, "_hf_rmsnorm_original": base.forward}
            always = getattr(fusion, "keeps", False)
            cls = derive(base, guarded(fusion.rewrite(base), base, always), marks, fused_layer_class, fusion)
            if not wrapped_alike(cls.forward, base.forward):
                raise CannotRewrite("something has wrapped its forward that its source does not show")
            _classes[key] = cls
        return _classes[key]


def layer_part(cls: type) -> type | None:
    """The class in cls's ancestry that `fused_layer_class` made, or None."""
    return marked(cls, "_hf_rmsnorm_fusion")
