"""Kernels for the norms of queries and keys, and the rotary embedding behind them: both tensors in one launch.

A row is one head of one position: row r of a (batch, heads, length, N) tensor is head r % heads of token r // heads.
Every operand is addressed by its own three strides, so that transposed and sliced views need no copy, and the lengths
and strides are run-time arguments. The first programs take the rows of q and the others those of k; each side has its
own copy of the code, so that an access still has one known pointer.
"""

import triton
import triton.language as tl

from .backward import eps_outside_factor, reduce_partials
from .device import load, normalised, root, round_hat, round_product, scale_of, step
from .forward import affine


@triton.jit
def places(rows, length, heads):
    """(batch, position, head) of each row; unsigned, because a signed division costs registers."""
    rows = tl.cast(rows, tl.uint32)
    heads = tl.cast(heads, tl.uint32)
    length = tl.cast(length, tl.uint32)
    tokens = rows // heads
    return tokens // length, tokens % length, rows % heads


@triton.jit
def offsets(batch, position, head, of_batch, of_position, of_head, UNIT: tl.constexpr):
    """Offset in elements of each row, as a column; strides arrive divided by UNIT, as in `row_offsets`."""
    at = tl.cast(batch, tl.int64) * (tl.cast(of_batch, tl.int64) * UNIT)
    at += tl.cast(position, tl.int64) * (tl.cast(of_position, tl.int64) * UNIT)
    at += tl.cast(head, tl.int64) * (tl.cast(of_head, tl.int64) * UNIT)
    return at[:, None]


@triton.jit
def rounded(value, X):
    """What float32 values become in a tensor of x's dtype."""
    return value.to(X.dtype.element_ty).to(tl.float32)


@triton.jit
def as_output(y, X, W, ROUNDING: tl.constexpr):
    """A norm's result, in float32, with the rounding of a tensor that holds it before it is rotated."""
    if W is not None:
        y = round_product(y, X, W, ROUNDING)
    if W is None or ROUNDING == "once":
        y = rounded(y, X)
    return y


