"""Backward kernels, the closed form with g = dy * (weight_offset + weight):

    dx = rstd * (g - xhat * mean(g * xhat) [- mean(g) if centered]),  dweight = sum(dy * xhat),  dbias = sum(dy)

An eps outside the root multiplies mean(g * xhat) by (RMS + eps) / RMS. A gate after the
norm multiplies dy first; one before it multiplies what dx becomes.

Parameter gradients are summed in float32, in a fixed order and without atomics: each
program of a persistent grid keeps one partial row in registers, and `reduce_partials`
adds the rows. A result whose pointer is None is not computed.

FROM_OUTPUT: X is the norm's output y, and xhat = (y - bias) / (weight_offset + weight);
MEAN is not read. Not with a gate or an eps outside the root.
"""

import triton
import triton.language as tl

from .device import (
    activation,
    hat_of_output,
    known,
    load,
    load32,
    round_hat,
    row_offsets,
    scale_of,
    store,
)


@triton.jit
def eps_outside_factor(square, eps):
    """(RMS + eps) / RMS from the mean square."""
    rms = tl.sqrt_rn(square)
    return (rms + eps) / rms


@triton.jit
def sums(g, along, CENTERED):
    """(sum of g, or 0.0 if not CENTERED; sum of along): warps exchange the two at once."""
    if CENTERED:
        return tl.split(tl.sum(tl.join(g, along), axis=1))
    else:
        return 0.0, tl.sum(along, axis=1)


@triton.jit
def weight_scale(w, W, at, col_mask, always, WHOLE, OFFSET, ROUND_OFFSET, RELOAD_W):
    """The factor of xhat, in float32, from w, the weight in registers; if RELOAD_W, the
    weight is loaded here.
    """
    if RELOAD_W:
        w = load(W + at, col_mask, WHOLE, always)
    return scale_of(w, W, OFFSET, ROUND_OFFSET)


@triton.jit
def hats(
    x,
    W,
    B,
    MEAN,
    w,
    rows,
    row_mask,
    rstd,
    at,
    col_mask,
    always,
    WHOLE,
    ONE_ROW,
    CENTERED,
    OFFSET,
    ROUND_OFFSET,
    EPS_OUTSIDE,
    SCALED,
    RELOAD_W,
    FROM_OUTPUT,
):
    """(x less its mean, xhat), xhat not yet multiplied by rstd if SCALED; both from the
    output if FROM_OUTPUT.
    """
    if FROM_OUTPUT:
        scale = None
        if W is not None:
            scale = weight_scale(
                w, W, at, col_mask, always, WHOLE, OFFSET, ROUND_OFFSET, RELOAD_W
            )
        xhat = hat_of_output(x, scale, B, at, col_mask, WHOLE)
    else:
        if CENTERED:
            x = x - load(MEAN + rows, row_mask, ONE_ROW)[:, None]
            if EPS_OUTSIDE and not WHOLE:
                x = tl.where(col_mask, x, 0.0)
        xhat = x if SCALED else x * rstd[:, None]
    return x, xhat


@triton.jit
def gated(x, gate, G, GATE, AFTER):
    """(x, multiplied by a gate before the norm; the gate's factor and its slope)."""
    factor, slope = activation(gate.to(tl.float32), G, GATE)
    if not AFTER:
        slope = slope * x
        x = x * factor
    return x, factor, slope


@triton.jit
def output(
    xhat,
    X,
    W,
    B,
    w,
    at,
    col_mask,
    always,
    WHOLE,
    OFFSET,
    ROUND_OFFSET,
    ROUNDING,
    RELOAD_W,
):
    """The norm's output before a gate behind it."""
    y = round_hat(xhat, X, W, ROUNDING)
    if W is not None:
        y = y * weight_scale(
            w, W, at, col_mask, always, WHOLE, OFFSET, ROUND_OFFSET, RELOAD_W
        )
    return y if B is None else y + load32(B + at, col_mask, WHOLE)


