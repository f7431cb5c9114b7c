"""Forward kernels: one tile of whole rows per program, and a two-pass loop for rows too wide for registers.

Every size, rounding and presence of an operand (a None pointer) is a compile-time constant; row counts, the inner
length and strides are not, so a new batch or sequence length compiles nothing.
"""

import triton
import triton.language as tl

from .common import load, round_hat, row_offsets, scale_of, store


@triton.jit
def affine(xhat, X, W, B, Y, cols, col_mask, DENSE: tl.constexpr, OFFSET: tl.constexpr, ROUNDING: tl.constexpr):
    """weight and bias applied to xhat (float32, columns last) with the formula's rounding; float32 out."""
    y = round_hat(xhat, X, W, ROUNDING)
    if W is not None:
        y = y * scale_of(load(W + cols, col_mask, DENSE), W, OFFSET, ROUNDING)
    if B is not None:
        if ROUNDING != "once":  # there the product is a tensor of its own, already rounded
            y = y.to(Y.dtype.element_ty).to(tl.float32)
        y = y + load(B + cols, col_mask, DENSE).to(tl.float32)
    return y


@triton.jit
def norm_forward(
    X, W, B, Y, RSTD, MEAN, rows_total, inner, x_outer: tl.int64, x_inner: tl.int64, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    CENTERED: tl.constexpr, OFFSET: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """One program normalises ROWS whole rows of N elements held in registers.

    Args:
        X: rows of unit stride, row r at (r // inner) * x_outer * UNIT + (r % inner) * x_inner * UNIT.
        W, B: (N,) or None.
        Y: (rows_total, N), contiguous.
        RSTD, MEAN: (rows_total,) float32, or None where no backward follows (MEAN also where not CENTERED).
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    col_mask = cols < N
    row_mask = rows < rows_total
    # A one-row tile never hangs over the last row: the grid is exact.
    DENSE: tl.constexpr = BLOCK == N and ROWS == 1
    mask = row_mask[:, None] & col_mask[None, :]
    x_at = row_offsets(rows, inner, x_outer, x_inner, UNIT)[:, None] + cols[None, :]
    y_at = tl.cast(rows, tl.int64)[:, None] * N + cols[None, :]
    x = load(X + x_at, mask, DENSE).to(tl.float32)
    if CENTERED:
        mean = tl.sum(x, axis=1) * (1.0 / N)
        # The mean of what is left corrects the rounding of a large mean; a constant row becomes exactly zero.
        x = x - mean[:, None]
        if BLOCK != N:
            x = tl.where(col_mask[None, :], x, 0.0)
        rest = tl.sum(x, axis=1) * (1.0 / N)
        mean = mean + rest
        x = x - rest[:, None]
        if BLOCK != N:
            x = tl.where(col_mask[None, :], x, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / N) + eps)
    if RSTD is not None:
        tl.store(RSTD + rows, rstd, mask=row_mask)
    if MEAN is not None:
        tl.store(MEAN + rows, mean, mask=row_mask)
    # The weight is read as a whole tile: it then has x's layout, so 16-byte loads and no trip through shared memory.
    tile = tl.broadcast_to(cols[None, :], (ROWS, BLOCK))
    y = affine(x * rstd[:, None], X, W, B, Y, tile, col_mask[None, :], BLOCK == N, OFFSET, ROUNDING)
    store(Y + y_at, y, mask, DENSE)


@triton.jit
def norm_forward_loop(
    X, W, B, Y, RSTD, MEAN, rows_total, inner, x_outer: tl.int64, x_inner: tl.int64, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    CENTERED: tl.constexpr, OFFSET: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """One program normalises one row of any width in two passes; the second reads the row again, from L2.

    Arguments as in `norm_forward`; ROWS is 1. The mean and variance of LayerNorm come from one Welford recurrence per
    lane (Welford 1962), merged at the end, so that a large mean costs no accuracy.
    """
    row = tl.program_id(0)
    x_row = X + row_offsets(row, inner, x_outer, x_inner, UNIT)
    y_row = Y + tl.cast(row, tl.int64) * N
    DENSE: tl.constexpr = N % BLOCK == 0
    squares = tl.zeros((BLOCK,), tl.float32)
    if CENTERED:
        lane_mean = tl.zeros((BLOCK,), tl.float32)
        lane_count = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        col_mask = cols < N
        x = load(x_row + cols, col_mask, DENSE).to(tl.float32)
        if CENTERED:
            lane_count += col_mask.to(tl.float32)
            delta = tl.where(col_mask, x - lane_mean, 0.0)
            lane_mean += delta / tl.maximum(lane_count, 1.0)
            squares += delta * (x - lane_mean)
        else:
            squares += x * x
    if CENTERED:
        # Summed as differences from one lane's mean: a large mean then costs no accuracy, a constant row none at all.
        lane = tl.max(tl.where(lane_count > 0, lane_mean, -float("inf")), axis=0)
        mean = lane + tl.sum((lane_mean - lane) * lane_count, axis=0) * (1.0 / N)
        delta = lane_mean - mean
        squares += lane_count * delta * delta
    rstd = tl.rsqrt(tl.sum(squares, axis=0) * (1.0 / N) + eps)
    if RSTD is not None:
        tl.store(RSTD + row, rstd)
    if MEAN is not None:
        tl.store(MEAN + row, mean)
    for start in tl.range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        col_mask = cols < N
        xhat = load(x_row + cols, col_mask, DENSE).to(tl.float32)
        if CENTERED:
            xhat = xhat - mean
        y = affine(xhat * rstd, X, W, B, Y, cols, col_mask, DENSE, OFFSET, ROUNDING)
        store(y_row + cols, y, col_mask, DENSE)
