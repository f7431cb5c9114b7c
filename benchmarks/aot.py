"""Compile the kernels ahead of time, without a GPU, and read registers, spills and access widths from the result.

    python benchmarks/aot.py                                       the table of sm_90, RMSNorm in bf16
    python benchmarks/aot.py sm_80,gfx942:gemma-bf16:128,4096      TARGETS:VARIANTS:SIZES, and more of them if wanted
    python benchmarks/aot.py sm_90:: --json                        every variant and size, one JSON object a kernel
    python benchmarks/aot.py sm_90:: --tighten tests/tools/aot_budgets.json

The kernels are compiled by the package's own launch code: Triton is handed a driver of this script that names a target
and launches nothing. So the signatures, the constants and the launch shapes are those of a real call.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # this process compiles
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from benchmarks.driver import StubDriver  # noqa: E402
from hf_rmsnorm.formula import NormSpec  # noqa: E402
from hf_rmsnorm.kernels import launch, launch_qk  # noqa: E402
from hf_rmsnorm.ops.qk import MAX_HEAD_DIM  # noqa: E402

KERNELS = (*launch.KERNELS, *launch_qk.KERNELS)
SASS_WIDTHS = {32: "256", 16: "128", 8: "64", 2: "U16", 1: "U8"}  # bytes by the mark of a load or store; 4 has none
SIZES = (64, 96, 128, 896, 2048, 2560, 4096, 5120, 8192, 14336, 16384, 65536)


@dataclass(frozen=True)
class Chip:
    """What the compiler and the launch code are told, and what bounds the blocks that share a multiprocessor."""

    target: GPUTarget
    sms: int
    shared_limit: int  # bytes one program may use
    shared_total: int = 0  # bytes of a multiprocessor; 0 where occupancy is not modelled
    max_warps: int = 64


CHIPS = {
    "sm_80": Chip(GPUTarget("cuda", 80, 32), 108, 166_912, 167_936),
    "sm_86": Chip(GPUTarget("cuda", 86, 32), 84, 101_376, 102_400, 48),
    "sm_90": Chip(GPUTarget("cuda", 90, 32), 132, 232_448, 233_472),
    "sm_100": Chip(GPUTarget("cuda", 100, 32), 148, 232_448, 233_472),
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), 304, 65_536),
}

_LLAMA = NormSpec(centered=False, eps=1e-6, rounding="before_weight")
_LAYER_NORM = NormSpec(centered=True, eps=1e-5, has_bias=True)


@dataclass(frozen=True)
class Variant:
    """A formula with the dtypes of its operands; `frozen`: the weight needs no gradient; `added`: after a residual.

    `output`: the backward reads the norm's output.
    """

    spec: NormSpec
    x: torch.dtype
    weight: torch.dtype | None
    frozen: bool = False
    aligned: bool = True
    added: bool = False
    output: bool = False
    heads: str = ""  # of q and k: "apart", or "turned" by a rotary embedding behind the norms


VARIANTS = {
    "llama-bf16": Variant(_LLAMA, torch.bfloat16, torch.bfloat16),
    "llama-bf16-frozen": Variant(_LLAMA, torch.bfloat16, torch.bfloat16, frozen=True),
    "llama-bf16-unaligned": Variant(_LLAMA, torch.bfloat16, torch.bfloat16, aligned=False),
    "llama-fp16": Variant(_LLAMA, torch.float16, torch.float16),
    "llama-fp32": Variant(_LLAMA, torch.float32, torch.float32),
    "llama-mixed": Variant(_LLAMA, torch.bfloat16, torch.float32),
    "gemma-bf16": Variant(NormSpec(centered=False, eps=1e-6, weight_offset=1.0), torch.bfloat16, torch.bfloat16),
    "t5-mixed": Variant(
        NormSpec(centered=False, eps=1e-6, rounding="weight_dtype"), torch.float32, torch.bfloat16
    ),
    "plain-bf16": Variant(NormSpec(centered=False, eps=1e-6, has_weight=False), torch.bfloat16, None),
    "mamba-bf16": Variant(
        NormSpec(centered=False, eps=1e-5, rounding="before_weight", gate="silu_before"), torch.bfloat16, torch.bfloat16
    ),
    "qwen3_next-bf16": Variant(
        NormSpec(centered=False, eps=1e-6, rounding="before_weight", gate="silu_after"), torch.bfloat16, torch.bfloat16
    ),
    "textbook-fp32": Variant(
        NormSpec(centered=False, eps=1e-6, has_bias=True, eps_outside=True), torch.float32, torch.float32
    ),
    "qk-bf16": Variant(_LLAMA, torch.bfloat16, torch.bfloat16, heads="apart"),
    "qk_rotary-bf16": Variant(_LLAMA, torch.bfloat16, torch.bfloat16, heads="turned"),
    "qk_rotary-bf16-unaligned": Variant(_LLAMA, torch.bfloat16, torch.bfloat16, aligned=False, heads="turned"),
    "qk_rotary-fp32": Variant(_LLAMA, torch.float32, torch.float32, heads="turned"),
    "layernorm-bf16": Variant(_LAYER_NORM, torch.bfloat16, torch.bfloat16),
    "layernorm-fp32": Variant(_LAYER_NORM, torch.float32, torch.float32),
    "llama-bf16-output": Variant(_LLAMA, torch.bfloat16, torch.bfloat16, output=True),
    "layernorm-bf16-output": Variant(_LAYER_NORM, torch.bfloat16, torch.bfloat16, output=True),
    "add_llama-bf16-output": Variant(_LLAMA, torch.bfloat16, torch.bfloat16, added=True, output=True),
    "add_llama-bf16": Variant(_LLAMA, torch.bfloat16, torch.bfloat16, added=True),
    "add_llama-bf16-frozen": Variant(_LLAMA, torch.bfloat16, torch.bfloat16, frozen=True, added=True),
    "add_llama-bf16-unaligned": Variant(_LLAMA, torch.bfloat16, torch.bfloat16, aligned=False, added=True),
    "add_llama-fp32": Variant(_LLAMA, torch.float32, torch.float32, added=True),
    "add_layernorm-bf16": Variant(_LAYER_NORM, torch.bfloat16, torch.bfloat16, added=True),
}


class CompileOnly(StubDriver):
    """The driver of one target of `CHIPS`. It keeps what it was asked to launch, in `launches`."""

    def __init__(self, name: str):
        self.chip = CHIPS[name]
        super().__init__(self.chip.target, self.chip.shared_limit, index=list(CHIPS).index(name))
        self.launches: list[tuple] = []

    def launcher_cls(self, source, metadata):
        return lambda *args: self.launches.append((source, metadata, args))


def compile_for(name: str) -> CompileOnly:
    """Make the launch code of this process compile for a target of `CHIPS`; returns the driver that records it."""
    recorder = CompileOnly(name)
    driver.set_active(recorder)
    for kernel in KERNELS:
        kernel._compiled.clear()
    launch.device_limits = lambda *_: (recorder.chip.sms, recorder.chip.shared_limit)
    return recorder


def run(variant: Variant, hidden_size: int, rows: int = 3) -> None:
    """Call forward and backward once, on uninitialised CPU tensors that nothing reads."""

    def tensor(shape, dtype):
        shape, shift = torch.Size(shape), 0 if variant.aligned else 1  # one element on is no multiple of 16 bytes
        return torch.empty(shift + shape.numel(), dtype=dtype)[shift:].view(shape)

    if variant.heads:
        return run_heads(variant, hidden_size, tensor)
    spec = variant.spec
    x = tensor((rows, hidden_size), variant.x)
    weight = tensor((hidden_size,), variant.weight) if spec.has_weight else None
    bias = tensor((hidden_size,), variant.weight) if spec.has_bias else None
    dy = tensor((rows, hidden_size), spec.output_dtype(variant.x, variant.weight))
    gate = None if spec.gate is None else tensor((rows, hidden_size), variant.x)
    residual, dh = (tensor((rows, hidden_size), variant.x) if variant.added else None for _ in range(2))
    _, rstd, mean, h = launch.norm_forward(x, weight, bias, spec, True, False, gate, residual)
    trained = not variant.frozen
    need = (True, spec.has_weight and trained, spec.has_bias and trained, spec.gate is not None)
    x = x if h is None else h
    launch.norm_backward(dy, x, weight, bias, rstd, mean, spec, need, False, gate, dh, variant.output)


def run_heads(variant: Variant, head_dim: int, tensor) -> None:
    """As `run`, on four heads of q and two of k in the strides of a projection, with gradients of an attention's."""
    q, k = (tensor((2, 5, heads, head_dim), variant.x).transpose(1, 2) for heads in (4, 2))
    dq, dk = (tensor(t.shape, variant.x) for t in (q, k))
    weights = [tensor((head_dim,), variant.weight) for _ in range(2)]
    tables = [tensor((2, 5, head_dim), variant.x) if variant.heads == "turned" else None for _ in range(2)]
    *_, rstd, mean = launch_qk.qk_norm_forward(q, k, *weights, *tables, variant.spec, True, False)
    launch_qk.qk_norm_backward(dq, dk, q, k, *weights, *tables, rstd, mean, variant.spec, (True,) * 4)


