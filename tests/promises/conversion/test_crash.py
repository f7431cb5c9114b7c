"""Whatever stops a conversion, the source stays whole, DST appears whole or not at all, and it can go on."""

import errno
import json
import os
import random
import resource
import shutil
import subprocess
import sys

import pytest
from checkpoints import contents, tiny, write_checkpoint, write_plan
from places import HELPERS, PYTHONPATH

from hf_rmsnorm.conversion import ConversionError
from hf_rmsnorm.conversion.plan import CentringPlan


@pytest.fixture
def job(tmp_path):
    """(plan, src, dst), and afterwards: the source is as it was."""
    shards, plan = tiny()
    src = write_checkpoint(tmp_path / "src", shards, metadata={"format": "pt"})
    (src / "tokenizer.json").write_text("{}")
    before = contents(src)
    yield plan, src, tmp_path / "dst"
    assert contents(src) == before


def staging_of(dst):
    return dst.with_name(dst.name + ".converting")


def assert_resumes(job, **arguments):
    """The same call again gives what an undisturbed one gives."""
    plan, src, dst = job
    result = write_plan(plan, src, dst, **arguments)
    whole = dst.with_name("undisturbed")
    write_plan(plan, src, whole)
    assert contents(dst) == contents(whole) and not staging_of(dst).exists()
    return result


def assert_refused(job, *words, **arguments):
    """One line with every word, DST absent."""
    plan, src, dst = job
    with pytest.raises(ConversionError) as error:
        write_plan(plan, src, dst, **arguments)
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text
    return text


