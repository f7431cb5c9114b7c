"""The errors of a conversion that is refused or fails: one line with the cure.

Every file here raises the two errors; `clear_errors` is around all that reads or writes.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ConversionRefused(ValueError):
    """A model cannot be converted; the message is one line that names it, says why and
    what can be done.
    """


class ConversionError(Exception):
    """An error and its cure, in one line. DST does not exist and SRC is as it was."""


AGAIN = "see to it and convert again"
PERMISSION = "give permission to it, or choose another DST"
CURES = dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), PERMISSION)


@contextmanager
def clear_errors(where: Path) -> Iterator[None]:
    """Turn an error of the file system into one line with the cure."""
    try:
        yield
    except OSError as error:
        reason = " ".join((error.strerror or str(error)).split())
        cure = CURES.get(error.errno, AGAIN)
        raise ConversionError(
            f"{error.filename or where}: {reason[:1].lower()}{reason[1:]}: {cure}"
        ) from error
