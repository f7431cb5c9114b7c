"""The staging folder beside DST: locked, journalled, resumable, published by one rename.

``DST.converting/`` holds ``lock``, ``journal.json`` (what is made from what, the names of the files in ``model``, and
the hash of each finished shard), ``model/`` (what becomes DST; every file in it is whole) and the file that is being
written, ``*.partial``. The journal makes the folder ours, and names are removed that a conversion gives, no others.
"""

import errno
import json
import os
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from .shard import ConversionError

LOCK, JOURNAL, REPORT, PARTIAL = "lock", "journal.json", "report.txt", ".partial"
WINDOWS = os.name == "nt"  # which opens no folder, and neither flushes what is open to be read nor removes what is open


def write_all(fd: int, data) -> None:
    """Write every byte; os.write may take fewer."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def reserve(fd: int, size: int) -> None:
    """Have the disk set the bytes of a file aside: a full one says so now, and writing them is faster."""
    try:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # a file system that cannot
            raise


def sync(path: Path) -> None:
    """Make a file's bytes durable, or, but on Windows, the names in a folder."""
    if WINDOWS and path.is_dir():
        return
    fd = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def durable_file(target: Path, partial: Path | None = None) -> Iterator[int]:
    """A file descriptor to write to; at the end the file is on the disk and then has its name, or it has it never."""
    partial = partial or target.parent.parent / (target.name + PARTIAL)
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(partial, target)
    sync(target.parent)


class Staging:
    """The staging folder of one DST, while this process holds its lock."""

    def __init__(self, dst: Path, identity: dict, files: Collection[str]):
        self.dst, self.folder = dst, dst.with_name(f"{dst.name}.converting")
        self.model = self.folder / "model"  # which becomes DST
        self.lock = FileLock(self.folder / LOCK)
        self.journal = {"identity": identity, "files": sorted(files), "shards": {}, "publishing": False}

    @property
    def published(self) -> bool:
        """DST is the model that was here: the process was killed after the rename."""
        return self.journal["publishing"] and not self.model.exists() and os.path.lexists(self.dst)

    def save(self) -> None:
        """Write the journal, all of it or nothing."""
        with durable_file(self.folder / JOURNAL, self.folder / (JOURNAL + PARTIAL)) as fd:
            write_all(fd, json.dumps(self.journal, indent=1).encode())

    def publish(self) -> None:
        """Make every file durable and give the folder the name DST, then clean up."""
        for parent, _, names in os.walk(self.model):
            for name in (*names, ""):  # the folder itself last
                sync(Path(parent, name))
        self.journal["publishing"] = True
        self.save()
        if os.path.lexists(self.dst):
            raise already_exists(self.dst)
        os.rename(self.model, self.dst)
        sync(self.dst.parent)
        self.clean_up()

    def clean_up(self) -> None:
        """Remove the staging folder; the journal goes last, so that a kill in between can be told from a start."""
        _remove(self.folder, _beside(self.journal))
        if WINDOWS:
            self.lock.release()
        for name in (LOCK, JOURNAL):
            (self.folder / name).unlink(missing_ok=True)
        if left := sorted(os.listdir(self.folder)):
            warnings.warn(f"{self.folder}: stays, as the conversion did not write {', '.join(left)}", stacklevel=2)
        else:
            self.folder.rmdir()


def _beside(journal: dict) -> list[str]:
    """Names of the files beside ``model``, but for lock and journal."""
    return [REPORT, *(name + PARTIAL for name in (JOURNAL, *journal.get("files", ())))]


