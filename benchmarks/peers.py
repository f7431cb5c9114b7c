"""The implementations of one norm that are set side by side, and the gate each passes
before it is timed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.tolerance import assert_as_accurate
from hf_rmsnorm import patch_model
from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.fused.attention import norm_and_rotate, rotate_together
from hf_rmsnorm.fused.later import later
from hf_rmsnorm.fused.sums import add_and_norm
from hf_rmsnorm.patching.layers.rotary_code import may_be_rotary
from hf_rmsnorm.reference import reference_norm

EPS = 1e-6
OURS, EAGER = "hf_rmsnorm", "hf_eager"
# the same once more: a real difference is larger than between these two
AGAIN = f"{OURS} again"
COMPILED = "torch.compile"
ROTARY = "q/k rotary"
Kind = Literal[
    "RMSNorm", "LayerNorm", "add + RMSNorm", "q/k norm", "q/k norm + rotary", ROTARY
]


@dataclass(frozen=True)
class Case:
    """One computation to measure.

    Args:
        kind: "add + RMSNorm" is ``h = residual + x`` and the norm of h; "q/k norm" that
            of the heads of q and of k, which are slices of a packed projection and
            whose gradients arrive transposed, as attention sends them; "+ rotary" turns
            both by their positions behind that, as LLaMA's `apply_rotary_pos_emb` does;
            "q/k rotary" turns them without norms.
        shape: of x; for q and k (batch, length, heads, key heads, head_dim).
        compiled: also measure torch.compile, which takes seconds to compile.
    """

    kind: Kind
    shape: tuple[int, ...]
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {'x'.join(map(str, self.shape))}"

    @property
    def paired(self) -> bool:
        return self.kind.startswith("q/k")

    @property
    def elements(self) -> int:
        """Elements of x, or of q and k together."""
        if not self.paired:
            return torch.Size(self.shape).numel()
        batch, length, heads, key_heads, head_dim = self.shape
        return batch * length * (heads + key_heads) * head_dim

    @property
    def rows(self) -> int:
        return self.elements // self.shape[-1]

    def passes(self, direction: str) -> int:
        """How many x-sized tensors at least are read or written: the floor that
        bandwidth is computed from.
        """
        floors = {"add + RMSNorm": (4, 4), ROTARY: (2, 2)}
        forward, backward = floors.get(self.kind, (2, 3))
        both = forward + backward
        return {"forward": forward, "backward": backward}.get(direction, both)


@dataclass
class Implementation:
    """Something that computes a case: `call(*inputs)` gives its output or outputs;
    `parameters` have gradients.
    """

    call: Callable
    parameters: list[torch.Tensor]


def other_libraries() -> tuple[dict[str, dict], dict[str, str]]:
    """The functions of other libraries that can be imported here, and for each its
    version or why it is missing.
    """
    try:
        return {"liger": _liger()}, {"liger": metadata.version("liger-kernel")}
    except Exception as error:
        # a peer may fail to import in any way it likes; which way is in the result
        return {}, {"liger": f"not importable: {type(error).__name__}: {error}"[:200]}


def _liger() -> dict[str, Callable]:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction

    # the offset of the weight, and not in place: the default writes dx over dy, which
    # other readers of dy would notice
    how = (EPS, 0.0, "llama", False)

    def rms_norm(x, norm):
        return LigerRMSNormFunction.apply(x, norm.weight, *how, None)

    def layer_norm(x, norm):
        return LigerLayerNormFunction.apply(x, norm.weight, norm.bias, EPS)

    def add(x, residual, norm):
        y, h = LigerFusedAddRMSNormFunction.apply(x, residual, norm.weight, *how)
        return h, y

    return {
        "RMSNorm": rms_norm,
        "LayerNorm": layer_norm,
        "add + RMSNorm": add,
        ROTARY: LigerRopeFunction.apply,
    }


def make_norms(case: Case, device: str, dtype: torch.dtype) -> list[nn.Module]:
    """The modules that Hugging Face models use for it, with random parameters: two for
    q and k, which do nothing where it has no norms.
    """
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    if case.kind == ROTARY:
        return [nn.Identity(), nn.Identity()]
    norms = []
    for _ in range(2 if case.paired else 1):
        cls = nn.LayerNorm if case.kind == "LayerNorm" else LlamaRMSNorm
        norm = cls(case.shape[-1], eps=EPS).to(device, dtype)
        with torch.no_grad():
            norm.weight.uniform_(0.5, 1.5)
            if case.kind == "LayerNorm":
                norm.bias.uniform_(-0.5, 0.5)
        norms.append(norm)
    return norms


def tables_of(case: Case, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(cos, sin) of a case with a rotary embedding, each (1, length, head_dim); of
    others none.
    """
    if not case.kind.endswith("rotary"):
        return ()
    _, length, _, _, head_dim = case.shape
    powers = torch.arange(0, head_dim, 2, device=device) / head_dim
    angles = torch.outer(torch.arange(length, device=device), 10_000**-powers)
    angles = torch.cat([angles, angles], -1)[None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def composed(kind: Kind, norms: Sequence[Callable], tables: tuple = ()) -> Callable:
    """The case in terms of norms of one tensor, as an unmodified model computes it."""
    norm = norms[0]

    def add(x, residual):
        h = residual + x
        return h, norm(h)

    def pair(q, k):
        q, k = (n(x).transpose(1, 2) for n, x in zip(norms, (q, k), strict=True))
        return rotary()(q, k, *tables) if tables else (q, k)

    if kind == "add + RMSNorm":
        return add
    return norm if len(norms) == 1 else pair


def rotary() -> Callable:
    """``rotate(q, k, cos, sin)`` of the models that norm q and k before it; LLaMA's is
    the same.
    """
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    return apply_rotary_pos_emb


def fused_copy(norm: nn.Module) -> tuple[nn.Module, NormSpec]:
    """A patched copy of a norm, and the formula it was recognised to compute.

    Raises:
        RuntimeError: it was not recognised.
    """
    holder = nn.Sequential(copy.deepcopy(norm))
    report = patch_model(holder)
    if not report.swapped:
        raise RuntimeError(f"patch_model did not swap {type(norm).__name__}: {report}")
    return holder[0], report.swapped[0].formula


def _ours(kind: Kind, norms: list[nn.Module], tables: tuple) -> Implementation:
    """As a patched model computes it."""
    rotate = rotary()
    if tables and not may_be_rotary(rotate):
        raise RuntimeError("no kernel computes the rotary embedding of Qwen3")

    def rotated_alone(q, k):
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        return rotate_together(norms[0], rotate, q, k, *tables)

    if kind == ROTARY:
        return Implementation(rotated_alone, [])
    fused = [fused_copy(norm)[0] for norm in norms]

    def add(x, residual):
        return add_and_norm(residual, x, fused[0])

    def rotated(q, k):
        q_norm, k_norm = fused
        q = later(q_norm, q).transpose(1, 2)
        k = later(k_norm, k).transpose(1, 2)
        return norm_and_rotate(rotate, q, k, *tables)

    call = composed(kind, fused)
    if kind == "add + RMSNorm":
        call = add
    elif tables:
        call = rotated
    return Implementation(call, _parameters(fused))


def implementations(
    case: Case,
    norms: list[nn.Module],
    tables: tuple,
    libraries: dict,
    compile_backend: str | None,
) -> dict[str, Implementation]:
    """By name; `hf_eager` is first, because the others are judged by it.

    Args:
        tables: of `tables_of`.
    """
    kind, parameters = case.kind, _parameters(norms)
    ours = _ours(kind, norms, tables)
    made = {
        EAGER: Implementation(composed(kind, norms, tables), parameters),
        OURS: ours,
        AGAIN: ours,
    }
    # nn.LayerNorm is F.layer_norm already
    if kind not in ("LayerNorm", ROTARY):
        functional = [partial(_functional, norm) for norm in norms]
        call = composed(kind, functional, tables)
        made["F.rms_norm"] = Implementation(call, parameters)
    if compile_backend is not None:
        copies = [copy.deepcopy(norm) for norm in norms]
        how = {"dynamic": False, "fullgraph": True, "backend": compile_backend}
        call = torch.compile(composed(kind, copies, tables), **how)
        made[COMPILED] = Implementation(call, _parameters(copies))
    for name, functions in libraries.items():
        call = _of_library(functions, kind, norms, tables)
        if call is not None:
            made[name] = Implementation(call, parameters)
    return made


def _parameters(norms: list[nn.Module]) -> list[torch.Tensor]:
    return [p for norm in norms for p in norm.parameters()]


def _functional(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, EPS)


def _of_library(
    functions: dict[str, Callable], kind: Kind, norms: list[nn.Module], tables: tuple
) -> Callable | None:
    """The case by a library's functions; None where it has none."""
    if kind == "add + RMSNorm" and kind in functions:
        return partial(functions[kind], norm=norms[0])
    if kind == ROTARY and kind in functions:
        return lambda q, k: functions[kind](
            q.transpose(1, 2), k.transpose(1, 2), *tables
        )
    one = functions.get("LayerNorm" if kind == "LayerNorm" else "RMSNorm")
    if one is None:
        return None
    return composed(kind, [partial(one, norm=norm) for norm in norms], tables)


def make_set(case: Case, device: str, dtype: torch.dtype) -> tuple[list, list]:
    """(inputs, gradients of the outputs) of one call; the inputs are leaves that ask
    for theirs.
    """

    def random(*shape):
        return torch.randn(shape, device=device, dtype=dtype)

    if case.paired:
        batch, length, heads, key_heads, size = case.shape
        packed = random(batch, length, heads + 2 * key_heads, size)  # q, k and v
        inputs = packed.split([heads, key_heads, key_heads], dim=2)[:2]
        gradients = [random(batch, h, length, size) for h in (heads, key_heads)]
    else:
        count = 2 if case.kind == "add + RMSNorm" else 1
        inputs = [random(*case.shape) for _ in range(count)]
        gradients = [random(*case.shape) for _ in range(count)]
    return [x.detach().requires_grad_() for x in inputs], gradients


def _outputs(outputs) -> tuple:
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def exact_results(
    case: Case, norms: list[nn.Module], inputs: list, gradients: list
) -> dict[str, torch.Tensor]:
    """The outputs of a case in float64, and behind them its gradients, by name."""
    exact_norms, parameters = [], []
    names = ["y", "dx"]
    if case.kind == "add + RMSNorm":
        names = ["h", "y", "dx", "dresidual"]
    elif case.paired:
        names = ["yq", "yk", "dq", "dk"]
    for number, norm in enumerate(norms):
        if case.kind == ROTARY:
            exact_norms.append(norm)
            continue
        spec = fused_copy(norm)[1]
        own = [p.detach().double().requires_grad_() for p in norm.parameters()]
        exact_norms.append(partial(_exact_norm, spec, own))
        parameters += own
        names += [f"d{name}{number or ''}" for name, _ in norm.named_parameters()]
    first = inputs[0]
    tables = [t.double() for t in tables_of(case, first.device, first.dtype)]
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    outputs = _outputs(composed(case.kind, exact_norms, tables)(*leaves))
    gradients = [g.double() for g in gradients]
    found = torch.autograd.grad(outputs, [*leaves, *parameters], gradients)
    values = [*(y.detach() for y in outputs), *found]
    return dict(zip(names, values, strict=True))


def _exact_norm(
    spec: NormSpec, parameters: list[torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    weight, bias = (*parameters, None)[:2]
    return reference_norm(x, weight, bias, spec)


def judge(
    case: Case, made: dict, norms: list[nn.Module], inputs: list, gradients: list
) -> dict[str, dict]:
    """Compare every implementation's outputs and gradients with float64, by name:
    ``failures``, and ``bit_equal_to_hf``, the share of elements of the (last) output;
    ``raised`` is there where the call failed.
    """
    exact = exact_results(case, norms, inputs, gradients)
    eager, verdicts = None, {}
    for name, implementation in made.items():
        try:
            results = _results(implementation, inputs, gradients)
        except Exception as error:
            # a peer may fail in any way it likes; which way is in the result
            reason = f"{type(error).__name__}: {error}"[:300]
            verdicts[name] = {"failures": [reason], "raised": True}
            continue
        eager = eager or results
        last = len(gradients) - 1
        equal = (results[last] == eager[last]).double().mean().item()
        failures = _failures(exact, results, eager)
        verdicts[name] = {"failures": failures, "bit_equal_to_hf": equal}
    return verdicts


def _results(
    implementation: Implementation, inputs: list, gradients: list
) -> list[torch.Tensor]:
    """Its outputs, and the gradients of the inputs and of the parameters."""
    outputs = _outputs(implementation.call(*inputs))
    leaves = [*inputs, *implementation.parameters]
    found = torch.autograd.grad(outputs, leaves, [g.clone() for g in gradients])
    return [*(y.detach() for y in outputs), *found]


def _failures(exact: dict, results: list, eager: list) -> list[str]:
    failures = []
    rows = zip(exact.items(), results, eager, strict=True)
    for (name, truth), ours, theirs in rows:
        if not truth.any():
            nothing = "zero everywhere in float64 too, so nothing was computed"
            failures.append(f"{name}: {nothing}")
        try:
            assert_as_accurate(ours, theirs, truth, name)
        except AssertionError as error:
            failures.append(str(error))
    return failures


def calls_of(implementation: Implementation, sets: list) -> dict[str, list[Callable]]:
    """For each direction one call per argument set."""
    compute, grad = implementation.call, torch.autograd.grad
    calls = {"forward": [], "backward": [], "forward+backward": []}

    def both(inputs, leaves, gradients):
        return grad(compute(*inputs), leaves, gradients)

    for inputs, gradients in sets:
        leaves = [*inputs, *implementation.parameters]
        backward = partial(grad, compute(*inputs), leaves, gradients, retain_graph=True)
        calls["forward"].append(partial(torch.no_grad()(compute), *inputs))
        calls["backward"].append(backward)
        calls["forward+backward"].append(partial(both, inputs, leaves, gradients))
    return calls
