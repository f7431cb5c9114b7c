"""Runs a decoded kernel for all threads of a grid at once, one numpy lane a thread, instruction by instruction.

Whoever is furthest behind goes first, so that threads which took different branches meet again where the branches do.
What threads see of each other's memory is theirs only by luck of that order, so races are found by who touched what
between barriers, not by values.
"""

from __future__ import annotations

import numpy as np

from .arithmetic import blurred
from .decode import Instruction, Kernel, Unknown
from .memory import SPACING, Fault, Shared, Window

LANES = 2**14  # about how many threads run at once: their registers fit a cache
SHARED = 2**25  # bytes of shared memory at once
STEPS = 10**5  # blocks of code; more is an endless loop
NOBODY = np.zeros(0, bool)


class Machine:
    """Executes launches.

    Args:
        blurred: results that the hardware only approximates are an ulp off, one way or the other or not at all.
    """

    def __init__(self, blurred: bool = False):
        self.blurred = blurred

    def launch(self, kernel: Kernel, grid: tuple[int, int, int], shared: int, arguments: list) -> list[int]:
        """Run a launch; `arguments` are tensors, numbers or None (a null pointer), one for each parameter.

        Returns:
            the numbers of the arguments that were written.

        Raises:
            Fault: the kernel did what it must not; the message names the statement.
        """
        windows, given = {}, {}
        for number, ((kind, name), value) in enumerate(zip(kernel.params, arguments, strict=True)):
            if hasattr(value, "data_ptr"):
                windows[number] = Window(value, number)
                value = windows[number].address
            bits = int(kind[1:])
            whole = np.dtype(f"u{bits // 8}").type
            given[name] = np.float32(value) if kind == "f32" else whole(int(value or 0) % 2**bits)
        programs = int(np.prod(grid))
        step = max(1, min(LANES // kernel.threads, SHARED // max(shared, 1)))
        try:
            for first in range(0, programs, step):
                some = np.arange(first, min(first + step, programs))
                _Run(kernel, grid, some, Shared(len(some), shared, kernel.threads), windows, given, self.blurred).run()
            for window in windows.values():
                window.close(windows.values())
        except Fault as fault:
            raise Fault(f"{kernel.name}: {fault}") from None
        return [number for number, window in windows.items() if window.owner is not None]


class _Run:
    """The programs of one launch that run together. A mask is which lanes do what is going on; None is all of them."""

    def __init__(self, kernel: Kernel, grid, programs, shared: Shared, windows: dict, given: dict, blurred: bool):
        self.kernel, self.shared, self.windows, self.blurred = kernel, shared, windows, blurred
        self.threads = kernel.threads
        self.count = len(programs) * self.threads
        self.lanes = np.arange(self.count, dtype=np.int32)
        self.program = np.repeat(programs + 1, self.threads).astype(np.int32)
        at = np.unravel_index(np.repeat(programs, self.threads), grid, "F")
        special = {f"%ctaid.{d}": a.astype(np.uint32) for d, a in zip("xyz", at, strict=True)}
        special |= {f"%nctaid.{d}": np.uint32(n) for d, n in zip("xyz", grid, strict=True)}
        special |= {"%tid.x": (self.lanes % self.threads).astype(np.uint32)}
        self.registers = list(kernel.registers)
        for name, slot in kernel.given.items():
            self.registers[slot] = special[name] if name in special else given[name]
        self.poison: dict = {}  # by slot, which lanes hold what nobody computed
        self.committed = np.zeros(self.count, np.int32)
        self.copies: list[tuple] = []  # (lanes, their groups, granules, values, text)
        self.waiting: dict[int, np.ndarray | None] = {0: None}  # by block, the lanes that come to it next
        self.mask: np.ndarray | None = None

    def run(self) -> None:
        instruction = None
        try:
            with np.errstate(all="ignore"):
                for _ in range(STEPS):
                    if not self.waiting:
                        break
                    number = min(self.waiting)
                    self.mask, block = self.waiting.pop(number), self.kernel.blocks[number]
                    for instruction in block.code:
                        self._step(instruction)
                    instruction = block.last
                    self._leave(block.last, number, block.target)
                else:
                    raise Fault("endless loop")
                self.shared.barrier()
        except Fault as fault:
            raise Fault(f"{fault} [{instruction.text if instruction else 'end'}]") from None

    def _leave(self, last: Instruction | None, number: int, target: int) -> None:
        """Send the lanes from the end of a block to where they go."""
        going = NOBODY if last is None else self._guarded(last)
        staying = self.mask
        if going is None or going is staying:
            staying = NOBODY
        elif going is not NOBODY:
            staying = ~going if staying is None else staying & ~going
        for block, lanes in ((target, going), (number + 1, staying)):
            if block >= 0 and (lanes is None or lanes.any()):
                if block in self.waiting:
                    lanes = lanes | self.waiting[block]
                self.waiting[block] = None if lanes is None or lanes.all() else lanes

    def _guarded(self, instruction: Instruction):
        """The lanes that an instruction is for: a mask, or NOBODY."""
        if instruction.guard is None:
            return self.mask
        slot, wanted = instruction.guard
        value = self._whole(slot, "value decides", self.mask)
        value = value if wanted else ~value
        if self.mask is not None:
            value = value & self.mask
        elif value.all():
            return None
        return value if value.any() else NOBODY

    def _step(self, instruction: Instruction) -> None:
        mask = self._guarded(instruction)
        if mask is NOBODY:
            return
        if instruction.function is None:
            getattr(self, "_" + instruction.act)(instruction, mask)
            return
        registers, values = self.registers, []
        for slot, kind in zip(instruction.sources, instruction.kinds, strict=True):
            value = registers[slot]
            if value is None:
                value = self._whole(slot)
            values.append(value if kind is None or value.dtype is kind else value.view(kind))
        if instruction.divides:
            zero = values[1] == 0
            if (zero if mask is None else zero & mask).any():
                raise Fault("division by zero")
        results = instruction.function(*values)
        if self.blurred and instruction.approximate:
            results = blurred(results)
        poison = self._poison_of(instruction.sources) if self.poison else None
        if len(instruction.targets) == 1:
            results = (results,)
        for slot, result in zip(instruction.targets, results, strict=True):
            self._put(slot, result, mask, poison)

    # -- registers

    def _whole(self, slot: int, use: str = "", mask=None):
        """A register of all lanes, or a scalar; `use`: for what those of the mask must have computed it."""
        value = self.registers[slot]
        if value is None:
            self.poison[slot] = np.True_
            value = self.registers[slot] = self.kernel.widths[slot].type(0)
        if use and slot in self.poison and (self.poison[slot] if mask is None else self.poison[slot] & mask).any():
            raise Fault(f"an uninitialised {use}")
        return value

    def _some(self, slot: int, mask, use: str = ""):
        """A register, as unsigned bits, of the lanes of a mask only."""
        value = self._whole(slot, use, mask)
        value = np.broadcast_to(value.view(f"u{value.itemsize}"), self.count)
        return value if mask is None else value[mask]

    def _address(self, slot: int, mask, offset: int):
        value = self._some(slot, mask, "address")
        return value + value.dtype.type(offset % 2 ** (8 * value.itemsize))

    def _poison_of(self, slots):
        """Which lanes hold poison in any of these registers, or None."""
        found = None
        for slot in slots:
            if slot in self.poison:
                found = self.poison[slot] if found is None else found | self.poison[slot]
        return found

    def _put(self, slot: int | None, value, mask, poison=None) -> None:
        if slot is None:
            return
        if mask is not None:
            value = np.where(mask, value, self._whole(slot).view(value.dtype))
            before = self.poison.get(slot)
            if poison is not None or before is not None:
                now, before = (np.False_ if p is None else p for p in (poison, before))
                poison = np.where(mask, now, before)
        self.registers[slot] = value
        if poison is not None and poison.any():
            self.poison[slot] = poison
        else:
            self.poison.pop(slot, None)

    def _put_some(self, slots: tuple, values, mask, poison=None) -> None:
        """As `_put`, of columns of values that only the lanes of the mask have."""
        if mask is not None:
            whole = np.zeros((self.count, values.shape[1]), values.dtype)
            whole[mask], values = values, whole
            if poison is not None:
                whole = np.zeros(self.count, bool)
                whole[mask], poison = poison, whole
        for column, slot in enumerate(slots):
            if slot is not None:
                self._put(slot, values[:, column].astype(self.kernel.widths[slot], copy=False), mask, poison)

    def _among(self, mask):
        return self.lanes if mask is None else self.lanes[mask]

    def _together(self, mask, size: int, what: str):
        """Which groups of so many lanes are here; none may be split."""
        if mask is None:
            return None
        groups = mask.reshape(-1, size)
        here = groups.any(1)
        if (here != groups.all(1)).any():
            raise Fault(f"some threads of a {what} are elsewhere")
        return here

    # -- memory

    def _by_window(self, address):
        """(the memory of an argument, which of the addresses point into it)."""
        numbers = (address >> np.uint64(SPACING)).astype(np.int64) - 1
        alike = (numbers == numbers[0]).all()
        for number in numbers[:1] if alike else np.unique(numbers):
            which = slice(None) if alike else numbers == number
            if number not in self.windows:
                raise Fault(f"outside of every argument, at {int(address[which][0]):#x}")
            yield self.windows[number], which

    def _ld_global(self, instruction: Instruction, mask) -> None:
        offset, width, count = instruction.numbers
        address = self._address(instruction.sources[0], mask, offset)
        values = np.empty((len(address), count), f"u{width}")
        for window, which in self._by_window(address):
            values[which] = window.load(address[which], width, count)
        self._put_some(instruction.targets, values, mask)

    def _st_global(self, instruction: Instruction, mask) -> None:
        offset, width, count = instruction.numbers
        address = self._address(instruction.sources[0], mask, offset)
        values = self._values(instruction, mask, "value is stored")
        program = self.program if mask is None else self.program[mask]
        for window, which in self._by_window(address):
            window.store(address[which], values[which], width, count, program[which])

    def _values(self, instruction: Instruction, mask, use: str = ""):
        """What is stored, as columns; a register may be wider than what is stored of it."""
        bits = np.dtype(f"u{instruction.numbers[1]}")
        return np.stack([self._some(slot, mask, use).astype(bits, copy=False) for slot in instruction.sources[1:]], 1)

    def _ld_shared(self, instruction: Instruction, mask) -> None:
        offset, width, count = instruction.numbers
        address = self._address(instruction.sources[0], mask, offset)
        values, poison = self.shared.load(address, width, count, self._among(mask), instruction.text)
        self._put_some(instruction.targets, values, mask, poison)

    def _st_shared(self, instruction: Instruction, mask) -> None:
        offset, width, count = instruction.numbers
        address = self._address(instruction.sources[0], mask, offset)
        values = self._values(instruction, mask)
        poison = self._poison_of(instruction.sources[1:])
        if poison is not None:
            poison = np.broadcast_to(poison, self.count)[self._among(mask)]
        self.shared.store(address, values, width, count, self._among(mask), instruction.text, poison)

    def _copy(self, instruction: Instruction, mask) -> None:
        to_offset, offset, size = instruction.numbers
        to = self._address(instruction.sources[0], mask, to_offset)
        source = self._address(instruction.sources[1], mask, offset)
        taken, lanes = self._some(instruction.sources[2], mask, "size"), self._among(mask)
        if ((taken != 0) & (taken != size)).any():
            raise Unknown(f"a copy of a part: {instruction.text}")
        values, reads = np.zeros((len(lanes), size // 2), np.uint16), taken != 0  # what is not read becomes zero
        if reads.any():
            found = np.empty((int(reads.sum()), size // 4), np.uint32)
            for window, which in self._by_window(source[reads]):
                found[which] = window.load(source[reads][which], 4, size // 4)
            values[reads] = found.view(np.uint16)
        where = self.shared.start_copy(to, size, lanes, instruction.text)
        self.copies.append((lanes, self.committed[lanes], where, values, instruction.text))

    def _commit(self, instruction: Instruction, mask) -> None:
        self.committed[self._among(mask)] += 1

    def _wait(self, instruction: Instruction, mask) -> None:
        left, copies, self.copies = instruction.numbers[0], self.copies, []
        for lanes, groups, where, values, text in copies:
            done = groups < self.committed[lanes] - left  # left is -1 where those not committed are meant too
            if mask is not None:
                done &= mask[lanes]
            self.shared.end_copy(where[done], values[done], lanes[done], text)
            if not done.all():
                self.copies.append((*(a[~done] for a in (lanes, groups, where, values)), text))

    def _shuffle(self, instruction: Instruction, mask) -> None:
        self._together(mask, 32, "warp")
        slot, distance = instruction.sources
        partner = self.lanes ^ (self._some(distance, None, "distance").astype(np.int32) & 31)
        value, poison = self._some(slot, None), self.poison.get(slot)
        poison = None if poison is None else np.broadcast_to(poison, self.count)[partner]
        self._put(instruction.targets[0], value[partner], mask, poison)

    def _ld_matrix(self, instruction: Instruction, mask) -> None:
        for number, slot in enumerate(instruction.targets):
            address = self._matrix(instruction, mask, number)
            values, poison = self.shared.load(address, 4, 1, self._among(mask), instruction.text)
            self._put_some((slot,), values, mask, poison)

    def _st_matrix(self, instruction: Instruction, mask) -> None:
        for number, slot in enumerate(instruction.sources[1:]):
            address = self._matrix(instruction, mask, number)
            values, poison = self._some(slot, mask)[:, None], self.poison.get(slot)
            if poison is not None:
                poison = np.broadcast_to(poison, self.count)[self._among(mask)]
            self.shared.store(address, values, 4, 1, self._among(mask), instruction.text, poison)

    def _matrix(self, instruction: Instruction, mask, number: int):
        """What each lane touches of an 8 by 8 matrix of 16 bits: four lanes a row, of which eight lanes say where."""
        self._together(mask, 32, "warp")
        address = self._address(instruction.sources[0], mask, instruction.numbers[0]).reshape(-1, 32)
        if (address % 16).any():
            raise Fault("misaligned: a row of a matrix in shared memory")
        lane = np.arange(32)
        return (address[:, 8 * number + lane // 4] + (lane % 4 * 4).astype(np.uint32)).ravel()

    def _barrier(self, instruction: Instruction, mask) -> None:
        self.shared.barrier(self._together(mask, self.threads, "program"))