@triton.jit
def input_gradient(
    g,
    dh,
    x,
    xhat,
    rstd,
    filled,
    eps,
    N,
    GAPS,
    CENTERED,
    EPS_OUTSIDE,
    BY_X,
    SCALED,
    EARLY_DH,
):
    """dx of a tile, with dh added if EARLY_DH. BY_X: x takes the place of xhat, as
    fewer values are live then.
    """
    if EARLY_DH:
        early = g * rstd[:, None] + dh.to(tl.float32)
    total, along = sums(known(g, filled, GAPS), known(g * xhat, filled, GAPS), CENTERED)
    along = along * (1.0 / N)
    if EPS_OUTSIDE:
        square = tl.sum(known(x * x, filled, GAPS), axis=1) * (1.0 / N)
        along = along * eps_outside_factor(square, eps)
    if EARLY_DH:  # which rstd has multiplied
        g, total, along = early, total * rstd, along * rstd
    if CENTERED:
        g = g - (total * (1.0 / N))[:, None]
    if SCALED:
        return g - x * (along * rstd * rstd)[:, None]
    else:
        dx = g - x * (along * rstd)[:, None] if BY_X else g - xhat * along[:, None]
        return dx if EARLY_DH else dx * rstd[:, None]


@triton.jit
def store_sum(PARTIALS, values, first, cols, N, BLOCK):
    """Store the sum of the rows of values, if PARTIALS is given."""
    if PARTIALS is not None:
        store(PARTIALS + first + cols, tl.sum(values, axis=0), cols < N, BLOCK == N)


@triton.jit
def norm_backward(
    DY,
    X,
    W,
    B,
    G,
    SCALE,
    DH,
    RSTD,
    MEAN,
    DX,
    DW,
    DB,
    DG,
    DSCALE,
    rows_total,
    dy_len,
    dy_outer: tl.int64,
    dy_inner: tl.int64,
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
    STAGES: tl.constexpr,
    RELOAD_W: tl.constexpr,
    GAPS: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
):
    """A persistent program walks tiles of ROWS rows, `num_programs` apart.

    Args:
        DY, X: rows of unit stride, addressed as in `norm_forward`, each with its own
            inner length.
        G, SCALE, DH: rows of the gate, of the scale of a modulation, and of a gradient
            that is added to dx before it is rounded, or None. Only one is given, at the
            address other_*.
        W: (HEADS, N) or None. B: the same, and given only where a gate's gradient or
            FROM_OUTPUT needs it.
        RSTD, MEAN: (rows_total,) float32 from the forward; MEAN is None if not
            CENTERED, and if FROM_OUTPUT.
        DX, DG, DSCALE: (rows_total, N), contiguous, or None.
        DW, DB: (num_programs, HEADS, N) float32 partial sums, or None; program_id(1) is
            the head.
        STAGES: software pipeline depth of the loop (prefetch of the next tiles).
        RELOAD_W: of wide rows, so that nothing spills, the weight is not held, but
            loaded in every step: 1 if ahead as x is; 2 if not, which takes no shared
            memory. Else 0.
        FLAT: as in `row_offsets`.
        GAPS: columns behind which the registers of every thread hold nothing; or 0.
    """
    if SCALE is not None:
        G = SCALE
        DG = DSCALE
    cols = tl.arange(0, BLOCK)
    col_mask = (cols < N)[None, :]
    filled = (cols < GAPS)[None, :]
    DENSE: tl.constexpr = BLOCK == N and ROWS == 1
    AFTER: tl.constexpr = GATE is not None and GATE != "silu_before"
    # A prefetched dh of wide rows is added before the sum: after it, registers would
    # hold one row more.
    EARLY_DH: tl.constexpr = DH is not None and RELOAD_W and STAGES > 1
    # If xhat is not rounded, rstd multiplies dy once, instead of each of its factors.
    BY_X: tl.constexpr = (CENTERED or RELOAD_W) and not FROM_OUTPUT
    ONCE: tl.constexpr = CENTERED and ROUNDING == "once" and ROWS == 1
    SCALED: tl.constexpr = ONCE and not (AFTER or FROM_OUTPUT or RELOAD_W)
    head = tl.program_id(1) if HEADS != 1 else 0
    # A whole tile gives the weight x's layout, as in `norm_forward`.
    tile_cols = tl.broadcast_to((head * N + cols)[None, :], (ROWS, BLOCK))
    # From the tile's first element: the addresses of x were computed stages earlier,
    # and would be held till here.
    dx_at = tl.arange(0, ROWS)[:, None] * (HEADS * N) + cols[None, :]
    w = None
    if W is not None and not RELOAD_W:
        w = load(W + tile_cols, col_mask, BLOCK == N)
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    db = tl.zeros((ROWS, BLOCK), tl.float32)
    tiles = tl.cdiv(rows_total, ROWS * HEADS)
    for tile in tl.range(
        tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES
    ):
        rows = tile * ROWS + tl.arange(0, ROWS)
        rows = rows * HEADS + head
        row_mask = rows < rows_total
        mask = col_mask if ROWS == 1 else row_mask[:, None] & col_mask
        x_at = row_offsets(rows, x_len, x_outer, x_inner, UNIT, FLAT)
        dy_at = row_offsets(rows, dy_len, dy_outer, dy_inner, UNIT, FLAT)
        first = (tl.cast(tile, tl.int64) * (ROWS * HEADS) + head) * N
        x = load(X + x_at + cols[None, :], mask, DENSE)
        dy = load(DY + dy_at + cols[None, :], mask, DENSE)
        other_at = row_offsets(rows, other_len, other_outer, other_inner, UNIT, FLAT)
        if G is not None:
            gate = load(G + other_at + cols[None, :], mask, DENSE)
        rstd = load(RSTD + rows, row_mask, ROWS == 1)
        x = x.to(tl.float32)
        if G is not None:
            x, factor, slope = gated(x, gate, G, GATE, AFTER)
        always = tile < tiles if RELOAD_W == 2 else True
        x, xhat = hats(
            x, W, B, MEAN, w, rows, row_mask, rstd, tile_cols, col_mask, always,
            BLOCK == N, ROWS == 1, CENTERED, OFFSET, ROUND_OFFSET, EPS_OUTSIDE, SCALED,
            RELOAD_W, FROM_OUTPUT,
        )  # fmt: skip
        g = dy.to(tl.float32)
        if AFTER:
            if DG is not None:
                y = output(
                    xhat, X, W, B, w, tile_cols, col_mask, always, BLOCK == N, OFFSET,
                    ROUND_OFFSET, ROUNDING, RELOAD_W,
                )  # fmt: skip
                store(DG + first + dx_at, g * y * slope, mask, DENSE)
            g = g * factor
        if DB is not None:
            db = known(db + g, filled, GAPS)
        if SCALED:
            g = g * rstd[:, None]
        if DW is not None:
            dw = known(dw + g * round_hat(xhat, X, W, ROUNDING), filled, GAPS)
        if DX is not None or GATE == "silu_before":
            if W is not None:
                g = g * weight_scale(
                    w, W, tile_cols, col_mask, always, BLOCK == N, OFFSET, ROUND_OFFSET,
                    RELOAD_W,
                )  # fmt: skip
            dh = None
            if EARLY_DH:
                dh = load(DH + other_at + cols[None, :], mask, DENSE)
            dx = input_gradient(
                g, dh, x, xhat, rstd, filled, eps, N, GAPS, CENTERED, EPS_OUTSIDE, BY_X,
                SCALED, EARLY_DH,
            )  # fmt: skip
            if GATE == "silu_before":
                if DG is not None:
                    store(DG + first + dx_at, dx * slope, mask, DENSE)
                dx = dx * factor
            if DH is not None and not EARLY_DH:
                dx = dx + load32(DH + other_at + cols[None, :], mask, DENSE)
            if DX is not None:
                store(DX + first + dx_at, dx, mask, DENSE)
    partial = (tl.program_id(0).to(tl.int64) * HEADS + head) * N
    store_sum(DW, dw, partial, cols, N, BLOCK)
    store_sum(DB, db, partial, cols, N, BLOCK)


