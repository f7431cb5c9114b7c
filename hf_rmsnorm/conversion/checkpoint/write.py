"""Write a checkpoint whose tensors are made from those of another, so that a kill at
any time costs one shard.

``DST.converting/`` holds ``lock``, ``journal.json`` (the source and the plan) and
``model/``, which becomes DST. A shard has its name there once it is on the disk, whole.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from filelock import FileLock, Timeout

from ..folders import CONFIG, INDEX, exists_already
from ..plan import BadTensor, ConversionError, clear_errors
from ..tensors import one_thread
from .layout import Layout
from .source import Checkpoint

LOCK = "lock"
JOURNAL = "journal.json"
PARTIAL = ".partial"


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
        plan: a run goes on where one with an equal plan has stopped.
        check: called with the folder that is to become DST; it may raise.
    """
    made_of = f"{plan}\n{config}\n{layout}".encode()
    digest = hashlib.sha256(made_of).hexdigest()
    identity = {"plan": digest, "source": source.fingerprints}
    staging = Path(f"{dst}.converting")
    model = staging / "model"
    with clear_errors(dst), _locked(staging):
        if not _begin(staging, dst, identity, restart):
            return len(layout.shards)
        with one_thread():
            done = _write_shards(source, layout, model, progress)
        _copy_files(source, layout, config, model)
        source.check_unchanged()
        check(model)
        _publish(model, dst)
        return done


@contextmanager
def _locked(staging: Path) -> Iterator[None]:
    """Make, lock and at the end remove a staging folder; refused if it is another's."""
    _journal(staging)
    staging.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(staging / LOCK).acquire(blocking=False)
    except (Timeout, FileNotFoundError):  # or the other one has just removed the folder
        raise ConversionError(
            f"{staging}: another process is converting into it: wait for it, or choose "
            "another DST"
        ) from None
    try:
        with lock:
            yield
    except BadTensor:  # the shards are of no use once the source is repaired
        shutil.rmtree(staging, ignore_errors=True)
        raise
    shutil.rmtree(staging, ignore_errors=True)


def _journal(staging: Path) -> dict:
    """The journal, or {} before there is one; refused in a folder of another program."""
    if not os.path.lexists(staging):
        return {}
    try:
        if {*os.listdir(staging)} <= {LOCK, JOURNAL + PARTIAL}:
            return {}
        journal = json.loads((staging / JOURNAL).read_bytes())
        journal["source"]
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
    if os.path.lexists(dst):
        if journal == identity and not model.exists():
            return False
        raise exists_already(dst)
    if journal and journal != identity:
        if not restart:
            raise ConversionError(
                f"{staging}: an unfinished conversion by another plan, or of a source "
                "that has changed since: finish that one, or drop it by restart=True"
            )
        if model.exists():
            shutil.rmtree(model)  # a shard that stayed would be taken for a new one
    with _whole_file(staging / JOURNAL) as file:
        file.write(json.dumps(identity).encode())
    model.mkdir(exist_ok=True)
    return True


def _write_shards(source: Checkpoint, layout: Layout, model: Path, progress) -> int:
    """Write the shards that are not there; how many were."""
    tensors = size = there = 0
    total = sum(shard.nbytes for shard in layout.shards.values())
    for name, shard in layout.shards.items():
        target = model / name
        head = shard.head()
        if target.exists() and target.stat().st_size == len(head) + shard.nbytes:
            there += 1
            tensors += len(shard.tensors)
            size += shard.nbytes
            progress(tensors, size, total)
            continue
        target.parent.mkdir(exist_ok=True, parents=True)
        with _whole_file(target) as file:
            file.write(head)
            for tensor in shard.tensors.values():
                data = tensor.value(source).reshape(-1).view(torch.uint8)
                size += file.write(data.numpy())
                tensors += 1
                progress(tensors, size, total)
            source.check_unchanged()  # before it gets its name
    return there


@contextmanager
def _whole_file(target: Path) -> Iterator[BinaryIO]:
    """A file to write to; it gets its name once it is whole and on the disk."""
    with open(target.with_name(target.name + PARTIAL), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, target)


def _copy_files(source: Checkpoint, layout: Layout, config: str, model: Path) -> None:
    for name in source.others:
        target = model / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / name, target)
    if layout.index is not None:
        (model / INDEX).write_text(json.dumps(layout.index, indent=2) + "\n")
    (model / CONFIG).write_text(config, encoding="utf-8")


def _publish(model: Path, dst: Path) -> None:
    """Flush every file to the disk, and give the folder the name DST."""
    for path in model.rglob("*"):
        if path.is_file():
            with open(path, "rb+") as file:  # Windows flushes none that is only read
                os.fsync(file.fileno())
    if os.path.lexists(dst):  # which a rename may replace
        raise exists_already(dst)
    os.rename(model, dst)
