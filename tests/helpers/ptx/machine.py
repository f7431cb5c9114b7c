"""Runs a decoded kernel for all threads of a grid at once, one numpy lane a thread,
instruction by instruction.

Whoever is furthest behind goes first, so that threads which took different branches
meet again where the branches do. What threads see of each other's memory is theirs only
by luck of that order, so races are found by who touched what between barriers, not by
values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import numpy as np

from .arithmetic import blurred
from .decode import LEAVES, Instruction, Kernel, Unknown
from .memory import SPACING, UNSIGNED, Fault, Shared, Window

LANES = 2**14  # about how many threads run at once: their registers fit a cache
SHARED = 2**25  # bytes of shared memory at once
STEPS = 10**5  # blocks of code; more is an endless loop
NOBODY = np.zeros(0, bool)


@dataclass
class Machine:
    """Executes launches.

    Args:
        blurred: what hardware only approximates is an ulp off, one way, the other or
            not at all.
        in_place: a launch may write to what it reads.
        watch: called after each launch with the bytes that it moved.
    """

    blurred: bool = False
    in_place: bool = False
    watch: Callable[[int], None] | None = None

    def launch(
        self, kernel: Kernel, grid: tuple[int, int, int], shared: int, arguments: list
    ) -> list[int]:
        """Run a launch; `arguments` are tensors, numbers or None (a null pointer), one
        for each parameter.

        Returns:
            the numbers of the arguments that were written.

        Raises:
            Fault: the kernel did what it must not; the message names the statement.
        """
        windows, given = self._take(kernel, arguments)
        programs = int(np.prod(grid))
        step = LANES // kernel.threads
        if shared:
            step = min(step, SHARED // shared)
        step = max(step, 1)
        try:
            for first in range(0, programs, step):
                some = np.arange(first, min(first + step, programs))
                memory = Shared(len(some), shared, kernel.threads)
                _Run(kernel, grid, some, memory, windows, given, self.blurred).run()
            for window in windows.values():
                window.close(() if self.in_place else windows.values())
        except Fault as fault:
            raise Fault(f"{kernel.name}: {fault}") from None
        if self.watch is not None:
            moved = sum(window.moved() for window in windows.values())
            self.watch(moved)
        return [n for n, window in windows.items() if window.owner is not None]

    def _take(self, kernel: Kernel, arguments: list) -> tuple[dict, dict]:
        """({number: memory of a tensor}, {parameter: value}) of a launch."""
        windows = {}
        given = {}
        for number, value in enumerate(arguments):
            if hasattr(value, "data_ptr"):
                windows[number] = Window(value, number)
                if self.watch is not None:
                    windows[number].keep_what_is_read()
                value = windows[number].address
            kind, name = kernel.params[number]
            if kind == "f32":
                given[name] = np.float32(value)
            else:
                size = int(kind[1:]) // 8
                bits = int(value or 0) % 2 ** (8 * size)
                unsigned = UNSIGNED[size]
                given[name] = unsigned.type(bits)
        return windows, given


class _Run:
    """The programs of one launch that run together. A mask is which lanes do what is
    going on; None is all of them.
    """

    def __init__(self, kernel, grid, programs, shared, windows, given, blurred):
        self.kernel = kernel
        self.shared = shared
        self.windows = windows
        self.blurred = blurred
        self.threads = kernel.threads  # of a program
        self.count = len(programs) * self.threads
        self.lanes = np.arange(self.count, dtype=np.int32)
        program = np.repeat(programs + 1, self.threads)
        self.program = program.astype(np.int32)
        thread = self.lanes % self.threads
        values = given | {"%tid.x": thread.astype(np.uint32)}
        places = np.unravel_index(self.program - 1, grid, "F")
        for axis, place, size in zip("xyz", places, grid, strict=True):
            values[f"%ctaid.{axis}"] = place.astype(np.uint32)
            values[f"%nctaid.{axis}"] = np.uint32(size)
        self.registers = list(kernel.registers)
        for name, slot in kernel.given.items():
            self.registers[slot] = values[name]
        self.poison: dict = {}  # by slot, which lanes hold what was never computed
        self.committed = np.zeros(self.count, np.int32)
        self.copies: list[tuple] = []  # (lanes, their groups, granules, values, text)
        # by block, the lanes that come to it next
        self.waiting: dict[int, np.ndarray | None] = {0: None}
        self.mask: np.ndarray | None = None

    def run(self) -> None:
        self.text = "end"  # the statement that is going on
        try:
            with np.errstate(all="ignore"):
                for _ in range(STEPS):
                    if not self.waiting:
                        self.shared.barrier()
                        return
                    self._run_block(min(self.waiting))
            raise Fault("endless loop")
        except Fault as fault:
            raise Fault(f"{fault} [{self.text}]") from None

    def _run_block(self, number: int) -> None:
        self.mask = self.waiting.pop(number)
        going = NOBODY
        for instruction in self.kernel.blocks[number]:
            self.text = instruction.text
            if instruction.act not in LEAVES:
                self._step(instruction)
                continue
            going = self._guarded(instruction)
            if instruction.numbers:
                self._arrive(self.kernel.labels[instruction.numbers[0]], going)
        self._arrive(number + 1, self._all_but(going))

    def _arrive(self, block: int, lanes) -> None:
        if lanes is not None:
            if not lanes.any():
                return
            if block in self.waiting:
                lanes = lanes | self.waiting[block]
            if lanes.all():
                lanes = None
        self.waiting[block] = lanes

    def _all_but(self, going):
        """The lanes of the mask that are not of `going`, which are some of them."""
        if going is NOBODY:
            return self.mask
        if going is None or going is self.mask:
            return NOBODY
        if self.mask is None:
            return ~going
        return self.mask & ~going

    def _guarded(self, instruction: Instruction):
        """The lanes that an instruction is for: a mask, or NOBODY."""
        if instruction.guard is None:
            return self.mask
        slot, wanted = instruction.guard
        value = self._whole(slot, "value decides", self.mask)
        if not wanted:
            value = ~value
        if self.mask is None and value.all():
            return None
        if self.mask is not None:
            value = value & self.mask
        if value.any():
            return value
        return NOBODY

    def _step(self, instruction: Instruction) -> None:
        mask = self._guarded(instruction)
        if mask is NOBODY:
            return
        if instruction.function is None:
            getattr(self, "_" + instruction.act)(instruction, mask)
        else:
            self._compute(instruction, mask)

    def _compute(self, instruction: Instruction, mask) -> None:
        values = []
        for slot, kind in zip(instruction.sources, instruction.kinds, strict=True):
            value = self._whole(slot)
            if value.dtype is not kind:
                value = value.view(kind)
            values.append(value)
        if instruction.divides:
            zero = values[1] == 0
            if mask is not None:
                zero = zero & mask
            if zero.any():
                raise Fault("division by zero")
        results = instruction.function(*values)
        if self.blurred and instruction.approximate:
            results = blurred(results)
        if type(results) is not tuple:
            results = (results,)
        poison = None
        if self.poison:
            poison = self._poison_of(instruction.sources)
        for slot, result in zip(instruction.targets, results, strict=True):
            self._put(slot, result, mask, poison)

    def _whole(self, slot: int, use: str = "", mask=None):
        """A register of all lanes, or a scalar; `use`: for what those of the mask must
        have computed it.
        """
        value = self.registers[slot]
        if value is None:
            self.poison[slot] = np.True_
            width = self.kernel.widths[slot]
            value = width.type(0)
            self.registers[slot] = value
        if use and slot in self.poison:
            poison = self.poison[slot]
            if mask is not None:
                poison = poison & mask
            if poison.any():
                raise Fault(f"an uninitialised {use}")
        return value

    def _some(self, slot: int, mask, use: str = ""):
        """A register, as unsigned bits, of the lanes of a mask only."""
        value = self._whole(slot, use, mask)
        value = value.view(UNSIGNED[value.itemsize])
        value = np.broadcast_to(value, self.count)
        if mask is None:
            return value
        return value[mask]

    def _address(self, slot: int, mask, offset: int):
        value = self._some(slot, mask, "address")
        bits = 8 * value.itemsize
        return value + value.dtype.type(offset % 2**bits)

    def _poison_of(self, slots):
        """Which lanes hold poison in any of these registers, or None."""
        held = [self.poison[slot] for slot in slots if slot in self.poison]
        if held:
            return reduce(np.logical_or, held)
        return None

    def _put(self, slot: int | None, value, mask, poison=None) -> None:
        if slot is None:
            return
        if mask is not None:
            held = self._whole(slot).view(value.dtype)
            value = np.where(mask, value, held)
            before = self.poison.get(slot)
            if poison is not None or before is not None:
                new = poison
                if poison is None:
                    new = np.False_
                old = before
                if before is None:
                    old = np.False_
                poison = np.where(mask, new, old)
        self.registers[slot] = value
        if poison is not None and poison.any():
            self.poison[slot] = poison
        else:
            self.poison.pop(slot, None)

    def _put_some(self, slots: tuple, values, mask, poison=None) -> None:
        """As `_put`, of columns of values that only the lanes of the mask have."""
        values = self._spread(values, mask)
        if poison is not None:
            poison = self._spread(poison, mask)
        for column, slot in enumerate(slots):
            if slot is not None:
                width = self.kernel.widths[slot]
                value = values[:, column].astype(width, copy=False)
                self._put(slot, value, mask, poison)

    def _spread(self, values, mask):
        """Values of the mask's lanes, with zeros for the other lanes."""
        if mask is None:
            return values
        shape = self.count, *values.shape[1:]
        whole = np.zeros(shape, values.dtype)
        whole[mask] = values
        return whole

    def _among(self, mask):
        if mask is None:
            return self.lanes
        return self.lanes[mask]

    def _together(self, mask, size: int, what: str):
        """Which groups of so many lanes are here; none may be split."""
        if mask is None:
            return None
        groups = mask.reshape(-1, size)
        here = groups.any(1)
        if (here != groups.all(1)).any():
            raise Fault(f"some threads of a {what} are elsewhere")
        return here

    def _by_window(self, address):
        """(the memory of an argument, which of the addresses point into it)."""
        numbers = address >> np.uint64(SPACING)
        numbers = numbers.astype(np.int64) - 1
        alike = (numbers == numbers[0]).all()
        for number in numbers[:1] if alike else np.unique(numbers):
            which = slice(None)
            if not alike:
                which = numbers == number
            if number not in self.windows:
                where = int(address[which][0])
                raise Fault(f"outside of every argument, at {where:#x}")
            yield self.windows[number], which

    def _read(self, address, width: int, count: int):
        values = np.empty((len(address), count), UNSIGNED[width])
        for window, which in self._by_window(address):
            values[which] = window.load(address[which], width, count)
        return values

    def _accesses(self, instruction: Instruction, mask, slots: tuple) -> list[tuple]:
        """(addresses, registers) of an access, or of each matrix of 8 by 8: four lanes
        touch a row, eight say where.
        """
        space, offset, *_ = instruction.numbers
        address = self._address(instruction.sources[0], mask, offset)
        if space != "matrix":
            return [(address, slots)]
        self._together(mask, 32, "warp")
        rows = address.reshape(-1, 32)
        lane = np.arange(32)
        if (rows % 16).any():
            raise Fault("misaligned: a row of a matrix in shared memory")
        within = (lane % 4 * 4).astype(np.uint32)
        accesses = []
        for k, slot in enumerate(slots):
            first = rows[:, 8 * k + lane // 4]
            places = (first + within).ravel()
            accesses.append((places, (slot,)))
        return accesses

    def _ld(self, instruction: Instruction, mask) -> None:
        space, _, width, count = instruction.numbers
        for address, slots in self._accesses(instruction, mask, instruction.targets):
            if space == "global":
                values = self._read(address, width, count)
                poison = None
            else:
                values, poison = self.shared.load(
                    address, width, count, self._among(mask), instruction.text
                )
            self._put_some(slots, values, mask, poison)

    def _st(self, instruction: Instruction, mask) -> None:
        space, _, width, count = instruction.numbers
        use = ""
        if space == "global":
            use = "value is stored"
        lanes = self._among(mask)
        unsigned = UNSIGNED[width]
        for address, slots in self._accesses(
            instruction, mask, instruction.sources[1:]
        ):
            columns = [self._some(slot, mask, use) for slot in slots]
            # A register may be wider than what is stored of it.
            columns = [column.astype(unsigned, copy=False) for column in columns]
            values = np.stack(columns, 1)
            if space == "global":
                for window, which in self._by_window(address):
                    program = self.program[lanes][which]
                    window.store(address[which], values[which], width, count, program)
                continue
            poison = self._poison_of(slots)
            if poison is not None:
                poison = np.broadcast_to(poison, self.count)[lanes]
            text = instruction.text
            self.shared.store(address, values, width, count, lanes, text, poison)

    def _copy(self, instruction: Instruction, mask) -> None:
        to_offset, offset, size = instruction.numbers
        to, source, taken = instruction.sources
        to = self._address(to, mask, to_offset)
        source = self._address(source, mask, offset)
        taken = self._some(taken, mask, "size")
        lanes = self._among(mask)
        reads = taken != 0
        if (reads & (taken != size)).any():
            raise Unknown(f"a copy of a part: {instruction.text}")
        # what is not read becomes zero
        values = np.zeros((len(lanes), size // 2), np.uint16)
        if reads.any():
            read = self._read(source[reads], 4, size // 4)
            values[reads] = read.view(np.uint16)
        where = self.shared.start_copy(to, size, lanes, instruction.text)
        copy = lanes, self.committed[lanes], where, values, instruction.text
        self.copies.append(copy)

    def _commit(self, instruction: Instruction, mask) -> None:
        self.committed[self._among(mask)] += 1

    def _wait(self, instruction: Instruction, mask) -> None:
        left = instruction.numbers[0]
        copies = self.copies
        self.copies = []
        for lanes, groups, where, values, text in copies:
            # left is -1 where those not committed are meant too
            done = groups < self.committed[lanes] - left
            if mask is not None:
                done &= mask[lanes]
            self.shared.end_copy(where[done], values[done], lanes[done], text)
            if not done.all():
                left_over = ~done
                rest = [t[left_over] for t in (lanes, groups, where, values)]
                self.copies.append((*rest, text))

    def _shuffle(self, instruction: Instruction, mask) -> None:
        self._together(mask, 32, "warp")
        slot, other = instruction.sources
        self._whole(other, "lane", mask)
        other = self._some(other, None).astype(np.int32) & 31
        partner = instruction.numbers[0](self.lanes, other)
        value = self._some(slot, None)[partner]
        poison = self.poison.get(slot, np.False_)
        poison = np.broadcast_to(poison, self.count)[partner]
        self._put(instruction.targets[0], value, mask, poison)

    def _barrier(self, instruction: Instruction, mask) -> None:
        self.shared.barrier(self._together(mask, self.threads, "program"))