@triton.jit
def store_sum_of_rows(PARTIALS, OUT, parts, N, BLOCK, ROWS):
    """OUT[n] = sum over p of PARTIALS[p, n], in a fixed order, cast to OUT's dtype."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.range(0, parts, ROWS):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < parts)[:, None] & (cols < N)[None, :]
        at = rows.to(tl.int64)[:, None] * N + cols[None, :]
        total += tl.load(PARTIALS + at, mask=mask, other=0.0)
    store(OUT + cols, tl.sum(total, axis=0), cols < N, False)


@triton.jit
def reduce_partials(
    PARTIALS,
    OUT,
    BEHIND,
    parts,
    parts_behind,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Two sums of rows of partial gradients, (parts + parts_behind, N).

    Args:
        OUT: (N,), the sum of the first `parts` rows; or None.
        BEHIND: (N,), that of the `parts_behind` rows behind them, by the programs whose
            program_id(1) is 1; or None.
    """
    if tl.program_id(1) == 0:
        if OUT is not None:
            store_sum_of_rows(PARTIALS, OUT, parts, N, BLOCK, ROWS)
    elif BEHIND is not None:
        PARTIALS += parts.to(tl.int64) * N
        store_sum_of_rows(PARTIALS, BEHIND, parts_behind, N, BLOCK, ROWS)
