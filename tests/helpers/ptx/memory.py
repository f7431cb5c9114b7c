"""Global memory, of which a launch may touch what its tensors cover, and the shared
memory of its programs.
"""

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
        self.number, self.item, self.shape = (
            number,
            tensor.element_size(),
            tuple(tensor.shape),
        )
        self.strides = [
            s if n > 1 else 0 for s, n in zip(tensor.stride(), self.shape, strict=True)
        ]
        spanned = (
            sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1
        ) * (0 not in self.shape)
        self.size, real = spanned * self.item, tensor.data_ptr()
        self.start, self.end = real, real + self.size
        # what lies shortly before it is still near it
        self.address = (number + 1 << SPACING) + 4096 + real % 4096
        self.shift = real % 64  # the array of bytes starts at a multiple of 64
        padded = -(-(self.shift + self.size) // 64) * 64
        about = {
            "data": (real - self.shift, False),
            "shape": (padded,),
            "typestr": "|u1",
            "version": 3,
        }
        self.bytes = np.asarray(
            SimpleNamespace(__array_interface__=about, tensor=tensor)
        )
        self.loaded = None  # which elements were read, where that is kept
        # of each element, the number of the program that wrote it, or 0
        self.read, self.owner = False, None
        # which elements are the view's, where there are others between them
        self.allowed = None
        if tensor.numel() < spanned <= LARGEST:
            self.allowed = np.zeros(padded // self.item, bool)
            self._of_view(self.allowed)[...] = True

    def _of_view(self, elements):
        first, strides = (
            self.shift // self.item,
            [s * elements.itemsize for s in self.strides],
        )
        return np.lib.stride_tricks.as_strided(elements[first:], self.shape, strides)

    def _places(self, address, total: int):
        """Where accesses of `total` bytes are, in memory seen as rows of so many."""
        at = (address - np.uint64(self.address)).view(np.int64)
        if (address % np.uint64(total)).any():
            raise Fault(f"misaligned: {total} bytes of argument {self.number}")
        if at.min() < 0 or at.max() + total > self.size:
            raise Fault(
                f"outside of argument {self.number}: bytes {at.min()} to {at.max() + total} of {self.size}"
            )
        if total % self.item:
            raise Fault(f"a part of an element of argument {self.number}")
        places = (at + self.shift) // total
        if (
            self.allowed is not None
            and not self.allowed.reshape(-1, total // self.item)[places].all()
        ):
            raise Fault(f"between the rows of argument {self.number}")
        return places

    def load(self, address, width: int, count: int):
        self.read = True
        places = self._places(address, width * count)
        if self.loaded is not None:
            self.loaded.reshape(-1, width * count // self.item)[places] = True
        return self.bytes.view(UNSIGNED[width]).reshape(-1, count)[places]

    def keep_what_is_read(self) -> None:
        """From now on, keep which elements are read, for `moved`."""
        self.loaded = np.zeros(len(self.bytes) // self.item, bool)

    def moved(self) -> int:
        """Bytes that were read and bytes that were written, each byte once."""
        written = 0 if self.owner is None else np.count_nonzero(self.owner)
        return self.item * int(np.count_nonzero(self.loaded) + written)

    def store(self, address, values, width: int, count: int, program) -> None:
        places = self._places(address, width * count)
        if self.owner is None:
            self.owner = np.zeros(len(self.bytes) // self.item, np.int32)
        owner = self.owner.reshape(-1, width * count // self.item)
        if owner[places].any() or len(np.unique(places)) < len(places):
            raise Fault(f"written twice: a place in argument {self.number}")
        owner[places] = program[:, None]
        self.bytes.view(UNSIGNED[width]).reshape(-1, count)[places] = values

    def close(self, others) -> None:
        """What can be said once all programs have run."""
        if self.owner is None:
            return
        if missing := int((self._of_view(self.owner) == 0).sum()):
            raise Fault(
                f"{missing} elements of argument {self.number} are not written, and others are"
            )
        for other in others:
            overlaps = self.start < other.end and other.start < self.end
            if (
                other.read
                and overlaps
                and (other is self or other.allowed is self.allowed is None)
            ):
                raise Fault(
                    f"argument {self.number} is written and, as argument {other.number}, read in one launch"
                )


def _alike(held, values) -> bool:
    """Whether all bits are equal, but for NaNs, of which a GPU makes one kind and numpy
    several.
    """
    same = held == values
    if not same.all() and same.shape[1] % 2 == 0:
        same = same[:, ::2] & same[:, 1::2] | np.isnan(
            held.view(np.float32)
        ) & np.isnan(values.view(np.float32))
    return same.all()


class Shared:
    """The shared memory of programs that run together, and who touched it since the
    last barrier.

    Lanes are threads, numbered through all programs. A granule is 2 bytes.
    """

    def __init__(self, programs: int, size: int, threads: int):
        self.size, self.threads, self.stride = size, threads, -(-size // 16) * 16
        self.bytes = np.zeros(programs * self.stride, np.uint8)
        self.state = np.full(len(self.bytes) // 2, EMPTY, np.uint8)
        self.last = np.full(len(self.state), -1, np.int32)  # scratch of `barrier`
        # (is it a write, granules, lanes, values or None, text)
        self.touched: list[tuple] = []

    def _touch(self, write: bool, address, total: int, lanes, values, text: str):
        """(rows of so many bytes, granules in them) of accesses."""
        address = address.astype(np.int64)
        if (address % total).any():
            raise Fault(f"misaligned: {total} bytes of shared memory")
        if address.max() + total > self.size:
            raise Fault(
                f"outside of shared memory: byte {address.max() + total} of {self.size}"
            )
        places = (lanes // self.threads * self.stride + address) // total
        granules = places[:, None] * (total // 2) + np.arange(total // 2)
        if (self.state[granules] == COPYING).any():
            raise Fault("touched before an asynchronous copy to it has been waited for")
        self.touched.append((write, granules, lanes, values, text))
        return places, granules

    def load(self, address, width: int, count: int, lanes, text: str):
        """(values, which lanes read what nobody wrote, or None)."""
        places, granules = self._touch(False, address, width * count, lanes, None, text)
        unset = (self.state[granules] == EMPTY).any(1)
        return self.bytes.view(UNSIGNED[width]).reshape(-1, count)[
            places
        ], unset if unset.any() else None

    def store(
        self, address, values, width: int, count: int, lanes, text: str, poison=None
    ) -> None:
        """values: (lanes, count); poison: which lanes of them nobody computed, or None."""
        halves = np.ascontiguousarray(values).view(np.uint16)
        places, granules = self._touch(
            True, address, width * count, lanes, halves, text
        )
        self.state[granules] = (
            FILLED if poison is None else np.where(poison, EMPTY, FILLED)[:, None]
        )
        self.bytes.view(UNSIGNED[width]).reshape(-1, count)[places] = values

    def start_copy(self, address, size: int, lanes, text: str):
        """The granules that a copy will fill, which is under way from now on."""
        _, granules = self._touch(True, address, size, lanes, None, text)
        self.state[granules] = COPYING
        return granules

    def end_copy(self, granules, values, lanes, text: str) -> None:
        self.state[granules] = FILLED
        self.bytes.view(np.uint16)[granules] = values
        self.touched.append((True, granules, lanes, values, text))

    def barrier(self, passing=None) -> None:
        """Nothing before can race with anything behind, for the programs `passing` (a
        mask; None: all).
        """
        touched, self.touched = self.touched, []
        if passing is not None:
            here = [(t, passing[t[2] // self.threads]) for t in touched]
            touched = [_part(t, mask) for t, mask in here]
            self.touched = [_part(t, ~mask) for t, mask in here]
        writes, reads = (
            [t for t in touched if t[0] is way and len(t[1])] for way in (True, False)
        )
        if not writes:
            return
        places, writers = _joined(writes)
        self.last[places] = writers
        held = self.bytes.view(np.uint16)
        alike = (
            values is not None and _alike(held[granules], values)
            for _, granules, _, values, _ in writes
        )
        if (self.last[places] != writers).any() and not all(alike):
            raise Fault(
                f"race on shared memory: written by several threads without a barrier: {_texts(writes)}"
            )
        if reads:
            read, readers = _joined(reads)
            found = self.last[read]
            if ((found >= 0) & (found != readers)).any():
                raise Fault(
                    f"race on shared memory: no barrier between {_texts(writes)} and {_texts(reads)}"
                )
        self.last[places] = -1


def _joined(touched: list[tuple]):
    granules = np.concatenate([granules.ravel() for _, granules, *_ in touched])
    return granules, np.concatenate(
        [np.repeat(lanes, granules.shape[1]) for _, granules, lanes, *_ in touched]
    )


def _part(touch: tuple, mask) -> tuple:
    way, granules, lanes, values, text = touch
    return (
        way,
        granules[mask],
        lanes[mask],
        None if values is None else values[mask],
        text,
    )


def _texts(touched: list[tuple]) -> str:
    return ", ".join(sorted({text for *_, text in touched})[:4])
