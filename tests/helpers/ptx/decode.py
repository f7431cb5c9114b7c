"""PTX text to instructions: registers become slots, control flow becomes blocks. What is not known is an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .arithmetic import KINDS, MOVES, is_approximate, operation

STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)(?:\s+(.*))?", re.DOTALL)
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^\s,{}\[\]][^,{}\[\]]*")
ADDRESS = re.compile(r"\[\s*(%?\w+)\s*(?:\+\s*(-?\d+))?\s*\]")
MEMORY = re.compile(r"(ld|st)\.(global|shared)((?:\.[a-zA-Z]\w*(?:::\w+)?)*?)(?:\.v([248]))?\.[bufs](16|32|64)")
CACHING = {"ca", "cg", "cs", "L1", "L2", "relaxed", "weak", "cta"}  # none of which changes what is read
COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global(?:\.L2::\w+)?")
MATRIX = re.compile(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x[124]\.shared(?:::cta)?\.b16")
WIDTHS = {"p": "p", "rs": "h", "r": "w", "rd": "d"}  # by the names of registers
LOADED = {"16": "h", "32": "w", "64": "d"}


class Unknown(Exception):
    """PTX that is not spoken here."""


@dataclass(slots=True)
class Instruction:
    """One statement.

    Args:
        function: of the sources' lanes, for arithmetic; None where the machine's method `act` does it.
        kinds: dtypes that the sources are looked at as (None: as they are).
        sources, targets: slots of registers; a target is None where the result is dropped.
        guard: the slot of a predicate and the value at which it lets pass, or None.
        numbers: what `act` needs to know besides, such as offsets and sizes.
    """

    text: str
    function: Callable | None = None
    act: str = ""
    kinds: tuple = ()
    sources: tuple = ()
    targets: tuple = ()
    guard: tuple | None = None
    numbers: tuple = ()
    approximate: bool = False
    divides: bool = False
    label: str = ""


@dataclass
class Block:
    code: list[Instruction] = field(default_factory=list)
    last: Instruction | None = None  # bra or ret; None: on to the next block
    target: int = -1


class Kernel:
    """A decoded entry function.

    Attributes:
        params: (type, name) of each parameter.
        threads: of one program.
        registers: the slots as they are at the start: a scalar for a constant, else None.
        widths: the dtype of the bits of each slot that is a register.
        given: {name: slot} of the parameters and special registers that a launch fills in.
    """

    def __init__(self, text: str):
        self.text, self.name = text, re.search(r"\.visible \.entry (\w+)\(", text)[1]
        head, _, body = text[text.index(f".entry {self.name}(") :].partition(")\n")
        self.params = re.findall(r"\.param \.(\w+)[^,\n]*?(\w+_param_\d+)", head)
        self.threads = int(re.search(r"\.reqntid (\d+)", body)[1])
        self.registers: list = []
        self.given: dict[str, int] = {}
        self.widths: list[np.dtype | None] = []
        self._slots: dict = {}
        self._sizes = {name: kind[-2:] for kind, name in self.params}
        self.blocks = [Block()]
        labels = self._read(body[body.index("{") + 1 :])
        for block in self.blocks:
            if block.last is not None and block.last.label:
                block.target = labels[block.last.label]

    def _read(self, body: str) -> dict[str, int]:
        labels, depth = {}, 1
        for line in body.splitlines():
            line = line.split("//")[0].strip()
            if not line or line[0] == ".":
                continue
            if line in "{}":
                depth += 1 if line == "{" else -1
                if not depth:
                    return labels
            elif line[-1] == ":":
                if self.blocks[-1].code:
                    self.blocks.append(Block())
                labels[line[:-1]] = len(self.blocks) - 1
            else:
                for statement in filter(None, map(str.strip, line.split(";"))):
                    instruction = self._decode(statement)
                    if instruction.act in ("bra", "ret"):
                        self.blocks[-1].last = instruction
                        self.blocks.append(Block())
                    else:
                        self.blocks[-1].code.append(instruction)
        raise Unknown("the entry has no end")

    # -- operands

    def _slot(self, text: str, kind: str = "") -> int | None:
        """The slot of a register, special register or parameter, or of a constant of that kind."""
        if text == "_":
            return None
        key = text if text[0] == "%" else (text, kind)
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = len(self.registers)
            self.registers.append(None)
            self.widths.append(None)
            if text in self._sizes or re.fullmatch(r"%(tid\.x|n?ctaid\.[xyz])", text):
                self.given[text] = slot
            elif text[0] != "%":
                self.registers[slot] = _constant(text, kind)
            elif match := re.fullmatch(r"%(p|rs|r|rd)\d+", text):
                self.widths[slot] = KINDS[WIDTHS[match[1]]]
            else:
                raise Unknown(text)
        return slot

    def _address(self, text: str, kind: str) -> tuple[int, int]:
        match = ADDRESS.fullmatch(text)
        if not match:
            raise Unknown(f"address {text}")
        return self._slot(match[1], kind), int(match[2] or 0)

    def _list(self, text: str, kind: str = "") -> tuple:
        return tuple(self._slot(name.strip(), kind) for name in text.strip("{} ").split(","))

    # -- one statement

    def _decode(self, statement: str) -> Instruction:
        match = STATEMENT.fullmatch(statement)
        if not match:
            raise Unknown(statement)
        negated, guard, name, rest = match.groups()
        made = Instruction(statement)
        if guard:
            made.guard = (self._slot(guard), not negated)
        parts = [part.strip() for part in OPERAND.findall(rest or "")]
        if name.startswith("mov.b") and any(part[0] == "{" for part in parts):
            kinds, made.function = MOVES[parts[0][0] == "{", name[4:]]
            made.targets, made.sources = self._list(parts[0]), self._list(parts[1], kinds[0])
            made.kinds = tuple(KINDS[k] for k in kinds)
        elif (found := operation(name)) is not None:
            kinds, made.function = found
            if len(parts) != len(kinds) + 1:
                raise Unknown(statement)
            made.targets, made.sources = (self._slot(parts[0]),), tuple(map(self._slot, parts[1:], kinds))
            made.kinds = (None,) if name.startswith("mov.") else tuple(KINDS[k] for k in kinds)
            made.approximate = is_approximate(name)
            made.divides = name[:3] in ("div", "rem") and kinds[0] != "f"
        elif name.startswith("ld.param."):
            param = parts[1].strip("[] ")
            if self._sizes.get(param) != name[-2:] or (name[-2:] == "64") != parts[0].startswith("%rd"):
                raise Unknown(statement)
            made.function, made.kinds = (lambda a: a), (None,)
            made.targets, made.sources = (self._slot(parts[0]),), (self._slot(param),)
        else:
            self._decode_action(made, name, parts)
        return made

    def _decode_action(self, made: Instruction, name: str, parts: list[str]) -> None:
        if match := MEMORY.fullmatch(name) or MATRIX.fullmatch(name):
            at, values = parts if match[1] == "st" else parts[::-1]
            space, modifiers, vector, bits = match.groups()[1:] or ("matrix", "", "", "32")
            if any(part.split("::")[0] not in CACHING for part in filter(None, modifiers.split("."))):
                raise Unknown(made.text)
            address, offset = self._address(at, "d" if space == "global" else "w")
            registers = self._list(values, LOADED[bits])
            made.act, made.numbers = f"{match[1]}_{space}", (offset, int(bits) // 8, int(vector or 1))
            made.sources, made.targets = ((address, *registers), ()) if match[1] == "st" else ((address,), registers)
        elif name == "shfl.sync.bfly.b32" and int(parts[3], 0) == 31 and int(parts[4], 0) in (-1, 0xFFFFFFFF):
            made.act, made.targets = "shuffle", (self._slot(parts[0]),)
            made.sources = tuple(self._slot(part, "w") for part in parts[1:3])
        elif COPY.fullmatch(name):
            (to, to_offset), (source, offset) = self._address(parts[0], "w"), self._address(parts[1], "d")
            made.act, made.numbers = "copy", (to_offset, offset, int(parts[2], 0))
            made.sources = (to, source, self._slot(parts[-1], "w"))  # the size again where nothing is left out
        elif name == "cp.async.commit_group":
            made.act = "commit"
        elif name in ("cp.async.wait_group", "cp.async.wait_all"):
            made.act, made.numbers = "wait", (int(parts[0], 0) if parts else -1,)
        elif name == "bar.sync" and parts == ["0"]:
            made.act = "barrier"
        elif name in ("bra", "bra.uni"):
            made.act, made.label = "bra", parts[0]
        elif name == "ret":
            made.act = "ret"
        else:
            raise Unknown(made.text)


def _constant(text: str, kind: str):
    if text == "global_smem":
        text = "0"
    if match := re.fullmatch(r"0[fF]([0-9A-Fa-f]{8})", text):
        value = int(match[1], 16)
    elif re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)", text):
        value = int(text, 0)
    else:
        raise Unknown(f"operand {text}")
    if kind == "p":
        return np.bool_(value)
    size = KINDS[kind].itemsize
    return np.dtype(f"u{size}").type(value % 2 ** (8 * size)).view(KINDS[kind])
