"""The kernels compiled ahead of time, without a GPU: registers, spills and access
widths of what comes of them.

They are compiled by the package's own launch code: Triton is handed a driver that names
a target and launches nothing. So the signatures, the constants and the launch shapes
are those of a real call. This process must not interpret.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.driver import StubDriver
from benchmarks.machine_code import read
from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.kernels import compiled, norm_launch, qk_launch
from hf_rmsnorm.kernels.compiled import Kernel
from hf_rmsnorm.kernels.sizes import MAX_HEAD_DIM
from hf_rmsnorm.operands import NormOperands, of_rotation
from hf_rmsnorm.ops import first_use
from hf_rmsnorm.ops.limits import MOST_COLUMNS_WITH_BIAS

KERNELS = (*norm_launch.KERNELS, *qk_launch.KERNELS)
SIZES = (64, 96, 128, 896, 2048, 2560, 4096, 5120, 8192, 12288, 14336, 16384)


@dataclass(frozen=True)
class Chip:
    """What the compiler and the launch code are told, and what bounds the blocks that
    share a multiprocessor.
    """

    target: GPUTarget
    sms: int
    shared_limit: int  # bytes one program may use
    # bytes of a multiprocessor; 0 where occupancy is not modelled
    shared_total: int = 0
    max_warps: int = 64
    shared_reserve: int = 1_024  # bytes that the driver takes of each block


CHIPS = {
    "sm_75": Chip(GPUTarget("cuda", 75, 32), 40, 65_536, 65_536, 32, shared_reserve=0),
    "sm_80": Chip(GPUTarget("cuda", 80, 32), 108, 166_912, 167_936),
    "sm_86": Chip(GPUTarget("cuda", 86, 32), 84, 101_376, 102_400, 48),
    # an L4, whose kind an RTX 40 is
    "sm_89": Chip(GPUTarget("cuda", 89, 32), 58, 101_376, 102_400, 48),
    "sm_90": Chip(GPUTarget("cuda", 90, 32), 132, 232_448, 233_472),
    "sm_100": Chip(GPUTarget("cuda", 100, 32), 148, 232_448, 233_472),
    # an RTX 5090
    "sm_120": Chip(GPUTarget("cuda", 120, 32), 170, 101_376, 102_400, 48),
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), 304, 65_536),
}

_LAYER_NORM = NormSpec(centered=True, eps=1e-5, has_bias=True)
_ADAPTIVE = NormSpec(centered=True, eps=1e-6, has_weight=False, functional=True)
FORMULAS = {
    "llama": NormSpec(centered=False, eps=1e-6, rounding="before_weight"),
    "gemma": NormSpec(centered=False, eps=1e-6, weight_offset=1.0),
    "t5": NormSpec(centered=False, eps=1e-6, rounding="weight_dtype"),
    "plain": NormSpec(centered=False, eps=1e-6, has_weight=False),
    "textbook": NormSpec(centered=False, eps=1e-6, has_bias=True, eps_outside=True),
    "layernorm": _LAYER_NORM,
    "gated_layernorm": replace(_LAYER_NORM, gate="silu_after"),
    "cohere": NormSpec(centered=True, eps=1e-5),
    "modulated": _ADAPTIVE,
}
FORMULAS["qk"] = FORMULAS["llama"]
FORMULAS["mamba"] = replace(FORMULAS["llama"], eps=1e-5, gate="silu_before")
FORMULAS["qwen3_next"] = replace(FORMULAS["llama"], gate="silu_after")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# of x, and of the weight
DTYPES = {"bf16": (BF16, BF16), "fp16": (FP16, FP16), "fp32": (FP32, FP32)}
DTYPES |= {"halves": (BF16, FP16), "mixed": (BF16, FP32)}


@dataclass(frozen=True)
class Variant:
    """A formula with the dtypes of its operands; `frozen`: the weight needs no
    gradient; `added`: after a residual.

    `output`: the backward reads the norm's output; `strided`: rows do not lie one
    behind the other. `modulated`: with the scale and shift of an adaptive LayerNorm,
    and where `added` with the gate of the sum. `heads`: of q and k, with a rotary
    embedding, and that alone.
    """

    spec: NormSpec
    x: torch.dtype
    weight: torch.dtype | None
    frozen: bool = False
    aligned: bool = True
    added: bool = False
    output: bool = False
    strided: bool = False
    modulated: bool = False
    heads: bool = False


def _named(name: str) -> Variant:
    """The variant of a name: "add_" after a residual, the formula, dtypes, and what is
    special.
    """
    formula, kind, *special = name.removeprefix("add_").split("-")
    added = name.startswith("add_")
    x, weight = DTYPES[kind]
    if kind == "mixed" and (added or formula == "t5"):  # the stream in float32
        x, weight = weight, x
    spec = FORMULAS[formula]
    flags = {flag: flag in special for flag in ("frozen", "output", "strided")}
    flags |= {"aligned": "unaligned" not in special, "added": added}
    flags |= {"modulated": formula == "modulated", "heads": formula == "qk"}
    return Variant(spec, x, weight if spec.has_weight else None, **flags)


VARIANTS = {
    name: _named(name)
    for name in (
        "llama-bf16", "llama-bf16-frozen", "llama-bf16-unaligned", "llama-bf16-strided",
        "llama-fp16", "llama-fp32", "llama-fp32-unaligned", "llama-mixed",
        "gemma-bf16", "t5-mixed", "plain-bf16", "mamba-bf16", "qwen3_next-bf16",
        "textbook-fp32", "qk-bf16", "qk-bf16-unaligned", "qk-fp32",
        "layernorm-bf16", "layernorm-bf16-strided", "layernorm-fp32", "cohere-bf16",
        "gated_layernorm-bf16", "llama-bf16-output", "llama-halves-output",
        "layernorm-bf16-output", "add_llama-bf16-output", "add_llama-bf16",
        "add_llama-bf16-frozen", "add_llama-bf16-unaligned", "add_llama-fp32",
        "add_llama-mixed", "add_llama-fp32-unaligned", "modulated-bf16",
        "add_modulated-bf16", "add_layernorm-bf16",
    )
}  # fmt: skip


def is_served(variant: Variant, hidden_size: int) -> bool:
    """Whether the kernels compute rows of this size: of heads short ones alone, and
    with a bias from outputs.
    """
    if variant.heads:
        return hidden_size <= MAX_HEAD_DIM
    limited = variant.output and variant.spec.has_bias
    return not limited or hidden_size <= MOST_COLUMNS_WITH_BIAS


class CompileOnly(StubDriver):
    """The driver of one target of `CHIPS`. It keeps what was compiled for it, in
    `compiled`: (kernel, what Triton made of it), each once.
    """

    def __init__(self, name: str):
        self.chip = CHIPS[name]
        index = list(CHIPS).index(name)
        super().__init__(self.chip.target, self.chip.shared_limit, index)
        self.compiled: list[tuple] = []

    def launcher_cls(self, source, metadata):
        return lambda *args: None


def compile_for(name: str) -> CompileOnly:
    """Make the launch code of this process compile for a target of `CHIPS`; returns the
    driver that records it.
    """
    recorder = CompileOnly(name)
    driver.set_active(recorder)
    first_use.is_enabled = False  # there are no results
    compiled.device_limits = lambda *_: (recorder.chip.sms, recorder.chip.shared_limit)

    def compile(kernel, start, operands, real=_compile):
        made = real(kernel, start, operands)
        if not any(made is other for _, other in recorder.compiled):
            recorder.compiled.append((kernel, made))
        return made

    Kernel.compile = compile
    return recorder


_compile = Kernel.compile


def run(variant: Variant, hidden_size: int, rows: int = 3) -> None:
    """Call forward and backward once, on uninitialised CPU tensors that nothing reads."""

    def tensor(shape, dtype):
        # one element on is no multiple of 16 bytes
        shape, shift = torch.Size(shape), 0 if variant.aligned else 1
        return torch.empty(shift + shape.numel(), dtype=dtype)[shift:].view(shape)

    if variant.heads:
        return run_heads(variant, hidden_size, tensor)
    spec = variant.spec
    x = tensor((rows, (1 + variant.strided) * hidden_size), variant.x)[:, :hidden_size]
    weight = tensor((hidden_size,), variant.weight) if spec.has_weight else None
    bias = tensor((hidden_size,), variant.weight) if spec.has_bias else None
    dy = tensor((rows, hidden_size), spec.output_dtype(variant.x, variant.weight))
    like_x, gated = (rows, hidden_size), spec.gate is not None
    gate = tensor(like_x, variant.x) if gated else None
    residual = tensor(like_x, variant.x) if variant.added else None
    dh = None if variant.modulated else residual
    scale = shift = multiplier = None
    if variant.modulated:  # one for all rows, as of one sequence
        scale = shift = tensor((1, hidden_size), variant.x).expand(rows, -1)
        multiplier = scale if variant.added else None
    operands = NormOperands(x, weight, bias, gate, scale, shift, multiplier, residual)
    forward = norm_launch.NormForward(spec, operands, variant.aligned)
    h, _, rstd, mean = forward.on(operands)
    trained = not variant.frozen
    of_parameters = spec.has_weight and trained, spec.has_bias and trained
    need = (True, *of_parameters, gated, variant.modulated)
    x = x if h is None else h
    operands = dy, x, weight, bias, gate, scale, dh, rstd, mean
    make = norm_launch.NormBackward
    make(spec, operands, variant.aligned, need, variant.output).on(operands)


def run_heads(variant: Variant, head_dim: int, tensor) -> None:
    """As `run`, on heads of q and of k in the strides of a projection, with gradients
    of an attention's.
    """
    q, k = (
        tensor((2, 5, heads, head_dim), variant.x).transpose(1, 2) for heads in (4, 2)
    )
    dq, dk = (tensor(t.shape, variant.x) for t in (q, k))
    weights = [tensor((head_dim,), variant.weight) for _ in range(2)]
    tables = [tensor((2, 5, head_dim), variant.x) for _ in range(2)]
    operands = q, k, *weights, *tables
    make, aligned = qk_launch.QKForward, variant.aligned
    results = [torch.empty_like(t, device="meta") for t in (q, k)]
    forward = make(operands, results, aligned, spec=variant.spec, stats=True)
    *_, rstd = forward.on(operands)
    operands = dq, dk, *operands, rstd
    need = (True,) * 4
    qk_launch.QKBackward(variant.spec, operands, aligned, need).on(operands)
    for back in (False, True):  # and the rotary embedding alone
        operands = of_rotation(dq if back else q, dk if back else k, *tables)
        make(operands, (q, k), aligned, back=back).on(operands)


def examine(name: str, variant: str, hidden_size: int) -> list[dict]:
    """Compile forward and backward of one variant for one target.

    Returns:
        What became of every kernel, with all that `machine_code.read` says of it.
    """
    recorder = compile_for(name)
    run(VARIANTS[variant], hidden_size)
    found = []
    for kernel in KERNELS:
        about = {"target": name, "variant": variant, "kernel": kernel.name}
        about["hidden_size"] = hidden_size
        for of, made in recorder.compiled:
            if of is kernel:
                found.append(about | read(made, recorder.chip))
    return found


def examine_all(cases: list[tuple[str, str, int]]) -> list[dict]:
    """`examine` for each (target, variant, hidden size), in forked processes: torch is
    imported once.
    """
    torch.set_num_threads(1)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
        results = pool.map(examine, *zip(*cases, strict=True))
        return [kernel for found in results for kernel in found]
