"""Kernels for the rotary embedding of queries and keys, with the norms in front of it if
there are any: both tensors in one launch.

A row is one head of one position: row r of a (batch, heads, length, N) tensor is head r
% heads of token r // heads. Every operand is addressed by its own three strides, so
that transposed and sliced views need no copy. Lengths and strides are run-time
arguments. The first programs take the rows of q and the others those of k; each side
has its own copy of the code, so that the compiler knows the pointer of each access.
"""

import triton
import triton.language as tl

from .device import load32, reciprocal_root, round_product, rounded, store
from .norm_forward import affine


@triton.jit
def divided(value, divisor):
    """(quotient, remainder) of unsigned values below 2^31, by the reciprocal of the
    divisor: all rows share it, and a loop computes it once.
    """
    divisor = tl.cast(divisor, tl.uint32)
    reciprocal = tl.full((), 0xFFFFFFFF, tl.uint32) // divisor
    quotient = tl.umulhi(value, reciprocal)
    rest = value - quotient * divisor
    # the product's upper half may be one less
    quotient = tl.where(rest < divisor, quotient, quotient + 1)
    rest = tl.where(rest < divisor, rest, rest - divisor)
    return quotient, rest


@triton.jit
def places(rows, length, heads):
    """(batch, position, head) of each row."""
    tokens, head = divided(rows.to(tl.uint32), heads)
    batch, position = divided(tokens, length)
    return batch, position, head


@triton.jit
def rows_of(tile, rows_total, length, heads, low_cols, high_cols, ROWS):
    """Of a tile: (its rows, which of them there are, the masks of both halves, the
    place of each row).
    """
    rows = tile * ROWS + tl.arange(0, ROWS)
    row_mask = rows < rows_total
    low_mask = row_mask[:, None] & low_cols
    high_mask = row_mask[:, None] & high_cols
    return rows, row_mask, low_mask, high_mask, places(rows, length, heads)


@triton.jit
def offsets(place, strides, UNIT):
    """Offset in elements of each row, as a column; the three strides arrive divided by
    UNIT, as in `row_offsets`.
    """
    at = place[0].to(tl.int64) * strides[0]
    at += place[1].to(tl.int64) * strides[1]
    at += place[2].to(tl.int64) * strides[2]
    return (at * UNIT)[:, None]


@triton.jit
def normed(xhat, X, W, at, mask, DENSE, OFFSET, ROUNDING):
    """A norm's result, in float32, with the rounding of a tensor that holds it before
    it is rotated.
    """
    y = affine(xhat, X, W, None, at, mask, DENSE, OFFSET, ROUNDING != "once", ROUNDING)
    if W is not None:
        y = round_product(y, X, W, ROUNDING)
    return rounded(y, X) if W is None or ROUNDING == "once" else y


