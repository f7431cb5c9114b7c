"""Write a checkpoint whose tensors are made from those of another, so that a kill at
any time costs one shard.

``DST.converting/`` holds ``lock``, ``journal.json`` (the source and the plan) and
``model/``. At the end ``model/`` is renamed to DST. A shard has its name there once it
is whole and on the disk.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from ..folders import CONFIG, INDEX, exists_already
from ..plan import BadTensor, ConversionError, clear_errors
from ..tensors import one_thread
from .layout import Layout
from .source import Checkpoint

LOCK = "lock"
JOURNAL = "journal.json"
REPORT = "report.txt"
PARTIAL = ".partial"
# where a folder cannot be opened, nor a file flushed that is open for reading
WINDOWS = os.name == "nt"


def write_checkpoint(
    source: Checkpoint,
    dst: Path,
    layout: Layout,
    config: str,
    *,
    plan: str,
    check: Callable[[Path], None],
    restart: bool,
    progress: Callable[[int, int, int], None],
) -> int:
    """Write the tensors of a layout and the source's other files; how many shards were
    there from a killed run.

    Args:
        dst, restart, progress: as in `convert_checkpoint`.
        config: text of config.json.
        plan: equal for what gives equal bytes; another one does not go on where a run
            stopped.
        check: called with the folder that is to become DST. If it raises, the folder is
            kept, with ``report.txt``.
    """
    headers = {name: shard.header() for name, shard in layout.shards.items()}
    texts = "\n".join([plan, config, json.dumps(layout.index)])
    made_of = b"\n".join([texts.encode(), *headers.values()])
    digest = hashlib.sha256(made_of).hexdigest()
    identity = {"plan": digest, "source": source.fingerprints}
    staging = Path(f"{dst}.converting")
    model = staging / "model"
    with clear_errors(dst), _locked(staging) as lock:
        if not _begin(staging, dst, identity, restart):
            _clean_up(staging, lock)
            return len(layout.shards)
        try:
            with one_thread():
                done = _write_shards(source, layout, headers, model, progress)
        except BadTensor:  # these shards are of no use once the source is repaired
            shutil.rmtree(model)
            _clean_up(staging, lock)
            raise
        _copy_files(source, layout, config, model)
        source.check_unchanged()
        try:
            check(model)
        except Exception as error:
            (staging / REPORT).write_text(f"{error}\n", encoding="utf-8")
            raise
        _publish(model, dst)
        _clean_up(staging, lock)
        return done


@contextmanager
def _locked(staging: Path) -> Iterator[FileLock]:
    """Make a staging folder and hold its lock; refused if it is another program's, or
    in use.
    """
    _journal(staging)
    staging.mkdir(parents=True, exist_ok=True)
    lock = FileLock(staging / LOCK)
    try:
        lock.acquire(blocking=False)
    except (Timeout, FileNotFoundError):  # or the other one has just removed the folder
        raise ConversionError(
            f"{staging}: another process is converting into it: wait for it, or choose "
            "another DST"
        ) from None
    try:
        yield lock
    finally:
        lock.release()


def _journal(staging: Path) -> dict:
    """The content of the journal, {} before there is one; refused if the folder is
    another program's.
    """
    if not os.path.lexists(staging):
        return {}
    try:
        if {*os.listdir(staging)} <= {LOCK, JOURNAL + PARTIAL}:
            return {}
        journal = json.loads((staging / JOURNAL).read_bytes())
        journal["identity"]["source"]
    except (OSError, ValueError, LookupError, TypeError):
        raise ConversionError(
            f"{staging}: in the way, of another program: move it, or choose another DST"
        ) from None
    return journal


def _begin(staging: Path, dst: Path, identity: dict, restart: bool) -> bool:
    """Make the folder ready; False if DST is the model that was in it, as a run was
    killed after the rename.
    """
    journal = _journal(staging)
    model = staging / "model"
    is_same = journal.get("identity") == identity
    if os.path.lexists(dst):
        if is_same and not model.exists():
            return False
        raise exists_already(dst)
    if journal and not is_same:
        if not restart:
            raise ConversionError(
                f"{staging}: an unfinished conversion by another plan, or of a source "
                "that has changed since: finish that one, or drop it by restart=True"
            )
        shutil.rmtree(model, ignore_errors=True)
    with _whole_file(staging / JOURNAL, staging) as file:
        file.write(json.dumps({"identity": identity}).encode())
    model.mkdir(exist_ok=True)
    return True


def _write_shards(
    source: Checkpoint, layout: Layout, headers: dict, model: Path, progress: Callable
) -> int:
    """Write the shards that are not there; how many were."""
    tensors = size = there = 0
    total = sum(shard.nbytes for shard in layout.shards.values())
    for name, shard in layout.shards.items():
        target = model / name
        whole = len(headers[name]) + shard.nbytes
        if target.exists() and target.stat().st_size == whole:
            there += 1
            tensors += len(shard.entries)
            size += shard.nbytes
            progress(tensors, size, total)
            continue
        target.parent.mkdir(exist_ok=True, parents=True)
        with _whole_file(target, model.parent) as file:
            file.write(headers[name])
            for entry in shard.entries.values():
                file.write(entry.data(source))
                tensors += 1
                size += entry.nbytes
                progress(tensors, size, total)
            source.check_unchanged()  # before it gets its name
    return there


@contextmanager
def _whole_file(target: Path, staging: Path) -> Iterator[BinaryIO]:
    """A file to write to; at the end it is on the disk and has its name, or it never
    has it.
    """
    with open(staging / (target.name + PARTIAL), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, target)


def _copy_files(source: Checkpoint, layout: Layout, config: str, model: Path) -> None:
    for name in source.others:
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / name, model / name)
    if layout.index is not None:
        (model / INDEX).write_text(json.dumps(layout.index, indent=2) + "\n")
    (model / CONFIG).write_text(config, encoding="utf-8")


def _publish(model: Path, dst: Path) -> None:
    """Make every file durable and give the folder the name DST."""
    for parent, _, names in os.walk(model):
        for name in (*names, ""):  # the folder itself last
            _sync(Path(parent, name))
    if os.path.lexists(dst):  # which a rename may replace
        raise exists_already(dst)
    os.rename(model, dst)
    _sync(dst.parent)


def _sync(path: Path) -> None:
    """Make a file's bytes durable, or the names in a folder."""
    if WINDOWS and path.is_dir():
        return
    fd = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _clean_up(staging: Path, lock: FileLock) -> None:
    """Remove the staging folder, but for files of others; the journal goes last, as it
    makes the folder ours.
    """
    lock.release()
    parts = staging.glob(f"*{PARTIAL}")
    for path in (*parts, staging / REPORT, staging / LOCK, staging / JOURNAL):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        staging.rmdir()
