"""DST, which appears whole or not at all: its draft is made in a working folder next to
it, and one rename makes the draft DST.

The working folder holds ``lock``, which its process has locked, and the draft,
``model``. A lock ends with its process, so a run takes over the folder of a killed one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..sources import Location
from .errors import ConversionError


@contextmanager
def working_folder(source: Location, dst: Path) -> Iterator[Path]:
    """An empty folder for the draft, which `publish` may make DST; else it is removed.
    Refused for a DST inside of the source, and if it exists or is being made.
    """
    if source.is_local and dst.parent.resolve().is_relative_to(
        Path(source.where).resolve()
    ):
        raise ConversionError(
            f"{dst}: lies inside of the source, which is only read: choose another DST"
        )
    working = Path(f"{dst}.converting")
    working.mkdir(parents=True, exist_ok=True)
    lock = FileLock(working / "lock", blocking=False)
    draft = working / "model"
    try:
        lock.acquire()
    except (Timeout, FileNotFoundError):  # or it has removed the folder
        raise ConversionError(
            f"{dst}: another process is converting into it: wait for it, or choose "
            "another DST"
        ) from None
    try:
        shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed
        _refuse_existing(dst)
        draft.mkdir()
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        lock.release()
        with suppress(OSError):  # another process has taken it over
            os.unlink(lock.lock_file)
            working.rmdir()


def publish(draft: Path, dst: Path) -> None:
    """Give a draft the name DST."""
    _refuse_existing(dst)  # an empty folder would be replaced
    os.rename(draft, dst)


def _refuse_existing(dst: Path) -> None:
    if os.path.lexists(dst):
        raise ConversionError(
            f"{dst}: exists already: choose another DST, or move it away"
        )
