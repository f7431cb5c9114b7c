"""What machine code and intermediate code of a compiled Triton kernel say of registers,
spills and memory accesses.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import triton


def read(compiled, chip) -> dict:
    """What a compiled kernel of Triton for a `benchmarks.aot.Chip` is like.

    Returns:
        ``registers`` per thread (VGPRs on AMD) and ``spilled`` bytes of local memory
        per thread; ``shared``, bytes per program, and its ``warps``; ``blocks``,
        programs that fit on a multiprocessor at once (waves per SIMD on AMD);
        ``widths``, by operand the distinct bytes per load or store of one thread,
        widest first; ``sums``, shape and layout over the threads of every tensor that
        is summed, which fix the order of the additions.
    """
    kinds = compiled.src.signature.items()
    arguments = [name for name, kind in kinds if kind != "constexpr"]
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    if "amdgcn" in compiled.asm:
        figures = _read_amd(compiled.asm["amdgcn"])
        accesses = _llvm_accesses(compiled.asm["llir"])
    else:
        figures = _read_nvidia(compiled.asm["cubin"])
        figures["blocks"] = min(
            # registers are handed out to warps by 8 a thread
            65_536 // (-(-figures["registers"] // 8) * 8 * 32 * warps),
            chip.max_warps // warps,
            chip.shared_total // max(shared + chip.shared_reserve, 1),
        )
        accesses = _ptx_accesses(compiled.asm["ptx"])
    figures |= {"shared": shared, "warps": warps}
    figures["widths"] = _widths(accesses, arguments)
    return figures | {"sums": _sums(compiled.asm["ttgir"])}


def _read_nvidia(code: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(code)
        cubin.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [tool, "-res-usage", cubin.name]
        text = subprocess.check_output(command, text=True)
    words = {"registers": r"REG:(\d+)", "spilled": r"STACK:(\d+)"}
    return {name: int(re.search(word, text)[1]) for name, word in words.items()}


def _read_amd(text: str) -> dict[str, int]:
    return {
        "registers": int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1]),
        "spilled": 4 * int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1]),
        "blocks": int(re.search(r"; Occupancy: (\d+)", text)[1]),
    }


def _sums(text: str) -> list[str]:
    """Of what is summed in Triton's GPU dialect."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    found = re.findall(r"\}\) : \(tensor<([^#]*)(#\w+)>\)", text)
    return [shape + layouts[name] for shape, name in found]


def _widths(accesses: list[tuple], arguments: list[str]) -> dict[str, list[int]]:
    widths: dict[str, set[int]] = {}
    for pointers, width in accesses:
        if not pointers:
            raise ValueError(f"of no argument: an access of {width} bytes")
        for pointer in pointers:
            # several where the compiler made one access of two branches
            widths.setdefault(arguments[pointer], set()).add(width)
    return {name: sorted(found, reverse=True) for name, found in sorted(widths.items())}


def _accesses(
    text: str, pointers: dict[str, int], access: Callable, definition: re.Pattern
) -> list[tuple[set[int], int]]:
    """(indices of pointer arguments, bytes) of every access to global memory.

    Args:
        pointers: by name the index of a pointer argument.
        access: of a line the name of its address and the bytes, or None.
        definition: what a line defines, and what it is computed from.
    """
    sources: dict[str, set[str]] = {}
    found = []
    for line in text.splitlines():
        if one := access(line):
            found.append(one)
        elif match := definition.match(line):
            names = re.findall(r"%[-\w.$]+|\w+_param_\d+", match[2])
            sources.setdefault(match[1], set()).update(names)
    return [(_origin(name, sources, pointers), width) for name, width in found]


def _origin(
    name: str, sources: dict[str, set[str]], pointers: dict[str, int]
) -> set[int]:
    """Indices of the pointer arguments that the value `name` is computed from."""
    seen, todo = set(), {name}
    while todo:
        name = todo.pop()
        seen.add(name)
        todo |= sources.get(name, set()) - seen
    return {pointers[name] for name in seen & pointers.keys()}


def _ptx_accesses(text: str) -> list[tuple[set[int], int]]:
    names = re.findall(r"\.param \.u64 \.ptr \.global .*?(\w+)[,\n]", text)
    pointers = {name: int(name.rpartition("_")[2]) for name in names}
    definition = re.compile(r"\s*(?:@!?%\w+ )?\s*[a-z][\w.:]*\s+\{?\s*(%\w+)(.*);")
    return _accesses(text, pointers, _ptx_access, definition)


PTX_COPY = re.compile(
    r"\bcp\.async\.\w+\.shared\.global\S* \[[^\]]*\], \[ ?(%\w+)[^\]]*\], (0x\w+|\d+)"
)
PTX_ACCESS = re.compile(r"\b(?:ld|st)\.global((?:\.\w+)*)\s+.*\[ ?(%\w+)")


def _ptx_access(line: str) -> tuple[str, int] | None:
    if copy := PTX_COPY.search(line):
        return copy[1], int(copy[2], 0)
    if access := PTX_ACCESS.search(line):
        vector = re.search(r"\.v(\d)", access[1])
        bits = int(re.search(r"\.[bufs](\d+)$", access[1])[1])
        return access[2], bits // 8 * (int(vector[1]) if vector else 1)
    if re.search(r"(ld|st|atom|red|shared)\.global", line.split("//")[0]):
        raise ValueError(f"cannot read {line.strip()}")
    return None


def _llvm_accesses(text: str) -> list[tuple[set[int], int]]:
    definition = re.search(r"define amdgpu_kernel void @.*", text)[0]
    parameter = r"(ptr addrspace\(1\)|i\d+|float)[^%]*(%[-\w.$]+)"
    pointers = {}
    for index, (kind, name) in enumerate(re.findall(parameter, definition)):
        if kind.startswith("ptr"):
            pointers[name] = index
    definition = re.compile(r"\s*(%[-\w.$]+) = (.*)")
    return _accesses(text, pointers, _llvm_access, definition)


LLVM_ACCESSES = (
    r"= .*raw\.ptr\.buffer\.load\.(\w+)\(ptr addrspace\(8\) (%[-\w.$]+)",
    r"raw\.ptr\.buffer\.store\.(\w+)\(.*?ptr addrspace\(8\) (%[-\w.$]+)",
    r"load (.*?), ptr addrspace\(1\) (%[-\w.$]+)",
    r"store (<.*?>|\w+) .*, ptr addrspace\(1\) (%[-\w.$]+)",
)


def _llvm_access(line: str) -> tuple[str, int] | None:
    for pattern in LLVM_ACCESSES:
        if access := re.search(pattern, line):
            return access[2], _llvm_bytes(access[1])
    other = r"buffer\.(load|store|atomic)|(load|store) .*addrspace\(1\)"
    if re.search(other, line) and "declare" not in line:
        raise ValueError(f"cannot read {line.strip()}")
    return None


def _llvm_bytes(kind: str) -> int:
    """Bytes of an LLVM type, spelled as in IR (``<4 x i32>``) or in an intrinsic's name
    (``v4i32``).
    """
    pattern = r"<?(?:v?(\d+)(?: x )?)?(i\d+|f\d+|bf16|bfloat|half|float|double)>?"
    count, element = re.fullmatch(pattern, kind).groups()
    bits = {"bfloat": 16, "half": 16, "float": 32, "double": 64}.get(element)
    bits = bits or int(re.search(r"\d+", element)[0])
    return int(count or 1) * bits // 8