@dataclass(frozen=True)
class Compiled:
    """What one kernel became on one target.

    Args:
        registers: per thread; VGPRs on AMD.
        spilled: bytes of local memory per thread.
        shared: bytes of shared memory per program.
        blocks: programs that fit on a multiprocessor at once; waves per SIMD on AMD.
        widths: by operand, the distinct bytes per load or store of one thread, widest first.
        sums: shape and layout over the threads of every tensor that is summed, which fix the order of the additions.
    """

    target: str
    variant: str
    kernel: str
    hidden_size: int
    registers: int
    spilled: int
    shared: int
    blocks: int
    warps: int
    widths: dict[str, list[int]]
    sums: list[str]


def examine(name: str, variant: str, hidden_size: int, disassemble: bool = False) -> list[Compiled]:
    """Compile forward and backward of one variant for one target, and read what became of every kernel.

    Access widths are read from PTX, which names the argument; `disassemble` (slow) checks them against the SASS.
    """
    recorder = compile_for(name)
    run(VARIANTS[variant], hidden_size)
    found = []
    for kernel in KERNELS:
        for compiled in (entry.kernel for entry in kernel._compiled.values()):
            arguments = [arg for arg, kind in compiled.src.signature.items() if kind != "constexpr"]
            try:
                if recorder.chip.target.backend == "hip":
                    read = _read_amd(compiled, arguments)
                else:
                    read = _read_nvidia(compiled, arguments, recorder.chip, disassemble)
            except ValueError as error:
                raise ValueError(f"{name} {variant} {kernel.name} N={hidden_size}: {error}") from error
            found.append(Compiled(
                target=name, variant=variant, kernel=kernel.name, hidden_size=hidden_size,
                shared=compiled.metadata.shared, warps=compiled.metadata.num_warps, **read,
                sums=_sums(compiled.asm["ttgir"]),
            ))  # fmt: skip
    return found


