"""The forward that a patched norm runs, and the class that carries it.

A fused class is a subclass of the module's current class that overrides `forward` alone, so that parameters, buffers,
hooks, `isinstance`, `repr` and saved bytes stay what they were.
"""

from __future__ import annotations

import copyreg
import inspect
import math
import threading
from dataclasses import dataclass
from typing import Any

import torch

from .formula import NormSpec
from .ops import fused_norm, resolve_backend


@dataclass(frozen=True)
class Recipe:
    """How to compute one norm module: the formula, and where the module keeps what the formula needs.

    Args:
        spec: the formula, with the eps found when the module was recognised.
        weight, bias: names of the module's attributes, None where the formula has none.
        eps: name of the attribute that holds eps; None if eps is fixed in the code.
        eps_value: what that attribute held when ``spec.eps`` was found; any other value is read as eps itself.
        hidden_size: the only size of x's last dimension that a norm without weight accepts; None if any.
        settings: flags of the module, as (name, value), without which it computes something else.
    """

    spec: NormSpec
    weight: str | None = None
    bias: str | None = None
    eps: str | None = None
    eps_value: Any = None
    hidden_size: int | None = None
    settings: tuple[tuple[str, bool], ...] = ()

    def spec_of(self, module: torch.nn.Module) -> NormSpec | None:
        """The formula with the eps that module holds now; None if that is no eps, or a setting has changed."""
        for name, value in self.settings:
            if getattr(module, name) is not value:
                return None
        if self.eps is None:
            return self.spec
        eps = getattr(module, self.eps)
        if eps == self.eps_value:
            return self.spec
        if isinstance(eps, (float, int)) and 0.0 <= eps < math.inf:
            return self.spec.with_eps(float(eps))
        return None


_classes: dict[tuple, type] = {}
_classes_lock = threading.Lock()


def fused_class(base: type, recipe: Recipe) -> type:
    """A subclass of base, with base's name and module, whose forward is the fused norm.

    Calls that the kernels do not serve (another device or dtype, a weight that is absent, on meta or of another shape,
    any argument besides the input) run ``base.forward`` untouched. The same arguments give the same class again.

    Args:
        base: the current class of the module, an `nn.Module` subclass.
        recipe: the formula it was recognised to compute.

    Raises:
        TypeError: base cannot be subclassed.
    """
    key = (base, base.forward, recipe)
    with _classes_lock:
        if key not in _classes:
            _classes[key] = _make_class(base, recipe)
        return _classes[key]


def _make_class(base: type, recipe: Recipe) -> type:
    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "forward": _make_forward(base, recipe),
        "_hf_rmsnorm_base": base,
        "_hf_rmsnorm_recipe": recipe,
    }
    cls = type(base)(base.__name__, (base,), namespace)

    def __reduce_ex__(self, protocol):
        reduced = super(cls, self).__reduce_ex__(max(protocol, 2))  # older ones ask for a class by name
        # The class is made at run time, so pickle cannot find it by name: have it made again instead.
        if type(self) is cls and reduced[0] is copyreg.__newobj__ and reduced[1] == (cls,):
            return (_rebuild, (base, recipe), *reduced[2:])
        return reduced

    cls.__reduce_ex__ = __reduce_ex__
    return cls


def _rebuild(base: type, recipe: Recipe) -> torch.nn.Module:
    cls = fused_class(base, recipe)
    return cls.__new__(cls)


def _make_forward(base: type, recipe: Recipe):
    base_forward = base.forward
    signature = inspect.signature(base_forward)
    input_name = list(signature.parameters)[1]
    weight_name, bias_name = recipe.weight, recipe.bias
    hidden_size, functional = recipe.hidden_size, recipe.spec.functional

    def forward(self, *args, **kwargs):
        # Somebody may have kept this method and unpatched the module since, or given its class another forward.
        if getattr(type(self), "_hf_rmsnorm_recipe", None) is not recipe or base.forward is not base_forward:
            return base.forward(self, *args, **kwargs)
        if len(args) == 1 and not kwargs:
            x = args[0]
        elif not args and len(kwargs) == 1 and input_name in kwargs:
            x = kwargs[input_name]
        else:
            return base_forward(self, *args, **kwargs)
        weight = None if weight_name is None else _tensor(self, weight_name)
        bias = None if bias_name is None else _tensor(self, bias_name)
        spec = recipe.spec_of(self)
        if (
            spec is None
            or (weight is None and weight_name is not None)
            or (bias is None and bias_name is not None)
            or not isinstance(x, torch.Tensor)
            or (hidden_size is not None and x.shape[-1:] != (hidden_size,))
            or (functional and not _one_dtype(x, weight, bias))
        ):
            return base_forward(self, *args, **kwargs)
        backend = resolve_backend(x, weight, bias)
        if backend == "original" or (backend == "reference" and not _fits(x, weight, bias)):
            return base_forward(self, *args, **kwargs)
        return fused_norm(x, weight, bias, spec, backend)

    forward.__doc__ = base_forward.__doc__
    forward.__signature__ = signature
    return forward


def _tensor(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    # nn.Module's own attribute look-up takes as long as a kernel launch's bookkeeping; most weights are parameters.
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


def _fits(x, weight, bias) -> bool:
    """Whether the plain formula, which would broadcast anything, may compute this; the kernels check for themselves."""
    columns = x.shape[-1:]
    return (
        x.is_floating_point()
        and len(columns) == 1
        and (weight is None or weight.shape == columns)
        and (bias is None or bias.shape == columns)
    )


def _one_dtype(x, weight, bias) -> bool:
    # torch's own operators refuse some mixtures of dtypes: leave those to torch, unless autocast resolves them.
    if (weight is None or weight.dtype == x.dtype) and (bias is None or bias.dtype == x.dtype):
        return True
    return x.device.type != "cpu" and torch.is_autocast_enabled(x.device.type)


def fused_part(cls: type) -> type | None:
    """The class in cls's ancestry that `fused_class` made, or None; it differs from cls where others subclassed it."""
    for ancestor in cls.__mro__:
        if "_hf_rmsnorm_recipe" in ancestor.__dict__:
            return ancestor
    return None