@triton.jit
def opposite(cols, R: tl.constexpr):
    """The column that rotate_half brings to each of the first R columns; columns behind them stay."""
    other = tl.where(cols < R // 2, cols + R // 2, cols - R // 2)
    return tl.where(cols < R, other, cols)


@triton.jit
def rotated(value, other, cos, sin, cols, Y, R: tl.constexpr):
    """value * cos + rotate_half(value) * sin, every operator rounded to Y's dtype; columns from R on pass through.

    `other` holds the value at the opposite column. With `sin` negative and taken at the opposite column this is the
    transposed map, which takes a gradient back.
    """
    half = tl.where(cols < R // 2, -other, other)
    result = rounded(rounded(value * cos, Y) + rounded(half * sin, Y), Y)
    return tl.where(cols < R, result, value)


@triton.jit
def rows_forward(
    X, W, COS, SIN, Y, RSTD, MEAN, tile, stats_at, rows_total, length, heads,
    x_batch, x_position, x_head, y_batch, y_position, y_head, rotary_batch, rotary_position, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, R: tl.constexpr,
    CENTERED: tl.constexpr, OFFSET: tl.constexpr, ROUND_OFFSET: tl.constexpr, ROUNDING: tl.constexpr,
    EPS_OUTSIDE: tl.constexpr,
):  # fmt: skip
    """One tile of ROWS rows of one side."""
    rows = tile * ROWS + tl.arange(0, ROWS)
    row_mask = rows < rows_total
    # The columns as a whole tile give weights, cos and sin x's layout: 16-byte loads, no trip through shared memory.
    cols = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
    col_mask = cols < N
    mask = row_mask[:, None] & col_mask
    batch, position, head = places(rows, length, heads)
    x_at = offsets(batch, position, head, x_batch, x_position, x_head, UNIT)
    x = load(X + x_at + cols, mask, False).to(tl.float32)
    if COS is not None:
        # The opposite half is read again, from L1, and normalised again: cheaper than moving it between threads.
        across = opposite(cols, R)
        other = load(X + x_at + across, mask, False).to(tl.float32)
    if CENTERED:  # as in `norm_forward`
        mean = step(tl.sum(x, axis=1) * (1.0 / N), X, ROUNDING)
        x = tl.where(col_mask, step(x - mean[:, None], X, ROUNDING), 0.0)
        if COS is not None:
            other = step(other - mean[:, None], X, ROUNDING)
        if ROUNDING != "every_step":
            rest = tl.sum(x, axis=1) * (1.0 / N)
            mean = mean + rest
            x = tl.where(col_mask, x - rest[:, None], 0.0)
            if COS is not None:
                other = other - rest[:, None]
        if MEAN is not None:
            tl.store(MEAN + stats_at + rows, mean, mask=row_mask)
    square = tl.sum(step(x * x, X, ROUNDING), axis=1) * (1.0 / N)
    divisor, rstd = root(square, X, eps, ROUNDING, EPS_OUTSIDE)
    if RSTD is not None:
        tl.store(RSTD + stats_at + rows, rstd, mask=row_mask)
    divisor = divisor[:, None]
    rstd = rstd[:, None]
    y = normalised(x, divisor, rstd, X, ROUNDING)
    y = affine(y, X, W, None, cols, col_mask, BLOCK == N, OFFSET, ROUND_OFFSET, ROUNDING)
    if COS is not None:
        other = normalised(other, divisor, rstd, X, ROUNDING)
        other = affine(other, X, W, None, across, col_mask, BLOCK == N, OFFSET, ROUND_OFFSET, ROUNDING)
        rotary_at = offsets(batch, position, head, rotary_batch, rotary_position, 0, UNIT) + cols
        rotary_mask = mask & (cols < R)
        cos = load(COS + rotary_at, rotary_mask, False).to(tl.float32)
        sin = load(SIN + rotary_at, rotary_mask, False).to(tl.float32)
        y = rotated(as_output(y, X, W, ROUNDING), as_output(other, X, W, ROUNDING), cos, sin, cols, Y, R)
    y_at = offsets(batch, position, head, y_batch, y_position, y_head, UNIT)
    tl.store(Y + y_at + cols, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def qk_norm_forward(
    Q, K, WQ, WK, COS, SIN, YQ, YK, RSTD, MEAN, tokens, length, q_heads, k_heads,
    q_batch: tl.int64, q_position: tl.int64, q_head: tl.int64,
    k_batch: tl.int64, k_position: tl.int64, k_head: tl.int64,
    yq_batch: tl.int64, yq_position: tl.int64, yq_head: tl.int64,
    yk_batch: tl.int64, yk_position: tl.int64, yk_head: tl.int64,
    rotary_batch: tl.int64, rotary_position: tl.int64, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, R: tl.constexpr,
    CENTERED: tl.constexpr, OFFSET: tl.constexpr, ROUND_OFFSET: tl.constexpr, ROUNDING: tl.constexpr,
    EPS_OUTSIDE: tl.constexpr,
):  # fmt: skip
    """One program normalises, and rotates where there is a rotary embedding, ROWS rows of q or of k.

    Args:
        Q, K, YQ, YK: (batch, heads, length, N), columns of unit stride.
        WQ, WK: (N,), or None.
        COS, SIN: (batch, length, R), both of the same strides, or None; only the first R columns rotate.
        RSTD, MEAN: (rows of q + rows of k,) float32, or None where no backward follows (MEAN also where not CENTERED).
        tokens: batch * length.
    """
    q_rows = tokens * q_heads
    q_tiles = tl.cdiv(q_rows, ROWS)
    tile = tl.program_id(0)
    if tile < q_tiles:
        rows_forward(
            Q, WQ, COS, SIN, YQ, RSTD, MEAN, tile, 0, q_rows, length, q_heads, q_batch, q_position, q_head,
            yq_batch, yq_position, yq_head, rotary_batch, rotary_position, eps,
            N, BLOCK, ROWS, UNIT, R, CENTERED, OFFSET, ROUND_OFFSET, ROUNDING, EPS_OUTSIDE,
        )  # fmt: skip
    else:
        rows_forward(
            K, WK, COS, SIN, YK, RSTD, MEAN, tile - q_tiles, q_rows, tokens * k_heads, length, k_heads,
            k_batch, k_position, k_head, yk_batch, yk_position, yk_head, rotary_batch, rotary_position, eps,
            N, BLOCK, ROWS, UNIT, R, CENTERED, OFFSET, ROUND_OFFSET, ROUNDING, EPS_OUTSIDE,
        )  # fmt: skip


@triton.jit
def rows_backward(
    DY, X, W, COS, SIN, RSTD, MEAN, DX, DW, part, parts, stats_at, rows_total, length, heads,
    dy_batch, dy_position, dy_head, x_batch, x_position, x_head, dx_batch, dx_position, dx_head,
    rotary_batch, rotary_position, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, R: tl.constexpr,
    CENTERED: tl.constexpr, OFFSET: tl.constexpr, ROUND_OFFSET: tl.constexpr, ROUNDING: tl.constexpr,
    EPS_OUTSIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every `parts`-th tile of one side from `part` on; DW is where this program's partial sum goes."""
    cols = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
    col_mask = cols < N
    if W is not None:
        w = load(W + cols, col_mask, BLOCK == N)
    if DW is not None:
        dw = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(part, tl.cdiv(rows_total, ROWS), parts, num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        row_mask = rows < rows_total
        mask = row_mask[:, None] & col_mask
        batch, position, head = places(rows, length, heads)
        x = load(X + offsets(batch, position, head, x_batch, x_position, x_head, UNIT) + cols, mask, False)
        dy_at = offsets(batch, position, head, dy_batch, dy_position, dy_head, UNIT)
        g = load(DY + dy_at + cols, mask, False).to(tl.float32)
        if COS is not None:
            across = opposite(cols, R)
            rotary_at = offsets(batch, position, head, rotary_batch, rotary_position, 0, UNIT)
            rotary_mask = mask & (cols < R)
            other = load(DY + dy_at + across, mask, False).to(tl.float32)
            cos = load(COS + rotary_at + cols, rotary_mask, False).to(tl.float32)
            sin = load(SIN + rotary_at + across, rotary_mask, False).to(tl.float32)
            g = rotated(g, other, cos, -sin, cols, DY, R)
        rstd = load(RSTD + stats_at + rows, row_mask, False)
        x = x.to(tl.float32)
        if CENTERED:
            x = x - load(MEAN + stats_at + rows, row_mask, False)[:, None]
            x = tl.where(col_mask, x, 0.0)
        xhat = x * rstd[:, None]
        if DW is not None:
            dw += g * round_hat(xhat, X, W, ROUNDING)
        if DX is not None:
            if W is not None:
                g = g * scale_of(w, W, OFFSET, ROUND_OFFSET)
            along = tl.sum(g * xhat, axis=1) * (1.0 / N)
            if EPS_OUTSIDE:
                along = along * eps_outside_factor(tl.sum(x * x, axis=1) * (1.0 / N), eps)
            if CENTERED:
                dx = g - x * (along * rstd)[:, None] - (tl.sum(g, axis=1) * (1.0 / N))[:, None]
            else:
                dx = g - xhat * along[:, None]
            dx_at = offsets(batch, position, head, dx_batch, dx_position, dx_head, UNIT)
            tl.store(DX + dx_at + cols, (dx * rstd[:, None]).to(DX.dtype.element_ty), mask=mask)
    if DW is not None:
        n = tl.arange(0, BLOCK)
        tl.store(DW + n, tl.sum(dw, axis=0), mask=n < N)


@triton.jit
def qk_norm_backward(
    DYQ, DYK, Q, K, WQ, WK, COS, SIN, RSTD, MEAN, DXQ, DXK, DW, q_parts, tokens, length, q_heads, k_heads,
    dyq_batch: tl.int64, dyq_position: tl.int64, dyq_head: tl.int64,
    dyk_batch: tl.int64, dyk_position: tl.int64, dyk_head: tl.int64,
    q_batch: tl.int64, q_position: tl.int64, q_head: tl.int64,
    k_batch: tl.int64, k_position: tl.int64, k_head: tl.int64,
    dxq_batch: tl.int64, dxq_position: tl.int64, dxq_head: tl.int64,
    dxk_batch: tl.int64, dxk_position: tl.int64, dxk_head: tl.int64,
    rotary_batch: tl.int64, rotary_position: tl.int64, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, R: tl.constexpr,
    CENTERED: tl.constexpr, OFFSET: tl.constexpr, ROUND_OFFSET: tl.constexpr, ROUNDING: tl.constexpr,
    EPS_OUTSIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Persistent programs: the first `q_parts` walk the rows of q, the others those of k.

    Arguments as in `qk_norm_forward`; DYQ or DYK is None where no gradient arrives, DXQ and DXK where none of q or k is
    wanted, and DW, the (num_programs, N) float32 partial sums of both weights, where none of a weight is.
    """
    part = tl.program_id(0)
    if DW is not None:
        DW += tl.cast(part, tl.int64) * N
    q_rows = tokens * q_heads
    if part < q_parts:
        if DYQ is not None:
            rows_backward(
                DYQ, Q, WQ, COS, SIN, RSTD, MEAN, DXQ, DW, part, q_parts, 0, q_rows, length, q_heads,
                dyq_batch, dyq_position, dyq_head, q_batch, q_position, q_head, dxq_batch, dxq_position, dxq_head,
                rotary_batch, rotary_position, eps,
                N, BLOCK, ROWS, UNIT, R, CENTERED, OFFSET, ROUND_OFFSET, ROUNDING, EPS_OUTSIDE, STAGES,
            )  # fmt: skip
    elif DYK is not None:
        rows_backward(
            DYK, K, WK, COS, SIN, RSTD, MEAN, DXK, DW, part - q_parts, tl.num_programs(0) - q_parts,
            q_rows, tokens * k_heads, length, k_heads,
            dyk_batch, dyk_position, dyk_head, k_batch, k_position, k_head, dxk_batch, dxk_position, dxk_head,
            rotary_batch, rotary_position, eps,
            N, BLOCK, ROWS, UNIT, R, CENTERED, OFFSET, ROUND_OFFSET, ROUNDING, EPS_OUTSIDE, STAGES,
        )  # fmt: skip


@triton.jit
def qk_reduce_partials(PARTIALS, DWQ, DWK, q_parts, parts, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """`reduce_partials` of both weights: rows before `q_parts` are those of q, those up to `parts` of k."""
    if tl.program_id(1) == 0:
        if DWQ is not None:
            reduce_partials(PARTIALS, DWQ, q_parts, N, BLOCK, ROWS)
    elif DWK is not None:
        reduce_partials(PARTIALS + tl.cast(q_parts, tl.int64) * N, DWK, parts - q_parts, N, BLOCK, ROWS)