@pytest.mark.full
@pytest.mark.parametrize(
    ("points", "seed"), [(20, 0), pytest.param(200, 1, marks=pytest.mark.nightly)], ids=["20", "200"]
)
def test_killed_at_any_point(tmp_path, points, seed):
    run = subprocess.run(
        [sys.executable, str(HELPERS / "crash_runs.py"), str(tmp_path), str(points), str(seed)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    report = json.loads(run.stdout)
    assert report["wrong"] == []
    # The kills fell where they were to: in the work, a few after the rename.
    assert report["killed"] >= 0.8 * points and report["resumed"] >= 0.5 * points and report["whole_at_kill"] > 0


def stopping_after(number):
    """A progress callback that raises when so many tensors are written."""

    def progress(tensors, *_):
        if tensors >= number:
            raise KeyboardInterrupt

    return progress


def interrupt(job, tensors=5):
    plan, src, dst = job
    with pytest.raises(KeyboardInterrupt):
        write_plan(plan, src, dst, progress=stopping_after(tensors))
    assert not dst.exists()


def test_goes_on_after_the_last_whole_shard(job):
    interrupt(job)
    assert assert_resumes(job).resumed == 1


def test_a_finished_shard_that_the_disk_lost_is_written_again(job):
    interrupt(job)
    path = next((staging_of(job[2]) / "model").glob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 1)
    assert assert_resumes(job).resumed == 0


def test_a_staging_folder_of_another_plan_is_kept_until_restart(job):
    interrupt(job)
    plan, src, dst = job
    held = contents(staging_of(dst))
    other = (CentringPlan(config={"x": 1}), src, dst)
    assert_refused(other, str(staging_of(dst)), "another plan", "restart")
    assert contents(staging_of(dst)) == held
    write_plan(*other, restart=True)
    assert json.loads((dst / "config.json").read_text())["x"] == 1
    assert contents(dst).keys() == contents(src).keys()  # nothing of the other plan


def test_a_staging_folder_of_another_source_is_kept_until_restart(job, tmp_path):
    interrupt(job)
    plan, src, dst = job
    shards, _ = tiny(hidden=24)
    plan = tiny(hidden=24)[1]
    other = write_checkpoint(tmp_path / "other", shards)
    assert_refused((plan, other, dst), "plan")
    interrupted = write_plan(plan, other, dst, restart=True)
    assert interrupted.resumed == 0


def test_a_source_that_changed_since_the_kill_is_noticed(job):
    interrupt(job)
    plan, src, dst = job
    path = next(src.glob("*.safetensors"))
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    assert_refused(job, "source", "changed", "restart")
    assert_resumes(job, restart=True)


OWN = {"identity": {"plan": "x", "source": {}}, "shards": {}, "publishing": False}
FOREIGN = {
    "no JSON": "{",
    "null": "null",
    "5": "5",
    "{}": "{}",
    "identity": json.dumps(OWN | {"identity": None}),
    "shards": json.dumps(OWN | {"shards": {"model.safetensors": 5}}),
    "a way out": json.dumps(OWN | {"files": ["../../mine.txt"]}),
}


@pytest.mark.parametrize("journal", FOREIGN)
def test_a_journal_of_another_shape_makes_no_folder_ours(job, journal):
    folder = staging_of(job[2])
    folder.mkdir()
    (folder / "journal.json").write_text(FOREIGN[journal])
    (folder / "mine.txt").write_text("x")
    (folder.parent / "mine.txt").write_text("x")
    before = contents(folder.parent)
    for restart in (False, True):
        assert_refused(job, str(folder), "in the way", restart=restart)
    assert contents(folder.parent) == before  # nor is there a lock of ours


@pytest.mark.parametrize("journal", [None, json.dumps(OWN)])
def test_a_lock_that_holds_something_makes_no_folder_ours(job, journal):
    folder = staging_of(job[2])
    folder.mkdir()
    (folder / "lock").write_text("hello")
    if journal:
        (folder / "journal.json").write_text(journal)
    before = contents(folder)
    assert_refused(job, str(folder), "in the way")
    assert_refused(job, "in the way", restart=True)
    assert contents(folder) == before


@pytest.mark.parametrize("restart", [False, True])
def test_a_file_beside_ours_stays_and_is_named(job, restart):
    interrupt(job)
    plan, src, dst = job
    for name in ("mine.txt", "mine.partial"):
        (staging_of(dst) / name).write_text("x")
    changed = CentringPlan(config={"x": 1}) if restart else plan
    with pytest.warns(UserWarning, match=r"dst.converting: stays, .*not write mine.partial, mine.txt"):
        write_plan(changed, src, dst, restart=restart)
    assert contents(staging_of(dst)).keys() == {"mine.txt", "mine.partial"} and dst.is_dir()


@pytest.mark.parametrize("restart", [False, True])
def test_a_file_among_ours_is_neither_removed_nor_published(job, restart):
    interrupt(job)
    plan, src, dst = job
    mine = staging_of(dst) / "model" / "mine.txt"
    mine.write_text("x")
    before = contents(staging_of(dst))
    changed = CentringPlan(config={"x": 1}) if restart else plan
    assert_refused((changed, src, dst), str(mine), "not written by the conversion", restart=restart)
    assert contents(staging_of(dst)) == before
    mine.unlink()
    write_plan(changed, src, dst, restart=restart)
    assert not staging_of(dst).exists()


def test_a_folder_in_the_way_is_not_touched(job):
    dst = job[2]
    staging_of(dst).mkdir()
    (staging_of(dst) / "mine").write_text("x")
    assert_refused(job, str(staging_of(dst)), "in the way")
    assert_refused(job, "in the way", restart=True)
    assert contents(staging_of(dst)).keys() == {"mine"}


@pytest.mark.parametrize("name", ["mine", "journal.json.partial.mine", "model/mine"])
def test_a_lock_alone_makes_no_folder_ours(job, name):
    dst = job[2]
    (staging_of(dst) / "model").mkdir(parents=True)
    (staging_of(dst) / "lock").touch()
    (staging_of(dst) / name).write_text("x")
    assert_refused(job, str(staging_of(dst)), "in the way")
    assert_refused(job, "in the way", restart=True)
    assert (staging_of(dst) / name).read_text() == "x"


@pytest.mark.parametrize("kind", ["full folder", "empty folder", "file", "dangling link"])
def test_dst_that_exists_is_not_touched(job, kind):
    dst = job[2]
    if kind == "file":
        dst.write_text("mine")
    elif kind == "dangling link":
        dst.symlink_to(dst.parent / "nowhere")
    else:
        dst.mkdir()
        if kind == "full folder":
            (dst / "mine").write_text("x")
    before = sorted(dst.parent.rglob("*"))
    assert_refused(job, str(dst), "exists already")
    assert sorted(dst.parent.rglob("*")) == before


def test_dst_that_appears_meanwhile_is_not_touched(job):
    dst = job[2]

    def check(folder):
        dst.mkdir()
        (dst / "mine").write_text("x")

    assert_refused(job, "exists already", check=check)
    assert contents(dst).keys() == {"mine"}
    shutil.rmtree(dst)
    assert assert_resumes(job).resumed == 2


def test_dst_inside_of_the_source(job):
    plan, src, _ = job
    assert_refused((plan, src, src / "converted"), "inside of the source")


@pytest.mark.parametrize("grown", [False, True])
def test_a_source_that_changes_half_way(job, grown):
    plan, src, dst = job
    path = sorted(src.glob("*.safetensors"))[1]
    original, status = path.read_bytes(), path.stat()

    def progress(tensors, *_):
        if tensors == 5:  # the first of the second shard; what is changed has yet to be read
            path.write_bytes(original + b"x" if grown else original[:-30] + b"x" + original[-29:])
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))

    assert_refused(job, str(path), "changed", "restart", progress=progress)
    assert not dst.exists()
    path.write_bytes(original)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert_resumes(job)


