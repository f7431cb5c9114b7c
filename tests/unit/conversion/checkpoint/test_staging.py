"""The staging folder: who holds it, and what it asks of a system that is Windows, or has no POSIX locks."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import contents, tiny, write_checkpoint, write_plan
from filelock import FileLock
from places import HELPERS, PYTHONPATH

from hf_rmsnorm.conversion import ConversionError, convert_checkpoint
from hf_rmsnorm.conversion.checkpoint import staging as staging_module
from hf_rmsnorm.demo import demo_path


@pytest.fixture
def job(tmp_path):
    """(plan, src, dst)"""
    shards, plan = tiny()
    return plan, write_checkpoint(tmp_path / "src", shards, metadata={"format": "pt"}), tmp_path / "dst"


@pytest.fixture
def whole(job):
    """What an undisturbed conversion gives."""
    plan, src, dst = job
    write_plan(plan, src, dst.with_name("whole"))
    return contents(dst.with_name("whole"))


def test_a_folder_that_another_holds_is_left_to_it(job, whole):
    folder = job[2].with_name("dst.converting")
    folder.mkdir()
    with FileLock(folder / "lock"):
        with pytest.raises(ConversionError, match="another process is converting into it: wait for it"):
            write_plan(*job)
        assert {*os.listdir(folder)} == {"lock"} and not job[2].exists()
    write_plan(*job)
    assert contents(job[2]) == whole and not folder.exists()


def test_a_lock_whose_folder_was_removed_is_taken_in_a_new_one(job, whole, monkeypatch):
    """As when the process that held it finishes in between."""
    acquire, folder = FileLock.acquire, job[2].with_name("dst.converting")

    def late(lock, **options):
        monkeypatch.setattr(FileLock, "acquire", acquire)
        folder.rmdir()
        return acquire(lock, **options)

    monkeypatch.setattr(FileLock, "acquire", late)
    write_plan(*job)
    assert contents(job[2]) == whole and not folder.exists()


WITHOUT = """
import os, sys
sys.modules["fcntl"] = None  # importing it fails
for name in ("preadv", "pread", "posix_fallocate"):
    delattr(os, name)
from checkpoints import tiny, write_plan
write_plan(tiny()[1], *sys.argv[1:])
"""


@pytest.mark.full
def test_without_what_posix_alone_has(job, whole):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((PYTHONPATH, str(HELPERS)))}
    command = [sys.executable, "-c", WITHOUT, str(job[1]), str(job[2])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert contents(job[2]) == whole and not job[2].with_name("dst.converting").exists()


def held_open(path) -> list[str]:
    """What this process has open, or mapped, at a path or below it; Linux tells."""
    opened = [os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()]
    mapped = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return [name for name in opened + mapped if f"{name}/".startswith(f"{os.path.abspath(path)}/")]


@pytest.fixture
def windows(monkeypatch):
    """Refuse what Windows refuses: to open a folder, to flush what is open to be read, to move what is open."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("this system does not tell what is open")
    real, readers = {name: getattr(os, name) for name in ("open", "fsync", "unlink", "rename", "replace")}, {}

    def opened(path, flags, *args, **options):
        # A file without a name, by which filelock asks whether this system has flock. It does not ask on Windows.
        nameless = flags & TMPFILE == TMPFILE
        of_ours = "dir_fd" not in options and not nameless and Path(path).parts[1] != "proc"
        if of_ours and os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        fd = real["open"](path, flags & ~BINARY, *args, **options)
        readers[fd] = flags & (os.O_WRONLY | os.O_RDWR) == 0
        assert readers[fd] or flags & BINARY or flags & os.O_WRONLY == 0, f"{path} would get \\r in its bytes"
        return fd

    def fsync(fd):
        if readers[fd]:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real["fsync"](fd)

    def moving(name):
        def move(path, *args, **options):
            if held_open(path):
                raise PermissionError(errno.EACCES, "The process cannot access the file", str(path))
            return real[name](path, *args, **options)

        return move

    BINARY, TMPFILE = 1 << 30, getattr(os, "O_TMPFILE", 1 << 29)
    monkeypatch.setattr(os, "O_BINARY", BINARY, raising=False)
    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("unlink", "rename", "replace"):
        monkeypatch.setattr(os, name, moving(name))
    monkeypatch.setattr(staging_module, "WINDOWS", True)


def test_under_the_rules_of_windows(job, whole, windows):
    write_plan(*job)
    assert contents(job[2]) == whole and not job[2].with_name("dst.converting").exists()


@pytest.mark.full
def test_a_verified_model_is_published_under_the_rules_of_windows(tmp_path, windows):
    """Nothing of the models that were compared holds a file of the folder that gets DST's name."""
    convert_checkpoint(demo_path("gpt2"), tmp_path / "rms")
    assert {*os.listdir(tmp_path)} == {"rms"}


def test_the_rules_of_windows_are_tried(job, windows, monkeypatch):
    """Else the test above says nothing."""
    monkeypatch.setattr(staging_module, "WINDOWS", False)
    with pytest.raises(ConversionError, match="ermission denied|cannot access|Bad file"):
        write_plan(*job)
