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
    assert not any(point["wrong"] for point in report.values()), report
    # A finished shard is not made again.
    resumed = {name: point["resumed"] for name, point in report.items()}
    assert resumed["between the shards"] == resumed["within the second shard"] == 1
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
    assert "\n" not in text and all(word in text for word in words), text
    assert not dst.is_dir() or not (dst / "config.json").exists()
    return text


def interrupt(job, tensors=5):
    """Stop within the second shard."""

    def progress(done, *_):
        if done >= tensors:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_plan(*job, progress=progress)
    assert not job[2].exists()


def assert_resumes(job, **options):
    """The same call ends with what an undisturbed one writes."""
    plan, src, dst = job
    done = write_plan(plan, src, dst, **options)
    write_plan(plan, src, dst.with_name("undisturbed"))
    assert contents(dst) == contents(dst.with_name("undisturbed"))
    assert not staging_of(dst).exists()
    return done


def test_goes_on_after_the_last_whole_shard(job):
    interrupt(job)
    assert assert_resumes(job).resumed == 1


def test_a_finished_shard_that_the_disk_lost_is_made_again(job):
    interrupt(job)
    path = next((staging_of(job[2]) / "model").glob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 1)
    assert assert_resumes(job).resumed == 0


def test_an_unfinished_conversion_of_something_else_is_kept_until_restart(job):
    interrupt(job)
    _, src, dst = job
    held = contents(staging_of(dst))
    other = (CentringPlan(config={"x": 1}), src, dst)
    refused(other, str(staging_of(dst)), "another plan", "restart")
    assert contents(staging_of(dst)) == held
    write_plan(*other, restart=True)
    assert json.loads((dst / "config.json").read_text())["x"] == 1


def test_a_source_that_changed_since_the_kill_is_noticed(job):
    interrupt(job)
    path = next(job[1].glob("*.safetensors"))
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1_000_000))
    refused(job, "source", "changed", "restart")
    assert_resumes(job, restart=True)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model-00002-of-00002.safetensors", 1),
        ("model-00002-of-00002.safetensors", -300),
        ("tokenizer.json", 1),
    ],
)
def test_a_source_that_changes_half_way(job, name, change):
    path = job[1] / name
    original, status = path.read_bytes(), path.stat()

    def progress(tensors, *_):
        if tensors == 4:  # what is changed has yet to be read
            os.truncate(path, len(original) + change)

    refused(job, str(path), "changed", "restart", progress=progress)
    path.write_bytes(original)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert_resumes(job)


@pytest.mark.parametrize("held", ["journal.json", "mine.txt", "model/mine.txt"])
def test_a_folder_in_the_way_is_not_touched(job, held):
    path = staging_of(job[2]) / held
    path.parent.mkdir(parents=True)
    path.write_text('{"mine": 1}')
    before = contents(job[2].parent)
    for restart in (False, True):
        refused(job, str(staging_of(job[2])), "in the way", restart=restart)
    assert contents(job[2].parent) == before


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_dst_that_exists_is_not_touched(job, kind):
    dst = job[2]
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
    refused(job, "exists already", progress=lambda *_: job[2].mkdir(exist_ok=True))
    assert not list(job[2].iterdir())
    job[2].rmdir()
    assert assert_resumes(job).resumed == 2


def test_dst_inside_of_the_source(job):
    with pytest.raises(ConversionError, match="inside of the source"):
        write_plan(job[0], job[1], job[1] / "converted")


def test_two_conversions_into_one_dst(job):
    texts = []

    def progress(*_):
        if not texts:
            texts.append(refused(job))

    write_plan(*job, progress=progress)
    assert "another process is converting into it" in texts[0]
    shutil.rmtree(job[2])
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
    plan, src, _ = job
    dst, filler = small_disk / "dst", small_disk / "filler"
    filler.write_bytes(b"x" * (56 << 10))
    refused((plan, src, dst), "no space left", "free some space")
    filler.unlink()
    write_plan(plan, src, dst)
    assert not staging_of(dst).exists()
    write_plan(*job)
    assert contents(dst) == contents(job[2])


def test_a_read_only_disk(job, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    refused((job[0], job[1], small_disk / "dst"), "read-only", "choose another DST")


def test_a_read_only_source(job):
    for path in (*job[1].iterdir(), job[1]):
        path.chmod(0o500 if path.is_dir() else 0o400)
    before = contents(job[1])
    write_plan(*job)
    assert contents(job[1]) == before
    job[1].chmod(0o700)


@pytest.mark.parametrize("call", ["fsync", "replace", "rename", "mkdir"])
@pytest.mark.parametrize(
    ("code", "cure"),
    [(errno.ENOSPC, "again"), (errno.EIO, "again"), (errno.EACCES, "permission")],
)
def test_a_system_call_that_fails(job, monkeypatch, call, code, cure):
    """One line, and the next run goes on."""

    def failing(*args, **options):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        refused(job, os.strerror(code)[1:], cure)
    assert_resumes(job)


def test_a_limit_of_the_file_size(job):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        refused(job, "too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_resumes(job)