def _remove(folder: Path, names: Iterable[str]) -> None:
    """Remove these files of a folder, and its folders that held them where they are empty then."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    for parent in sorted({parent for name in names for parent in Path(name).parents[:-1]}, reverse=True):
        with suppress(OSError):
            (folder / parent).rmdir()


def destination(src: str | os.PathLike | None, dst: str | os.PathLike) -> Path:
    """DST as an absolute path; refused inside of the source, if there is one, and where it exists or cannot be made."""
    dst = Path(os.path.abspath(dst))
    if src is not None and Path(os.path.realpath(dst.parent)).is_relative_to(os.path.realpath(src)):
        raise ConversionError(f"{dst}: lies inside of the source, which is only read: choose another DST")
    if os.path.lexists(dst) and not os.path.lexists(f"{dst}.converting"):
        raise already_exists(dst)
    home = next(parent for parent in dst.parents if os.path.lexists(parent))
    if not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
        what = "is read-only, or gives no permission to write" if home.is_dir() else "is no folder"
        raise ConversionError(f"{dst}: {home} {what}: choose another DST")
    return dst


def already_exists(dst: Path) -> ConversionError:
    return ConversionError(f"{dst}: exists already: choose another DST, or move it away")


@contextmanager
def staging_for(dst: Path, identity: dict, files: Collection[str] = (), *, restart: bool = False) -> Iterator[Staging]:
    """The staging folder of DST, made or taken up where a conversion of the same identity stopped.

    Args:
        dst: absolute path.
        identity: ``{"plan": hash, "source": fingerprints}``, as JSON would give it back.
        files: relative to DST, every file that it may get.
        restart: begin anew where the folder is of another identity, which is refused otherwise.
    """
    staging = Staging(dst, identity, files)
    if os.path.lexists(dst) and not (staging.folder / JOURNAL).exists():
        raise already_exists(dst)
    if os.path.lexists(staging.folder):
        _read_journal(staging)  # before the lock, which would be one more file of ours in another's folder
    with _locked(staging.folder, staging.lock):
        found = _read_journal(staging)
        same = found is not None and found["identity"] == identity
        if same:
            staging.journal |= {name: found[name] for name in ("shards", "publishing")}
        if os.path.lexists(dst) and not staging.published:
            if found is None:  # made above, just after another process published DST
                staging.clean_up()
            raise already_exists(dst)
        if found is not None and not same and not restart:
            what = "by another plan" if found["identity"]["plan"] != identity["plan"] else "of another source"
            cure = "finish that one, or drop it by restart=True"
            raise ConversionError(f"{staging.folder}: an unfinished conversion {what}, or of before it changed: {cure}")
        if not staging.published:
            written = set((found or {}).get("files", ()))
            if left := [
                path for path in _files(staging.model) if path.relative_to(staging.model).as_posix() not in written
            ]:
                raise ConversionError(f"{left[0]}: not written by the conversion: move it, or choose another DST")
            if not same:
                _remove(staging.model, written)
            _remove(staging.folder, _beside(found or {}))
            staging.journal["publishing"] = False
            staging.model.mkdir(exist_ok=True)
            staging.save()
        yield staging


def _files(folder: Path) -> list[Path]:
    return [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]


def _read_journal(staging: Staging) -> dict | None:
    """What is in the journal of a folder of ours, None before there is one; refused where the folder is another's."""
    folder, model, lock = staging.folder, staging.model, staging.folder / LOCK
    try:
        journal = json.loads((folder / JOURNAL).read_bytes())
        ours = _is_journal(journal)
    except ValueError:
        ours = False
    except (FileNotFoundError, NotADirectoryError):
        journal = None
        present = {*os.listdir(folder)} if folder.is_dir() else {folder.name}
        begun = LOCK in present and present <= {LOCK, JOURNAL + PARTIAL, model.name}  # what precedes a journal
        ours = not present or (begun and not _files(model))
    held = lock.is_file() and lock.stat().st_size and FileLock is not SoftFileLock  # which alone writes into it
    if not ours or held or model.is_symlink() or (model.exists() and not model.is_dir()):
        raise ConversionError(f"{folder}: in the way, of another program: move it, or choose another DST")
    return journal


def _is_journal(found) -> bool:
    """Whether a conversion may have written this, and the names in it stay inside of its folder."""
    match found:
        case {"identity": {"plan": str(), "source": dict()}, "shards": dict(shards), "publishing": bool()}:
            names = found.get("files", [])
            whole = isinstance(names, list) and all(isinstance(name, str) for name in names)
            inside = whole and not any(Path(name).anchor or ".." in Path(name).parts for name in names)
            return inside and all(isinstance(s, dict) and isinstance(s.get("sha256"), str) for s in shards.values())
    return False


@contextmanager
def _locked(folder: Path, lock: FileLock) -> Iterator[None]:
    while not lock.is_locked:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except (FileNotFoundError, Timeout):  # or the other process finished and removed the folder in between
            if (folder / LOCK).exists():
                busy = "another process is converting into it: wait for it, or choose another DST"
                raise ConversionError(f"{folder}: {busy}") from None
    try:
        yield
    finally:
        lock.release()  # as the end of the process does
