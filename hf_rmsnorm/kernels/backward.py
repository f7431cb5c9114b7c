"""Backward kernels, the closed form with g = dy * (weight_offset + weight):

    dx = rstd * (g - xhat * mean(g * xhat) [- mean(g) if centered]),  dweight = sum(dy * xhat),  dbias = sum(dy)

Parameter gradients are summed in float32, in a fixed order and without atomics: each program of a persistent grid
keeps one partial row in registers, and `reduce_partials` adds the rows. What nobody asked for (a None pointer) is not
computed.
"""

import triton
import triton.language as tl

from .common import load, round_hat, row_offsets, scale_of, store


@triton.jit
def norm_backward(
    DY, X, W, RSTD, MEAN, DX, DW, DB, rows_total,
    dy_len, dy_outer: tl.int64, dy_inner: tl.int64, x_len, x_outer: tl.int64, x_inner: tl.int64,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    OFFSET: tl.constexpr, ROUNDING: tl.constexpr, STAGES: tl.constexpr, RELOAD_W: tl.constexpr,
):  # fmt: skip
    """A persistent program walks tiles of ROWS rows, `num_programs` apart.

    Args:
        DY, X: rows of unit stride, addressed as in `norm_forward`, each with its own inner length.
        RSTD, MEAN: (rows_total,) float32 from the forward; MEAN is None for RMSNorm.
        DX: (rows_total, N), contiguous, or None.
        DW, DB: (num_programs, N) float32 partial sums, or None.
        STAGES: software pipeline depth of the loop (prefetch of the next tiles).
        RELOAD_W: wide rows: read the weight in every step instead of holding it, so that nothing spills.
    """
    cols = tl.arange(0, BLOCK)
    col_mask = (cols < N)[None, :]
    DENSE: tl.constexpr = BLOCK == N and ROWS == 1
    tile_cols = tl.broadcast_to(cols[None, :], (ROWS, BLOCK))  # gives the weight x's layout, as in `norm_forward`
    if W is not None and not RELOAD_W:
        w = load(W + tile_cols, col_mask, BLOCK == N)
    if DW is not None:
        dw = tl.zeros((ROWS, BLOCK), tl.float32)
    if DB is not None:
        db = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows_total, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        row_mask = rows < rows_total
        mask = row_mask[:, None] & col_mask
        x_at = row_offsets(rows, x_len, x_outer, x_inner, UNIT)[:, None] + cols[None, :]
        dy_at = row_offsets(rows, dy_len, dy_outer, dy_inner, UNIT)[:, None] + cols[None, :]
        x = load(X + x_at, mask, DENSE)
        dy = load(DY + dy_at, mask, DENSE)
        rstd = load(RSTD + rows, row_mask, ROWS == 1)
        x = x.to(tl.float32)
        if MEAN is not None:
            x = x - load(MEAN + rows, row_mask, ROWS == 1)[:, None]
            if BLOCK != N:
                x = tl.where(col_mask, x, 0.0)
        xhat = x * rstd[:, None]
        g = dy.to(tl.float32)
        if DW is not None:
            dw += g * round_hat(xhat, X, W, ROUNDING)
        if DB is not None:
            db += g
        if DX is not None:
            if W is not None:
                if RELOAD_W:
                    w = load(W + tile_cols, col_mask, BLOCK == N)
                g = g * scale_of(w, W, OFFSET, ROUNDING)
            along = tl.sum(g * xhat, axis=1) * (1.0 / N)
            if RELOAD_W or MEAN is not None:  # noqa: SIM108  by way of x fewer values are live across the sum
                dx = g - x * (along * rstd)[:, None]
            else:
                dx = g - xhat * along[:, None]
            if MEAN is not None:
                dx = dx - (tl.sum(g, axis=1) * (1.0 / N))[:, None]
            dx_at = tl.cast(rows, tl.int64)[:, None] * N + cols[None, :]
            store(DX + dx_at, dx * rstd[:, None], mask, DENSE)
    partial = tl.cast(tl.program_id(0), tl.int64) * N + cols
    if DW is not None:
        store(DW + partial, tl.sum(dw, axis=0), cols < N, BLOCK == N)
    if DB is not None:
        store(DB + partial, tl.sum(db, axis=0), cols < N, BLOCK == N)


