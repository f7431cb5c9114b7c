"""What the launch code of the fused q/k norm hands to Triton: how often it compiles, for which types and arguments."""

from functools import partial

import pytest
from probes import facts

pytest.importorskip("triton", reason="there is nothing to launch without Triton")
probe = partial(facts, "launch_probe_qk.py")
TARGETS = ("sm_90", "gfx942")
STRIDES = ("_batch", "_position", "_head")


@pytest.mark.parametrize("target", TARGETS)
def test_fifty_shapes_and_layouts_compile_once_and_unaligned_ones_once_more(target):
    facts = probe(target)
    assert facts["shapes"] >= 50
    for which, count in (("aligned", 1), ("unaligned too", 2)):
        rows = [count, count if which == "aligned" else 1]  # what Triton holds, and the launch code since it forgot
        assert facts[which] == {"qk_norm_forward": rows, "qk_norm_backward": rows, "qk_reduce_partials": [1, 1]}


@pytest.mark.parametrize("target", TARGETS)
def test_types_are_fixed_and_only_pointers_are_known_to_be_aligned(target):
    sources = probe(target)["sources"]
    assert len(sources) == 6
    for name, source in sources.items():
        kinds = {a: kind for a, kind in source["signature"].items() if a != a.upper()}
        expected = {a: "fp32" if a == "eps" else "i64" if a.endswith(STRIDES) else "i32" for a in kinds}
        assert kinds == expected, name
        pointers = [a for a, kind in source["signature"].items() if kind.startswith("*")]
        assert source["aligned"] == pointers, name


@pytest.mark.parametrize("target", TARGETS)
def test_a_repeated_launch_passes_what_the_first_one_passed(target):
    for first, again in probe(target)["repeats"]:
        assert [name for name, *_ in first] == ["qk_norm_forward", "qk_norm_backward", "qk_reduce_partials"]
        assert first == again
