"""The memory of a streamed conversion, measured in a process of its own."""

import json
from pathlib import Path

import pytest
from places import HELPERS
from processes import python

pytestmark = pytest.mark.full

MEBIBYTE = 1 << 20


def measure(folder, *numbers):
    return json.loads(python(HELPERS / "conversion_cost.py", folder, *numbers))


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="the peak is read from /proc, which Linux has",
)
@pytest.mark.parametrize(("mebibytes", "shards"), [(256, 1), (1024, 1), (1024, 4)])
def test_memory_does_not_grow_with_the_checkpoint(tmp_path, mebibytes, shards):
    """One shard of 128 MB is in memory, also where the source is one large file; and for
    as long as it is read, its largest tensor of 64 MB, in pages of the source.
    """
    used = measure(tmp_path, mebibytes, shards)
    assert used["largest_shard"] <= 129_000_000
    assert used["after"] - used["before"] <= 128 * MEBIBYTE + 224 * MEBIBYTE
