"""DST, which appears whole or not at all: its draft is made in a working folder next to
it, and one rename makes the draft DST.

The working folder holds ``lock``, which its process has locked, and the draft,
``model``. A lock ends with its process. So a run recognises the folder of a killed one,
and removes it.
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ..sources import Location
from .errors import ConversionError

LOCK = "lock"
DRAFT = "model"
TOKEN = "[0-9a-f]" * 8


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
    _refuse_if_taken(dst)
    parent = next(parent for parent in dst.parents if os.path.lexists(parent))
    if not parent.is_dir():
        raise ConversionError(f"{dst}: {parent} is no folder: choose another DST")
    working = Path(f"{dst}.converting-{secrets.token_hex(4)}")
    try:
        working.mkdir(parents=True)
        with _locked(working, dst) as draft:
            yield draft
    finally:
        shutil.rmtree(working, ignore_errors=True)


@contextmanager
def _locked(working: Path, dst: Path) -> Iterator[Path]:
    """Lock a working folder, for the folder of the draft in it; refused if another
    process has done that.
    """
    lock = FileLock(working / LOCK, blocking=False)
    draft = working / DRAFT
    try:
        lock.acquire()
        draft.mkdir(exist_ok=True)
    except (Timeout, FileNotFoundError):  # or it has removed the folder
        raise ConversionError(
            f"{dst}: another process is converting into it: wait for it, or choose "
            "another DST"
        ) from None
    try:
        yield draft
    finally:
        lock.release()


def _refuse_if_taken(dst: Path) -> None:
    """Refuse a DST that exists, or that another process is making. Remove the folders
    of killed runs.
    """
    for working in dst.parent.glob(f"{glob.escape(dst.name)}.converting-{TOKEN}"):
        try:
            _remove_if_left(working, dst)
        except OSError:  # it is gone, or another user's
            continue
    _refuse_existing(dst)


def _remove_if_left(working: Path, dst: Path) -> None:
    """Remove the working folder of a run that was killed; refused while it runs."""
    held = {*os.listdir(working)}
    if held - {LOCK, DRAFT} or held == {DRAFT} or working.is_symlink():
        return  # of another program
    with _locked(working, dst):
        shutil.rmtree(working, ignore_errors=True)
    if os.name == "nt":  # which removes no file that is open
        shutil.rmtree(working, ignore_errors=True)


def publish(draft: Path, dst: Path) -> None:
    """Give a draft the name DST."""
    _refuse_existing(dst)  # an empty folder would be replaced
    os.rename(draft, dst)


def _refuse_existing(dst: Path) -> None:
    if os.path.lexists(dst):
        raise ConversionError(
            f"{dst}: exists already: choose another DST, or move it away"
        )
