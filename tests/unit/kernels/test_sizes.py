"""Launch shapes cover every column within what a chip has."""

import itertools

import pytest

from hf_rmsnorm.kernels.sizes import (
    MAX_HIDDEN_SIZE,
    TILE_ELEMENTS,
    WARP_ELEMENTS,
    BackwardCase,
    forward_config,
    reduce_config,
)
from hf_rmsnorm.kernels.sizes import backward_config as config_of

SIZES = (
    1, 7, 64, 128, 300, 1000, 1024, 2048, 2049, 4096, 8192, 5120, 5121, 8193, 14336,
    MAX_HIDDEN_SIZE,
)  # fmt: skip
LIMITS = (65_536, 101_376, 166_912, 232_448)  # gfx942, sm_86, sm_80, sm_90


def backward_config(*args, **options):
    return config_of(BackwardCase(*args, **options))


@pytest.mark.parametrize("hidden_size", SIZES)
def test_a_tile_holds_the_row(hidden_size):
    config = forward_config(hidden_size)
    assert hidden_size <= config.block < 2 * hidden_size
    assert config.rows * config.block == max(TILE_ELEMENTS, config.block), (
        "short rows share a program"
    )
    if config.block > 256:
        few = config.block > WARP_ELEMENTS and 8 * hidden_size <= 5 * config.block
        assert config.num_warps * WARP_ELEMENTS * (1 + few) == max(
            WARP_ELEMENTS, config.block
        )


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("hidden_size", SIZES)
def test_the_backwards_buffers_fit_in_shared_memory(hidden_size, limit):
    """`tests/tools/test_aot.py` says the same of what was compiled."""
    flags = itertools.product((False, True), repeat=5)
    for itemsize, (centered, gated, added, biased, mixed) in itertools.product(
        (2, 4), flags
    ):
        how = {"gated": gated, "added": added, "reads_bias": biased, "mixed": mixed}
        config = backward_config(hidden_size, centered, itemsize, limit, **how)
        assert config.block >= hidden_size
        assert 1 <= config.stages <= 3
        assert config.programs_per_sm >= 1
        tile = config.rows * config.block * itemsize
        operands = 2 + gated + added + biased
        taken = 0
        if config.reload_weight == 1:  # of a weight that is loaded ahead
            operands += 2 if gated else mixed
        elif mixed and not config.reload_weight and config.stages > 1:
            taken = tile // 2
        assert (config.stages - 1) * operands * tile + taken <= limit


@pytest.mark.parametrize(
    "hidden_size, block, rows",
    [(1, 16, 512), (2_048, 16, 512), (2_049, 32, 256), (8_192, 64, 128)],
)
def test_partial_rows_are_summed_by_about_as_many_programs_as_a_chip_has_multiprocessors(
    hidden_size, block, rows
):
    config = reduce_config(hidden_size)
    assert (config.block, config.rows, config.num_warps) == (block, rows, 8)


@pytest.mark.parametrize(
    "hidden_size, gated, added, config",
    [
        # columns, rows, warps, stages, how the weight is read anew, programs on a
        # multiprocessor
        (64, False, False, (64, 32, 4, 3, 0, 6)),
        (64, True, False, (64, 32, 4, 3, 0, 4)),
        (64, False, True, (64, 32, 4, 3, 0, 4)),
        (1_024, True, False, (1_024, 1, 4, 3, 0, 4)),
        (2_048, False, False, (2_048, 1, 4, 3, 0, 4)),
        (4_096, True, False, (4_096, 1, 8, 3, 0, 1)),
        (8_192, True, False, (8_192, 1, 16, 2, 1, 1)),
        (8_193, False, False, (16_384, 1, 16, 2, 2, 1)),
        (MAX_HIDDEN_SIZE, False, True, (16_384, 1, 16, 2, 2, 1)),
        (MAX_HIDDEN_SIZE, True, False, (16_384, 1, 16, 1, 1, 1)),
    ],
)
def test_backwards_in_float32_on_sm_90(hidden_size, gated, added, config):
    made = backward_config(hidden_size, False, 4, LIMITS[-1], gated, added)
    shape = made.block, made.rows, made.num_warps
    assert (*shape, made.stages, made.reload_weight, made.programs_per_sm) == config


@pytest.mark.parametrize(
    "hidden_size, gaps, warps, programs",
    [
        (1_024, False, 2, 6),
        (1_025, True, 2, 6),
        (1_537, False, 4, 4),
        (2_560, True, 4, 4),
        (3_073, False, 8, 2),
        (5_120, True, 8, 2),
        (6_145, False, 16, 1),
        (12_289, False, 16, 1),
    ],
)
def test_what_lies_behind_a_row_of_two_bytes_an_element_is_not_computed(
    hidden_size, gaps, warps, programs
):
    config = backward_config(hidden_size, False, 2, LIMITS[-1])
    assert (config.num_warps, config.programs_per_sm) == (warps, programs)
    assert config.gaps == (config.block // 4 * 3 if gaps else 0)
    for how in ({"gated": True}, {"from_output": True}):
        assert not backward_config(hidden_size, False, 2, LIMITS[-1], **how).gaps
    assert not backward_config(hidden_size, False, 4, LIMITS[-1]).gaps
    # for as many programs as there are then
    assert not backward_config(hidden_size, False, 2, 131_071).gaps
    assert backward_config(hidden_size, False, 2, 131_072).gaps == config.gaps


@pytest.mark.parametrize(
    "hidden_size, eighths, warps, programs",
    [
        (1_024, 0, 2, 6),
        (1_025, 5, 1, 6),
        (1_281, 6, 2, 4),
        (1_537, 0, 4, 4),
        (2_561, 6, 4, 2),
        (3_073, 0, 8, 2),
        (5_121, 6, 8, 1),
        (6_145, 0, 16, 1),
    ],
)
def test_two_sums_of_a_row_take_fewer_warps_or_fewer_programs(
    hidden_size, eighths, warps, programs
):
    config = backward_config(hidden_size, True, 2, LIMITS[-1])
    assert config.gaps == config.block // 8 * eighths
    assert (config.num_warps, config.programs_per_sm) == (warps, programs)
