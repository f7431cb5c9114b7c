"""Runs a decoded kernel for all threads of a grid at once, one numpy lane a thread,
instruction by instruction.

Whoever is furthest behind goes first, so that threads which took different branches
meet again where the branches do. What threads see of each other's memory is theirs only
by luck of that order, so races are found by who touched what between barriers, not by
values.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .arithmetic import blurred, joined, parted
from .decode import LEAVES, Unknown
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
        lenient: for kernels of others: a launch may write to what it reads, to some
            elements of a tensor, and a program again to what it wrote.
        watch: called after each launch with the bytes that it moved.
    """

    blurred: bool = False
    lenient: bool = False
    watch: Callable | None = None

    def launch(self, kernel, grid, shared, arguments):
        """Run a launch; `arguments` are tensors, numbers or None (a null pointer), one
        for each parameter.

        Returns:
            the numbers of the arguments that were written.

        Raises:
            Fault: the kernel did what it must not; the message names the statement.
        """
        windows, values = _memory_and_values(kernel, arguments, self.lenient)
        if self.watch is not None:
            for window in windows.values():
                window.keep_what_is_read()
        programs = int(np.prod(grid))
        step = LANES // kernel.threads
        if shared:
            step = min(step, SHARED // shared)
        step = max(step, 1)
        try:
            for first in range(0, programs, step):
                end = min(first + step, programs)
                some = np.arange(first, end)
                memory = Shared(len(some), shared, kernel.threads)
                run = _Run(kernel, grid, some, memory, windows, values, self.blurred)
                run.run()
            for window in windows.values():
                window.close(windows.values())
        except Fault as fault:
            raise Fault(f"{kernel.name}: {fault}") from None
        if self.watch is not None:
            moved = sum(window.moved() for window in windows.values())
            self.watch(moved)
        written = []
        for number, window in windows.items():
            if window.owner is not None:
                written.append(number)
        return written


def _memory_and_values(kernel, arguments, lenient):
    """({number: memory of a tensor}, {parameter: value}) of a launch."""
    windows = {}
    values = {}
    for number, value in enumerate(arguments):
        if hasattr(value, "data_ptr"):
            windows[number] = Window(value, number, lenient)
            value = windows[number].address
        kind, name = kernel.params[number]
        if kind == "f32":
            values[name] = np.float32(value)
            continue
        bits = int(kind[1:])
        if value is None:
            value = 0
        unsigned = UNSIGNED[bits // 8]
        values[name] = unsigned.type(int(value) % 2**bits)
    return windows, values


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
        values = dict(given)
        values["%tid.x"] = thread.astype(np.uint32)
        places = np.unravel_index(self.program - 1, grid, "F")
        for axis, place, size in zip("xyz", places, grid, strict=True):
            values[f"%ctaid.{axis}"] = place.astype(np.uint32)
            values[f"%nctaid.{axis}"] = np.uint32(size)
        self.registers = list(kernel.registers)
        for name, slot in kernel.given.items():
            self.registers[slot] = values[name]
        self.poison = {}  # by slot, which lanes hold what was never computed
        self.halves = {}  # by slot of two joined registers, the poison of each
        self.committed = np.zeros(self.count, np.int32)
        self.copies = []  # (lanes, their groups, granules, values, text)
        self.waiting = {0: None}  # by block, the lanes that come to it next
        self.mask = None

    def run(self):
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

    def _run_block(self, number):
        self.mask = self.waiting.pop(number)
        going = NOBODY
        for instruction in self.kernel.blocks[number]:
            self.text = instruction.text
            if instruction.act not in LEAVES:
                self._step(instruction)
                continue
            going = self._guarded(instruction)
            if instruction.numbers:
                (label,) = instruction.numbers
                block = self.kernel.labels[label]
                self._arrive(block, going)
        rest = self._all_but(going)
        self._arrive(number + 1, rest)

    def _arrive(self, block, lanes):
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

    def _guarded(self, instruction):
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

    def _step(self, instruction):
        mask = self._guarded(instruction)
        if mask is NOBODY:
            return
        if instruction.function is not None:
            self._compute(instruction, mask)
            return
        act = getattr(self, "_" + instruction.act)
        act(instruction, mask)

    def _compute(self, instruction, mask):
        values = self._sources(instruction, mask)
        results = instruction.function(*values)
        if self.blurred and instruction.approximate:
            results = blurred(results)
        if type(results) is not tuple:
            results = (results,)
        poison = None
        if self.poison:
            poison = self._poison_of(instruction.sources)
        poisons = [poison] * len(results)
        if instruction.function is parted:
            poisons = self.halves.get(instruction.sources[0], poisons)
        for slot, *made in zip(instruction.targets, results, poisons, strict=True):
            result, poison = made
            self._put(slot, result, mask, poison)
        if instruction.function is joined and mask is None:
            halves = [self._poison_of([slot]) for slot in instruction.sources]
            self.halves[instruction.targets[0]] = halves

    def _sources(self, instruction, mask):
        """What an instruction computes from, in the dtypes that it names."""
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
        return values

    def _whole(self, slot, use="", mask=None):
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

    def _some(self, slot, mask, use=""):
        """A register, as unsigned bits, of the lanes of a mask only."""
        value = self._whole(slot, use, mask)
        value = value.view(UNSIGNED[value.itemsize])
        value = np.broadcast_to(value, self.count)
        if mask is None:
            return value
        return value[mask]

    def _address(self, slot, mask, offset):
        value = self._some(slot, mask, "address")
        bits = 8 * value.itemsize
        unsigned = value.dtype
        return value + unsigned.type(offset % 2**bits)

    def _poison_of(self, slots):
        """Which lanes hold poison in any of these registers, or None."""
        poison = np.False_
        for slot in slots:
            poison = poison | self.poison.get(slot, np.False_)
        if poison.any():
            return poison
        return None

    def _put(self, slot, value, mask, poison=None):
        if slot is None:
            return
        self.halves.pop(slot, None)
        if mask is not None:
            held = self._whole(slot).view(value.dtype)
            value = np.where(mask, value, held)
            if poison is not None or slot in self.poison:
                before = self.poison.get(slot, np.False_)
                if poison is None:
                    poison = np.False_
                poison = np.where(mask, poison, before)
        self.registers[slot] = value
        if poison is not None and poison.any():
            self.poison[slot] = poison
        else:
            self.poison.pop(slot, None)

    def _put_some(self, slots, values, mask, poison=None):
        """As `_put`, of columns of values that only the lanes of the mask have."""
        values = self._spread(values, mask)
        if poison is not None:
            poison = self._spread(poison, mask)
        for slot, column in zip(slots, values.T, strict=True):
            if slot is not None:
                width = self.kernel.widths[slot]
                value = column.astype(width, copy=False)
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

    def _together(self, mask, size, what):
        """Which groups of so many lanes are here; none may be split."""
        if mask is None:
            return None
        groups = mask.reshape(-1, size)
        here = groups.any(1)
        split = here != groups.all(1)
        if split.any():
            raise Fault(f"some threads of a {what} are elsewhere")
        return here

    def _by_window(self, address):
        """(the memory of an argument, which of the addresses point into it)."""
        numbers = address >> np.uint64(SPACING)
        numbers = numbers.astype(np.int64) - 1
        first = numbers[0]
        if (numbers == first).all():
            yield self._window(first), slice(None)
            return
        for number in np.unique(numbers):
            which = numbers == number
            yield self._window(number), which

    def _window(self, number):
        if number not in self.windows:
            raise Fault("outside of every argument")
        return self.windows[number]

    def _read(self, address, width, count):
        shape = (len(address), count)
        values = np.empty(shape, UNSIGNED[width])
        for window, which in self._by_window(address):
            places = address[which]
            values[which] = window.load(places, width, count)
        return values

    def _accesses(self, instruction, mask, slots):
        """(addresses, registers) of an access, or of each matrix of 8 by 8: four lanes
        touch a row, eight say where.
        """
        space, offset, *_ = instruction.numbers
        address = self._address(instruction.sources[0], mask, offset)
        if space != "matrix":
            return [(address, slots)]
        rows = self._rows_of_matrices(instruction, mask)
        lane = np.arange(32)
        row = lane // 4
        within = lane % 4 * 4
        accesses = []
        for slot in slots:
            places = rows[:, row] + within.astype(np.uint32)
            accesses.append((places.ravel(), (slot,)))
            row = row + 8  # of the next matrix
        return accesses

    def _rows_of_matrices(self, instruction, mask):
        """The addresses of rows of 8 elements that the lanes of each warp give."""
        _, offset, *_ = instruction.numbers
        address = self._address(instruction.sources[0], mask, offset)
        self._together(mask, 32, "warp")
        rows = address.reshape(-1, 32)
        unaligned = rows % 16
        if unaligned.any():
            raise Fault("misaligned: a row of a matrix in shared memory")
        return rows

    def _ld(self, instruction, mask):
        space, _, width, count = instruction.numbers
        lanes = self._among(mask)
        text = instruction.text
        for address, slots in self._accesses(instruction, mask, instruction.targets):
            if space == "global":
                values = self._read(address, width, count)
                poison = None
            else:
                values, poison = self.shared.load(address, width, count, lanes, text)
            self._put_some(slots, values, mask, poison)

    def _ld_transposed(self, instruction, mask):
        """Of each matrix of 8 by 8 a lane gets two elements of a column, from two rows."""
        rows = self._rows_of_matrices(instruction, mask)
        lanes = self._among(mask)
        lane = np.arange(32)
        row = lane % 4 * 2
        column = lane // 4 * 2  # in bytes
        for slot in instruction.targets:
            halves = []
            poison = np.False_
            for each in (row, row + 1):
                places = rows[:, each] + column.astype(np.uint32)
                values, unset = self.shared.load(
                    places.ravel(), 2, 1, lanes, instruction.text
                )
                halves.append(values.astype(np.uint32))
                if unset is not None:
                    poison = poison | unset
            low, high = halves
            if not np.any(poison):
                poison = None
            self._put_some([slot], high << 16 | low, mask, poison)
            row = row + 8  # of the next matrix

    def _st(self, instruction, mask):
        space, _, width, count = instruction.numbers
        _, *registers = instruction.sources
        lanes = self._among(mask)
        for address, slots in self._accesses(instruction, mask, registers):
            if space == "global":
                values = self._columns(slots, width, mask, "value is stored")
                self._write(address, values, width, count, lanes)
                continue
            values = self._columns(slots, width, mask)
            poison = self._poison_of(slots)
            if poison is not None:
                poison = np.broadcast_to(poison, self.count)
                poison = poison[lanes]
            text = instruction.text
            self.shared.store(address, values, width, count, lanes, text, poison)

    def _columns(self, slots, width, mask, use=""):
        """Registers of the lanes of a mask, one a column; a register may be wider than
        what is stored of it.
        """
        unsigned = UNSIGNED[width]
        columns = []
        for slot in slots:
            column = self._some(slot, mask, use)
            columns.append(column.astype(unsigned, copy=False))
        return np.stack(columns, 1)

    def _write(self, address, values, width, count, lanes):
        program = self.program[lanes]
        for window, which in self._by_window(address):
            places = address[which]
            of_window = values[which]
            window.store(places, of_window, width, count, program[which])

    def _copy(self, instruction, mask):
        to_offset, offset, size = instruction.numbers
        to, source, taken = instruction.sources
        to = self._address(to, mask, to_offset)
        source = self._address(source, mask, offset)
        taken = self._some(taken, mask, "size")
        lanes = self._among(mask)
        text = instruction.text
        reads = taken != 0
        in_part = reads & (taken != size)
        if in_part.any():
            raise Unknown(f"a copy of a part: {text}")
        # what is not read becomes zero
        shape = (len(lanes), size // 2)
        values = np.zeros(shape, np.uint16)
        if reads.any():
            read = self._read(source[reads], 4, size // 4)
            values[reads] = read.view(np.uint16)
        granules = self.shared.start_copy(to, size, lanes, text)
        groups = self.committed[lanes]
        self.copies.append((lanes, groups, granules, values, text))

    def _commit(self, instruction, mask):
        self.committed[self._among(mask)] += 1

    def _wait(self, instruction, mask):
        (left,) = instruction.numbers
        copies = self.copies
        self.copies = []
        for *arrays, text in copies:
            lanes, groups, _, _ = arrays
            # left is -1 where those not committed are meant too
            awaited = self.committed[lanes] - left
            done = groups < awaited
            if mask is not None:
                done &= mask[lanes]
            lanes, _, granules, values = [t[done] for t in arrays]
            self.shared.end_copy(granules, values, lanes, text)
            if not done.all():
                rest = [t[~done] for t in arrays]
                self.copies.append((*rest, text))

    def _shuffle(self, instruction, mask):
        self._together(mask, 32, "warp")
        slot, other = instruction.sources
        (target,) = instruction.targets
        (partner_of,) = instruction.numbers
        self._whole(other, "lane", mask)
        other = self._some(other, None)
        other = other.astype(np.int32) & 31
        partner = partner_of(self.lanes, other)
        value = self._some(slot, None)
        poison = self.poison.get(slot, np.False_)
        poison = np.broadcast_to(poison, self.count)
        self._put(target, value[partner], mask, poison[partner])

    def _barrier(self, instruction, mask):
        passing = self._together(mask, self.threads, "program")
        self.shared.barrier(passing)
