"""Write a checkpoint whose tensors are computed from those of another, so that a kill at any time costs one shard."""

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...record import RECORD_KEY
from .expressions import look_at_centred
from .layout import ShardLayout
from .shard import clear_errors
from .source import INDEX, Checkpoint
from .staging import REPORT, Staging, destination, durable_file, reserve, staging_for, write_all
from .values import COPIED, Values

WAITING = 8
FLUSHED = 32 << 20  # bytes that are flushed to the disk while the next are computed: little is left for the end
DESCRIBED = {"README.md", "conversion_plan.json", "conversion_report.json"}  # what a check may add
FORMAT = 3  # of the bytes that expressions give: a staging folder of another one is not taken up


@dataclass(frozen=True)
class Written:
    """What `write_checkpoint` wrote."""

    dst: Path
    shards: dict[str, str]  # for each file name, its SHA-256
    tensors: int
    bytes: int
    changed: tuple[str, ...]  # as in `ShardLayout`
    added: tuple[str, ...]
    unused: tuple[str, ...]  # tensors of the source that nothing is computed from
    not_copied: tuple[str, ...]  # files of the source with weights in other formats, which would be the old model
    resumed: int  # how many shards a run before this one had written

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        lists = {name: list(getattr(self, name)) for name in ("changed", "added", "unused", "not_copied")}
        sizes = {"tensors_written": self.tensors, "bytes": self.bytes, "shards_resumed": self.resumed}
        return {"dst": str(self.dst), **sizes, **lists}

    def __str__(self) -> str:
        changes = f", {len(self.changed)} changed, {len(self.added)} added" if self.changed or self.added else ""
        lines = [f"{self.dst}: {self.tensors} tensors, {self.bytes / 1e6:,.1f} MB{changes}"]
        if self.resumed:
            lines.append(f"{self.resumed} of {len(self.shards)} shards were there from a run before this one")
        if self.unused:
            lines.append(f"tensors of no use to the result: {', '.join(self.unused)}")
        if self.not_copied:
            lines.append(f"not copied, as they hold the old weights: {', '.join(self.not_copied)}")
        return "\n".join(lines)


def write_checkpoint(
    values: Values,
    dst: str | os.PathLike,
    layout: ShardLayout,
    config: str | None = None,
    *,
    check: Callable[[Path], None] | None = None,
    restart: bool = False,
    progress: Callable[[int, int, int], None] | None = None,
) -> Written:
    """Write the tensors of a layout while those of the source are read, and the source's other files.

    Memory does not grow with the checkpoint. Equal layouts and sources give equal bytes. Everything is written to
    ``DST.converting``, and one rename at the end makes DST appear. Killed at any time, or out of disk space, the same
    call again goes on after the last whole shard.

    Args:
        dst, restart, progress: as in `convert_checkpoint`.
        config: text of config.json; None for the source's own.
        check: called with the folder that is to become DST. Where it raises, DST does not appear, its error is
            raised, and the staging folder is kept with the error's text in ``report.txt``. What it writes into the
            folder becomes a part of DST; new files have names of `DESCRIBED`. It is not called where DST had just
            appeared.
    """
    source = values.checkpoint
    dst = destination(source.folder, dst)
    resumed: list[str] = []
    identity = {"plan": _digest(values, layout, config), "source": source.fingerprints}
    if restart or not os.path.lexists(f"{dst}.converting"):  # else it was looked at then
        with clear_errors(source.folder):
            look_at_centred(layout.tensors.values(), values)
    with ExitStack() as stack:
        with clear_errors(dst):
            files = {*_expected(source, layout), *DESCRIBED}
            staging = stack.enter_context(staging_for(dst, identity, files, restart=restart))
            published = staging.published  # by a run before this one, which was killed while it cleaned up
            if published:
                staging.clean_up()
        if not published:
            done = at = 0
            with closing(_write_shards(values, layout, staging, resumed)) as steps:
                for more_tensors, more_bytes in steps:
                    done, at = done + more_tensors, at + more_bytes
                    if progress is not None:
                        progress(done, at, layout.nbytes)
            with clear_errors(staging.model):
                _write_other_files(source, layout, config, staging.model)
                source.check_unchanged()
            if check is not None:
                try:
                    check(staging.model)
                except Exception as error:
                    with clear_errors(staging.folder):
                        (staging.folder / REPORT).write_text(f"{error}\n", encoding="utf-8")
                    raise
            with clear_errors(dst):
                staging.publish()
        digests = {name: done["sha256"] for name, done in staging.journal["shards"].items()}
    used = set().union(*(made.keys() for made in layout.tensors.values()))
    unused = tuple(sorted(source.tensors.keys() - used))
    return Written(
        dst, digests, len(layout.tensors), layout.nbytes, layout.changed, layout.added, unused, source.not_copied,
        len(layout.shards if published else resumed),
    )  # fmt: skip


