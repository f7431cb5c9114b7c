"""What the launch code hands to Triton: how often it compiles, for which types, and with which arguments."""

import pytest
from probes import facts

pytest.importorskip("triton", reason="there is nothing to launch without Triton")
pytestmark = pytest.mark.full
ROWS = {"norm_forward", "norm_backward", "reduce_partials"}
HEADS = {"qk_norm_forward", "qk_norm_backward", "qk_reduce_partials"}
STRIDES = ("outer", "x_inner", "dy_inner", "other_inner", "_batch", "_position", "_head")
families = pytest.mark.parametrize("family", ["rows", "heads"])


@pytest.fixture(scope="module", params=["sm_90", "gfx942"])
def found(request):
    return request.param, facts("launch_probe.py", request.param)


def test_row_counts_compile_nothing_again_and_gaps_between_rows_once_more(found):
    once = {"norm_forward": [2, 2], "norm_backward": [2, 2], "reduce_partials": [1, 1]}
    assert found[1]["rows"]["compiles_aligned"] == once


def test_unaligned_tensors_compile_once_more(found):
    twice = {"norm_forward": [4, 4], "norm_backward": [4, 4], "reduce_partials": [1, 1]}
    assert found[1]["rows"]["compiles_with_unaligned"] == twice


def test_a_residual_compiles_once_more_for_all_strides_with_gaps(found):
    both = {"norm_forward": [8, 4], "norm_backward": [8, 4], "reduce_partials": [1, 1]}
    assert found[1]["rows"]["compiles_with_residual"] == both  # four with, and Triton still holds the four without


def test_fifty_shapes_and_layouts_of_heads_compile_once_and_unaligned_ones_once_more(found):
    heads = found[1]["heads"]
    assert heads["shapes"] >= 50
    for which, count in (("aligned", 1), ("unaligned too", 2)):
        rows = [count, count if which == "aligned" else 1]  # what Triton holds, and the launch code since it forgot
        assert heads[which] == {"qk_norm_forward": rows, "qk_norm_backward": rows, "qk_reduce_partials": [1, 1]}


@families
def test_types_are_fixed_and_only_pointers_are_known_to_be_aligned(family, found):
    sources = found[1][family]["sources"]
    assert len(sources) == 6
    for name, source in sources.items():
        kinds = {
            argument: kind for argument, kind in source["signature"].items() if argument != argument.upper()
        }  # pointers and constants are in capitals
        expected = {a: "fp32" if a == "eps" else "i64" if a.endswith(STRIDES) else "i32" for a in kinds}
        assert kinds == expected, name
        pointers = [a for a, kind in source["signature"].items() if kind.startswith("*")]
        assert source["aligned"] == pointers, name


@families
def test_a_repeated_launch_passes_what_the_first_one_passed(family, found):
    repeats = found[1][family]["repeats"]
    assert {name for first, _ in repeats for name, *_ in first} == (ROWS if family == "rows" else HEADS)
    for first, again in repeats:
        assert first == again


def test_launch_hooks_of_triton_are_told_of_repeated_launches(found):
    names = ["norm_forward", "norm_backward", "reduce_partials"]
    assert found[1]["rows"]["hooked"] == names
    assert found[1]["rows"]["unhooked"] == [[None] * 3] * len(names)


def test_amd_compiles_again_for_storage_past_32_bit_offsets(found):
    target, facts = found
    small, large = facts["rows"].get("x_attributes", (["tt.divisibility"], ["tt.divisibility"]))
    assert small == ["tt.divisibility", *(["tt.pointer_range"] if target == "gfx942" else [])]
    assert large == ["tt.divisibility"]
