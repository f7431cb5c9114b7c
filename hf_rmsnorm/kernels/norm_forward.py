"""The forward kernel: one tile of whole rows per program.

Every size, rounding, presence of an operand (a None pointer) and FLAT is a compile-time
constant; row counts, the inner length and strides are not: a new batch or sequence
length compiles nothing where rows lie as they did.
"""

import triton
import triton.language as tl

from .device import (
    activation,
    load,
    load32,
    normalised,
    reciprocal_root,
    round_hat,
    round_product,
    rounded,
    row_offsets,
    scale_of,
    store,
    wide,
)  # fmt: skip


@triton.jit
def affine(
    xhat,
    X,
    W,
    B,
    cols,
    col_mask,
    DENSE,
    OFFSET,
    ROUND_OFFSET,
    ROUNDING,
):
    """weight and bias applied to xhat (float32, columns last) with the formula's
    rounding; float32 out.
    """
    y = round_hat(xhat, X, W, ROUNDING)
    if W is not None:
        w = load(W + cols, col_mask, DENSE)
        # The product of two rounded factors is computed in their dtype, two in one
        # instruction, if w is left as it is.
        y = y * scale_of(wide(w) if ROUNDING == "once" else w, W, OFFSET, ROUND_OFFSET)
        if B is not None:
            y = round_product(y, X, W, ROUNDING)
    if B is not None:
        y = y + wide(load(B + cols, col_mask, DENSE))
    return y


@triton.jit
def mean_of(x, N):
    """Mean of each row of x, divided: a product with 1 / N could be another value for a
    constant row.
    """
    total = tl.sum(x, axis=1)
    return tl.div_rn(total, tl.full(total.shape, N, tl.float32))


@triton.jit
def less_mean(x, col_mask, N, BLOCK):
    """(x less the mean of its row, zero behind the row; that mean)."""
    mean = mean_of(x, N)
    x = x - mean[:, None]
    if BLOCK != N:
        x = tl.where(col_mask[None, :], x, 0.0)
    return x, mean


@triton.jit
def norm_forward(
    X,
    W,
    B,
    G,
    SCALE,
    SHIFT,
    MULTIPLIER,
    RES,
    H,
    Y,
    RSTD,
    MEAN,
    rows_total,
    x_len,
    x_outer: tl.int64,
    x_inner: tl.int64,
    other_len,
    other_outer: tl.int64,
    other_inner: tl.int64,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    FLAT: tl.constexpr,
    HEADS: tl.constexpr,
    CENTERED: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_OFFSET: tl.constexpr,
    ROUNDING: tl.constexpr,
    EPS_OUTSIDE: tl.constexpr,
    GATE: tl.constexpr,
):
    """One program normalises ROWS whole rows of N elements held in registers.

    Args:
        X: rows of unit stride, row r at (r // x_len) * x_outer * UNIT + (r % x_len) *
            x_inner * UNIT.
        W, B: (HEADS, N) or None; row r has the parameters r % HEADS, and program_id(1)
            says which rows those are.
        G: rows of the gate, or None.
        SCALE, SHIFT: rows of the scale and shift of a modulation, in Y's dtype as all
            operands then; or None.
        MULTIPLIER: rows by which x is multiplied before it is added to RES; or None.
        RES: rows of the residual, or None. With it the norm is that of H = residual +
            x. With a SCALE, RES is contiguous.
        other_len, other_outer, other_inner: address of G, of SCALE, SHIFT and
            MULTIPLIER, or else of RES, as x_len, x_outer, x_inner of X.
        H: (rows_total, N), contiguous, in the dtype of that sum; None without RES.
        Y: (rows_total, N), contiguous.
        RSTD, MEAN: (rows_total,) float32, or None where no backward follows (MEAN also
            where not CENTERED).
        FLAT: as in `row_offsets`.
        GATE: what `activation` makes of G, or of SCALE.
    """
    if SCALE is not None:
        G = SCALE
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    head = tl.program_id(1) if HEADS != 1 else 0
    rows = rows * HEADS + head
    col_mask = cols < N
    row_mask = rows < rows_total
    # A one-row tile never hangs over the last row: the grid is exact. Columns alone
    # tell which registers hold nothing.
    DENSE: tl.constexpr = BLOCK == N and ROWS == 1
    mask = col_mask[None, :] if ROWS == 1 else row_mask[:, None] & col_mask[None, :]
    x_at = row_offsets(rows, x_len, x_outer, x_inner, UNIT, FLAT) + cols[None, :]
    # From the tile's first element, not as x's are, which would be held in registers
    # until Y is stored.
    y_at = tl.arange(0, ROWS)[:, None] * (HEADS * N) + cols[None, :]
    first = (tl.program_id(0).to(tl.int64) * (ROWS * HEADS) + head) * N
    x = load(X + x_at, mask, DENSE)
    # A sum of two is computed in their dtype, two in one instruction; single elements
    # would take registers.
    x = wide(x) if RES is None and UNIT != 1 else x.to(tl.float32)
    other_at = row_offsets(rows, other_len, other_outer, other_inner, UNIT, FLAT)
    other_at = other_at + cols[None, :]
    if RES is not None:
        if MULTIPLIER is not None:
            x = rounded(x * load32(MULTIPLIER + other_at, mask, DENSE), X)
        res_at = other_at if G is None else first + y_at
        h = load32(RES + res_at, mask, DENSE) + x
        h = h.to(H.dtype.element_ty)
        store(H + first + y_at, h, mask, DENSE)
        X = H  # its dtype is that of the normalised tensor
        x = h.to(tl.float32)
    if G is not None:
        factor, _ = activation(load32(G + other_at, mask, DENSE), G, GATE)
        if GATE == "silu_before":
            x = x * factor
    # The weight is read as a whole tile: it then has x's layout, so 16-byte loads and
    # no trip through shared memory.
    tile = tl.broadcast_to((head * N + cols)[None, :], (ROWS, BLOCK))
    if CENTERED:
        x, mean = less_mean(x, col_mask, N, BLOCK)
        # Sums of equal values are exact where 24 bits hold N times as many as x has; so
        # are those of values about as large, as the elements of a row are where its
        # mean is large.
        SPARE: tl.constexpr = 1 << (23 - X.dtype.element_ty.fp_mantissa_width)
        if GATE == "silu_before" or SPARE < N:
            # The mean of the rest corrects the rounding of a large mean; a constant row
            # becomes exactly zero.
            x, rest = less_mean(x, col_mask, N, BLOCK)
            mean = mean + rest
    square = tl.sum(x * x, axis=1) * (1.0 / N)
    rstd = reciprocal_root(square, eps, EPS_OUTSIDE)
    if RSTD is not None:
        tl.store(RSTD + rows, rstd, mask=row_mask)
    if MEAN is not None:
        tl.store(MEAN + rows, mean, mask=row_mask)
    xhat = normalised(x, rstd[:, None], X, ROUNDING)
    y = affine(
        xhat, X, W, B, tile, col_mask[None, :], BLOCK == N, OFFSET, ROUND_OFFSET,
        ROUNDING,
    )  # fmt: skip
    if G is not None and GATE != "silu_before":
        if W is not None:
            y = round_product(y, X, W, ROUNDING)
        if GATE == "modulate_after" or GATE == "multiply_after":  # each operator rounds
            y = rounded(rounded(y, Y) * factor, Y)
            if SHIFT is not None:
                y = y + load32(SHIFT + other_at, mask, DENSE)
        else:
            y = y * factor
    store(Y + first + y_at, y, mask, DENSE)