@triton.jit
def norm_backward_loop(
    DY, X, W, RSTD, MEAN, DX,
    dy_len, dy_outer: tl.int64, dy_inner: tl.int64, x_len, x_outer: tl.int64, x_inner: tl.int64,
    N: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, OFFSET: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """dx of one row of any width in two passes; arguments as in `norm_backward`."""
    row = tl.program_id(0)
    x_row = X + row_offsets(row, x_len, x_outer, x_inner, UNIT)
    dy_row = DY + row_offsets(row, dy_len, dy_outer, dy_inner, UNIT)
    DENSE: tl.constexpr = N % BLOCK == 0
    rstd = tl.load(RSTD + row)
    mean = 0.0
    if MEAN is not None:
        mean = tl.load(MEAN + row)
    along = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        col_mask = cols < N
        xhat = (load(x_row + cols, col_mask, DENSE).to(tl.float32) - mean) * rstd
        g = load(dy_row + cols, col_mask, DENSE).to(tl.float32)  # zero in masked lanes
        if W is not None:
            g = g * scale_of(load(W + cols, col_mask, DENSE), W, OFFSET, ROUNDING)
        along += g * xhat
        if MEAN is not None:
            total += g
    mean_along = tl.sum(along, axis=0) * (1.0 / N)
    mean_g = tl.sum(total, axis=0) * (1.0 / N)
    for start in tl.range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        col_mask = cols < N
        xhat = (load(x_row + cols, col_mask, DENSE).to(tl.float32) - mean) * rstd
        g = load(dy_row + cols, col_mask, DENSE).to(tl.float32)
        if W is not None:
            g = g * scale_of(load(W + cols, col_mask, DENSE), W, OFFSET, ROUNDING)
        dx = g - xhat * mean_along
        if MEAN is not None:
            dx = dx - mean_g
        store(DX + tl.cast(row, tl.int64) * N + cols, dx * rstd, col_mask, DENSE)


@triton.jit
def norm_backward_columns(
    DY, X, W, RSTD, MEAN, DW, DB, rows_total, rows_per_program,
    dy_len, dy_outer: tl.int64, dy_inner: tl.int64, x_len, x_outer: tl.int64, x_inner: tl.int64,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Partial sums of dweight and dbias for wide rows: program (c, p) adds `rows_per_program` rows of BLOCK columns.

    Arguments as in `norm_backward`; DW and DB have one row per p. W serves only as the dtype xhat is rounded to.
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
            if MEAN is not None:
                xhat = xhat - tl.load(MEAN + rows, mask=row_mask, other=0.0)[:, None]
            xhat = xhat * tl.load(RSTD + rows, mask=row_mask, other=0.0)[:, None]
            dw += g * round_hat(xhat, X, W, ROUNDING)
        db += g
    partial = tl.cast(part, tl.int64) * N + cols
    if DW is not None:
        tl.store(DW + partial, tl.sum(dw, axis=0), mask=cols < N)
    if DB is not None:
        tl.store(DB + partial, tl.sum(db, axis=0), mask=cols < N)


@triton.jit
def reduce_partials(PARTIALS, OUT, parts, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """OUT[n] = sum over p of PARTIALS[p, n], in a fixed order, cast to OUT's dtype."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.range(0, parts, ROWS):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < parts)[:, None] & (cols < N)[None, :]
        total += tl.load(PARTIALS + tl.cast(rows, tl.int64)[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(OUT + cols, tl.sum(total, axis=0).to(OUT.dtype.element_ty), mask=cols < N)
