"""Launch shapes cover every column within what a chip has."""

import pytest

from hf_rmsnorm.kernels.sizes import (
    MAX_HIDDEN_SIZE,
    TILE_ELEMENTS,
    TILE_MAX,
    backward_config,
    forward_config,
    next_power_of_2,
)

SIZES = (1, 7, 64, 128, 1000, 1024, 2048, 2049, 4096, 8192, 8193, 14336, TILE_MAX, TILE_MAX + 1, MAX_HIDDEN_SIZE)
LIMITS = (65_536, 101_376, 232_448)  # gfx942, sm_86, sm_90


def test_powers_of_two():
    assert [next_power_of_2(n) for n in (1, 2, 3, 4, 5, 1023, 1025)] == [1, 2, 4, 4, 8, 1024, 2048]


@pytest.mark.parametrize("hidden_size", SIZES)
def test_a_tile_holds_the_row_or_the_loop_takes_it(hidden_size):
    config = forward_config(hidden_size)
    assert config.loop == (hidden_size > TILE_MAX)
    assert config.loop or hidden_size <= config.block < 2 * hidden_size
    assert config.rows * config.block >= min(TILE_ELEMENTS, config.block) and config.num_warps in (4, 8, 16)
    if config.rows > 1:
        assert config.rows * config.block == TILE_ELEMENTS, "short rows fill a tile together"


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("hidden_size", SIZES)
def test_the_backwards_buffers_fit_in_shared_memory(hidden_size, limit):
    for centered in (False, True):
        for itemsize in (2, 4):
            for gated, added in ((False, False), (True, False), (False, True)):
                config = backward_config(hidden_size, centered, itemsize, limit, gated, 1, added)
                assert config.loop or config.block >= hidden_size
                assert 1 <= config.stages <= 3 and config.programs_per_sm >= 1
                operands = 2 + config.reload_weight + gated + added
                assert (config.stages - 1) * operands * config.rows * config.block * itemsize <= limit


def test_gates_and_heads_keep_their_rows_in_registers():
    for hidden_size in (9_000, TILE_MAX):
        assert backward_config(hidden_size, True, 2, LIMITS[-1]).loop
        assert not backward_config(hidden_size, True, 2, LIMITS[-1], gated=True).loop
        assert not backward_config(hidden_size, True, 2, LIMITS[-1], heads=4).loop
