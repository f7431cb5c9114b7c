"""What machine code and intermediate code of a compiled Triton kernel say of registers,
spills and memory accesses.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton

# bytes by the mark of a load or store; 4 has none
SASS_WIDTHS = {32: "256", 16: "128", 8: "64", 2: "U16", 1: "U8"}


def read_nvidia(compiled, arguments: list[str], chip, disassemble: bool) -> dict:
    """Of a compiled kernel of Triton for a `benchmarks.aot.Chip`: registers, spills,
    programs, and access widths.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [tool, "-res-usage", *(["-sass"] if disassemble else []), cubin.name]
        text = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (
        int(re.search(rf"{word}:(\d+)", text)[1]) for word in ("REG", "STACK")
    )
    accesses = list(_ptx_accesses(compiled.asm["ptx"]))
    if disassemble:
        suffixes = re.findall(r"\s(?:LDG|STG|LDGSTS)\.(\S+)", text)
        machine = {
            next((w for w, mark in SASS_WIDTHS.items() if mark in s.split(".")), 4)
            for s in suffixes
        }
        if machine != {width for _, width in accesses}:
            raise ValueError(
                f"ptxas accesses memory by {machine} bytes, the PTX by {accesses}"
            )
    warps, shared = (
        compiled.metadata.num_warps,
        compiled.metadata.shared + chip.shared_reserve,
    )
    blocks = min(
        # registers are handed out to warps by 8 a thread
        65_536 // (-(-registers // 8) * 8 * 32 * warps),
        chip.max_warps // warps,
        chip.shared_total // max(shared, 1),
    )
    return {
        "registers": registers,
        "spilled": stack,
        "blocks": blocks,
        "widths": _widths(accesses, arguments),
    }


def read_amd(compiled, arguments: list[str]) -> dict:
    """As `read_nvidia`."""
    text = compiled.asm["amdgcn"]
    return {
        "registers": int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1]),
        "spilled": 4 * int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1]),
        "blocks": int(re.search(r"; Occupancy: (\d+)", text)[1]),
        "widths": _widths(_llvm_accesses(compiled.asm["llir"]), arguments),
    }  # fmt: skip


def sums(text: str) -> list[str]:
    """Shape and layout over the threads of every tensor that is summed, from Triton's
    GPU dialect.
    """
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    return [
        shape + layouts[name]
        for shape, name in re.findall(r"\}\) : \(tensor<([^#]*)(#\w+)>\)", text)
    ]


def _widths(
    accesses: Iterator[tuple[set[int], int]], arguments: list[str]
) -> dict[str, list[int]]:
    widths: dict[str, set[int]] = {}
    for pointers, width in accesses:
        if not pointers:
            raise ValueError(
                f"cannot tell which argument an access of {width} bytes belongs to"
            )
        for pointer in pointers:
            # several where the compiler made one access of two branches
            widths.setdefault(arguments[pointer], set()).add(width)
    return {name: sorted(found, reverse=True) for name, found in sorted(widths.items())}


def _origin(
    name: str, sources: dict[str, set[str]], pointers: dict[str, int]
) -> set[int]:
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
        copy = re.search(
            r"\bcp\.async\.\w+\.shared\.global\S* \[[^\]]*\], \[ ?(%\w+)[^\]]*\], (0x\w+|\d+)",
            line,
        )
        access = re.search(r"\b(?:ld|st)\.global((?:\.\w+)*)\s+.*\[ ?(%\w+)", line)
        if copy:
            accesses.append((copy[1], int(copy[2], 0)))
        elif access:
            vector = re.search(r"\.v(\d)", access[1])
            bits = int(re.search(r"\.[bufs](\d+)$", access[1])[1])
            accesses.append((access[2], bits // 8 * (int(vector[1]) if vector else 1)))
        elif re.search(r"(ld|st|atom|red|shared)\.global", line):
            raise ValueError(f"cannot read {line.strip()}")
        elif match := re.match(
            r"\s*(?:@!?%\w+ )?\s*[a-z][\w.:]*\s+\{?\s*(%\w+)(.*);", line
        ):
            target, operands = match.groups()
            sources.setdefault(target, set()).update(
                re.findall(r"%\w+|\w+_param_\d+", operands)
            )
    return ((_origin(address, sources, pointers), width) for address, width in accesses)


def _llvm_accesses(text: str) -> Iterator[tuple[set[int], int]]:
    """(pointer arguments, bytes) of every access to global memory in LLVM IR for AMD."""
    definition = re.search(r"define amdgpu_kernel void @.*", text)[0]
    declared = re.findall(
        r"(ptr addrspace\(1\)|i\d+|float)[^%]*(%[-\w.$]+)", definition
    )
    pointers = {
        name: i for i, (kind, name) in enumerate(declared) if kind.startswith("ptr")
    }
    sources: dict[str, set[str]] = {}
    accesses = []
    for line in text.splitlines():
        load = re.search(
            r"= .*raw\.ptr\.buffer\.load\.(\w+)\(ptr addrspace\(8\) (%[-\w.$]+)", line
        )
        store = re.search(
            r"raw\.ptr\.buffer\.store\.(\w+)\(.*?ptr addrspace\(8\) (%[-\w.$]+)", line
        )
        plain = re.search(r"load (.*?), ptr addrspace\(1\) (%[-\w.$]+)", line)
        plain = plain or re.search(
            r"store (<.*?>|\w+) .*, ptr addrspace\(1\) (%[-\w.$]+)", line
        )
        if access := load or store or plain:
            accesses.append((access[2], _llvm_bytes(access[1])))
        elif (
            re.search(
                r"buffer\.(load|store|atomic)|(load|store) .*addrspace\(1\)", line
            )
            and "declare" not in line
        ):
            raise ValueError(f"cannot read {line.strip()}")
        elif match := re.match(r"\s*(%[-\w.$]+) = (.*)", line):
            sources.setdefault(match[1], set()).update(
                re.findall(r"%[-\w.$]+", match[2])
            )
    return ((_origin(address, sources, pointers), width) for address, width in accesses)


def _llvm_bytes(kind: str) -> int:
    """Bytes of an LLVM type, spelled as in IR (``<4 x i32>``) or in an intrinsic's name
    (``v4i32``).
    """
    count, element = re.fullmatch(
        r"<?(?:v?(\d+)(?: x )?)?(i\d+|f\d+|bf16|bfloat|half|float|double)>?", kind
    ).groups()
    bits = {"bfloat": 16, "half": 16, "float": 32, "double": 64}.get(element) or int(
        re.search(r"\d+", element)[0]
    )
    return int(count or 1) * bits // 8
