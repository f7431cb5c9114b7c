"""Global memory, of which a launch may touch what its tensors cover, and the shared
memory of its programs.
"""

import ctypes
from dataclasses import dataclass

import numpy as np

# bits: each tensor argument has addresses of its own, far from those of any other
SPACING = 44
LARGEST = 2**27  # elements that a view may span to have its gaps watched
# of shared memory: written by nobody, by a thread or a finished copy, not yet
EMPTY = 0
FILLED = 1
COPYING = 2
UNSIGNED = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
}


class Fault(Exception):
    """What a GPU would not have told: a stray or misaligned access, a race, an
    uninitialised value, a split barrier.
    """


class Window:
    """The memory of one tensor argument, at made-up addresses of the same alignment;
    only its view may be touched.
    """

    def __init__(self, tensor, number, lenient=False):
        self.lenient = lenient
        self.tensor = tensor  # keeps the memory
        self.number = number
        self.item = tensor.element_size()
        self.shape = tuple(tensor.shape)
        self.strides = []
        last = 0
        for stride, size in zip(tensor.stride(), self.shape, strict=True):
            if size < 2:
                stride = 0
            self.strides.append(stride)
            last += (size - 1) * stride
        spanned = 0
        if tensor.numel():
            spanned = last + 1
        self.size = spanned * self.item
        self.start = tensor.data_ptr()
        self.end = self.start + self.size
        # what lies shortly before it is still near it
        self.address = number + 1 << SPACING
        self.address += 4096 + self.start % 4096
        self.shift = self.start % 64  # the array of bytes starts at a multiple of 64
        rows = -(-(self.shift + self.size) // 64)
        of_bytes = ctypes.c_ubyte * (64 * rows)
        memory = of_bytes.from_address(self.start - self.shift)
        self.bytes = np.frombuffer(memory, np.uint8)
        self.elements = len(self.bytes) // self.item
        self.read = False
        self.loaded = None  # which elements were read, where that is kept
        # of each element, the number of the program that wrote it, or 0
        self.owner = None
        # which elements are the view's, where there are others between them
        self.allowed = None
        if tensor.numel() < spanned <= LARGEST:
            self.allowed = np.zeros(self.elements, bool)
            self._of_view(self.allowed)[...] = True

    def _of_view(self, elements):
        first = self.shift // self.item
        elements = elements[first:]
        strides = [stride * elements.itemsize for stride in self.strides]
        return np.lib.stride_tricks.as_strided(elements, self.shape, strides)

    def _places(self, address, total):
        """Where accesses of `total` bytes are, in memory seen as rows of so many."""
        this = f"argument {self.number}"
        at = address - np.uint64(self.address)
        at = at.view(np.int64)
        first = at.min()
        end = at.max() + total
        rest = address % np.uint64(total)
        if rest.any():
            raise Fault(f"misaligned: {total} bytes of {this}")
        if first < 0 or end > self.size:
            raise Fault(f"outside of {this}: bytes {first} to {end} of {self.size}")
        if total % self.item:
            raise Fault(f"a part of an element of {this}")
        places = (at + self.shift) // total
        if self.allowed is not None:
            allowed = self.allowed.reshape(-1, total // self.item)
            if not allowed[places].all():
                raise Fault(f"between the rows of {this}")
        return places

    def load(self, address, width, count):
        self.read = True
        total = width * count
        places = self._places(address, total)
        if self.loaded is not None:
            loaded = self.loaded.reshape(-1, total // self.item)
            loaded[places] = True
        rows = _rows(self.bytes, width, count)
        return rows[places]

    def keep_what_is_read(self):
        """From now on, keep which elements are read, for `moved`."""
        self.loaded = np.zeros(self.elements, bool)

    def moved(self):
        """Bytes that were read and bytes that were written, each byte once."""
        elements = np.count_nonzero(self.loaded)
        if self.owner is not None:
            elements += np.count_nonzero(self.owner)
        return self.item * int(elements)

    def store(self, address, values, width, count, program):
        total = width * count
        places = self._places(address, total)
        if self.owner is None:
            self.owner = np.zeros(self.elements, np.int32)
        owner = self.owner.reshape(-1, total // self.item)
        different = np.unique(places)
        taken = owner[places] != 0
        if self.lenient:
            taken &= owner[places] != program[:, None]
        if taken.any() or len(different) < len(places):
            raise Fault(f"written twice: a place in argument {self.number}")
        owner[places] = program[:, None]
        rows = _rows(self.bytes, width, count)
        rows[places] = values

    def close(self, others):
        """What can be said once all programs have run."""
        if self.owner is None or self.lenient:
            return
        this = f"argument {self.number}"
        owners = self._of_view(self.owner)
        missing = np.count_nonzero(owners == 0)
        if missing:
            raise Fault(f"{missing} elements of {this} are not written, others are")
        for other in others:
            if other.read and self._meets(other):
                that = f"argument {other.number}"
                raise Fault(f"{this} is written and, as {that}, read in one launch")

    def _meets(self, other):
        """Whether they share memory. Views with gaps may lie within each other."""
        if other.end <= self.start or self.end <= other.start:
            return False
        gapless = self.allowed is None and other.allowed is None
        return other is self or gapless


def _rows(array, width, count):
    """Bytes seen as rows of so many numbers of that width."""
    numbers = array.view(UNSIGNED[width])
    return numbers.reshape(-1, count)


def _alike(held, values):
    """Whether all bits are equal, but for NaNs, of which a GPU makes one kind and numpy
    several.
    """
    same = held == values
    if same.all():
        return True
    if same.shape[1] % 2:
        return False
    first = np.isnan(held.view(np.float32))
    second = np.isnan(values.view(np.float32))
    pairs = same[:, ::2] & same[:, 1::2]
    alike = pairs | (first & second)
    return alike.all()


@dataclass
class Access:
    """What lanes did to shared memory in one statement: to these granules, each lane to
    a row of them; of a store, with these values.
    """

    write: bool
    granules: np.ndarray
    lanes: np.ndarray
    values: np.ndarray | None
    text: str

    def of(self, mask):
        values = self.values
        if values is not None:
            values = values[mask]
        granules = self.granules[mask]
        lanes = self.lanes[mask]
        return Access(self.write, granules, lanes, values, self.text)

    def is_in(self, held):
        """Whether the memory holds what was written here."""
        if self.values is None:
            return False
        return _alike(held[self.granules], self.values)


class Shared:
    """The shared memory of programs that run together, and who touched it since the
    last barrier.

    Lanes are threads, numbered through all programs. A granule is 2 bytes.
    """

    def __init__(self, programs, size, threads):
        self.size = size
        self.threads = threads
        self.stride = -(-size // 16) * 16
        self.bytes = np.zeros(programs * self.stride, np.uint8)
        self.state = np.full(len(self.bytes) // 2, EMPTY, np.uint8)
        self.last = np.full(len(self.state), -1, np.int32)  # scratch of `barrier`
        self.accesses: list[Access] = []

    def _touch(self, write, address, total, lanes, values, text):
        """(rows of so many bytes, granules in them) of accesses."""
        address = address.astype(np.int64)
        end = address.max() + total
        if (address % total).any():
            raise Fault(f"misaligned: {total} bytes of shared memory")
        if end > self.size:
            raise Fault(f"outside of shared memory: byte {end} of {self.size}")
        of_program = lanes // self.threads * self.stride
        places = (of_program + address) // total
        count = total // 2
        granules = places[:, None] * count + np.arange(count)
        state = self.state[granules]
        if (state == COPYING).any():
            raise Fault("touched before an asynchronous copy to it has been waited for")
        access = Access(write, granules, lanes, values, text)
        self.accesses.append(access)
        return places, granules

    def load(self, address, width, count, lanes, text):
        """(values, which lanes read what nobody wrote, or None)."""
        total = width * count
        places, granules = self._touch(False, address, total, lanes, None, text)
        rows = _rows(self.bytes, width, count)
        values = rows[places]
        state = self.state[granules]
        unset = (state == EMPTY).any(1)
        if unset.any():
            return values, unset
        return values, None

    def store(self, address, values, width, count, lanes, text, poison=None):
        """values: (lanes, count); poison: which lanes of them nobody computed, or None."""
        values = np.ascontiguousarray(values)
        halves = values.view(np.uint16)
        total = width * count
        places, granules = self._touch(True, address, total, lanes, halves, text)
        self.state[granules] = FILLED
        if poison is not None:
            uncomputed = granules[poison]
            self.state[uncomputed] = EMPTY
        rows = _rows(self.bytes, width, count)
        rows[places] = values

    def start_copy(self, address, size, lanes, text):
        """The granules that a copy will fill, which is under way from now on."""
        _, granules = self._touch(True, address, size, lanes, None, text)
        self.state[granules] = COPYING
        return granules

    def end_copy(self, granules, values, lanes, text):
        self.state[granules] = FILLED
        halves = self.bytes.view(np.uint16)
        halves[granules] = values
        access = Access(True, granules, lanes, values, text)
        self.accesses.append(access)

    def barrier(self, passing=None):
        """Nothing before can race with anything behind, for the programs `passing` (a
        mask; None: all).
        """
        accesses = self.accesses
        self.accesses = []
        if passing is not None:
            accesses = self._of_passing(accesses, passing)
        writes = []
        reads = []
        for access in accesses:
            if not len(access.granules):
                continue
            if access.write:
                writes.append(access)
            else:
                reads.append(access)
        if writes:
            self._look_for_races(writes, reads)

    def _of_passing(self, accesses, passing):
        """The accesses of programs that pass; those of the others are kept."""
        here = []
        for access in accesses:
            program = access.lanes // self.threads
            mask = passing[program]
            here.append(access.of(mask))
            self.accesses.append(access.of(~mask))
        return here

    def _look_for_races(self, writes, reads):
        places, writers = _joined(writes)
        self.last[places] = writers
        several = self.last[places] != writers
        if several.any() and not self._hold_all(writes):
            fault = "race on shared memory: several threads write without a barrier"
            raise Fault(f"{fault}: {_texts(writes)}")
        if reads:
            read, readers = _joined(reads)
            last = self.last[read]
            others = (last >= 0) & (last != readers)
            if others.any():
                between = f"{_texts(writes)} and {_texts(reads)}"
                raise Fault(f"race on shared memory: no barrier between {between}")
        self.last[places] = -1

    def _hold_all(self, writes):
        """Whether the memory holds what each wrote, so that their order is the same."""
        held = self.bytes.view(np.uint16)
        return all(write.is_in(held) for write in writes)


def _joined(accesses):
    """All granules, and the lane that touched each."""
    granules = []
    lanes = []
    for access in accesses:
        count = access.granules.shape[1]
        granules.append(access.granules.ravel())
        lanes.append(np.repeat(access.lanes, count))
    return np.concatenate(granules), np.concatenate(lanes)


def _texts(accesses):
    texts = sorted({access.text for access in accesses})
    return ", ".join(texts[:4])
