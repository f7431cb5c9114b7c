"""PTX text to instructions: registers become slots, control flow becomes blocks. What
is not known is an error.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .arithmetic import KINDS, MOVES, operation

STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)(?:\s+(.*))?", re.DOTALL)
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^\s,{}\[\]][^,{}\[\]]*")
ADDRESS = re.compile(r"\[\s*(%?\w+)\s*(?:\+\s*(-?\d+))?\s*\]")
MEMORY = re.compile(
    r"(ld|st)\.(global|shared)((?:\.[a-zA-Z]\w*(?:::\w+)?)*?)(?:\.v([248]))?\.[bufs](16|32|64)"
)
# none of which changes what is read
CACHING = {"ca", "cg", "cs", "L1", "L2", "relaxed", "weak", "cta"}
COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global(?:\.L2::\w+)?")
MATRIX = re.compile(
    r"(ld|st)matrix\.sync\.aligned\.m8n8\.x[124]\.shared(?:::cta)?\.b16"
)
WIDTHS = {"p": "p", "rs": "h", "r": "w", "rd": "d"}  # by the names of registers
SHUFFLE = {
    "shfl.sync.bfly.b32": np.bitwise_xor,
    "shfl.sync.idx.b32": lambda lane, other: lane & ~31 | other,
}
LEAVES = {"bra", "bra.uni", "ret"}
LOADED = {"16": "h", "32": "w", "64": "d"}


class Unknown(Exception):
    """PTX that is not spoken here."""


@dataclass(slots=True)
class Instruction:
    """One statement.

    Args:
        function: of the sources' lanes, for arithmetic; None where the machine's method
            `act` does it.
        kinds: dtypes that the sources are looked at as (None: as they are).
        sources, targets: slots of registers; a target is None where the result is
            dropped.
        guard: the slot of a predicate and the value at which it lets pass, or None.
        numbers: what `act` needs to know besides, such as offsets, sizes and labels.
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


class Kernel:
    """A decoded entry function.

    Attributes:
        params: (type, name) of each parameter; threads: of one program.
        registers: the slots as they are at the start: a scalar for a constant, else
            None.
        widths: the dtype of the bits of each slot that is a register.
        given: {name: slot} of the parameters and special registers that a launch fills
            in.
        blocks: statements up to a branch or a label; labels: {name: number of its
            block}.
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
        self.blocks: list[list[Instruction]] = [[]]
        self.labels: dict[str, int] = {}
        self._read(body[body.index("{") + 1 :].splitlines())

    def _read(self, lines: list[str]) -> None:
        depth = 1
        for line in lines:
            line = line.split("//")[0].strip()
            if not line or line[0] == ".":
                continue
            if line in "{}":
                depth += 1 if line == "{" else -1
                if not depth:
                    return
            elif line[-1] == ":":
                if self.blocks[-1]:
                    self.blocks.append([])
                self.labels[line[:-1]] = len(self.blocks) - 1
            else:
                for statement in filter(None, map(str.strip, line.split(";"))):
                    self.blocks[-1].append(self._decode(statement))
                    if self.blocks[-1][-1].act in LEAVES:
                        self.blocks.append([])
        raise Unknown("the entry has no end")

    def _slot(self, text: str, kind: str = "") -> int | None:
        """The slot of a register, special register or parameter, or of a constant of
        that kind.
        """
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
        return tuple(
            self._slot(name.strip(), kind)
            for name in re.split("[,|]", text.strip("{} "))
        )

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
            made.targets, made.sources = (
                self._list(parts[0]),
                self._list(parts[1], kinds[0]),
            )
            made.kinds = tuple(KINDS[k] for k in kinds)
        elif (found := operation(name)) is not None:
            kinds, made.function = found
            if len(parts) != len(kinds) + 1:
                raise Unknown(statement)
            made.targets, made.sources = (
                self._list(parts[0]),
                tuple(map(self._slot, parts[1:], kinds)),
            )
            made.kinds = (
                (None,) if name.startswith("mov.") else tuple(KINDS[k] for k in kinds)
            )
            made.approximate = ".approx" in name or ".full" in name  # by an ulp or two
            made.divides = name[:3] in ("div", "rem") and kinds[0] != "f"
        elif name.startswith("ld.param."):
            param = parts[1].strip("[] ")
            wider = name == "ld.param.s32" and parts[0].startswith("%rd")
            if self._sizes.get(param) != name[-2:] or (
                wider or name[-2:] == "64"
            ) != parts[0].startswith("%rd"):
                raise Unknown(statement)
            made.function = operation("cvt.s64.s32" if wider else "mov.b32")[1]
            made.kinds = (KINDS["s"],) if wider else (None,)
            made.targets, made.sources = (self._slot(parts[0]),), (self._slot(param),)
        else:
            self._decode_action(made, name, parts)
        return made

    def _decode_action(self, made: Instruction, name: str, parts: list[str]) -> None:
        if match := MEMORY.fullmatch(name) or MATRIX.fullmatch(name):
            at, values = parts if match[1] == "st" else parts[::-1]
            space, modifiers, vector, bits = match.groups()[1:] or (
                "matrix",
                "",
                "",
                "32",
            )
            if any(
                part.split("::")[0] not in CACHING
                for part in filter(None, modifiers.split("."))
            ):
                raise Unknown(made.text)
            address, offset = self._address(at, "d" if space == "global" else "w")
            registers = self._list(values, LOADED[bits])
            made.act, made.numbers = (
                match[1],
                (space, offset, int(bits) // 8, int(vector or 1)),
            )
            made.sources, made.targets = (
                ((address, *registers), ())
                if match[1] == "st"
                else ((address,), registers)
            )
        elif (
            (mode := SHUFFLE.get(name))
            and int(parts[3], 0) == 31
            and int(parts[4], 0) in (-1, 0xFFFFFFFF)
        ):
            made.act, made.targets, made.numbers = (
                "shuffle",
                (self._slot(parts[0]),),
                (mode,),
            )
            made.sources = tuple(self._slot(part, "w") for part in parts[1:3])
        elif COPY.fullmatch(name):
            (to, to_offset), (source, offset) = (
                self._address(parts[0], "w"),
                self._address(parts[1], "d"),
            )
            made.act, made.numbers = "copy", (to_offset, offset, int(parts[2], 0))
            # the size again where nothing is left out
            made.sources = (to, source, self._slot(parts[-1], "w"))
        elif name == "cp.async.commit_group":
            made.act = "commit"
        elif name in ("cp.async.wait_group", "cp.async.wait_all"):
            made.act, made.numbers = "wait", (int(parts[0], 0) if parts else -1,)
        elif [name, *parts] == ["bar.sync", "0"] or (
            name == "bar.warp.sync" and self.threads == 32
        ):
            made.act = "barrier"
        elif name in LEAVES:
            made.act, made.numbers = name, tuple(parts)
        else:
            raise Unknown(made.text)


def _constant(text: str, kind: str):
    try:
        value = int(
            "0"
            if text == "global_smem"
            else re.sub("^0[fF](?=.{8}$)", "0x", text).removesuffix("U"),
            0,
        )
    except ValueError:
        raise Unknown(f"operand {text}") from None
    if kind == "p":
        return np.bool_(value)
    size = KINDS[kind].itemsize
    return np.dtype(f"u{size}").type(value % 2 ** (8 * size)).view(KINDS[kind])
