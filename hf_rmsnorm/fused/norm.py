"""The forward that a patched norm runs, and the class that carries it.

A fused class is a subclass of the module's current class that overrides `forward`, so that parameters, buffers, hooks,
`isinstance`, `extra_repr` and saved bytes stay what they were. `repr` says that the module is patched.
"""

import inspect
import math
import threading
from dataclasses import replace
from functools import cache

import torch

from ..formula import NormSpec
from ..ops import fused_norm, resolve_backend
from ..ops.backend import left_alone
from ..ops.direct import NOTHING, LaunchCache, is_watched
from ..ops.norm import launched_norm, plan_of
from ..ops.unrounded import norm_of_summands
from .recipe import Recipe, one_dtype, operands, shapes_fit, tensor_of
from .subclass import derive, marked
from .summands import summands_of

_is_compiling = torch.compiler.is_compiling
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
            plans = LaunchCache()
            marks = {
                "_hf_rmsnorm_base": base, "_hf_rmsnorm_recipe": recipe, "_hf_rmsnorm_forward": base.forward,
                "_hf_rmsnorm_code": getattr(base.forward, "__code__", None), "_hf_rmsnorm_plans": plans,
                "__repr__": _repr_of(base),
            }  # fmt: skip
            _classes[key] = derive(base, _make_forward(base, recipe, plans), marks, fused_class, recipe)
        return _classes[key]


def _repr_of(base: type):
    def __repr__(self):
        return f"{base.__repr__(self)} [hf_rmsnorm]"

    return __repr__


def fused_forward(base: type, recipe: Recipe):
    """The forward of `fused_class(base, recipe)` as a function, for modules that keep base as their class."""
    return _forward_for_any(base, base.forward, recipe)


@cache
def _forward_for_any(base: type, _, recipe: Recipe):
    return _make_forward(base, recipe, LaunchCache(), any_class=True)


def _make_forward(base: type, recipe: Recipe, plans: LaunchCache, any_class: bool = False):
    base_forward = base.forward
    code = getattr(base_forward, "__code__", None)
    signature = inspect.signature(base_forward)
    input_name = list(signature.parameters)[1]
    weight_name, bias_name, gate_name = recipe.weight, recipe.bias, recipe.gate
    hidden_size, functional, restricted = recipe.hidden_size, recipe.spec.functional, recipe.restricted
    channels_first = recipe.layout == "channels_first"
    any_gate, row_major = not recipe.one_gate_dtype, recipe.row_major
    own_forward = _formula_forward(input_name, recipe) if recipe.replaces else base_forward
    # Where nothing but eps can change, what it was found with; None is also what is not there.
    only_eps = not (recipe.settings or recipe.absent) and (recipe.eps is None or recipe.eps_value is not None)
    eps_name, eps_value = (recipe.eps, recipe.eps_value) if only_eps else (None, math.nan)
    replaces, is_simple, keep_output = recipe.replaces, recipe.is_simple, recipe.keeps_output
    # vLLM's RMSNorm multiplies in the weight's dtype, and returns x's.
    mixes, unrounded = recipe.numerics == "vllm" and recipe.spec.rounding == "before_weight", not recipe.rounds_sum
    mixes = mixes and gate_name is None

    def forward(self, *args, **kwargs):
        if not replaces and args and getattr(args[0], "is_cpu", False) and left_alone(args[0]):
            return base.forward(self, *args, **kwargs)
        # Somebody may have kept this method and unpatched the module since, or given its class another forward, or its
        # forward other code, as IPython's autoreload does.
        if (
            not (any_class or getattr(type(self), "_hf_rmsnorm_recipe", None) is recipe)
            or base.forward is not base_forward
            or getattr(base_forward, "__code__", None) is not code
        ):
            return base.forward(self, *args, **kwargs)
        gate = None
        if len(args) == 1 and not kwargs:
            x = args[0]
        else:
            x, gate = _inputs(args, kwargs, input_name, gate_name)
        weight = None if weight_name is None else tensor_of(self, weight_name)
        bias = None if bias_name is None else tensor_of(self, bias_name)
        spec = recipe.spec if self.__dict__.get(eps_name) is eps_value else recipe.spec_of(self)
        if gate is None and gate_name is not None and spec is not None:
            spec = _ungated(spec) if recipe.gate_optional else None
        if mixes and spec and weight is not None and getattr(x, "dtype", weight.dtype) != weight.dtype:
            if torch.finfo(weight.dtype).eps > torch.finfo(x.dtype).eps:
                return fused_norm(x, weight, bias, _in_weight_dtype(spec, "weight_dtype")).to(x.dtype)
            spec = _in_weight_dtype(spec, "once")
        key, plan, backend = None, None, "triton"
        whole = (weight is not None or weight_name is None) and (bias is not None or bias_name is None)
        if is_simple and whole and spec is not None and not _is_compiling():  # Dynamo guards on a dictionary it sees
            if unrounded and (summands := summands_of(self, x)) is not None:
                y = norm_of_summands(x, *summands, weight, bias, spec)
                return y.contiguous() if row_major else y
            key, plan = plans.find(x, weight, bias, functional)
            plans.recent = NOTHING if plan is None else plans.last.get(x.shape, NOTHING)
        if plan is None:
            if not replaces and left_alone(x):  # on an old GPU, or one of another kind
                return base.forward(self, *args, **kwargs)
            rows = recipe.rows_of(x) if restricted and isinstance(x, torch.Tensor) else x
            if (
                spec is None
                or not whole
                or not isinstance(rows, torch.Tensor)
                or not (gate is None or (isinstance(gate, torch.Tensor) and (any_gate or gate.dtype == x.dtype)))
                or (bias is not None and weight is not None and bias.dtype != weight.dtype)
                or (hidden_size is not None and rows.shape[-1:] != (hidden_size,))
                or (functional and not one_dtype(spec, rows, weight, bias))
            ):
                return own_forward(self, *args, **kwargs)
            backend = resolve_backend(rows, weight, bias, spec, gate)
            if backend == "original" or (backend == "reference" and not shapes_fit(rows, weight, bias, gate, spec)):
                return own_forward(self, *args, **kwargs)
            plan = None if key is None else plans.keep(key, backend, plan_of, x, weight, bias, spec)
        if plan is not None:
            y = launched_norm(x, weight, bias, None, spec, plan, keep_output)
            return y.contiguous() if row_major else y
        y = fused_norm(rows, weight, bias, spec, backend, gate, keep_output)
        if channels_first:
            y = y.movedim(-1, 1)
        return y.contiguous() if row_major else y

    def like_the_last(self, *args, **kwargs):
        """`forward`, and the shortest way to it for a call like the last one, as layer after layer makes it."""
        if not replaces and args and getattr(args[0], "is_cpu", False) and left_alone(args[0]):
            return base.forward(self, *args, **kwargs)
        alike, _, plan = NOTHING if _is_compiling() else plans.recent  # Dynamo would guard on it
        if (
            plan is not None
            and len(args) == 1
            and not kwargs
            and (any_class or getattr(type(self), "_hf_rmsnorm_recipe", None) is recipe)
            and base.forward is base_forward
            and (code is None or base_forward.__code__ is code)
            and (self.__dict__.get(eps_name) is eps_value or recipe.spec_of(self) is recipe.spec)
        ):
            (x,), weight, bias = args, self._parameters.get(weight_name), None
            if bias_name is None:
                like = alike(x, weight)
            else:
                like = alike(x, weight, bias := self._parameters.get(bias_name))
            if like and not is_watched():
                return launched_norm(x, weight, bias, None, recipe.spec, plan, keep_output)
        return forward(self, *args, **kwargs)

    made = like_the_last if is_simple and gate_name is None and not (mixes or unrounded or row_major) else forward
    made.__doc__ = base_forward.__doc__
    made.__signature__ = signature
    return made


