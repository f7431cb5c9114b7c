"""What an error of a model's forward tells of the arguments that it wants."""

from __future__ import annotations

import itertools
import linecache
import re

import torch

REFUSALS = (
    AttributeError,
    AssertionError,
    ImportError,
    IndexError,
    KeyError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
    UnboundLocalError,
    ZeroDivisionError,
)
# The last dimension that a linear layer, a norm or a sum wanted, and the second one
# that a convolution did.
WANTED_WIDTH = re.compile(
    r"cannot be multiplied \(\d+x\d+ and (\d+)x|must match the size of tensor b \((\d+)\)|with shape \[\*, (\d+)\]"
)
WANTED_MULTIPLE = re.compile(r"multiple of \D{0,30}(\d+)")
WANTED_CHANNELS = re.compile(r"expected input\[([\d, ]+)\] to have (\d+) channels")
DERIVED = re.compile(r"inputs_embeds$|position_ids$")
WANTED_RANK = re.compile(r"unpack \(expected (\d)")


def wanted_sizes(value, error: str) -> list[tuple[int, int]]:
    """(dimension, size) that an error asks for, where this value can be meant."""
    found = []
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return found
    if match := WANTED_WIDTH.search(error):
        width = int(next(filter(None, match.groups())))
        # nothing in a tiny model is wider
        found += [(-1, width)] if width <= 1024 else []
    if match := WANTED_MULTIPLE.search(error):
        found.append((-1, 2 * int(match[1])))
    if (match := WANTED_CHANNELS.search(error)) and match[1] == ", ".join(
        map(str, value.shape)
    ):
        found.append((1, int(match[2])))
    return found


def absent_arguments(error: BaseException, names: list[str]) -> list[str]:
    """Those of the arguments `names` that the failing expression uses while they are
    None, in the innermost frame.
    """
    found: list[str] = []
    for frame, instruction in ((t.tb_frame, t.tb_lasti) for t in _tracebacks(error)):
        first, last, *_ = next(
            itertools.islice(frame.f_code.co_positions(), instruction // 2, None)
        )
        words: set[str] = set()
        for number in range(first or 0, (last or -1) + 1):
            words.update(
                re.findall(r"\w+", linecache.getline(frame.f_code.co_filename, number))
            )
        found = [
            n for n in names if n in words and frame.f_locals.get(n, n) is None
        ] or found
    return found


def _tracebacks(error: BaseException):
    at = error.__traceback__
    while at is not None:
        yield at
        at = at.tb_next
