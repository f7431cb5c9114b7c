"""examples/norm_means.py: a conversion takes the mean out of every norm's input."""

import pytest
from places import EXAMPLES
from processes import python

from hf_rmsnorm import convert_checkpoint


def printed(model, cwd):
    """The mean of each norm's input, by path."""
    text = python(EXAMPLES / "norm_means.py", model, cwd=cwd)
    means = {}
    for line in text.splitlines():
        path, mean = line.split()
        means[path] = float(mean)
    return means


@pytest.mark.full
def test_the_means_are_gone_after_a_conversion(tmp_path):
    converted = tmp_path / "rms"
    convert_checkpoint("demo:gpt2", converted, verify=False)
    before = printed("demo:gpt2", tmp_path)
    after = printed(converted, tmp_path)
    assert len(before) == 11
    assert before.keys() == after.keys()
    assert max(after.values()) < 1e-6
    assert min(before.values()) > 1e-6
