"""PTX text to instructions: registers become slots, control flow becomes blocks. What
is not known is an error.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .arithmetic import KINDS, MOVES, operation

STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)(?:\s+(.*))?", re.DOTALL)
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^\s,{}\[\]][^,{}\[\]]*")
ADDRESS = re.compile(r"\[\s*(%?\w+)\s*(?:\+\s*(-?\d+))?\s*\]")
WIDTHS = {"p": "p", "rs": "h", "r": "w", "rd": "d"}  # by the names of registers
LEAVES = {"bra", "bra.uni", "ret"}
LOADED = {"16": "h", "32": "w", "64": "d"}
ALL_LANES = (-1, 0xFFFFFFFF)


def _lane_of_warp(lane, other):
    first = lane & ~31
    return first | other


SHUFFLES = {
    "bfly": np.bitwise_xor,
    "idx": _lane_of_warp,
}


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
    kinds: Sequence = ()
    sources: Sequence = ()
    targets: Sequence = ()
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

    def __init__(self, text):
        self.text = text
        entry = re.search(r"\.visible \.entry (\w+)\(", text)
        self.name = entry[1]
        head, _, body = text[entry.start() :].partition(")\n")
        self.params = re.findall(r"\.param \.(\w+)[^,\n]*?(\w+_param_\d+)", head)
        threads = re.search(r"\.reqntid (\d+)", body)
        self.threads = int(threads[1])
        self.registers = []
        self.given = {}
        self.widths = []
        self.blocks = [[]]
        self.labels = {}
        self._slots = {}
        self._sizes = {}
        for kind, name in self.params:
            self._sizes[name] = kind[-2:]
        _, _, statements = body.partition("{")
        self._read(statements)

    def _read(self, body):
        depth = 1
        for line in body.splitlines():
            code, _, _ = line.partition("//")
            code = code.strip()
            if not code or code.startswith("."):
                continue
            if code == "{":
                depth += 1
            elif code == "}":
                depth -= 1
            elif code.endswith(":"):
                self._begin_block(code.removesuffix(":"))
            else:
                self._read_statements(code)
            if not depth:
                return
        raise Unknown("the entry has no end")

    def _begin_block(self, label):
        if self.blocks[-1]:
            self.blocks.append([])
        self.labels[label] = len(self.blocks) - 1

    def _read_statements(self, line):
        for part in line.split(";"):
            statement = part.strip()
            if not statement:
                continue
            instruction = self._decode(statement)
            self.blocks[-1].append(instruction)
            if instruction.act in LEAVES:
                self.blocks.append([])

    def _slot(self, text, kind=""):
        """The slot of a register, special register or parameter, or of a constant of
        that kind.
        """
        if text == "_":
            return None
        key = text
        if text[0] != "%":
            key = (text, kind)
        if key in self._slots:
            return self._slots[key]
        slot = len(self.registers)
        self._slots[key] = slot
        self.registers.append(None)
        self.widths.append(None)
        self._describe(slot, text, kind)
        return slot

    def _describe(self, slot, text, kind):
        if text in self._sizes or re.fullmatch(r"%(tid\.x|n?ctaid\.[xyz])", text):
            self.given[text] = slot
        elif text[0] != "%":
            self.registers[slot] = _constant(text, kind)
        elif match := re.fullmatch(r"%(p|rs|r|rd)\d+", text):
            kind = WIDTHS[match[1]]
            self.widths[slot] = KINDS[kind]
        else:
            raise Unknown(text)

    def _address(self, text, kind):
        match = ADDRESS.fullmatch(text)
        if not match:
            raise Unknown(f"address {text}")
        base, offset = match.groups("0")
        return self._slot(base, kind), int(offset)

    def _list(self, text, kind=""):
        names = re.split("[,|]", text.strip("{} "))
        slots = []
        for name in names:
            slots.append(self._slot(name.strip(), kind))
        return slots

    def _decode(self, statement):
        match = STATEMENT.fullmatch(statement)
        if not match:
            raise Unknown(statement)
        negated, guard, name, rest = match.groups()
        made = Instruction(statement)
        if guard:
            slot = self._slot(guard)
            made.guard = (slot, not negated)
        parts = []
        for part in OPERAND.findall(rest or ""):
            parts.append(part.strip())
        for pattern, decode in ACTIONS.items():
            if match := re.fullmatch(pattern, name):
                decode(self, made, parts, *match.groups())
                return made
        self._arithmetic(made, name, parts)
        return made

    def _arithmetic(self, made, name, parts):
        target, *rest = parts
        sources = re.findall(r"[^{}, ]+", ",".join(rest))
        unpacks = target.startswith("{")
        known = operation(name)
        if unpacks or "{" in parts[-1]:
            known = MOVES.get((name, unpacks))
        if known is None:
            raise Unknown(made.text)
        kinds, made.function = known
        if len(sources) != len(kinds):
            raise Unknown(made.text)
        made.targets = self._list(target)
        made.sources = list(map(self._slot, sources, kinds))
        made.kinds = [KINDS[kind] for kind in kinds]
        made.approximate = ".approx" in name or ".full" in name  # by an ulp or two
        made.divides = name.startswith(("div", "rem")) and "f" not in kinds

    def _param(self, made, parts, size):
        target, param = parts
        param = param.strip("[] ")
        bits = size[-2:]
        wide = target.startswith("%rd")
        extended = wide and size == "s32"
        if self._sizes.get(param) != bits:
            raise Unknown(made.text)
        if wide != (extended or bits == "64"):
            raise Unknown(made.text)
        made.targets = [self._slot(target)]
        made.sources = [self._slot(param)]
        name = f"mov.{size}"
        if extended:
            name = "cvt.s64.s32"
        kind, made.function = operation(name)
        made.kinds = [KINDS[kind]]

    def _memory(self, made, parts, act, space, vector, bits):
        stores = act == "st"
        at, values = parts
        if not stores:
            values, at = parts
        kind = "w"
        if space == "global":
            kind = "d"
        address, offset = self._address(at, kind)
        registers = self._list(values, LOADED[bits])
        width = int(bits) // 8
        count = int(vector or 1)
        made.act = act
        made.numbers = (space, offset, width, count)
        made.sources = [address]
        if stores:
            made.sources += registers
        else:
            made.targets = registers

    def _matrix(self, made, parts, act):
        self._memory(made, parts, act, "matrix", "", "32")

    def _transposed_matrix(self, made, parts):
        self._matrix(made, parts, "ld")
        made.act = "ld_transposed"

    def _shuffle(self, made, parts, mode):
        target, source, lane, clamp, members = parts
        if int(clamp, 0) != 31 or int(members, 0) not in ALL_LANES:
            raise Unknown(made.text)
        made.act = "shuffle"
        made.numbers = (SHUFFLES[mode],)
        made.targets = [self._slot(target)]
        made.sources = [self._slot(source, "w"), self._slot(lane, "w")]

    def _copy(self, made, parts):
        at, source_at, size, *_ = parts
        to, to_offset = self._address(at, "w")
        source, offset = self._address(source_at, "d")
        # the size again where nothing is left out
        taken = self._slot(parts[-1], "w")
        made.act = "copy"
        made.numbers = (to_offset, offset, int(size, 0))
        made.sources = [to, source, taken]

    def _commit(self, made, parts):
        made.act = "commit"

    def _wait(self, made, parts):
        made.act = "wait"
        left = -1
        if parts:
            left = int(parts[0], 0)
        made.numbers = (left,)

    def _barrier(self, made, parts, warp):
        if warp and self.threads != 32:
            raise Unknown(made.text)
        if not warp and parts != ["0"]:
            raise Unknown(made.text)
        made.act = "barrier"

    def _leave(self, made, parts, name):
        made.act = name
        made.numbers = tuple(parts)


# none of these changes what is read
CACHING = r"(?:\.(?:ca|cg|cs|L1|L2|relaxed|weak|cta)(?:::\w+)*)*"
ACTIONS = {
    r"ld\.param\.(\w+)": Kernel._param,
    rf"(ld|st)\.(global|shared)(?:::cta)?{CACHING}(?:\.v([248]))?\.[bufs](16|32|64)": Kernel._memory,
    r"(ld|st)matrix\.sync\.aligned\.m8n8\.x[124]\.shared(?:::cta)?\.b16": Kernel._matrix,
    r"ldmatrix\.sync\.aligned\.m8n8\.x[124]\.trans\.shared(?:::cta)?\.b16": Kernel._transposed_matrix,
    r"shfl\.sync\.(bfly|idx)\.b32": Kernel._shuffle,
    r"cp\.async\.c[ag]\.shared\.global(?:\.L2::\w+)?": Kernel._copy,
    r"cp\.async\.commit_group": Kernel._commit,
    r"cp\.async\.wait_(?:group|all)": Kernel._wait,
    r"bar(\.warp)?\.sync": Kernel._barrier,
    r"(bra|bra\.uni|ret)": Kernel._leave,
}


def _constant(text, kind):
    if text == "global_smem":
        text = "0"
    digits = re.sub("^0[fF](?=.{8}$)", "0x", text).removesuffix("U")
    try:
        value = int(digits, 0)
    except ValueError:
        raise Unknown(f"operand {text}") from None
    if kind == "p":
        return np.bool_(value)
    dtype = KINDS[kind]
    size = dtype.itemsize
    unsigned = np.dtype(f"u{size}")
    bits = unsigned.type(value % 2 ** (8 * size))
    return bits.view(dtype)
