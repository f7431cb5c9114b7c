"""The backward of the norms of queries and keys, and of the rotary embedding behind them."""

import triton
import triton.language as tl

from .backward import eps_outside_factor, reduce_partials
from .device import load, round_hat, scale_of
from .qk import halves, mean_of_rows, offsets, places, rotated, tile_rows, tiles_of


@triton.jit
def reciprocal(divisor):
    """What `divided` takes: 2^32 / divisor, rounded down."""
    return tl.full((), 0xFFFFFFFF, tl.uint32) // tl.cast(divisor, tl.uint32)


@triton.jit
def rows_backward(
    DY, X, W, COS, SIN, RSTD, MEAN, DX, DW, DB, part, parts, stats_at, rows_total, length, heads, of_dy, of_x, of_dx,
    of_tables, eps, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, WHOLE: tl.constexpr,
    UNIT: tl.constexpr, R: tl.constexpr, CENTERED: tl.constexpr, OFFSET: tl.constexpr, ROUND_OFFSET: tl.constexpr,
    ROUNDING: tl.constexpr, EPS_OUTSIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every `parts`-th tile of one side from `part` on; DW and DB are where this program's partial sums go.

    A program sees the same heads in each tile: there are as many programs as tiles of a token, or some times as many.
    """
    dense: tl.constexpr = 2 * BLOCK == N and not HEADS
    cols = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
    low, high, low_cols, high_cols = halves(cols, BLOCK, N, R)
    of_low, of_high, low_kept, high_kept = low, high, low_cols, high_cols  # where the parameters of these columns are
    if HEADS:
        _, heads_mask, head = tile_rows(part, rows_total, ROWS, HEADS)
        of_low, of_high = low + (head * N)[:, None], high + (head * N)[:, None]
        low_kept, high_kept = low_cols & heads_mask[:, None], high_cols & heads_mask[:, None]
    if W is not None:
        scale = scale_of(load(W + of_low, low_kept, dense), W, OFFSET, ROUND_OFFSET)
        scale_z = scale_of(load(W + of_high, high_kept, dense), W, OFFSET, ROUND_OFFSET)
    if DB is not None:
        db = tl.zeros((ROWS, BLOCK), tl.float32)
        db_z = tl.zeros((ROWS, BLOCK), tl.float32)
    if DW is not None:
        dw = tl.zeros((ROWS, BLOCK), tl.float32)
        dw_z = tl.zeros((ROWS, BLOCK), tl.float32)
    inverse_length = reciprocal(length)
    inverse_heads = reciprocal(heads)
    for tile in tl.range(part, tiles_of(rows_total, ROWS, HEADS), parts, num_stages=STAGES):
        rows, row_mask, _ = tile_rows(tile, rows_total, ROWS, HEADS)
        low_mask = row_mask[:, None] & low_cols
        high_mask = row_mask[:, None] & high_cols
        place = places(rows, length, heads, inverse_length, inverse_heads)
        x_at = X + offsets(place, of_x, UNIT)
        x = load(x_at + low, low_mask, False).to(tl.float32)
        z = load(x_at + high, high_mask, False).to(tl.float32)  # the other half, as in the forward
        dy_at = DY + offsets(place, of_dy, UNIT)
        g = load(dy_at + low, low_mask, False).to(tl.float32)
        g_z = load(dy_at + high, high_mask, False).to(tl.float32)
        if COS is not None:
            at = offsets(place, of_tables, UNIT)
            g, g_z = rotated(g, g_z, COS, SIN, at, low, high, cols < R // 2, low_mask, DY, N, R, True, False)
        rstd = load(RSTD + stats_at + rows, row_mask, False)[:, None]
        if CENTERED:
            mean = load(MEAN + stats_at + rows, row_mask, False)[:, None]
            x = tl.where(low_cols, x - mean, 0.0)
            z = tl.where(high_cols, z - mean, 0.0)
        xhat = x * rstd
        zhat = z * rstd
        if DB is not None:
            db += g
            db_z += g_z
        if DW is not None:
            # By name: the compiler contracts nothing where products of the rotation are to be rounded.
            dw = tl.fma(g, round_hat(xhat, X, W, ROUNDING), dw)
            dw_z = tl.fma(g_z, round_hat(zhat, X, W, ROUNDING), dw_z)
        if DX is not None:
            if W is not None:
                g = g * scale
                g_z = g_z * scale_z
            along = mean_of_rows(tl.fma(g, xhat, g_z * zhat), N, HEADS, WHOLE)[:, None]
            if EPS_OUTSIDE:
                along = along * eps_outside_factor(mean_of_rows(x * x + z * z, N, HEADS, WHOLE), eps)[:, None]
            dx = tl.fma(xhat, -along, g)
            dz = tl.fma(zhat, -along, g_z)
            if CENTERED:
                mean = mean_of_rows(g + g_z, N, HEADS, WHOLE)[:, None]
                dx = dx - mean
                dz = dz - mean
            dx_at = DX + offsets(place, of_dx, UNIT)
            tl.store(dx_at + low, (dx * rstd).to(DX.dtype.element_ty), mask=low_mask)
            tl.store(dx_at + high, (dz * rstd).to(DX.dtype.element_ty), mask=high_mask)
    if HEADS:
        if DW is not None:
            tl.store(DW + of_low, dw, mask=low_kept)
            tl.store(DW + of_high, dw_z, mask=high_kept)
        if DB is not None:
            tl.store(DB + of_low, db, mask=low_kept)
            tl.store(DB + of_high, db_z, mask=high_kept)
    else:
        low, high, low_cols, high_cols = halves(tl.arange(0, BLOCK), BLOCK, N, R)
        if DW is not None:
            tl.store(DW + low, tl.sum(dw, axis=0), mask=low_cols)
            tl.store(DW + high, tl.sum(dw_z, axis=0), mask=high_cols)
        if DB is not None:
            tl.store(DB + low, tl.sum(db, axis=0), mask=low_cols)
            tl.store(DB + high, tl.sum(db_z, axis=0), mask=high_cols)


@triton.jit
def partial_at(part, N: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """Where the partial sums of a program are: those that have tiles of one token share a row of all heads."""
    if HEADS:
        return tl.cast(part // ((HEADS + ROWS - 1) // ROWS), tl.int64) * (HEADS * N)
    else:
        return tl.cast(part, tl.int64) * N


@triton.jit
def qk_norm_backward(
    DYQ, DYK, Q, K, WQ, WK, COS, SIN, RSTD, MEAN, DXQ, DXK, DW, DB, q_parts, tokens, length, q_heads, k_heads,
    dyq_batch: tl.int64, dyq_position: tl.int64, dyq_head: tl.int64,
    dyk_batch: tl.int64, dyk_position: tl.int64, dyk_head: tl.int64,
    q_batch: tl.int64, q_position: tl.int64, q_head: tl.int64,
    k_batch: tl.int64, k_position: tl.int64, k_head: tl.int64,
    dxq_batch: tl.int64, dxq_position: tl.int64, dxq_head: tl.int64,
    dxk_batch: tl.int64, dxk_position: tl.int64, dxk_head: tl.int64,
    rotary_batch: tl.int64, rotary_position: tl.int64, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ROWS_K: tl.constexpr, HEADS: tl.constexpr,
    HEADS_K: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr, R: tl.constexpr, CENTERED: tl.constexpr,
    OFFSET: tl.constexpr, ROUND_OFFSET: tl.constexpr, ROUNDING: tl.constexpr, EPS_OUTSIDE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Persistent programs: the first `q_parts` walk the rows of q, the others those of k.

    Arguments as in `qk_norm_forward`; DXQ and DXK are None where none of q or k is wanted. DW and DB are the float32
    partial sums of both weights and both biases, those of q first, or None.
    """
    part = tl.program_id(0)
    partial = partial_at(part, N, ROWS, HEADS)
    if HEADS and part >= q_parts:
        partial = partial_at(q_parts, N, ROWS, HEADS) + partial_at(part - q_parts, N, ROWS_K, HEADS_K)
    if DW is not None:
        DW += partial
    if DB is not None:
        DB += partial
    q_rows = tokens * q_heads
    of_tables = (rotary_batch, rotary_position, 0)
    if part < q_parts:
        rows_backward(
            DYQ, Q, WQ, COS, SIN, RSTD, MEAN, DXQ, DW, DB, part, q_parts, 0, q_rows, length, q_heads,
            (dyq_batch, dyq_position, dyq_head), (q_batch, q_position, q_head), (dxq_batch, dxq_position, dxq_head),
            of_tables, eps, N, BLOCK, ROWS, HEADS, WHOLE, UNIT, R, CENTERED, OFFSET, ROUND_OFFSET, ROUNDING,
            EPS_OUTSIDE, STAGES,
        )  # fmt: skip
    else:
        rows_backward(
            DYK, K, WK, COS, SIN, RSTD, MEAN, DXK, DW, DB, part - q_parts, tl.num_programs(0) - q_parts,
            q_rows, tokens * k_heads, length, k_heads,
            (dyk_batch, dyk_position, dyk_head), (k_batch, k_position, k_head), (dxk_batch, dxk_position, dxk_head),
            of_tables, eps, N, BLOCK, ROWS_K, HEADS_K, WHOLE, UNIT, R, CENTERED, OFFSET, ROUND_OFFSET, ROUNDING,
            EPS_OUTSIDE, STAGES,
        )  # fmt: skip


@triton.jit
def qk_reduce_partials(
    PARTIALS, DWQ, DWK, q_parts, k_parts, N: tl.constexpr, N_K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """`reduce_partials` of both weights: `q_parts` rows of N columns are q's, and `k_parts` of N_K behind them k's."""
    if tl.program_id(1) == 0:
        if DWQ is not None:
            reduce_partials(PARTIALS, DWQ, q_parts, N, BLOCK, ROWS)
    elif DWK is not None:
        reduce_partials(PARTIALS + tl.cast(q_parts, tl.int64) * N, DWK, k_parts, N_K, BLOCK, ROWS)
