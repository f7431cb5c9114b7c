"""DST, which appears whole or not at all: it is made in a working folder beside it, and
one rename makes that DST.

The working folder holds ``lock``, which its process has locked, and ``model``. A lock
ends with its process. So a run can tell what a killed one has left, and removes it.
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

from ..sources import Source
from .plan import ConversionError

LOCK = "lock"
MODEL = "model"
TOKEN = "[0-9a-f]" * 8


def destination(source: Source, dst: str | os.PathLike) -> Path:
    """DST as an absolute path; refused inside of the source, and if it exists, is being
    made, or cannot be made.
    """
    dst = Path(os.path.abspath(dst))
    if source.is_local and dst.parent.resolve().is_relative_to(
        Path(source.where).resolve()
    ):
        raise ConversionError(
            f"{dst}: lies inside of the source, which is only read: choose another DST"
        )
    home = next(parent for parent in dst.parents if os.path.lexists(parent))
    if not home.is_dir():
        raise ConversionError(f"{dst}: {home} is no folder: choose another DST")
    _refuse_if_taken(dst)
    if not os.access(home, os.W_OK | os.X_OK):
        raise ConversionError(
            f"{dst}: {home} is read-only, or gives no permission to write: choose "
            "another DST"
        )
    return dst


@contextmanager
def working_folder(dst: Path) -> Iterator[Path]:
    """An empty folder for the model, which `publish` may make DST. It is in a locked
    one beside DST, which is removed at the end.
    """
    _refuse_if_taken(dst)
    folder = Path(f"{dst}.converting-{secrets.token_hex(4)}")
    model = folder / MODEL
    try:
        model.mkdir(parents=True)
        with FileLock(folder / LOCK, blocking=False):
            yield model
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_if_taken(dst: Path) -> None:
    """Refuse a DST that is there, or that another process is making. What killed runs
    have left beside it is removed.
    """
    for folder in dst.parent.glob(f"{glob.escape(dst.name)}.converting-{TOKEN}"):
        if _is_working_folder(folder):
            _remove_if_left(folder, dst)
    if os.path.lexists(dst):
        raise _exists_already(dst)


def _is_working_folder(folder: Path) -> bool:
    """Whether a folder holds what a working folder does, and nothing else."""
    return (
        folder.is_dir()
        and not folder.is_symlink()
        and {*os.listdir(folder)} <= {LOCK, MODEL}
    )


def _remove_if_left(folder: Path, dst: Path) -> None:
    """Remove the working folder of a run that was killed; refused while it runs."""
    try:
        with FileLock(folder / LOCK, blocking=False):
            pass
    except Timeout:
        raise ConversionError(
            f"{dst}: another process is converting into it: wait for it, or choose "
            "another DST"
        ) from None
    except OSError:  # it is gone, or another user's
        return
    shutil.rmtree(folder, ignore_errors=True)


def publish(model: Path, dst: Path) -> None:
    """Flush every file of a folder to the disk, and give it the name DST."""
    for path in model.rglob("*"):
        if path.is_file():
            with open(path, "rb+") as file:  # Windows flushes none that is only read
                os.fsync(file.fileno())
    if os.path.lexists(dst):  # an empty folder would be replaced
        raise _exists_already(dst)
    os.rename(model, dst)


def _exists_already(dst: Path) -> ConversionError:
    return ConversionError(
        f"{dst}: exists already: choose another DST, or move it away"
    )