def _read_nvidia(compiled, arguments: list[str], chip: Chip, disassemble: bool) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [tool, "-res-usage", *(["-sass"] if disassemble else []), cubin.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", text)[1]) for word in ("REG", "STACK"))
    accesses = list(_ptx_accesses(compiled.asm["ptx"]))
    if disassemble:
        suffixes = re.findall(r"\s(?:LDG|STG|LDGSTS)\.(\S+)", text)
        machine = {next((w for w, mark in SASS_WIDTHS.items() if mark in s.split(".")), 4) for s in suffixes}
        if machine != {width for _, width in accesses}:
            raise ValueError(f"ptxas accesses memory by {machine} bytes, the PTX by {accesses}")
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    blocks = min(
        65_536 // (-(-registers // 8) * 8 * 32 * warps),  # registers are handed out to warps by 8 a thread
        chip.max_warps // warps,
        chip.shared_total // (shared + 1_024),  # the driver takes 1 KB of each block
    )
    return {"registers": registers, "spilled": stack, "blocks": blocks, "widths": _widths(accesses, arguments)}


def _read_amd(compiled, arguments: list[str]) -> dict:
    text = compiled.asm["amdgcn"]
    return {
        "registers": int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1]),
        "spilled": 4 * int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1]),
        "blocks": int(re.search(r"; Occupancy: (\d+)", text)[1]),
        "widths": _widths(_llvm_accesses(compiled.asm["llir"]), arguments),
    }  # fmt: skip


