"""The memory and the time of a streamed conversion, measured in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import HELPERS, PYTHONPATH

pytestmark = pytest.mark.full

MEBIBYTE = 1 << 20


def measure(what, folder, *numbers):
    script = str(HELPERS / "conversion_cost.py")
    command = [sys.executable, script, what, str(folder), *map(str, numbers)]
    env = os.environ | {"PYTHONPATH": PYTHONPATH}
    run = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=env)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.mark.nightly
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="the peak is read from /proc, which Linux has",
)
@pytest.mark.parametrize(("mebibytes", "shards"), [(256, 2), (4096, 4)])
def test_memory_does_not_grow_with_the_checkpoint(tmp_path, mebibytes, shards):
    used = measure("memory", tmp_path, mebibytes, shards)
    before = used["before"]
    after = used["after"]
    shard = used["largest_shard"]
    assert shard >= mebibytes // shards * MEBIBYTE
    assert after <= 2 * shard + 300 * MEBIBYTE
    # The same for both: what is in memory does not depend on the checkpoint, whose
    # largest tensor has 64 MiB.
    assert after - before <= 160 * MEBIBYTE


@pytest.mark.nightly
def test_time_is_that_of_a_copy(tmp_path):
    """At most 1.5 times safetensors' load and save of the same shards, both to the
    disk: the best of five turns.

    It means something on a machine that does nothing else.
    """
    times = measure("time", tmp_path, 768, 3, 5)
    copy = min(times["copy_to_disk"])
    assert min(times["convert"]) <= 1.5 * copy, times
