"""Global memory, of which a launch may touch what its tensors cover, and the shared
memory of its programs.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

# bits: each tensor argument has addresses of its own, far from those of any other
SPACING = 44
LARGEST = 2**27  # elements that a view may span to have its gaps watched
# of shared memory: written by nobody, by a thread or a finished copy, not yet
EMPTY, FILLED, COPYING = 0, 1, 2
UNSIGNED = {n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)}


class Fault(Exception):
    """What a GPU would not have told: a stray or misaligned access, a race, an
    uninitialised value, a split barrier.
    """


class Window:
    """The memory of one tensor argument, at made-up addresses of the same alignment;
    only its view may be touched.
    """

    def __init__(self, tensor, number: int):
        self.number = number
        self.item = tensor.element_size()
        self.shape = tuple(tensor.shape)
        strides = zip(tensor.stride(), self.shape, strict=True)
        self.strides = []
        last = 0
        for stride, size in strides:
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
        padded = -(-(self.shift + self.size) // 64) * 64
        about = {
            "data": (self.start - self.shift, False),
            "shape": (padded,),
            "typestr": "|u1",
            "version": 3,
        }
        holder = SimpleNamespace(__array_interface__=about, tensor=tensor)
        self.bytes = np.asarray(holder)
        self.loaded = None  # which elements were read, where that is kept
        # of each element, the number of the program that wrote it, or 0
        self.read, self.owner = False, None
        # which elements are the view's, where there are others between them
        self.allowed = None
        if tensor.numel() < spanned <= LARGEST:
            self.allowed = np.zeros(padded // self.item, bool)
            self._of_view(self.allowed)[...] = True

    def _of_view(self, elements):
        first = self.shift // self.item
        strides = [stride * elements.itemsize for stride in self.strides]
        elements = elements[first:]
        return np.lib.stride_tricks.as_strided(elements, self.shape, strides)

    def _places(self, address, total: int):
        """Where accesses of `total` bytes are, in memory seen as rows of so many."""
        at = address - np.uint64(self.address)
        at = at.view(np.int64)
        first = at.min()
        end = at.max() + total
        if (address % np.uint64(total)).any():
            raise Fault(f"misaligned: {total} bytes of argument {self.number}")
        if first < 0 or end > self.size:
            beyond = f"bytes {first} to {end} of {self.size}"
            raise Fault(f"outside of argument {self.number}: {beyond}")
        if total % self.item:
            raise Fault(f"a part of an element of argument {self.number}")
        places = (at + self.shift) // total
        if self.allowed is not None:
            allowed = self.allowed.reshape(-1, total // self.item)
            if not allowed[places].all():
                raise Fault(f"between the rows of argument {self.number}")
        return places

    def load(self, address, width: int, count: int):
        self.read = True
        total = width * count
        places = self._places(address, total)
        if self.loaded is not None:
            loaded = self.loaded.reshape(-1, total // self.item)
            loaded[places] = True
        rows = _rows(self.bytes, width, count)
        return rows[places]

    def keep_what_is_read(self) -> None:
        """From now on, keep which elements are read, for `moved`."""
        self.loaded = np.zeros(len(self.bytes) // self.item, bool)

    def moved(self) -> int:
        """Bytes that were read and bytes that were written, each byte once."""
        written = 0
        if self.owner is not None:
            written = np.count_nonzero(self.owner)
        return self.item * int(np.count_nonzero(self.loaded) + written)

    def store(self, address, values, width: int, count: int, program) -> None:
        total = width * count
        places = self._places(address, total)
        if self.owner is None:
            elements = len(self.bytes) // self.item
            self.owner = np.zeros(elements, np.int32)
        owner = self.owner.reshape(-1, total // self.item)
        if owner[places].any() or len(np.unique(places)) < len(places):
            raise Fault(f"written twice: a place in argument {self.number}")
        owner[places] = program[:, None]
        rows = _rows(self.bytes, width, count)
        rows[places] = values

    def close(self, others) -> None:
        """What can be said once all programs have run."""
        if self.owner is None:
            return
        number = self.number
        owners = self._of_view(self.owner)
        missing = int((owners == 0).sum())
        if missing:
            message = f"{missing} elements of argument {number} are not written"
            raise Fault(f"{message}, and others are")
        for other in others:
            if other.read and self._meets(other):
                message = (
                    f"argument {number} is written and, as argument {other.number}"
                )
                raise Fault(f"{message}, read in one launch")

    def _meets(self, other: "Window") -> bool:
        """Whether they share memory. Views with gaps may lie within each other."""
        if other.end <= self.start or self.end <= other.start:
            return False
        gapless = self.allowed is None and other.allowed is None
        return other is self or gapless


def _rows(array, width: int, count: int):
    """Bytes seen as rows of so many numbers of that width."""
    numbers = array.view(UNSIGNED[width])
    return numbers.reshape(-1, count)


def _alike(held, values) -> bool:
    """Whether all bits are equal, but for NaNs, of which a GPU makes one kind and numpy
    several.
    """
    same = held == values
    if not same.all() and same.shape[1] % 2 == 0:
        first = np.isnan(held.view(np.float32))
        second = np.isnan(values.view(np.float32))
        pairs = same[:, ::2] & same[:, 1::2]
        same = pairs | first & second
    return same.all()


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

    def of(self, mask) -> "Access":
        values = self.values
        if values is not None:
            values = values[mask]
        granules = self.granules[mask]
        lanes = self.lanes[mask]
        return Access(self.write, granules, lanes, values, self.text)

    def is_in(self, held) -> bool:
        """Whether the memory holds what was written here."""
        if self.values is None:
            return False
        return _alike(held[self.granules], self.values)


class Shared:
    """The shared memory of programs that run together, and who touched it since the
    last barrier.

    Lanes are threads, numbered through all programs. A granule is 2 bytes.
    """

    def __init__(self, programs: int, size: int, threads: int):
        self.size = size
        self.threads = threads
        self.stride = -(-size // 16) * 16
        self.bytes = np.zeros(programs * self.stride, np.uint8)
        self.state = np.full(len(self.bytes) // 2, EMPTY, np.uint8)
        self.last = np.full(len(self.state), -1, np.int32)  # scratch of `barrier`
        self.accesses: list[Access] = []

    def _touch(self, write: bool, address, total: int, lanes, values, text: str):
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
        if (self.state[granules] == COPYING).any():
            raise Fault("touched before an asynchronous copy to it has been waited for")
        self.accesses.append(Access(write, granules, lanes, values, text))
        return places, granules

    def load(self, address, width: int, count: int, lanes, text: str):
        """(values, which lanes read what nobody wrote, or None)."""
        places, granules = self._touch(False, address, width * count, lanes, None, text)
        unset = (self.state[granules] == EMPTY).any(1)
        values = _rows(self.bytes, width, count)[places]
        if not unset.any():
            unset = None
        return values, unset

    def store(
        self, address, values, width: int, count: int, lanes, text: str, poison=None
    ) -> None:
        """values: (lanes, count); poison: which lanes of them nobody computed, or None."""
        halves = np.ascontiguousarray(values).view(np.uint16)
        places, granules = self._touch(
            True, address, width * count, lanes, halves, text
        )
        self.state[granules] = FILLED
        if poison is not None:
            self.state[granules[poison]] = EMPTY
        rows = _rows(self.bytes, width, count)
        rows[places] = values

    def start_copy(self, address, size: int, lanes, text: str):
        """The granules that a copy will fill, which is under way from now on."""
        _, granules = self._touch(True, address, size, lanes, None, text)
        self.state[granules] = COPYING
        return granules

    def end_copy(self, granules, values, lanes, text: str) -> None:
        self.state[granules] = FILLED
        self.bytes.view(np.uint16)[granules] = values
        self.accesses.append(Access(True, granules, lanes, values, text))

    def barrier(self, passing=None) -> None:
        """Nothing before can race with anything behind, for the programs `passing` (a
        mask; None: all).
        """
        accesses = self.accesses
        self.accesses = []
        if passing is not None:
            here = []
            for access in accesses:
                mask = passing[access.lanes // self.threads]
                self.accesses.append(access.of(~mask))
                here.append(access.of(mask))
            accesses = here
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

    def _look_for_races(self, writes: list[Access], reads: list[Access]) -> None:
        places, writers = _joined(writes)
        self.last[places] = writers
        held = self.bytes.view(np.uint16)
        several = (self.last[places] != writers).any()
        if several and not all(write.is_in(held) for write in writes):
            fault = (
                "race on shared memory: written by several threads without a barrier"
            )
            raise Fault(f"{fault}: {_texts(writes)}")
        if reads:
            read, readers = _joined(reads)
            last = self.last[read]
            if ((last >= 0) & (last != readers)).any():
                between = f"{_texts(writes)} and {_texts(reads)}"
                raise Fault(f"race on shared memory: no barrier between {between}")
        self.last[places] = -1


def _joined(accesses: list[Access]):
    """All granules, and the lane that touched each."""
    granules = [access.granules.ravel() for access in accesses]
    lanes = []
    for a in accesses:
        lanes.append(np.repeat(a.lanes, a.granules.shape[1]))
    return np.concatenate(granules), np.concatenate(lanes)


def _texts(accesses: list[Access]) -> str:
    texts = sorted({access.text for access in accesses})
    return ", ".join(texts[:4])
