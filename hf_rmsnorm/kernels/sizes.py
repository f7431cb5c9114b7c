"""Launch shapes as pure functions of the hidden size: nothing is timed, tuned or
searched at run time.
"""

from dataclasses import dataclass
from functools import cache

# the widest row that registers hold; longer ones keep their own forward
MAX_HIDDEN_SIZE = 16_384
MAX_HEAD_DIM = 512  # a tile of q or k holds several rows, and both halves of each
QK_PROGRAMS_PER_SM = 4  # of their backward: what its registers leave room for
# of a program at least, in several rows if need be: fewer would be launched too often
TILE_ELEMENTS = 2_048
# of a wide row in a forward: 32, four 16-byte bf16 loads, for each thread
WARP_ELEMENTS = 1_024


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class TileConfig:
    """Shape of one launch: `block` columns by `rows` rows a program."""

    block: int
    rows: int
    num_warps: int


@dataclass(frozen=True)
class BackwardConfig(TileConfig):
    """Shape of one backward launch; `programs_per_sm` sizes the persistent grid (and so
    the partial sums).

    `reload_weight`: as the kernel's RELOAD_W. `gaps`: columns behind which registers
    hold nothing, or 0. `flat`: rows without gaps between them have their own code.
    """

    stages: int = 1
    reload_weight: int = 0
    gaps: int = 0
    flat: bool = True
    programs_per_sm: int = 1


@cache
def forward_config(hidden_size: int) -> TileConfig:
    block = next_power_of_2(hidden_size)
    # Rows that lie within a warp exchange no sums through shared memory: short ones do
    # so in any of several.
    num_warps = 4 if block <= 256 else max(1, block // WARP_ELEMENTS)
    if block > WARP_ELEMENTS and 8 * hidden_size <= 5 * block:
        # 40 elements a thread: of twice the warps each would hold 24, most of them
        # behind the row
        num_warps //= 2
    return TileConfig(block, max(1, TILE_ELEMENTS // block), num_warps)


@cache
def qk_config(head_dim: int) -> TileConfig:
    """Forward and backward of q and k; heads of 512 with their tables would spill in
    fewer warps.
    """
    block = next_power_of_2(head_dim)
    return TileConfig(block, TILE_ELEMENTS // block, num_warps=4)


def qk_stages(itemsize: int, shared_limit: int) -> int:
    """As many stages of the backward of q and k as let all programs of a multiprocessor
    fit at once.
    """
    buffer = 4 * TILE_ELEMENTS * itemsize  # x, dy, cos and sin
    memory = shared_limit // QK_PROGRAMS_PER_SM - 1_024
    return max(1, min(3, 1 + memory // buffer))


@cache
def reduce_config(hidden_size: int) -> TileConfig:
    """The sum of partial rows: of few columns a program where there are few, and in one
    step or two on large chips.
    """
    block = min(64, max(16, next_power_of_2(hidden_size) // 128))
    return TileConfig(block, 8_192 // block, 8)


@dataclass(frozen=True)
class BackwardCase:
    """Everything on which the shape of a backward depends.

    Args:
        itemsize: bytes of an element of x, dy, the gate or the parameters, whichever is
            largest.
        shared_limit: bytes of shared memory that one program may use.
        added: the gradient of a residual stream is added to dx.
        reads_bias: the bias is read, with each row.
        from_output: the norm's output is read, not its input.
        mixed: the weight has another dtype than x.
    """

    hidden_size: int
    centered: bool
    itemsize: int
    shared_limit: int
    gated: bool = False
    added: bool = False
    reads_bias: bool = False
    from_output: bool = False
    mixed: bool = False

    @property
    def block(self) -> int:
        return next_power_of_2(self.hidden_size)

    @property
    def rows(self) -> int:
        # One row of 1,024 columns already fills the tile: two would halve the programs
        # that fit on a multiprocessor.
        if self.block >= 1_024:
            return 1
        return TILE_ELEMENTS // self.block

    @property
    def reload_weight(self) -> bool:
        return self.block > (4_096 if self.gated else 8_192)


@cache
def backward_config(case: BackwardCase) -> BackwardConfig:
    """The shape for such rows."""
    block = case.block
    rows = case.rows
    eighths = _filled_eighths(case)
    stages = _stages(case)
    reload_weight = 0
    if case.reload_weight:
        late = stages > 1 and not case.gated and not case.mixed
        reload_weight = 2 if late else 1
    is_simple = not (case.gated or case.from_output)
    return BackwardConfig(
        block=block,
        rows=rows,
        num_warps=_warps(case, eighths),
        stages=stages,
        reload_weight=reload_weight,
        gaps=block * eighths // 8 if eighths < 8 else 0,
        # Elsewhere such code takes registers: without a prefetch the one address of all
        # operands is held with them.
        flat=stages > 1 and is_simple and (rows == 1 or case.hidden_size == block),
        programs_per_sm=_programs(case, eighths),
    )


def _filled_eighths(case: BackwardCase) -> int:
    """How many eighths of a tile are computed; the registers behind them hold nothing
    in every thread.

    More operands, or float32, would not fit into the registers of fewer warps, nor as
    many programs into the memory of a small chip.
    """
    if case.block < 2_048 or case.gated or case.from_output or case.itemsize > 2:
        return 8
    if (2 + case.added + case.reads_bias) * 65_536 > case.shared_limit:
        return 8
    if case.centered and case.block <= 8_192 and 8 * case.hidden_size <= 5 * case.block:
        return 5
    if 8 * case.hidden_size <= 6 * case.block:
        return 6
    return 8


def _warps(case: BackwardCase, eighths: int) -> int:
    """Warps for 16 elements a thread, which holds the sums of dweight and dbias
    besides; 8 and as many of the gate.

    A tile with a gap has more elements a thread in fewer warps: 24, or 40 where there
    are two sums.
    """
    columns_of_a_warp = {8: 512, 6: 1_024, 5: 2_048}[eighths]
    warps = case.rows * case.block // columns_of_a_warp
    least = 4 if case.gated else 1
    return min(16, max(least, warps))


def _stages(case: BackwardCase) -> int:
    """How many stages fit: three load the next row ahead; two save registers.

    Every stage but the first has a buffer in shared memory for x, dy, the bias and a
    weight copied with them; twice for a gate's gradient. rstd, mean and the sums take
    less than 1 KB. A weight of another dtype changes layout there: in the buffers where
    it is reloaded.
    """
    tile = case.rows * case.block * case.itemsize
    buffers = 2 + case.reads_bias + case.gated + case.added
    converted = 0
    if case.reload_weight:
        buffers += 2 if case.gated else case.mixed
    elif case.mixed:
        converted = tile // 2
    memory = case.shared_limit - 1_024 - converted
    return min(3, 1 + memory // (buffers * tile))


def _programs(case: BackwardCase, eighths: int) -> int:
    """As many programs as fit on a multiprocessor: one more would run alone,
    afterwards.
    """
    columns = 16_384
    if eighths == 8 or (case.centered and eighths == 6):
        columns = 4_096 if case.gated else 8_192
    # A third operand takes registers, a gate most.
    most = 4 if case.gated or case.added or case.from_output else 6
    return min(most, max(1, columns // case.block))
