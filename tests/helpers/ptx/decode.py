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
WIDTHS = {"p": "p", "rs": "h", "r": "w", "rd": "d"}  # by the names of registers
SHUFFLES = {"bfly": np.bitwise_xor, "idx": lambda lane, other: lane & ~31 | other}
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
        self.text = text
        self.name = re.search(r"\.visible \.entry (\w+)\(", text)[1]
        start = text.index(f".entry {self.name}(")
        head, _, body = text[start:].partition(")\n")
        self.params = re.findall(r"\.param \.(\w+)[^,\n]*?(\w+_param_\d+)", head)
        self.threads = int(re.search(r"\.reqntid (\d+)", body)[1])
        self.registers: list = []
        self.given: dict[str, int] = {}
        self.widths: list[np.dtype | None] = []
        self._slots: dict = {}
        self._sizes = {name: kind[-2:] for kind, name in self.params}
        self.blocks: list[list[Instruction]] = [[]]
        self.labels: dict[str, int] = {}
        self._read(body[body.index("{") + 1 :])

    def _read(self, body: str) -> None:
        depth = 1
        for line in body.splitlines():
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
                self._read_statements(line)
        raise Unknown("the entry has no end")

    def _read_statements(self, line: str) -> None:
        for statement in filter(None, map(str.strip, line.split(";"))):
            instruction = self._decode(statement)
            self.blocks[-1].append(instruction)
            if instruction.act in LEAVES:
                self.blocks.append([])

    def _slot(self, text: str, kind: str = "") -> int | None:
        """The slot of a register, special register or parameter, or of a constant of
        that kind.
        """
        if text == "_":
            return None
        key = text
        if text[0] != "%":
            key = (text, kind)
        if key not in self._slots:
            self._slots[key] = len(self.registers)
            self.registers.append(None)
            self.widths.append(None)
            self._describe(self._slots[key], text, kind)
        return self._slots[key]

    def _describe(self, slot: int, text: str, kind: str) -> None:
        if text in self._sizes or re.fullmatch(r"%(tid\.x|n?ctaid\.[xyz])", text):
            self.given[text] = slot
        elif text[0] != "%":
            self.registers[slot] = _constant(text, kind)
        elif match := re.fullmatch(r"%(p|rs|r|rd)\d+", text):
            kind = WIDTHS[match[1]]
            self.widths[slot] = KINDS[kind]
        else:
            raise Unknown(text)

    def _address(self, text: str, kind: str) -> tuple[int, int]:
        match = ADDRESS.fullmatch(text)
        if not match:
            raise Unknown(f"address {text}")
        return self._slot(match[1], kind), int(match[2] or 0)

    def _list(self, text: str, kind: str = "") -> tuple:
        names = re.split("[,|]", text.strip("{} "))
        return tuple(self._slot(name.strip(), kind) for name in names)

    def _decode(self, statement: str) -> Instruction:
        match = STATEMENT.fullmatch(statement)
        if not match:
            raise Unknown(statement)
        negated, guard, name, rest = match.groups()
        made = Instruction(statement)
        if guard:
            made.guard = (self._slot(guard), not negated)
        parts = [part.strip() for part in OPERAND.findall(rest or "")]
        for pattern, decode in ACTIONS.items():
            if match := re.fullmatch(pattern, name):
                decode(self, made, parts, *match.groups())
                return made
        self._arithmetic(made, name, parts)
        return made

    def _arithmetic(self, made, name, parts) -> None:
        operand = operation(name)
        if "{" in parts[0] + parts[-1]:
            operand = MOVES.get((name, parts[0][0] == "{"))
        if operand is None:
            raise Unknown(made.text)
        kinds, made.function = operand
        sources = re.findall(r"[^{}, ]+", ",".join(parts[1:]))
        if len(sources) != len(kinds):
            raise Unknown(made.text)
        made.targets = self._list(parts[0])
        made.sources = tuple(map(self._slot, sources, kinds))
        made.kinds = tuple(KINDS[kind] for kind in kinds)
        made.approximate = ".approx" in name or ".full" in name  # by an ulp or two
        made.divides = name[:3] in ("div", "rem") and kinds[0] != "f"

    def _param(self, made, parts, size) -> None:
        param = parts[1].strip("[] ")
        wide = parts[0].startswith("%rd")
        extended = wide and size == "s32"
        if self._sizes.get(param) != size[-2:]:
            raise Unknown(made.text)
        if wide != (extended or size[-2:] == "64"):
            raise Unknown(made.text)
        made.targets = (self._slot(parts[0]),)
        made.sources = (self._slot(param),)
        kind, made.function = operation("cvt.s64.s32" if extended else f"mov.{size}")
        made.kinds = (KINDS[kind],)

    def _memory(self, made, parts, act, space, vector, bits) -> None:
        made.act = act
        at, values = parts if act == "st" else parts[::-1]
        address, offset = self._address(at, "d" if space == "global" else "w")
        made.numbers = (space, offset, int(bits) // 8, int(vector or 1))
        registers = self._list(values, LOADED[bits])
        if act == "st":
            made.sources = (address, *registers)
        else:
            made.sources = (address,)
            made.targets = registers

    def _matrix(self, made, parts, act) -> None:
        self._memory(made, parts, act, "matrix", "", "32")

    def _shuffle(self, made, parts, mode) -> None:
        target, source, lane, clamp, members = parts
        if int(clamp, 0) != 31 or int(members, 0) not in (-1, 0xFFFFFFFF):
            raise Unknown(made.text)
        made.act = "shuffle"
        made.numbers = (SHUFFLES[mode],)
        made.targets = (self._slot(target),)
        made.sources = (self._slot(source, "w"), self._slot(lane, "w"))

    def _copy(self, made, parts) -> None:
        to, to_offset = self._address(parts[0], "w")
        source, offset = self._address(parts[1], "d")
        made.act = "copy"
        made.numbers = (to_offset, offset, int(parts[2], 0))
        # the size again where nothing is left out
        made.sources = (to, source, self._slot(parts[-1], "w"))

    def _commit(self, made, parts) -> None:
        made.act = "commit"

    def _wait(self, made, parts) -> None:
        made.act = "wait"
        made.numbers = (int(parts[0], 0) if parts else -1,)

    def _barrier(self, made, parts, warp) -> None:
        if warp and self.threads != 32 or not warp and parts != ["0"]:
            raise Unknown(made.text)
        made.act = "barrier"

    def _leave(self, made, parts, name) -> None:
        made.act = name
        made.numbers = tuple(parts)


# none of these changes what is read
CACHING = r"(?:\.(?:ca|cg|cs|L1|L2|relaxed|weak|cta)(?:::\w+)*)*"
ACTIONS = {
    r"ld\.param\.(\w+)": Kernel._param,
    rf"(ld|st)\.(global|shared){CACHING}(?:\.v([248]))?\.[bufs](16|32|64)": Kernel._memory,
    r"(ld|st)matrix\.sync\.aligned\.m8n8\.x[124]\.shared(?:::cta)?\.b16": Kernel._matrix,
    r"shfl\.sync\.(bfly|idx)\.b32": Kernel._shuffle,
    r"cp\.async\.c[ag]\.shared\.global(?:\.L2::\w+)?": Kernel._copy,
    r"cp\.async\.commit_group": Kernel._commit,
    r"cp\.async\.wait_(?:group|all)": Kernel._wait,
    r"bar(\.warp)?\.sync": Kernel._barrier,
    r"(bra|bra\.uni|ret)": Kernel._leave,
}


def _constant(text: str, kind: str):
    if text == "global_smem":
        text = "0"
    digits = re.sub("^0[fF](?=.{8}$)", "0x", text).removesuffix("U")
    try:
        value = int(digits, 0)
    except ValueError:
        raise Unknown(f"operand {text}") from None
    if kind == "p":
        return np.bool_(value)
    size = KINDS[kind].itemsize
    bits = value % 2 ** (8 * size)
    return np.dtype(f"u{size}").type(bits).view(KINDS[kind])
