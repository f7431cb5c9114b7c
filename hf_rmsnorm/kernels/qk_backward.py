"""The backward of the norms of queries and keys, and of the rotary embedding behind
them.
"""

import triton
import triton.language as tl

from .device import load, round_hat, scale_of, store
from .qk_forward import (
    halves,
    load_halves,
    offsets,
    rotated,
    rounded,
    rows_of,
)


@triton.jit
def rows_backward(
    DY,
    X,
    W,
    COS,
    SIN,
    RSTD,
    DX,
    DW,
    part,
    parts,
    stats_at,
    rows_total,
    length,
    heads,
    of_dy,
    of_x,
    of_dx,
    of_tables,
    N,
    R,
    BLOCK,
    ROWS,
    UNIT,
    OFFSET,
    ROUNDING,
    ONCE,
    STAGES,
):
    """Every `parts`-th tile of one side from `part` on; DW is where this program's
    partial sums go.
    """
    DENSE: tl.constexpr = 2 * BLOCK == N
    cols = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
    low, high, low_cols, high_cols = halves(cols, BLOCK, N, R)
    if W is not None:
        w = load(W + low, low_cols, DENSE)
        w_z = load(W + high, high_cols, DENSE)
        scale = scale_of(w, W, OFFSET, ROUNDING != "once")
        scale_z = scale_of(w_z, W, OFFSET, ROUNDING != "once")
    if DW is not None:
        dw = tl.zeros((ROWS, BLOCK), tl.float32)
        dw_z = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(part, tl.cdiv(rows_total, ROWS), parts, num_stages=STAGES):
        rows, row_mask, low_mask, high_mask, place = rows_of(
            tile, rows_total, length, heads, low_cols, high_cols, ROWS
        )
        x_at = X + offsets(place, of_x, UNIT)
        x, z = load_halves(x_at, low, high, low_mask, high_mask)
        dy_at = DY + offsets(place, of_dy, UNIT)
        g, g_z = load_halves(dy_at, low, high, low_mask, high_mask)
        at = offsets(place, of_tables, UNIT)
        g, g_z = rotated(
            g, g_z, COS, SIN, at, low, high, cols < R // 2, low_mask, DY, N, R, True,
            ONCE,
        )  # fmt: skip
        if ONCE:
            g = rounded(g, DY)
            g_z = rounded(g_z, DY)
        rstd = load(RSTD + stats_at + rows, row_mask, False)[:, None]
        xhat = x * rstd
        zhat = z * rstd
        if DW is not None:
            # By name: the compiler contracts nothing where products of the rotation are
            # to be rounded.
            dw = tl.fma(g, round_hat(xhat, X, W, ROUNDING), dw)
            dw_z = tl.fma(g_z, round_hat(zhat, X, W, ROUNDING), dw_z)
        if DX is not None:
            if W is not None:
                g = g * scale
                g_z = g_z * scale_z
            along = tl.sum(tl.fma(g, xhat, g_z * zhat), axis=1) * (1.0 / N)
            along = along[:, None]
            dx = tl.fma(xhat, -along, g)
            dz = tl.fma(zhat, -along, g_z)
            dx_at = DX + offsets(place, of_dx, UNIT)
            store(dx_at + low, dx * rstd, low_mask, False)
            store(dx_at + high, dz * rstd, high_mask, False)
    if DW is not None:
        low, high, low_cols, high_cols = halves(tl.arange(0, BLOCK), BLOCK, N, R)
        store(DW + low, tl.sum(dw, axis=0), low_cols, False)
        store(DW + high, tl.sum(dw_z, axis=0), high_cols, False)


@triton.jit
def qk_norm_backward(
    DYQ,
    DYK,
    Q,
    K,
    WQ,
    WK,
    COS,
    SIN,
    RSTD,
    DXQ,
    DXK,
    DW,
    q_parts,
    tokens,
    length,
    q_heads,
    k_heads,
    dyq_batch: tl.int64,
    dyq_position: tl.int64,
    dyq_head: tl.int64,
    dyk_batch: tl.int64,
    dyk_position: tl.int64,
    dyk_head: tl.int64,
    q_batch: tl.int64,
    q_position: tl.int64,
    q_head: tl.int64,
    k_batch: tl.int64,
    k_position: tl.int64,
    k_head: tl.int64,
    dxq_batch: tl.int64,
    dxq_position: tl.int64,
    dxq_head: tl.int64,
    dxk_batch: tl.int64,
    dxk_position: tl.int64,
    dxk_head: tl.int64,
    rotary_batch: tl.int64,
    rotary_position: tl.int64,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDING: tl.constexpr,
    ONCE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Persistent programs: the first `q_parts` walk the rows of q, the others those of
    k.

    Arguments as in `qk_norm_forward`, and besides:

    Args:
        DYQ, DYK: gradients of the results, addressed as Q and K.
        DXQ, DXK: gradients of q and k, addressed as Q and K; both None where neither is
            wanted.
        DW: (programs, N) float32 partial sums of both weights, those of q first; or
            None.
        ONCE: the gradient is rounded when it has been rotated back; else after each
            operator.
        STAGES: software pipeline depth of the loop.
    """
    part = tl.program_id(0)
    if DW is not None:
        DW += part.to(tl.int64) * N
    q_rows = tokens * q_heads
    of_tables = (rotary_batch, rotary_position, 0)
    if part < q_parts:
        rows_backward(
            DYQ, Q, WQ, COS, SIN, RSTD, DXQ, DW, part, q_parts, 0, q_rows, length,
            q_heads, (dyq_batch, dyq_position, dyq_head), (q_batch, q_position, q_head),
            (dxq_batch, dxq_position, dxq_head), of_tables, N, R, BLOCK, ROWS, UNIT,
            OFFSET, ROUNDING, ONCE, STAGES,
        )  # fmt: skip
    else:
        rows_backward(
            DYK, K, WK, COS, SIN, RSTD, DXK, DW, part - q_parts,
            tl.num_programs(0) - q_parts, q_rows, tokens * k_heads, length, k_heads,
            (dyk_batch, dyk_position, dyk_head), (k_batch, k_position, k_head),
            (dxk_batch, dxk_position, dxk_head), of_tables, N, R, BLOCK, ROWS, UNIT,
            OFFSET, ROUNDING, ONCE, STAGES,
        )  # fmt: skip
