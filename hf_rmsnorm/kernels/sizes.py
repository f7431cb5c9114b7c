"""Launch shapes as pure functions of the hidden size: nothing is timed, tuned or searched at run time."""

from dataclasses import dataclass
from functools import cache

MAX_HIDDEN_SIZE = 16_384  # the widest row that registers hold; longer ones keep their own forward
MAX_HEAD_DIM = 512  # a tile of q or k holds several rows, and both halves of each
QK_PROGRAMS_PER_SM = 4  # of their backward: what its registers leave room for
CENTERED_SUMS_MAX = 8_192  # LayerNorm sums dweight and dbias beside dx; of wider rows without a gap they would spill
TILE_ELEMENTS = 2_048  # of a program at least, in several rows if need be: fewer would be launched too often
WARP_ELEMENTS = 1_024  # of a wide row in a forward: 32, four 16-byte bf16 loads, for each thread


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
    """Shape of one backward launch; `programs_per_sm` sizes the persistent grid (and so the partial sums).

    `flat` says that rows which lie one behind the other have code of their own; `sums_apart` that the gradients of the
    parameters have a launch of their own.
    """

    stages: int = 1
    reload_weight: bool = False
    gaps: int = 0
    flat: bool = True
    programs_per_sm: int = 1
    sums_apart: bool = False


@cache
def forward_config(hidden_size: int) -> TileConfig:
    block = next_power_of_2(hidden_size)
    # Rows that lie within a warp exchange no sums through shared memory: short ones do so in any of several.
    num_warps = 4 if block <= 256 else max(1, block // WARP_ELEMENTS)
    if block > WARP_ELEMENTS and 8 * hidden_size <= 5 * block:
        num_warps //= 2  # 40 elements a thread: of twice the warps each would hold 24, most of them behind the row
    return TileConfig(block, max(1, TILE_ELEMENTS // block), num_warps)


@cache
def qk_config(head_dim: int) -> TileConfig:
    """Forward and backward of q and k; heads of 512 with their tables would spill in fewer warps."""
    block = next_power_of_2(head_dim)
    return TileConfig(block, TILE_ELEMENTS // block, num_warps=4)


def qk_stages(itemsize: int, shared_limit: int) -> int:
    """As many stages of the backward of q and k as let all programs of a multiprocessor fit at once."""
    buffer = 4 * TILE_ELEMENTS * itemsize  # x, dy, cos and sin
    memory = shared_limit // QK_PROGRAMS_PER_SM - 1_024
    return max(1, min(3, 1 + memory // buffer))


@cache
def reduce_config(hidden_size: int) -> TileConfig:
    """The sum of partial rows: of few columns a program where there are few, and in one step or two on large chips."""
    block = min(64, max(16, next_power_of_2(hidden_size) // 128))
    return TileConfig(block, 8_192 // block, 8)


@cache
def backward_config(
    hidden_size: int,
    centered: bool,
    itemsize: int,
    shared_limit: int,
    gated: bool = False,
    added: bool = False,
    reads_bias: bool = False,
    from_output: bool = False,
    mixed: bool = False,
) -> BackwardConfig:
    """The shape for rows whose widest operand has `itemsize` bytes an element.

    Args:
        itemsize: bytes of an element of x, dy, the gate or the parameters, whichever is largest.
        shared_limit: bytes of shared memory that one program may use.
        added: whether the gradient of a residual stream is added to dx.
        reads_bias: whether the bias is read, with each row.
        from_output: whether it is the norm's output that is read.
        mixed: whether the weight has another dtype than x.
    """
    block = next_power_of_2(hidden_size)
    # 1,024 columns: one row already fills the tile, two would halve the programs that fit on an SM
    rows = 1 if block >= 1_024 else TILE_ELEMENTS // block
    # 16 elements a thread, or 8 and as many of the gate: it holds the sums of dweight and dbias besides. What lies
    # behind the row is not computed, where so fewer warps do: 24 elements a thread, or 40 where there are two sums.
    # More operands, or float32, would not fit into registers, nor as many programs into a small chip's memory.
    eighths, elements = 8, 16
    gaps = block >= 2_048 and not (gated or from_output or itemsize > 2)
    if gaps and (2 + added + reads_bias) * 65_536 <= shared_limit:
        if centered and block <= 8_192 and 8 * hidden_size <= 5 * block:
            eighths, elements = 5, 40
        elif 8 * hidden_size <= 6 * block:
            eighths, elements = 6, 24
    num_warps = min(16, max(4 * gated, rows * block * eighths // (8 * 32 * elements)))
    reload_weight = block > (4_096 if gated else 8_192)
    # Every stage but the first has a buffer in shared memory for x, dy, the bias and a weight copied with them
    # (twice for a gate's gradient); rstd, mean and the sums take less than 1 KB. A weight of another dtype changes
    # layout there, in the buffers where it is reloaded. Three stages load the next row ahead; two save registers.
    buffer = (2 + reload_weight * (2 * gated or mixed) + reads_bias + gated + added) * rows * block * itemsize
    stages = min(3, 1 + (shared_limit - 1_024 - mixed * (not reload_weight) * rows * block * itemsize // 2) // buffer)
    columns = 4_096 if gated else 8_192 if eighths == 8 or (centered and eighths == 6) else 16_384
    return BackwardConfig(
        block=block,
        rows=rows,
        num_warps=num_warps,
        stages=stages,
        reload_weight=reload_weight,
        gaps=block * eighths // 8 if eighths < 8 else 0,
        # Elsewhere such code takes registers: without a prefetch the one address of all operands is held with them.
        flat=stages > 1 and not (gated or from_output) and (rows == 1 or hidden_size == block),
        # As many as fit: one more would run alone, afterwards. A third operand takes registers, a gate most.
        programs_per_sm=min(4 if gated or added or from_output else 6, max(1, columns // block)),
        sums_apart=centered and block > CENTERED_SUMS_MAX and eighths == 8,
    )
