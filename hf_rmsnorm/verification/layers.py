"""Compares each fused layer with the same layer unfused, on the input that it gets in
the model.

The comparison does not depend on how a layer is fused. Unfused, the layer has its
original class, and its norms stay patched.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..fused.layer import layer_part
from ..fused.norm import recipe_of
from ..ops import use_backend
from ..patching.swap import fuse
from .context import is_float, one_line
from .float64 import in_float64
from .gradients import CALLS, GradientCheck, alike, cotangents_of, gradients, judged
from .noise import NoiseFloor, compare_logits
from .quantised import quantised_modules


@dataclass(frozen=True)
class LayerCheck:
    """One fused layer: its outputs against those of the same layer unfused.

    They must be equal, bit for bit. Two cases are compared by `noise_floor` instead: a
    fusion that does not promise equal bits, such as q and k with their rotary
    embedding, and a layer whose unfused runs differ among themselves.
    """

    path: str  # of the layer, and its fused pieces
    class_name: str
    dtype: str = ""
    elements: int = 0
    differing: int = 0  # how many of them are not equal
    noise_floor: NoiseFloor | None = None  # None if the outputs are equal
    passed: bool = True
    reason: str = ""  # why it failed


@dataclass
class LayerComparison:
    """The result of `comparing_layers`: for each fused layer that ran, the check of its
    worst call.
    """

    backward: bool
    checks: dict[str, LayerCheck] = field(default_factory=dict)
    gradients: list[GradientCheck] = field(default_factory=list)
    seen: set[tuple[str, bool]] = field(default_factory=set)
    busy: bool = False

    def compare(self, path: str, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        """Compare a layer on its arguments, if this is its first call with one row, or
        with several.
        """
        call = None if self.busy else call_of(path, layer, args, kwargs)
        if call is None or (path, call.has_rows) in self.seen:
            return
        self.seen.add((path, call.has_rows))
        self.busy = True
        try:
            with warnings.catch_warnings():
                # A copy of a sum has no summands to be read unrounded.
                warnings.filterwarnings(
                    "ignore", "this .* reads residual sums unrounded"
                )
                self._compare(call)
        finally:
            self.busy = False

    def _compare(self, call: "LayerCall") -> None:
        checks = [check_outputs(call, grad) for grad in (False, True)]
        if call.path in self.checks:
            checks.append(self.checks[call.path])
        self.checks[call.path] = min(
            checks, key=lambda check: (check.passed, -check.differing)
        )
        if self.backward and call.has_rows:
            self.gradients += check_gradients(call)


@contextmanager
def comparing_layers(model: nn.Module, backward: bool) -> Iterator[LayerComparison]:
    """Inside, each fused layer of a patched model is compared when it is called, and
    its gradients where asked for.
    """
    comparison = LayerComparison(backward)
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if layer_part(type(module)) is not None:
                compare = partial(comparison.compare, path)
                hook = module.register_forward_pre_hook(
                    compare, prepend=True, with_kwargs=True
                )
                stack.callback(hook.remove)
        yield comparison


@dataclass
class LayerCall:
    """One call of a layer, to be made again on copies of its arguments.

    Attributes:
        path: of the layer, and its fused pieces.
        place: of the input, among `args` by its number or among `kwargs` by its name.
        keeps_bits: the fusion promises the bits of the unfused layer.
    """

    path: str
    layer: nn.Module
    args: tuple
    kwargs: dict
    place: int | str
    keeps_bits: bool

    @property
    def x(self) -> torch.Tensor:
        """The layer's input."""
        return (
            self.args[self.place]
            if isinstance(self.place, int)
            else self.kwargs[self.place]
        )

    @property
    def has_rows(self) -> bool:
        """Whether the input is more than one token."""
        return self.x.shape[:-1].numel() > 1

    def again(self) -> "LayerCall":
        """The same call with copies of its arguments, of which a layer may write to a
        cache.
        """
        args, kwargs = copy.deepcopy((self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def outputs(
        self, x: torch.Tensor, parameters: dict | None = None
    ) -> list[torch.Tensor]:
        """The floating tensors that the layer returns for an input x, with other
        parameters where these are named.
        """
        args, kwargs = self.args, self.kwargs
        if isinstance(self.place, int):
            args = (*args[: self.place], x, *args[self.place + 1 :])
        else:
            kwargs = {**kwargs, self.place: x}
        if parameters is None:
            returned = self.layer(*args, **kwargs)
        else:
            returned = torch.func.functional_call(self.layer, parameters, args, kwargs)
        return [t for t in tree_leaves(returned) if is_float(t)]


def call_of(path: str, layer: nn.Module, args: tuple, kwargs: dict) -> LayerCall | None:
    """A layer's call, or None where no argument is a floating tensor of rows."""
    fusion = layer_part(type(layer))._hf_rmsnorm_fusion
    for place, value in (*enumerate(args), *kwargs.items()):
        if is_float(value) and value.dim() > 1:
            keeps_bits = getattr(fusion, "keeps_bits", False)
            return LayerCall(
                f"{path}: {fusion}", layer, args, kwargs, place, keeps_bits
            )
    return None


@contextmanager
def unfused(layer: nn.Module) -> Iterator[None]:
    """Inside, the layer has its own class; its norms stay patched."""
    fusion = fuse(layer, None)
    try:
        yield
    finally:
        fuse(layer, fusion)


def check_outputs(call: LayerCall, grad: bool) -> LayerCheck:
    """Compare a layer's outputs fused and unfused, with gradients where `grad` is set."""

    def run() -> list[torch.Tensor]:
        with torch.set_grad_enabled(grad):
            x = call.x.detach().clone().requires_grad_(grad)
            return [y.detach() for y in call.again().outputs(x)]

    class_name = type(call.layer).__name__
    failed = partial(LayerCheck, call.path, class_name, passed=False)
    try:
        fused = run()
        with unfused(call.layer):
            plain = run()
    except Exception as error:
        # whatever a broken kernel or forward raises is the verdict on it
        return failed(reason=f"raises {one_line(error)}")
    if _kinds(fused) != _kinds(plain):
        return failed(
            reason=f"returns {', '.join(_kinds(fused))}, unfused {', '.join(_kinds(plain))}"
        )
    check = LayerCheck(
        call.path,
        class_name,
        dtype=", ".join(
            dict.fromkeys(str(y.dtype).removeprefix("torch.") for y in plain)
        ),
        elements=sum(y.numel() for y in plain),
        differing=_differing(fused, plain),
    )
    if not check.differing:
        return check
    if call.keeps_bits:
        with unfused(call.layer):
            again = run()
        if not _differing(plain, again):
            counts = f"{check.differing} of {check.elements} elements differ from those of the unfused layer"
            return replace(check, passed=False, reason=counts)
    floor = _noise_floor(call, fused, plain)
    if floor.passed:
        return replace(check, noise_floor=floor)
    errors = f"error {floor.candidate_max:.3g} (RMS {floor.candidate_rms:.3g})"
    theirs = f"unfused {floor.reference_max:.3g} (RMS {floor.reference_rms:.3g})"
    return replace(
        check,
        noise_floor=floor,
        passed=False,
        reason=floor.reason or f"{errors}, {theirs}",
    )


def _kinds(outputs: list[torch.Tensor]) -> list[str]:
    return [f"{y.dtype} {tuple(y.shape)}" for y in outputs]


def _differing(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> int:
    """How many elements are not equal; NaN equals NaN."""
    pairs = zip(ours, theirs, strict=True)
    return sum(((a != b) & ~(a.isnan() & b.isnan())).sum().item() for a, b in pairs)


def _noise_floor(
    call: LayerCall, fused: list[torch.Tensor], plain: list[torch.Tensor]
) -> NoiseFloor:
    """Both against the unfused layer in float64."""
    again = call.again()
    with _exactly(call.layer):
        exact = again.outputs(again.x)
    rows = [
        [y.reshape(-1, y.shape[-1]) for y in outputs if y.dim()]
        for outputs in (plain, fused, exact)
    ]
    quantised = bool(quantised_modules(call.layer))
    return compare_logits(*rows, are_logits=False, quantised=quantised)[1]


@contextmanager
def _exactly(layer: nn.Module) -> Iterator[None]:
    """Inside, the layer is unfused, its norms compute their formulas in plain torch,
    and all of it is in float64.
    """
    with unfused(layer), use_backend("reference"), in_float64(layer):
        yield


def check_gradients(call: LayerCall) -> list[GradientCheck]:
    """Check the gradients of a layer's input, and of the parameters of its norms.

    None are checked of a layer with quantised weights, whose backward knows no float64.
    """
    if quantised_modules(call.layer):
        return []
    parameters = _norm_parameters(call.layer)
    doubles = {name: p.detach().double() for name, p in parameters.items()}
    names = ["input", *parameters]
    with torch.no_grad(), unfused(call.layer):
        cotangents = cotangents_of(call.again().outputs(call.x))
    try:
        ours = gradients(call.again().outputs, call.x, parameters.values(), cotangents)
    except Exception as error:  # whatever a broken backward raises is the verdict on it
        return [GradientCheck(call.path, "all", reason=f"raises {one_line(error)}")]
    theirs, right = [], []
    for number in range(CALLS):
        x = alike(call.x, number)
        with unfused(call.layer):
            theirs.append(
                gradients(call.again().outputs, x, parameters.values(), cotangents)
            )
        exactly = partial(call.again().outputs, parameters=doubles)
        in_double = [dy.double() for dy in cotangents]
        with _exactly(call.layer):
            right.append(gradients(exactly, x.double(), doubles.values(), in_double))
    return list(judged(call.path, names, ours, theirs, right))


def _norm_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the patched norms in a layer, by name, as far as they are here."""
    parameters = {}
    for path, module in layer.named_modules():
        if recipe_of(module) is None:
            continue
        for name, p in module.named_parameters(path, recurse=False):
            if not p.is_meta:
                parameters[name] = p
    return parameters