def _sums(text: str) -> list[str]:
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    return [shape + layouts[name] for shape, name in re.findall(r"\}\) : \(tensor<([^#]*)(#\w+)>\)", text)]


def _widths(accesses: Iterator[tuple[set[int], int]], arguments: list[str]) -> dict[str, list[int]]:
    widths: dict[str, set[int]] = {}
    for pointers, width in accesses:
        if not pointers:
            raise ValueError(f"cannot tell which argument an access of {width} bytes belongs to")
        for pointer in pointers:  # several where the compiler made one access of two branches
            widths.setdefault(arguments[pointer], set()).add(width)
    return {name: sorted(found, reverse=True) for name, found in sorted(widths.items())}


def _origin(name: str, sources: dict[str, set[str]], pointers: dict[str, int]) -> set[int]:
    """Indices of the pointer arguments that the value `name` is computed from."""
    seen, todo, found = set(), [name], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in pointers:
            found.add(pointers[name])
        todo.extend(sources.get(name, ()))
    return found


def _ptx_accesses(text: str) -> Iterator[tuple[set[int], int]]:
    """(pointer arguments, bytes) of every access to global memory in PTX."""
    pointer_names = re.findall(r"\.param \.u64 \.ptr \.global .*?(\w+)[,\n]", text)
    pointers = {name: int(name.rpartition("_")[2]) for name in pointer_names}
    sources: dict[str, set[str]] = {}
    accesses = []
    for line in text.splitlines():
        line = line.split("//")[0]
        copy = re.search(r"\bcp\.async\.\w+\.shared\.global\S* \[[^\]]*\], \[ ?(%\w+)[^\]]*\], (0x\w+|\d+)", line)
        access = re.search(r"\b(?:ld|st)\.global((?:\.\w+)*)\s+.*\[ ?(%\w+)", line)
        if copy:
            accesses.append((copy[1], int(copy[2], 0)))
        elif access:
            vector = re.search(r"\.v(\d)", access[1])
            bits = int(re.search(r"\.[bufs](\d+)$", access[1])[1])
            accesses.append((access[2], bits // 8 * (int(vector[1]) if vector else 1)))
        elif re.search(r"(ld|st|atom|red|shared)\.global", line):
            raise ValueError(f"cannot read {line.strip()}")
        elif match := re.match(r"\s*(?:@!?%\w+ )?\s*[a-z][\w.:]*\s+\{?\s*(%\w+)(.*);", line):
            target, operands = match.groups()
            sources.setdefault(target, set()).update(re.findall(r"%\w+|\w+_param_\d+", operands))
    return ((_origin(address, sources, pointers), width) for address, width in accesses)


def _llvm_accesses(text: str) -> Iterator[tuple[set[int], int]]:
    """(pointer arguments, bytes) of every access to global memory in LLVM IR for AMD."""
    definition = re.search(r"define amdgpu_kernel void @.*", text)[0]
    declared = re.findall(r"(ptr addrspace\(1\)|i\d+|float)[^%]*(%[-\w.$]+)", definition)
    pointers = {name: i for i, (kind, name) in enumerate(declared) if kind.startswith("ptr")}
    sources: dict[str, set[str]] = {}
    accesses = []
    for line in text.splitlines():
        load = re.search(r"= .*raw\.ptr\.buffer\.load\.(\w+)\(ptr addrspace\(8\) (%[-\w.$]+)", line)
        store = re.search(r"raw\.ptr\.buffer\.store\.(\w+)\(.*?ptr addrspace\(8\) (%[-\w.$]+)", line)
        plain = re.search(r"load (.*?), ptr addrspace\(1\) (%[-\w.$]+)", line)
        plain = plain or re.search(r"store (<.*?>|\w+) .*, ptr addrspace\(1\) (%[-\w.$]+)", line)
        if access := load or store or plain:
            accesses.append((access[2], _llvm_bytes(access[1])))
        elif re.search(r"buffer\.(load|store|atomic)|(load|store) .*addrspace\(1\)", line) and "declare" not in line:
            raise ValueError(f"cannot read {line.strip()}")
        elif match := re.match(r"\s*(%[-\w.$]+) = (.*)", line):
            sources.setdefault(match[1], set()).update(re.findall(r"%[-\w.$]+", match[2]))
    return ((_origin(address, sources, pointers), width) for address, width in accesses)


def _llvm_bytes(kind: str) -> int:
    """Bytes of an LLVM type, spelled as in IR (``<4 x i32>``) or in an intrinsic's name (``v4i32``)."""
    count, element = re.fullmatch(r"<?(?:v?(\d+)(?: x )?)?(i\d+|f\d+|bf16|bfloat|half|float|double)>?", kind).groups()
    bits = {"bfloat": 16, "half": 16, "float": 32, "double": 64}.get(element) or int(re.search(r"\d+", element)[0])
    return int(count or 1) * bits // 8


def examine_all(cases: list[tuple[str, str, int]], disassemble: bool = False) -> list[Compiled]:
    """`examine` for each (target, variant, hidden size), in forked processes: torch is imported once."""
    torch.set_num_threads(1)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
        results = pool.map(partial(examine, disassemble=disassemble), *zip(*cases, strict=True))
        return [kernel for found in results for kernel in found]


def tighten(budgets: dict, found: list[Compiled]) -> None:
    """Lower the budgets of this Triton version to what was compiled where that is better; never raise one.

    budgets[version]["target variant kernel"][hidden size] is [registers, blocks].
    """
    table = budgets.setdefault(triton.__version__, {})
    for c in found:
        row = table.setdefault(f"{c.target} {c.variant} {c.kernel}", {})
        registers, blocks = row.get(str(c.hidden_size), (c.registers, c.blocks))
        row[str(c.hidden_size)] = [min(registers, c.registers), max(blocks, c.blocks)]


def write_budgets(path: Path, budgets: dict) -> None:
    """One line for each kernel, so that a change is easy to review."""
    lines = []
    for version, table in sorted(budgets.items()):
        rows = (
            f"  {json.dumps(name)}: {json.dumps(dict(sorted(row.items(), key=lambda item: int(item[0]))))}"
            for name, row in sorted(table.items())
        )
        lines.append(f" {json.dumps(version)}: {{\n" + ",\n".join(rows) + "\n }")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def parse_cases(text: str) -> list[tuple[str, str, int]]:
    """``TARGETS:VARIANTS:SIZES``, each a comma-separated list, an empty one meaning all."""

    def choose(part, known):
        chosen = part.split(",") if part else list(map(str, known))
        if unknown := [c for c in chosen if known is not SIZES and c not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not one of {', '.join(known)}")
        return chosen

    targets, variants, sizes, *_ = [*text.split(":"), "", ""]
    sizes = map(int, choose(sizes, SIZES))
    cases = product(choose(targets, CHIPS), choose(variants, VARIANTS), sizes)
    return [case for case in cases if not VARIANTS[case[1]].heads or case[2] <= MAX_HEAD_DIM]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", type=parse_cases, metavar="TARGETS:VARIANTS:SIZES",
                        default=[parse_cases("sm_90:llama-bf16")])  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--disassemble", action="store_true", help="check access widths against the machine code")
    parser.add_argument("--tighten", type=Path, metavar="FILE", help="lower the budgets in FILE to what was compiled")
    arguments = parser.parse_args()
    found = examine_all([case for cases in arguments.cases for case in cases], arguments.disassemble)
    if arguments.tighten:
        budgets = json.loads(arguments.tighten.read_text()) if arguments.tighten.exists() else {}
        tighten(budgets, found)
        write_budgets(arguments.tighten, budgets)
    if arguments.json:
        print(json.dumps({"triton": triton.__version__, "kernels": [asdict(c) for c in found]}))
        return
    row = "{:7} {:20} {:22} {:>6} {:>6} {:>10} {:>8} {:>7} {:>7}  {}"
    heads = ("target", "variant", "kernel", "N", "warps", "registers", "spilled", "blocks", "shared", "widths")
    print(row.format(*heads))
    for c in found:
        widths = " ".join(f"{name}:{'/'.join(map(str, w))}" for name, w in c.widths.items())
        print(row.format(c.target, c.variant, c.kernel, c.hidden_size, c.warps, c.registers, c.spilled, c.blocks,
                         c.shared, widths))  # fmt: skip


if __name__ == "__main__":
    main()