def _write_other_files(source: Checkpoint, layout: ShardLayout, config: str | None, folder: Path) -> None:
    """Put everything but the shards in place, config.json last, and remove what a check that did not pass wrote."""
    for name in DESCRIBED - _expected(source, layout):
        (folder / name).unlink(missing_ok=True)
    for name in source.others:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / name, target)
    if layout.index is not None:
        (folder / INDEX).write_bytes(layout.index)
    if config is None:
        shutil.copyfile(source.folder / source.config_name, folder / source.config_name)
    else:
        (folder / source.config_name).write_text(config, encoding="utf-8")


def _expected(source: Checkpoint, layout: ShardLayout) -> set[str]:
    """Every file that is written before the check."""
    names = {*layout.shards, *source.others, source.config_name, *([INDEX] if layout.index is not None else [])}
    return {Path(name).as_posix() for name in names}


def _digest(values: Values, layout: ShardLayout, config: str | None) -> str:
    """Equal for what gives equal bytes alone."""
    tensors = {name: made.described() for name, made in layout.tensors.items()}
    given = {name: hashlib.sha256(*values.raw(name)).hexdigest() for name in values.given}
    files = {name: hashlib.sha256(header).hexdigest() for name, header in layout.headers.items()}
    index = layout.index and hashlib.sha256(layout.index).hexdigest()
    text = json.dumps([FORMAT, config, files, index, tensors, given], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _write_shards(
    values: Values, layout: ShardLayout, staging: Staging, resumed: list[str]
) -> Iterator[tuple[int, int]]:
    """Write what the journal does not have, and yield tensors and bytes done since the last time.

    A shard is written to a temporary file, every byte hashed on its way, flushed to the disk, and renamed.
    """
    finished = staging.journal["shards"]
    for name, held in layout.shards.items():
        target, header, size = staging.model / name, layout.headers[name], sum(tensor.nbytes for tensor in held)
        with clear_errors(target):
            # What a run that did not end says it wrote is read back: the disk may have lost it.
            if name in finished and target.exists() and _sha256_of(target) == finished[name]["sha256"]:
                resumed.append(name)
                yield len(held), size
                continue
            values.checkpoint.check_unchanged()
            sha = hashlib.sha256()
            with durable_file(target) as file, ExitStack() as stack:
                reserve(file, len(header) + size)
                flush = _Lane(lambda count: os.fsync(file), stack)
                lanes = [_Lane(partial(write_all, file), stack), _Lane(sha.update, stack)]
                for lane in lanes:
                    lane(header)
                unflushed = 0
                for tensor in held:
                    for data in layout.tensors[tensor.name].data(values):
                        for lane in lanes:
                            lane(data)
                        unflushed += len(data)
                        if unflushed >= FLUSHED:
                            flush(unflushed)
                            unflushed = 0
                        yield 0, len(data)
                    values.kept.clear()
                    yield 1, 0
                for lane in (*lanes, flush):
                    lane.wait()
                values.checkpoint.check_unchanged()  # before the rename: a mixture never gets a shard's name
            finished[name] = {"sha256": sha.hexdigest()}
            staging.save()


class _Lane:
    """Calls one function with piece after piece, in a thread beside the reading; at most `WAITING` pieces wait."""

    def __init__(self, function: Callable, stack: ExitStack):
        self._pool = stack.enter_context(ThreadPoolExecutor(1))
        self._function, self._waiting = function, deque()

    def __call__(self, data) -> None:
        if len(self._waiting) == WAITING:
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(self._function, data))

    def wait(self) -> None:
        """Until nothing is left to do; raises what the function raised."""
        while self._waiting:
            self._waiting.popleft().result()


def _sha256_of(path: Path) -> str:
    sha = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while data := file.read(COPIED):
            sha.update(data)
    return sha.hexdigest()


def changed_config(config: dict, changes: dict) -> str:
    """Text of a config with the changes set, dictionaries in it merged but for the record of another conversion."""

    def merged(config: dict, changes: dict) -> dict:
        both = (key for key in changes if key != RECORD_KEY and isinstance(config.get(key), dict))
        inner = {key: merged(config[key], changes[key]) for key in both if isinstance(changes[key], dict)}
        return {**config, **changes, **inner}

    return json.dumps(merged(config, changes), indent=2) + "\n"
