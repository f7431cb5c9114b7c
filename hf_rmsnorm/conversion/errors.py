"""The errors of a conversion that is refused or fails: one line with the cure.

Every file here raises the two errors; `clear_errors` is around all that reads or writes.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ..sources import SourceError


class ConversionRefused(ValueError):
    """A model cannot be converted; the message is one line that names it, says why and
    what can be done.
    """


class ConversionError(Exception):
    """An error and its cure, in one line. DST does not exist and SRC is as it was."""


AGAIN = "convert again"
PERMISSION = "give permission to it, or choose another DST"
CURES = {
    errno.ENOSPC: f"free some space and {AGAIN}",
    errno.EDQUOT: f"free some of the quota and {AGAIN}",
    errno.EFBIG: f"raise the limit of the file size and {AGAIN}",
    errno.EROFS: "choose a DST on a file system that can be written",
    errno.EACCES: PERMISSION,
    errno.EPERM: PERMISSION,
}


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn an error of the file system, or in the name of a source, into one line with
    the cure.
    """
    try:
        yield
    except SourceError as error:
        raise ConversionError(str(error)) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        reason = " ".join((error.strerror or str(error)).split())
        cure = CURES.get(error.errno, f"see to it and {AGAIN}")
        raise ConversionError(
            f"{where}{reason[:1].lower()}{reason[1:]}: {cure}"
        ) from error
