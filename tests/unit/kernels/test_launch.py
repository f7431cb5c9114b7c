"""What the launch code hands to Triton: how often it compiles, for which types, and with which arguments."""

from functools import partial

import pytest
from probes import facts

pytest.importorskip("triton", reason="there is nothing to launch without Triton")
probe = partial(facts, "launch_probe.py")
TARGETS = ("sm_90", "gfx942")
LAUNCHED = {"norm_forward", "norm_forward_loop", "norm_backward", "norm_backward_loop", "norm_backward_columns",
            "reduce_partials"}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_neither_row_counts_nor_strides_compile_again(target):
    once = {"norm_forward": [1, 1], "norm_backward": [1, 1], "reduce_partials": [1, 1]}
    assert probe(target)["compiles_aligned"] == once


@pytest.mark.parametrize("target", TARGETS)
def test_unaligned_tensors_compile_once_more(target):
    twice = {"norm_forward": [2, 2], "norm_backward": [2, 2], "reduce_partials": [1, 1]}
    assert probe(target)["compiles_with_unaligned"] == twice


@pytest.mark.parametrize("target", TARGETS)
def test_a_residual_compiles_once_for_all_its_strides(target):
    both = {"norm_forward": [4, 2], "norm_backward": [4, 2], "reduce_partials": [1, 1]}
    assert probe(target)["compiles_with_residual"] == both  # two with, and Triton still holds the two without


@pytest.mark.parametrize("target", TARGETS)
def test_types_are_fixed_and_only_pointers_are_known_to_be_aligned(target):
    for name, source in probe(target)["sources"].items():
        kinds = {
            argument: kind for argument, kind in source["signature"].items() if argument != argument.upper()
        }  # pointers and constants are in capitals
        strides = ("outer", "x_inner", "dy_inner", "other_inner")
        expected = {a: "fp32" if a == "eps" else "i64" if a.endswith(strides) else "i32" for a in kinds}
        assert kinds == expected, name
        pointers = [a for a, kind in source["signature"].items() if kind.startswith("*")]
        assert source["aligned"] == pointers, name


@pytest.mark.parametrize("target", TARGETS)
def test_a_repeated_launch_passes_what_the_first_one_passed(target):
    repeats = probe(target)["repeats"]
    assert {name for first, _ in repeats for name, *_ in first} == LAUNCHED
    for first, again in repeats:
        assert first == again


@pytest.mark.parametrize("target", TARGETS)
def test_launch_hooks_of_triton_are_told_of_repeated_launches(target):
    names = ["norm_forward", "norm_backward", "reduce_partials"]
    assert probe(target)["hooked"] == names
    assert probe(target)["unhooked"] == [[None] * 3] * len(names)


def test_amd_compiles_again_for_storage_past_32_bit_offsets():
    small, large = probe("gfx942")["x_attributes"]
    assert small == ["tt.divisibility", "tt.pointer_range"]
    assert large == ["tt.divisibility"]

