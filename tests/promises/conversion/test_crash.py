"""Killed, out of disk space or disturbed, a conversion loses nothing: DST appears
whole or not at all, and the same call begins anew.
"""

import errno
import json
import os
import resource
import shutil

import pytest
from checkpoints import contents, tiny, write_checkpoint, write_plan
from places import HELPERS
from processes import python

from hf_rmsnorm.conversion import ConversionError


def test_killed_at_every_boundary(tmp_path):
    report = json.loads(python(HELPERS / "crash_runs.py", tmp_path))
    assert not any(report.values()), report


@pytest.fixture
def job(tmp_path):
    """(plan, source, DST), with what is written of it when all goes well."""
    shards, plan = tiny()
    src = write_checkpoint(tmp_path / "src", shards, metadata={"format": "pt"})
    (src / "tokenizer.json").write_text("{}")
    return plan, src, tmp_path / "dst"


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


def assert_runs_anew(job):
    """The same call ends with what an undisturbed one writes, and nothing else."""
    plan, src, dst = job
    undisturbed = dst.with_name("undisturbed")
    before = {*dst.parent.iterdir()}
    assert before == {src}
    write_plan(plan, src, dst)
    write_plan(plan, src, undisturbed)
    assert contents(dst) == contents(undisturbed)
    assert {*dst.parent.iterdir()} == before | {dst, undisturbed}


def test_an_interrupt_leaves_nothing(job):
    def progress(done, *_):
        if done == 5:
            raise KeyboardInterrupt

    plan, src, dst = job
    with pytest.raises(KeyboardInterrupt):
        write_plan(plan, src, dst, progress=progress)
    assert_runs_anew(job)


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

    def progress(tensors, *_):
        if tensors == 4:
            os.truncate(path, len(original) + change)

    refused(job, str(path), "convert again", progress=progress)
    path.write_bytes(original)
    assert_runs_anew(job)


@pytest.mark.parametrize("held", ["mine.txt", "lock/mine.txt", "model/mine.txt"])
@pytest.mark.parametrize("token", ["old", "0a1b2c3d"])
def test_a_folder_of_another_program_is_not_touched(job, held, token):
    plan, src, dst = job
    path = dst.with_name(f"{dst.name}.converting-{token}") / held
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    write_plan(plan, src, dst)
    assert path.read_text() == "mine"


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
    assert_runs_anew(job)


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
    assert_runs_anew(job)


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


@pytest.mark.parametrize("call", ["rename", "mkdir"])
@pytest.mark.parametrize("code", CURES)
def test_a_system_call_that_fails(job, monkeypatch, call, code):
    """One line, and the next run begins anew."""
    text = os.strerror(code)

    def failing(*args, **options):
        raise OSError(code, text)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        refused(job, text[1:], CURES[code])
    assert_runs_anew(job)


def test_a_limit_of_the_file_size(job):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        refused(job, "too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_runs_anew(job)