def test_a_source_that_shrinks_while_it_is_read(job):
    """A read past the end is an error, not zeros and not a crash."""
    plan, src, dst = job
    path = sorted(src.glob("*.safetensors"))[0]
    original, status = path.read_bytes(), path.stat()

    def progress(*_):
        os.truncate(path, 300)

    assert_refused(job, str(path), "changed", progress=progress)
    path.write_bytes(original)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert_resumes(job)


def test_another_file_that_changes_half_way(job):
    plan, src, dst = job
    path = src / "tokenizer.json"
    status = path.stat()
    assert_refused(job, str(path), "changed", progress=lambda *_: path.write_text("[1]"))
    assert not dst.exists()
    path.write_text("{}")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.full
def test_two_conversions_into_one_dst(job):
    texts = []

    def progress(*_):
        if not texts:
            command = [sys.executable, "-c", SECOND, *map(str, job[1:])]
            env = os.environ | {"PYTHONPATH": PYTHONPATH}
            run = subprocess.run(command, capture_output=True, text=True, env=env)
            texts.append(run.stdout or run.stderr)

    write_plan(*job, progress=progress)
    assert "another process is converting" in texts[0] and texts[0].count("\n") == 1, texts[0]
    shutil.rmtree(job[2])
    assert_resumes(job)


SECOND = """
import sys
from checkpoints import write_plan
from hf_rmsnorm.conversion import CentringPlan, ConversionError
try:
    write_plan(CentringPlan(), *sys.argv[1:])
except ConversionError as error:
    print(error)
"""


def test_a_check_that_fails_keeps_dst_away(job):
    plan, src, dst = job
    seen = []

    def check(folder):
        seen.append(contents(folder))
        (folder / "README.md").write_text("checked")
        raise RuntimeError("the logits differ")

    with pytest.raises(RuntimeError, match="the logits differ"):
        write_plan(plan, src, dst, check=check)
    assert not dst.exists()
    assert (staging_of(dst) / "report.txt").read_text() == "the logits differ\n"
    assert assert_resumes(job).resumed == 2  # and without the README of the failed check
    assert seen == [contents(dst)]


def test_what_a_check_writes_is_published(job):
    write_plan(*job, check=lambda folder: (folder / "README.md").write_text("checked"))
    assert (job[2] / "README.md").read_text() == "checked"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB; only root may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs root; the test with a failing write covers the same lines")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(job, small_disk):
    plan, src, _ = job
    dst = small_disk / "dst"
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (56 << 10))
    assert_refused((plan, src, dst), "no space left", "free some space")
    assert not dst.exists()
    filler.unlink()
    write_plan(plan, src, dst)
    assert not staging_of(dst).exists()
    write_plan(plan, src, job[2])
    assert contents(dst) == contents(job[2])


def test_a_read_only_disk(job, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert_refused((job[0], job[1], small_disk / "dst"), "read-only", "choose another DST")


CALLS = ["write", "fsync", "replace", "rename", "mkdir"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_a_system_call_that_fails(job, monkeypatch, call, code):
    """Wherever it fails, one line, and the next run goes on."""
    real, left = (
        getattr(os, call),
        [random.Random(CALLS.index(call) * 200 + code).randrange(6 if call != "rename" else 1)],
    )

    def failing(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        if call == "mkdir":
            left[0] = min(left[0], 1)  # it makes two folders
        assert_refused(job, os.strerror(code)[1:], "again" if code != errno.EACCES else "permission")
    assert not job[2].exists()
    assert_resumes(job)


def test_a_limit_of_the_file_size(job):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        text = assert_refused(job, "too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ".safetensors" in text
    assert_resumes(job)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(job, tmp_path):
    parent = tmp_path / "closed"
    parent.mkdir(mode=0o500)
    assert_refused((job[0], job[1], parent / "dst"), "permission denied")
