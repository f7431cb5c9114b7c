"""Backward of rows too wide for registers: one kernel for dx, one for the gradients of the parameters."""

import triton
import triton.language as tl

from .backward import eps_outside_factor, sums
from .device import hat_of_output, load, round_hat, row_offsets, scale_of, store, wide


@triton.jit
def hat_and_gradient(
    x_row, dy_row, W, B, mean, cols, col_mask, DENSE: tl.constexpr,
    OFFSET: tl.constexpr, ROUND_OFFSET: tl.constexpr, FROM_OUTPUT: tl.constexpr,
):  # fmt: skip
    """(x - mean, or xhat FROM_OUTPUT; g) of some columns of one row; g is zero in masked lanes."""
    x = wide(load(x_row + cols, col_mask, DENSE))
    g = wide(load(dy_row + cols, col_mask, DENSE))
    scale = None
    if W is not None:
        scale = scale_of(wide(load(W + cols, col_mask, DENSE)), W, OFFSET, ROUND_OFFSET)
        g = g * scale
    if FROM_OUTPUT:
        return hat_of_output(x, scale, B, cols, col_mask, DENSE, False), g
    return x - mean, g


@triton.jit
def norm_backward_loop(
    DY, X, W, B, DH, RSTD, MEAN, DX,
    dy_len, dy_outer: tl.int64, dy_inner: tl.int64, x_len, x_outer: tl.int64, x_inner: tl.int64,
    other_len, other_outer: tl.int64, other_inner: tl.int64, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, CENTERED: tl.constexpr, OFFSET: tl.constexpr,
    ROUND_OFFSET: tl.constexpr, ROUNDING: tl.constexpr, EPS_OUTSIDE: tl.constexpr, FROM_OUTPUT: tl.constexpr,
):  # fmt: skip
    """dx of one row of any width in two passes; arguments as in `norm_backward`."""
    row = tl.program_id(0)
    x_row = X + row_offsets(row, x_len, x_outer, x_inner, UNIT)
    dy_row = DY + row_offsets(row, dy_len, dy_outer, dy_inner, UNIT)
    DENSE: tl.constexpr = N % BLOCK == 0
    rstd = tl.load(RSTD + row)
    mean = 0.0
    if CENTERED and not FROM_OUTPUT:
        mean = tl.load(MEAN + row)
    along = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        col_mask = cols < N
        if FROM_OUTPUT:  # g * xhat without the scale that the one has and the other is divided by
            g = load(dy_row + cols, col_mask, DENSE).to(tl.float32)
            if W is not None:
                scale = scale_of(load(W + cols, col_mask, DENSE), W, OFFSET, ROUND_OFFSET)
                g = tl.where(scale == 0.0, 0.0, g)
            along += g * load(x_row + cols, col_mask, DENSE).to(tl.float32)
            if B is not None:
                along -= g * load(B + cols, col_mask, DENSE).to(tl.float32)
            if W is not None:
                g = g * scale
        else:
            x, g = hat_and_gradient(x_row, dy_row, W, B, mean, cols, col_mask, DENSE, OFFSET, ROUND_OFFSET, FROM_OUTPUT)
            along += g * x
        if EPS_OUTSIDE:
            squares += x * x
        if CENTERED:
            total += g
    total, along = sums(total, along, 0, CENTERED)
    # rstd multiplies these sums, not what is added up.
    along = along * (1.0 / N) * (rstd if FROM_OUTPUT else rstd * rstd * rstd)
    total = total * (1.0 / N) * rstd
    if EPS_OUTSIDE:
        along = along * eps_outside_factor(tl.sum(squares, axis=0) * (1.0 / N), eps)
    for start in tl.range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        col_mask = cols < N
        x, g = hat_and_gradient(x_row, dy_row, W, B, mean, cols, col_mask, DENSE, OFFSET, ROUND_OFFSET, FROM_OUTPUT)
        dx = g * rstd
        if CENTERED:
            dx = dx - total
        dx = dx - x * along
        if DH is not None:
            other_at = row_offsets(row, other_len, other_outer, other_inner, UNIT)
            dx = dx + load(DH + other_at + cols, col_mask, DENSE).to(tl.float32)
        store(DX + tl.cast(row, tl.int64) * N + cols, dx, col_mask, DENSE)


@triton.jit
def norm_backward_columns(
    DY, X, W, B, RSTD, MEAN, DW, DB, rows_total, rows_per_program,
    dy_len, dy_outer: tl.int64, dy_inner: tl.int64, x_len, x_outer: tl.int64, x_inner: tl.int64,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    CENTERED: tl.constexpr, OFFSET: tl.constexpr, ROUND_OFFSET: tl.constexpr, ROUNDING: tl.constexpr,
    EPS_OUTSIDE: tl.constexpr, FROM_OUTPUT: tl.constexpr,
):  # fmt: skip
    """Partial sums of dweight and dbias for wide rows: program (c, p) adds `rows_per_program` rows of BLOCK columns.

    Arguments as in `norm_backward`; DW and DB have one row per p. Unless FROM_OUTPUT, W is only the dtype that xhat is
    rounded to.
    """
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    col_mask = (cols < N)[None, :]
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    db = tl.zeros((ROWS, BLOCK), tl.float32)
    end = tl.minimum((part + 1) * rows_per_program, rows_total)
    for first in tl.range(part * rows_per_program, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        row_mask = rows < end
        mask = row_mask[:, None] & col_mask
        x_at = row_offsets(rows, x_len, x_outer, x_inner, UNIT)[:, None] + cols[None, :]
        dy_at = row_offsets(rows, dy_len, dy_outer, dy_inner, UNIT)[:, None] + cols[None, :]
        g = tl.load(DY + dy_at, mask=mask, other=0.0).to(tl.float32)
        if DW is not None:
            xhat = tl.load(X + x_at, mask=mask, other=0.0).to(tl.float32)
            if FROM_OUTPUT:
                scale = None
                if W is not None:
                    scale = scale_of(load(W + cols[None, :], col_mask, False), W, OFFSET, ROUND_OFFSET)
                xhat = hat_of_output(xhat, scale, B, cols[None, :], col_mask, False, True)
            else:
                if CENTERED:
                    xhat = xhat - tl.load(MEAN + rows, mask=row_mask, other=0.0)[:, None]
                xhat = xhat * tl.load(RSTD + rows, mask=row_mask, other=0.0)[:, None]
            dw += g * round_hat(xhat, X, W, ROUNDING)
        db += g
    partial = tl.cast(part, tl.int64) * N + cols
    if DW is not None:
        tl.store(DW + partial, tl.sum(dw, axis=0), mask=cols < N)
    if DB is not None:
        tl.store(DB + partial, tl.sum(db, axis=0), mask=cols < N)
