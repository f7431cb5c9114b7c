"""The forward that a patched norm runs, and the class that carries it.

A fused class is a subclass of the module's current class that overrides `forward`. So
parameters, buffers, hooks, `isinstance`, `extra_repr` and saved bytes do not change.
`repr` shows that the module is patched.
"""

import inspect
import threading
from dataclasses import replace
from functools import cache, lru_cache

import torch

from ..formula import NormSpec
from ..ops import fused_norm, resolve_backend
from ..ops.backend import compiles_original, left_alone
from ..ops.launches import Launches
from ..ops.norm import run
from ..ops.unrounded import norm_of_summands
from .recipe import Recipe, operands, parameters_of, shapes_fit
from .subclass import derive, marked
from .summands import summands_of
from .watch import NORM, note, watchers

_is_compiling = torch.compiler.is_compiling
_classes: dict[tuple, type] = {}
_classes_lock = threading.Lock()


def fused_class(base: type, recipe: Recipe) -> type:
    """A subclass of base, with base's name and module, whose forward is the fused norm.

    A call that the kernels do not serve runs ``base.forward``: another device or dtype,
    any argument besides the input, or a weight that is absent, on meta or of another
    shape. The same arguments give the same class again.

    Args:
        base: the current class of the module, an `nn.Module` subclass.
        recipe: the formula it was recognised to compute.

    Raises:
        TypeError: base cannot be subclassed.
    """
    key = (base, base.forward, recipe)
    with _classes_lock:
        if key not in _classes:
            norm = PatchedNorm(base, recipe)
            marks = {
                "_hf_rmsnorm_base": base,
                "_hf_rmsnorm_recipe": recipe,
                "_hf_rmsnorm_norm": norm,
                "_hf_rmsnorm_launches": norm.launches,
                "__repr__": _repr_of(base),
            }
            _classes[key] = derive(base, _forward_of(norm), marks, fused_class, recipe)
        return _classes[key]


def _repr_of(base: type):
    def __repr__(self):
        return f"{base.__repr__(self)} [hf_rmsnorm]"

    return __repr__


class PatchedNorm:
    """The class and recipe of a patched norm, as its forward reads them."""

    def __init__(self, base: type, recipe: Recipe):
        self.base = base
        self.recipe = recipe
        self.forward = base.forward
        self.code = getattr(base.forward, "__code__", None)
        self.signature = inspect.signature(base.forward)
        self.input_name = list(self.signature.parameters)[1]
        self.launches = Launches(recipe.spec, recipe.suits)
        # Not asked of the recipe in a call: Dynamo does not trace its cached
        # properties.
        self.replaces = recipe.replaces
        self.restricted = recipe.restricted
        self.keeps_output = recipe.keeps_output
        self.rounds_sum = recipe.rounds_sum
        # vLLM's RMSNorm multiplies in the weight's dtype, and returns x's.
        in_weight_dtype = (
            recipe.numerics == "vllm" and recipe.spec.rounding == "before_weight"
        )
        self.mixes = in_weight_dtype and recipe.gate is None
        is_unusual = self.mixes or recipe.gate or recipe.restricted or recipe.row_major
        without_eps = recipe.eps is not None and recipe.eps_value is None
        others = recipe.settings or recipe.absent or without_eps
        self.is_usual = not (is_unusual or others)

    def is_ours(self, module: torch.nn.Module) -> bool:
        """Whether the module is still patched, and its class and that class's code as
        they were then.

        This method may be kept while its module is unpatched. The class may get another
        forward, and the forward other code, as IPython's autoreload does.
        """
        return (
            getattr(type(module), "_hf_rmsnorm_recipe", None) is self.recipe
            and self.base.forward is self.forward
            and getattr(self.forward, "__code__", None) is self.code
        )

    def run_own(self, module: torch.nn.Module, args: tuple, kwargs: dict):
        """`compute_own`, which `count_launches` hears of."""
        if watchers:
            note(NORM, (module,), next(iter((*args, *kwargs.values())), None))
        return self.compute_own(module, args, kwargs)

    def compute_own(self, module: torch.nn.Module, args: tuple, kwargs: dict):
        """The module's own forward; or its formula in plain torch, if that is another
        than the forward's.
        """
        if self.replaces and self.is_ours(module):
            return _in_plain_torch(self, module, args, kwargs)
        return self.base.forward(module, *args, **kwargs)


def _forward_of(norm: PatchedNorm):
    def forward(self, *args, **kwargs):
        if _is_compiling() and compiles_original():
            return norm.compute_own(self, args, kwargs)
        call = read(norm, self, args, kwargs)
        if call is None:
            return norm.run_own(self, args, kwargs)
        y = run(*call) if norm.rounds_sum else run_unrounded(self, call)
        if y is None:
            y = run_by_backend(norm, call)
        if y is None:
            return norm.run_own(self, args, kwargs)
        if watchers:
            note(NORM, (self,), call[1])
        return y if norm.is_usual else lay_out(norm, call, y)

    forward.__doc__ = norm.forward.__doc__
    forward.__signature__ = norm.signature
    return forward


def read(
    norm: PatchedNorm, module: torch.nn.Module, args: tuple, kwargs: dict
) -> tuple | None:
    """The arguments of `run` for a call; None if the module's own forward has to serve
    it.

    x is the rows along the last dimension, the input or a view of it, and the formula
    of the launches has the eps that the module holds now.
    """
    recipe = norm.recipe
    x, gate = _inputs(args, kwargs, norm.input_name, recipe.gate)
    if not isinstance(x, torch.Tensor):
        return None
    if x.is_cpu and not norm.replaces and left_alone(x):
        return None
    if not norm.is_ours(module):
        return None
    parameters = parameters_of(module, recipe)
    if parameters is None:
        return None
    weight, bias = parameters
    eps = module.__dict__.get(recipe.eps)
    if norm.is_usual and eps is recipe.eps_value:
        return norm.launches, x, weight, bias, gate, None, norm.keeps_output
    return _read_unusual(norm, module, x, weight, bias, gate)


