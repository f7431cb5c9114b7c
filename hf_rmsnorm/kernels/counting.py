"""Counts of kernel launches. A direct launch passes no dispatcher, so no profiler of
operators shows it.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
active: list[Counter] = []  # those that count now


@contextmanager
def counting_into(counter: Counter) -> Iterator[None]:
    """Inside, count each launch of this package's kernels, in all threads, in `counter`
    by the kernel's name.
    """
    with _lock:
        active.append(counter)
    try:
        yield
    finally:
        with _lock:
            # by identity: equal counters of other contexts must stay
            active[:] = [c for c in active if c is not counter]


def record_launch(name: str) -> None:
    with _lock:
        for counter in active:
            counter[name] += 1
