"""The forward of a patched decoder layer: its own, where sums that a norm reads next are computed with that norm."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..formula import HALF_DTYPES
from ..ops import add_norm_backend, fused_add_norm, sum_ahead_of_norm
from ..ops.direct import LaunchCache, capturing, launch_key, under_transform
from ..ops.norm import plan_of
from .handover import given_otherwise, hand_over
from .recipe import operands
from .source import CannotRewrite, guarded, with_sums, wrapped_alike
from .subclass import derive, marked
from .summands import keep_summands

_is_compiling = torch.compiler.is_compiling
_any_global_hook = torch.nn.modules.module._has_any_global_hook
_NO_LINK = (lambda: None), "", ()
# Of what a layer is given. Below it the host is what everything waits for, and handing a norm over takes it twice the
# time of an add and a norm, and a fifth more with their backwards; a graph that is captured needs the host no more.
LEAST_ELEMENTS = 2**20
# Layers and inputs of fewer that ran fused once, without gradients: a captured graph fuses the sums it finds loaded.
_ran_fused: set[tuple] = set()
# observer(module, kind, which, operands): `module` adds or attends, `which` names the place in its forward.
observers: list[Callable[[torch.nn.Module, str, tuple, tuple], None]] = []


@contextlib.contextmanager
def observing(observer: Callable) -> Iterator[None]:
    """Tell an observer, in all threads, the operands of each sum that a norm reads, and of each q with its k."""
    observers.append(observer)
    try:
        yield
    finally:
        observers[:] = [each for each in observers if each is not observer]


def tell(*seen) -> None:
    for observer in list(observers):
        observer(*seen)


@dataclass(frozen=True)
class Fusion:
    """Which sums of a layer's forward are computed with which norm.

    Args:
        sites: (position among the sums of the forward's source, name of the child norm that reads the sum); the name
            is "" for the sum that the layer returns, which a norm elsewhere reads.
        seen: positions of those sums that something besides norms and operators may get hold of.
        unrounded: norms of the model read sums before they are rounded, on every device.
    """

    sites: tuple[tuple[int, str], ...]
    seen: tuple[int, ...] = ()
    unrounded: bool = False

    def rewrite(self, base: type) -> Callable:
        """The forward of a class, with these sums made by `add`, or by `add_unrounded`."""
        sites = {at: (reader, not reader or at in self.seen) for at, reader in self.sites}
        return with_sums(base, sites, add_unrounded if self.unrounded else add)


# layer -> (the module that calls the norm that reads what the layer returns, the norm's name there, the modules around
# the layer that return it too). Not an attribute of the layer, which would copy, pickle and show the next layer with
# it; a copy has no entry until it is patched itself. An entry outlives the patch, and does nothing without it.
_links: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def link(layer: torch.nn.Module, owner: torch.nn.Module, name: str, around: tuple[torch.nn.Module, ...] = ()) -> None:
    """Tell a fused layer which norm reads what it returns: the child `name` of `owner`, which calls it.

    around: modules that contain the layer, and return the very tensor that it returned.
    """
    _links[layer] = weakref.ref(owner), name, tuple(map(weakref.ref, around))


def reader_of(layer: torch.nn.Module, name: str) -> torch.nn.Module | None:
    """The norm that reads a sum of a layer: the child of that name, or for "" the one behind the layer."""
    owner, name, _ = (lambda: layer, name, ()) if name else _links.get(layer, _NO_LINK)
    owner = owner()
    return None if owner is None else owner._modules.get(name)


def add(layer: torch.nn.Module, left, right, site: tuple[str, bool]):
    """``left + right``, with the norm that reads the sum computed in the same launch where that is the same.

    Args:
        layer: whose forward this is.
        left, right: whatever the forward adds.
        site: (name of the norm among the layer's children, "" for the one that reads what the layer returns; whether
            something besides norms and operators may get hold of the sum). Such a sum is a node of the graph by
            itself, whose gradient is that of the unfused sum; under `inference_mode` nobody could tell that it was
            written to, so there it is left alone.
    """
    if _is_compiling() or type(left) is not torch.Tensor or type(right) is not torch.Tensor:
        return left + right
    graded, (reader, seen) = torch.is_grad_enabled(), site
    if seen and torch.is_inference_mode_enabled():
        return left + right
    if observers:
        tell(layer, "sum", site, (left, right))
    norm = layer._modules.get(reader) if reader else _next_norm(layer, left)
    found = None if norm is None else operands_ahead(norm)
    if found is None or (left.dtype != right.dtype and norm in given_otherwise):
        return left + right
    weight, bias, spec = found
    recipe = type(norm)._hf_rmsnorm_recipe
    key = launch_key(right, weight, bias, spec.functional)
    if key is not None:
        key += ((left.shape, left.stride(), left.dtype, left.device),)
    elif under_transform():
        return left + right
    plans = type(norm)._hf_rmsnorm_plans
    plan, backend = None if key is None else plans.get(key), "triton"
    if plan is None:
        if capturing(left):
            return left + right
        wider = left if left.element_size() >= right.element_size() else right
        backend = add_norm_backend(right, left, weight, bias, spec)
        if backend == "original" or not recipe.fits(wider, weight, bias):
            return left + right
        plan = None if key is None else plans.keep(key, backend, plan_of, right, weight, bias, spec, left)
    if graded and not (left.requires_grad or right.requires_grad):
        seen = True  # a node of both would have the sum ask for gradients where the norm's weight does
    if not seen or backend != "triton":
        if seen and graded:
            return left + right
        if graded and not (plan and plan.backward) and capturing(left):  # nor has its backward run
            return left + right
        keep_output = recipe.keeps_output(norm, weight, bias, spec)
        total, output = fused_add_norm(right, left, weight, bias, spec, backend, keep_output, plan)
    elif weight is None or type(norm._parameters.get(recipe.weight)) is torch.nn.Parameter:
        total, output = sum_ahead_of_norm(right, left, weight, bias, spec, plan)
    else:
        return left + right
    hand_over(norm, total, output, weight, bias, spec, backend)
    return total


def waits_for_host(layer: torch.nn.Module, x) -> bool:
    """Whether a layer is to add and normalise x in two launches, as the host is quicker so than in one."""
    if _is_compiling() or type(x) is not torch.Tensor or x.numel() >= LEAST_ELEMENTS or capturing(x):
        return False
    if not x.is_floating_point():  # the ids that a whole model is given
        return False
    # A checkpoint runs a forward twice, and both alike; transforms have shapes that do not hash.
    if torch.is_grad_enabled() or under_transform() or torch._C._len_torch_dispatch_stack():
        return True
    key = type(layer), x.shape, x.dtype, x.get_device()
    if key in _ran_fused:
        return True
    if len(_ran_fused) >= LaunchCache.MOST:
        _ran_fused.clear()
    _ran_fused.add(key)
    return False


def add_unrounded(layer: torch.nn.Module, left, right, site: tuple[str, bool]):
    """`add` where norms read sums before they are rounded: its summands are kept for whoever reads it.

    Raises:
        RuntimeError: the sum is one of a graph that is compiled, exported or transformed, or of other tensors.
    """
    norm = reader_of(layer, site[0])
    recipe = getattr(type(norm), "_hf_rmsnorm_recipe", None)
    if recipe is not None and recipe.rounds_sum:
        return add(layer, left, right, site)
    total = left + right
    if _is_compiling() or under_transform() or not type(left) is type(right) is type(total) is torch.Tensor:
        if total.dtype in HALF_DTYPES:
            raise RuntimeError(
                "numerics='vllm' and 'sglang' read residual sums before they are rounded, which torch.compile, "
                "torch.export, functorch and tensors of other types do not allow: run the model without them"
            )
        return total
    if observers and norm is not None:
        tell(layer, "sum", site, (left, right))
    keep_summands(norm, total, left, right, returned=not site[0], again=layer.training or torch.is_grad_enabled())
    return total


def _next_norm(layer: torch.nn.Module, x: torch.Tensor) -> torch.nn.Module | None:
    """The norm behind the layer, where it may be computed before its owner is called; else None. x: of the sum."""
    owner, name, around = _links.get(layer, _NO_LINK)
    owner = owner()
    if (
        owner is None
        or _is_interrupted(layer)
        or (around and any(_is_interrupted(module()) for module in around))
        or owner._forward_pre_hooks  # they may fetch or change its weights: FSDP2, DeepSpeed, a user's own
        or "_hf_hook" in owner.__dict__
        or "forward" in owner.__dict__  # it may bring the weights in as hooks do
        # Non-reentrant checkpoints and offloading of activations: what one region makes no other may use.
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or under_transform()
        or capturing(x)  # the owner may be captured in a graph of its own, and replayed on another sum
    ):
        return None
    norm = owner._modules.get(name)
    return None if norm is None or "_is_fsdp_managed_module" in norm.__dict__ else norm


def _is_interrupted(layer: torch.nn.Module) -> bool:
    """Whether something comes between what a layer returns and who reads it: a hook, or a checkpoint around it."""
    return (layer._forward_hooks and any(map(_may_write, layer._forward_hooks.values()))) or (
        layer.training and getattr(layer, "gradient_checkpointing", False)
    )


def _may_write(hook: Callable) -> bool:
    """Whether a hook may write to what a layer returns, past its version; those of `output_hidden_states` only look."""
    return getattr(hook, "__module__", None) != "transformers.utils.output_capturing"


def operands_ahead(norm: torch.nn.Module, restricted: bool = False) -> tuple | None:
    """(weight, bias, formula) of a patched norm that may be computed before it is called.

    None where that is patched to be computed by itself, has a hook, of a user or of what manages its weights, or needs
    more than its one input; unless `restricted`, also where more than the shape of its input decides whether it is
    served.
    """
    state, cls = norm.__dict__, type(norm)
    base = getattr(cls, "_hf_rmsnorm_base", None)
    if (
        base is None
        or base.forward is not cls._hf_rmsnorm_forward  # somebody gave the class another, or it other code
        or getattr(base.forward, "__code__", None) is not cls._hf_rmsnorm_code
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
            always = observers if not getattr(fusion, "unrounded", False) else (True,)
            aside = waits_for_host if isinstance(fusion, Fusion) else None
            cls = derive(base, guarded(fusion.rewrite(base), base, always, aside), marks, fused_layer_class, fusion)
            if not wrapped_alike(cls.forward, base.forward):
                raise CannotRewrite("something has wrapped its forward that its source does not show")
            _classes[key] = cls
        return _classes[key]


def layer_part(cls: type) -> type | None:
    """The class in cls's ancestry that `fused_layer_class` made, or None."""
    return marked(cls, "_hf_rmsnorm_fusion")