def _read_unusual(
    norm: PatchedNorm, module: torch.nn.Module, x: torch.Tensor, weight, bias, gate
) -> tuple | None:
    """`read` of a norm with another eps, a gate, another layout, limits or two dtypes."""
    recipe = norm.recipe
    spec = recipe.spec_of(module)
    if spec is None:
        return None
    if recipe.gate is not None and gate is None:
        if not recipe.gate_optional:
            return None
        spec = _ungated(spec)
    if gate is not None and not isinstance(gate, torch.Tensor):
        return None
    if norm.mixes and weight is not None and x.dtype != weight.dtype:
        spec = _of_two_dtypes(spec, x.dtype, weight.dtype)
    rows = recipe.rows_of(x) if norm.restricted else x
    if rows is None:
        return None
    launches = launches_for(module, spec)
    return launches, rows, weight, bias, gate, None, norm.keeps_output


def run_unrounded(module: torch.nn.Module, call: tuple):
    """`run`, of the summands of x before they are rounded, where these are kept."""
    launches, x, weight, bias, *_ = call
    summands = None if _is_compiling() else summands_of(module, x)
    return (
        run(*call)
        if summands is None
        else norm_of_summands(x, *summands, weight, bias, launches.spec)
    )


def run_by_backend(norm: PatchedNorm, call: tuple):
    """The norm where no kernel is started directly; None where the module's own forward
    is to compute it.
    """
    launches, x, weight, bias, gate, _, keep_output = call
    spec = launches.spec
    if (not norm.replaces and left_alone(x)) or not norm.recipe.suits(
        x, weight, bias, gate
    ):
        return None
    backend = resolve_backend(x, weight, bias, spec, gate)
    if backend == "original" or (
        backend == "reference" and not shapes_fit(x, weight, bias, gate, spec)
    ):
        return None
    return fused_norm(x, weight, bias, spec, backend, gate, keep_output)


def lay_out(norm: PatchedNorm, call: tuple, y: torch.Tensor) -> torch.Tensor:
    """The rows y that were computed, as the module returns them."""
    if norm.mixes:
        _, x, *_ = call
        y = y.to(x.dtype)
    if norm.recipe.layout == "channels_first":
        y = y.movedim(-1, 1)
    return y.contiguous() if norm.recipe.row_major else y


def launches_for(norm: torch.nn.Module, spec: NormSpec) -> Launches:
    """The launches of a patched norm, of another formula where the module holds another
    eps.
    """
    launches = type(norm)._hf_rmsnorm_launches
    if spec is launches.spec:
        return launches
    return _of_another_formula(type(norm)._hf_rmsnorm_recipe, spec)


@lru_cache(1_024)
def _of_another_formula(recipe: Recipe, spec: NormSpec) -> Launches:
    return Launches(spec, recipe.suits)


def _in_plain_torch(
    norm: PatchedNorm, module: torch.nn.Module, args: tuple, kwargs: dict
):
    recipe = norm.recipe
    x, gate = _inputs(args, kwargs, norm.input_name, recipe.gate)
    parameters = operands(module, recipe)
    if x is None or parameters is None or (gate is None) != (recipe.spec.gate is None):
        what = (
            "RMSNorm that its converted checkpoint records"
            if recipe.as_rms
            else f"norm of {recipe.numerics}"
        )
        raise TypeError(
            f"{type(module).__name__} runs the {what}, on the input alone and with the eps that it had: unpatch it "
            "to call it in another way"
        )
    y = fused_norm(x, *parameters, "reference", gate)
    return y.contiguous() if recipe.row_major else y


def _inputs(args: tuple, kwargs: dict, input_name: str, gate_name: str | None) -> tuple:
    """(input, gate) of a call, or (None, None) if it holds anything else."""
    if len(args) == 1 and not kwargs:
        return args[0], None
    names = (input_name,) if gate_name is None else (input_name, gate_name)
    operands_by_name = dict(zip(names, args, strict=False))
    operands_by_name.update(kwargs)
    is_whole = len(operands_by_name) == len(args) + len(kwargs)
    if not is_whole or input_name not in operands_by_name:
        return None, None
    if not operands_by_name.keys() <= set(names):
        return None, None
    return operands_by_name[input_name], operands_by_name.get(gate_name)


@cache
def _ungated(spec: NormSpec) -> NormSpec:
    return replace(spec, gate=None)


@cache
def _of_two_dtypes(spec: NormSpec, x: torch.dtype, weight: torch.dtype) -> NormSpec:
    """The formula of a server that multiplies in the weight's dtype and rounds to x's
    behind that.
    """
    return replace(
        spec,
        rounding="weight_dtype"
        if torch.finfo(weight).eps > torch.finfo(x).eps
        else "once",
    )


def fused_part(cls: type) -> type | None:
    """The class in cls's ancestry that `fused_class` made, or None; it differs from cls
    where others subclassed it.
    """
    return marked(cls, "_hf_rmsnorm_recipe")


def recipe_of(module: torch.nn.Module) -> Recipe | None:
    """The recipe of a patched module; None for a module that is not patched."""
    return getattr(type(module), "_hf_rmsnorm_recipe", None)


def fusible_recipe(module: torch.nn.Module) -> Recipe | None:
    """`recipe_of` a norm that may be computed with what surrounds it; None of any other
    module.
    """
    recipe = recipe_of(module)
    return recipe if recipe is not None and recipe.fuse_residual else None