@triton.jit
def halves(place, BLOCK, N, R):
    """(columns, masks) of the two halves of rows: two columns that turn with each other
    have one place in both.

    Of the R columns that rotate, the first half has the first R / 2 and the second half
    the next R / 2. The other columns are split in the same way. So a thread has both
    columns of a pair, and nothing is read or normalised twice.
    """
    HALF: tl.constexpr = (N + 1) // 2
    low = place
    high = place + HALF
    if R < N:
        low = tl.where(place < R // 2, place, place + R // 2)
        high = tl.where(place < R // 2, place + R // 2, high)
    return low, high, place < HALF, place < N - HALF


@triton.jit
def paired(place, low, high, R, PAIRS):
    """The columns of `halves`; PAIRS: of those that rotate, 2i and 2i + 1 are a pair."""
    if PAIRS:
        low = tl.where(place < R // 2, 2 * place, low)
        high = tl.where(place < R // 2, 2 * place + 1, high)
    return low, high


@triton.jit
def load_halves(at, low, high, low_mask, high_mask):
    """Both halves of rows in float32."""
    return load32(at + low, low_mask, False), load32(at + high, high_mask, False)


@triton.jit
def turned(value, other, cos, sin, Y, PLUS, ONCE):
    """value * cos +- other * sin, every operator rounded to Y's dtype; ONCE: none of
    them rounded.
    """
    along = value * cos
    across = other * sin
    if not ONCE:
        along = rounded(along, Y)
        across = rounded(across, Y)
    total = along + across if PLUS else along - across
    return total if ONCE else rounded(total, Y)


@triton.jit
def rotated(
    x,
    z,
    COS,
    SIN,
    at,
    low,
    high,
    turns,
    mask,
    Y,
    N,
    R,
    BACK,
    ONCE,
):
    """The halves x and z, turned by the tables at `at`; BACK: by the transposed map,
    which takes a gradient back.
    """
    mask = mask & turns
    cos, cos_z = load_halves(COS + at, low, high, mask, mask)
    sin, sin_z = load_halves(SIN + at, low, high, mask, mask)
    new_x = turned(x, z, cos, sin_z if BACK else sin, Y, BACK, ONCE)
    new_z = turned(z, x, cos_z, sin if BACK else sin_z, Y, not BACK, ONCE)
    if R < N:  # the columns behind them pass
        new_x = tl.where(turns, new_x, x)
        new_z = tl.where(turns, new_z, z)
    return new_x, new_z


@triton.jit
def rows_forward(
    X,
    W,
    COS,
    SIN,
    Y,
    RSTD,
    tile,
    stats_at,
    rows_total,
    length,
    heads,
    of_x,
    of_y,
    of_tables,
    eps,
    N,
    R,
    BLOCK,
    ROWS,
    UNIT,
    OFFSET,
    ROUNDING,
    ONCE,
    BACK,
    READ_PAIRS,
    WRITE_PAIRS,
    SHARED,
):
    """One tile of ROWS rows of one side; of_x, of_y and of_tables are strides of batch,
    position and head.
    """
    # The columns as whole tiles give weights, cos and sin x's layout: 16-byte loads, no
    # trip through shared memory.
    cols = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
    low, high, low_cols, high_cols = halves(cols, BLOCK, N, R)
    to_low, to_high = paired(cols, low, high, R, WRITE_PAIRS)
    low, high = paired(cols, low, high, R, READ_PAIRS)
    rows, row_mask, low_mask, high_mask, place = rows_of(
        tile, rows_total, length, heads, low_cols, high_cols, ROWS
    )
    # z is the other half of y
    y, z = load_halves(X + offsets(place, of_x, UNIT), low, high, low_mask, high_mask)
    if ROUNDING is not None:
        square = tl.sum(y * y + z * z, axis=1) * (1.0 / N)
        rstd = reciprocal_root(square, eps, False)
        if RSTD is not None:
            tl.store(RSTD + stats_at + rows, rstd, mask=row_mask)
        DENSE: tl.constexpr = 2 * BLOCK == N
        y = normed(y * rstd[:, None], X, W, low, low_cols, DENSE, OFFSET, ROUNDING)
        z = normed(z * rstd[:, None], X, W, high, high_cols, DENSE, OFFSET, ROUNDING)
    at = offsets(place, of_tables, UNIT)
    if SHARED:
        low = cols
        high = cols
    y, z = rotated(
        y, z, COS, SIN, at, low, high, cols < R // 2, low_mask, Y, N, R, BACK, ONCE
    )
    y_at = Y + offsets(place, of_y, UNIT)
    store(y_at + to_low, y, low_mask, False)
    store(y_at + to_high, z, high_mask, False)


@triton.jit
def qk_norm_forward(
    Q,
    K,
    WQ,
    WK,
    COS,
    SIN,
    YQ,
    YK,
    RSTD,
    tokens,
    length,
    q_heads,
    k_heads,
    q_batch: tl.int64,
    q_position: tl.int64,
    q_head: tl.int64,
    k_batch: tl.int64,
    k_position: tl.int64,
    k_head: tl.int64,
    yq_batch: tl.int64,
    yq_position: tl.int64,
    yq_head: tl.int64,
    yk_batch: tl.int64,
    yk_position: tl.int64,
    yk_head: tl.int64,
    rotary_batch: tl.int64,
    rotary_position: tl.int64,
    eps,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDING: tl.constexpr,
    ONCE: tl.constexpr,
    BACK: tl.constexpr,
    READ_PAIRS: tl.constexpr,
    WRITE_PAIRS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """One program normalises and rotates a tile of ROWS rows of q or of k.

    Args:
        Q, K: (batch, heads, length, N), columns of unit stride, addressed by *_batch,
            *_position and *_head.
        WQ, WK: (N,), or None both.
        COS, SIN: (batch or 1, length, R), less where SHARED: the first R columns
            rotate, as `halves` says.
        YQ, YK: the results, addressed as Q and K.
        RSTD: float32, one for each row of q and then of k; None where no backward
            follows.
        tokens: batch * length.
        BLOCK: columns of half a row, rounded up to a power of two.
        ROUNDING: as the formula rounds; None: no norm, the rotation alone.
        ONCE: the rotation is rounded only when it is stored; else after each operator.
        BACK: by the transposed map, which takes a gradient back; without a norm.
        READ_PAIRS, WRITE_PAIRS: columns of Q and K, and of YQ and YK, as `paired` says.
        SHARED: both columns of a pair read one of COS and SIN, that of its number.
    """
    q_rows = tokens * q_heads
    q_tiles = tl.cdiv(q_rows, ROWS)
    tile = tl.program_id(0)
    of_tables = (rotary_batch, rotary_position, 0)
    if tile < q_tiles:
        rows_forward(
            Q, WQ, COS, SIN, YQ, RSTD, tile, 0, q_rows, length, q_heads,
            (q_batch, q_position, q_head), (yq_batch, yq_position, yq_head), of_tables,
            eps, N, R, BLOCK, ROWS, UNIT, OFFSET, ROUNDING, ONCE, BACK, READ_PAIRS,
            WRITE_PAIRS, SHARED,
        )  # fmt: skip
    else:
        rows_forward(
            K, WK, COS, SIN, YK, RSTD, tile - q_tiles, q_rows, tokens * k_heads, length,
            k_heads, (k_batch, k_position, k_head), (yk_batch, yk_position, yk_head),
            of_tables, eps, N, R, BLOCK, ROWS, UNIT, OFFSET, ROUNDING, ONCE, BACK,
            READ_PAIRS, WRITE_PAIRS, SHARED,
        )  # fmt: skip
