"""Killed, out of disk space or disturbed, a conversion loses nothing: DST appears
whole, and the same call goes on.
"""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys

import pytest
from checkpoints import contents, tiny, write_checkpoint, write_plan
from places import HELPERS, PYTHONPATH

from hf_rmsnorm.conversion import CentringPlan, ConversionError


def test_killed_at_every_boundary(tmp_path):
    command = [sys.executable, str(HELPERS / "crash_runs.py"), str(tmp_path)]
    env = os.environ | {"PYTHONPATH": PYTHONPATH}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert run.returncode == 0, run.stderr[-3000:]
    report = json.loads(run.stdout)
    for point in report.values():
        assert not point["wrong"], report
    # A finished shard is not made again.
    resumed = {name: point["resumed"] for name, point in report.items()}
    assert resumed["between the shards"] == resumed["within the second shard"]
    assert resumed["within the second shard"] == 1
    for name in ("after the last shard", "before DST appears", "after DST appears"):
        assert resumed[name] == 2


@pytest.fixture
def job(tmp_path):
    """(plan, source, DST), with what is written of it when all goes well."""
    shards, plan = tiny()
    src = write_checkpoint(tmp_path / "src", shards, metadata={"format": "pt"})
    (src / "tokenizer.json").write_text("{}")
    return plan, src, tmp_path / "dst"


def staging_of(dst):
    return dst.with_name(f"{dst.name}.converting")


def refused(job, *words, **options):
    """The error in one line with these words; DST is not there."""
    plan, src, dst = job
    with pytest.raises(ConversionError) as error:
        write_plan(plan, src, dst, **options)
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text
    assert not (dst / "config.json").exists()
    return text


def interrupt(job, tensors=5):
    """Stop within the second shard."""

    def progress(done, *_):
        if done >= tensors:
            raise KeyboardInterrupt

    plan, src, dst = job
    with pytest.raises(KeyboardInterrupt):
        write_plan(plan, src, dst, progress=progress)
    assert not dst.exists()


def assert_resumes(job, **options):
    """The same call ends with what an undisturbed one writes."""
    plan, src, dst = job
    undisturbed = dst.with_name("undisturbed")
    done = write_plan(plan, src, dst, **options)
    write_plan(plan, src, undisturbed)
    assert contents(dst) == contents(undisturbed)
    assert not staging_of(dst).exists()
    return done


def test_goes_on_after_the_last_whole_shard(job):
    interrupt(job)
    done = assert_resumes(job)
    assert done.resumed == 1


def test_a_finished_shard_that_the_disk_lost_is_made_again(job):
    interrupt(job)
    _, _, dst = job
    (path,) = staging_of(dst).glob("model/*.safetensors")
    size = path.stat().st_size
    os.truncate(path, size - 1)
    done = assert_resumes(job)
    assert done.resumed == 0


def test_an_unfinished_conversion_of_something_else_is_kept_until_restart(job):
    interrupt(job)
    _, src, dst = job
    staging = staging_of(dst)
    held = contents(staging)
    plan = CentringPlan(config={"x": 1})
    refused((plan, src, dst), str(staging), "another plan", "restart")
    assert contents(staging) == held
    write_plan(plan, src, dst, restart=True)
    written = (dst / "config.json").read_text()
    assert json.loads(written)["x"] == 1


