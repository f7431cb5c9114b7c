"""Counts what a launch does, as the executor runs it: instructions of warps, 32-byte
sectors of global memory that a warp's access touches, barriers that warps meet, and
exchanges between the lanes of a warp.

They are counts of PTX, not times; the assembler behind it makes fewer or more
instructions of it.
"""

from collections import Counter
from unittest.mock import patch

import numpy as np

from . import machine

UNITS = ("instructions", "sectors", "barriers", "shuffles")


class Counting(machine._Run):
    """A run that counts. A statement costs every warp that comes to it, whatever its
    guard.
    """

    counts: Counter = Counter()

    def _step(self, instruction):
        warps = self.count // 32
        if self.mask is not None:
            warps = int(self.mask.reshape(-1, 32).any(1).sum())
        self.counts["instructions"] += warps
        if instruction.act in ("barrier", "shuffle"):
            self.counts[instruction.act + "s"] += warps
        super()._step(instruction)

    def _touches(self, lanes, address):
        """Sectors of a warp's access: its lanes read or write 32 bytes at most, from a
        multiple of what they take.
        """
        places = np.stack([lanes // 32, address >> np.uint64(5)])
        self.counts["sectors"] += np.unique(places, axis=1).shape[1]

    def _ld(self, instruction, mask):
        self._of_global(instruction, mask)
        super()._ld(instruction, mask)

    def _st(self, instruction, mask):
        self._of_global(instruction, mask)
        super()._st(instruction, mask)

    def _of_global(self, instruction, mask):
        if instruction.numbers[0] == "global":
            offset = instruction.numbers[1]
            address = self._address(instruction.sources[0], mask, offset)
            self._touches(self._among(mask), address)

    def _copy(self, instruction, mask):
        read = self._some(instruction.sources[2], mask, "size") != 0
        source = self._address(instruction.sources[1], mask, instruction.numbers[1])
        self._touches(self._among(mask)[read], source[read])
        super()._copy(instruction, mask)


def of_launch(executor: machine.Machine, launch: tuple) -> Counter:
    """What all warps of a launch do, by unit; `launch` is one that the driver kept."""
    with (
        patch.object(machine, "_Run", Counting),
        patch.object(Counting, "counts", Counter()),
    ):
        executor.launch(*launch)
        return Counting.counts