def _formula_forward(input_name: str, recipe: Recipe):
    """What a module that computes another formula than its own runs where no kernel serves: that, in plain torch."""

    def forward(self, *args, **kwargs):
        x, gate = _inputs(args, kwargs, input_name, recipe.gate)
        found = operands(self, recipe)
        if x is None or found is None or (gate is None) != (recipe.spec.gate is None):
            what = "RMSNorm that its converted checkpoint records" if recipe.as_rms else f"norm of {recipe.numerics}"
            raise TypeError(
                f"{type(self).__name__} runs the {what}, on the input alone and with the eps that it had: unpatch it "
                "to call it in another way"
            )
        y = fused_norm(x, *found, "reference", gate)
        return y.contiguous() if recipe.row_major else y

    return forward


def _inputs(args: tuple, kwargs: dict, input_name: str, gate_name: str | None) -> tuple:
    """(input, gate) of a call, or (None, None) where it holds anything else."""
    names = (input_name,) if gate_name is None else (input_name, gate_name)
    given = dict(zip(names, args, strict=False)) if len(args) <= len(names) else {}
    if input_name not in {**given, **kwargs} or len(given) != len(args) or kwargs.keys() - set(names[len(args) :]):
        return None, None
    given.update(kwargs)
    return given[input_name], given.get(gate_name)


@cache
def _ungated(spec: NormSpec) -> NormSpec:
    return replace(spec, gate=None)


@cache
def _in_weight_dtype(spec: NormSpec, rounding: str) -> NormSpec:
    return replace(spec, rounding=rounding)


def fused_part(cls: type) -> type | None:
    """The class in cls's ancestry that `fused_class` made, or None; it differs from cls where others subclassed it."""
    return marked(cls, "_hf_rmsnorm_recipe")


def recipe_of(module: torch.nn.Module) -> Recipe | None:
    """What a patched module computes; None where it is not patched."""
    return getattr(type(module), "_hf_rmsnorm_recipe", None)


def fusible_recipe(module: torch.nn.Module) -> Recipe | None:
    """`recipe_of` a norm that may be computed with what surrounds it; None of any other module."""
    recipe = recipe_of(module)
    return recipe if recipe is not None and recipe.fuse_residual else None