def test_a_restart_keeps_no_shard_that_cannot_be_removed(job, monkeypatch):
    """A shard of the right size would be taken for one of this conversion."""
    interrupt(job)
    _, src, dst = job
    unlink = os.unlink

    def busy(path, *args, **how):
        if str(path).endswith(".safetensors"):
            raise PermissionError("another process uses it")
        unlink(path, *args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", busy)
        with pytest.raises(ConversionError, match="another process uses it"):
            write_plan(CentringPlan(config={"x": 1}), src, dst, restart=True)
    assert not dst.exists()


def test_a_source_that_changed_since_the_kill_is_noticed(job):
    interrupt(job)
    _, src, _ = job
    path = src / "model-00001-of-00002.safetensors"
    status = path.stat()
    later = status.st_mtime_ns + 1_000_000
    os.utime(path, ns=(status.st_atime_ns, later))
    refused(job, "source", "changed", "restart")
    assert_resumes(job, restart=True)


CHANGES = [
    ("model-00002-of-00002.safetensors", 1),
    ("model-00002-of-00002.safetensors", -300),
    ("tokenizer.json", 1),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_a_source_that_changes_half_way(job, name, change):
    _, src, _ = job
    path = src / name
    original = path.read_bytes()
    status = path.stat()

    def progress(tensors, *_):
        if tensors == 4:  # what is changed has yet to be read
            os.truncate(path, len(original) + change)

    refused(job, str(path), "changed", "restart", progress=progress)
    path.write_bytes(original)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert_resumes(job)


@pytest.mark.parametrize("held", ["journal.json", "mine.txt", "model/mine.txt"])
def test_a_folder_in_the_way_is_not_touched(job, held):
    _, _, dst = job
    staging = staging_of(dst)
    path = staging / held
    path.parent.mkdir(parents=True)
    path.write_text('{"mine": 1}')
    before = contents(dst.parent)
    for restart in (False, True):
        refused(job, str(staging), "in the way", restart=restart)
    assert contents(dst.parent) == before


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_dst_that_exists_is_not_touched(job, kind):
    _, _, dst = job
    if kind == "file":
        dst.write_text("mine")
    elif kind == "dangling link":
        dst.symlink_to(dst.parent / "nowhere")
    else:
        dst.mkdir()
    before = sorted(dst.parent.rglob("*"))
    refused(job, str(dst), "exists already")
    assert sorted(dst.parent.rglob("*")) == before


def test_dst_that_appears_meanwhile_is_not_touched(job):
    _, _, dst = job

    def progress(*_):
        dst.mkdir(exist_ok=True)

    refused(job, "exists already", progress=progress)
    dst.rmdir()
    done = assert_resumes(job)
    assert done.resumed == 2


def test_dst_inside_of_the_source(job):
    plan, src, _ = job
    refused((plan, src, src / "converted"), "inside of the source")


def test_two_conversions_into_one_dst(job):
    texts = []

    def progress(*_):
        if not texts:
            texts.append(refused(job))

    plan, src, dst = job
    write_plan(plan, src, dst, progress=progress)
    assert "another process is converting into it" in texts[0]
    shutil.rmtree(dst)
    assert_resumes(job)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB; only root may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command).returncode != 0:
        pytest.skip("it needs root; a failing call covers the same lines")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(job, small_disk):
    plan, src, on_a_large_disk = job
    dst = small_disk / "dst"
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (56 << 10))
    refused((plan, src, dst), "no space left", "free some space")
    filler.unlink()
    write_plan(plan, src, dst)
    assert not staging_of(dst).exists()
    write_plan(plan, src, on_a_large_disk)
    assert contents(dst) == contents(on_a_large_disk)


def test_a_read_only_disk(job, small_disk):
    plan, src, _ = job
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    dst = small_disk / "dst"
    refused((plan, src, dst), "read-only", "choose another DST")


def test_a_read_only_source(job):
    plan, src, dst = job
    for path in src.iterdir():
        path.chmod(0o400)
    src.chmod(0o500)
    before = contents(src)
    write_plan(plan, src, dst)
    assert contents(src) == before
    src.chmod(0o700)


CURES = {
    errno.ENOSPC: "again",
    errno.EIO: "again",
    errno.EACCES: "permission",
}


@pytest.mark.parametrize("call", ["fsync", "replace", "rename", "mkdir"])
@pytest.mark.parametrize("code", CURES)
def test_a_system_call_that_fails(job, monkeypatch, call, code):
    """One line, and the next run goes on."""
    text = os.strerror(code)

    def failing(*args, **options):
        raise OSError(code, text)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        refused(job, text[1:], CURES[code])
    assert_resumes(job)


def test_a_limit_of_the_file_size(job):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        refused(job, "too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_resumes(job)
