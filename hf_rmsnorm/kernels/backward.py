"""Backward kernels, the closed form with g = dy * (weight_offset + weight):

    dx = rstd * (g - xhat * mean(g * xhat) [- mean(g) if centered]),  dweight = sum(dy * xhat),  dbias = sum(dy)

An eps outside the root multiplies mean(g * xhat) by (RMS + eps) / RMS. A gate after the norm multiplies dy first; one
before it multiplies what dx becomes.

Parameter gradients are summed in float32, in a fixed order and without atomics: each program of a persistent grid
keeps one partial row in registers, and `reduce_partials` adds the rows. What nobody asked for (a None pointer) is not
computed.

FROM_OUTPUT: X is the norm's output y, and xhat = (y - bias) / (weight_offset + weight); MEAN is not read. Not with a
gate or an eps outside the root.
"""

import triton
import triton.language as tl

from .device import activation, hat_of_output, known, load, round_hat, row_offsets, scale_of, store


@triton.jit
def eps_outside_factor(square, eps):
    """(RMS + eps) / RMS from the mean square."""
    rms = tl.sqrt_rn(square)
    return (rms + eps) / rms


@triton.jit
def sums(g, along, CENTERED: tl.constexpr):
    """(sum of g, where that is asked for; sum of along): warps exchange the two at once."""
    if CENTERED:
        return tl.split(tl.sum(tl.join(g, along), axis=1))
    else:
        return 0.0, tl.sum(along, axis=1)


@triton.jit
def norm_backward(
    DY, X, W, B, G, DH, RSTD, MEAN, DX, DW, DB, DG, rows_total,
    dy_len, dy_outer: tl.int64, dy_inner: tl.int64, x_len, x_outer: tl.int64, x_inner: tl.int64,
    other_len, other_outer: tl.int64, other_inner: tl.int64, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, FLAT: tl.constexpr,
    HEADS: tl.constexpr, CENTERED: tl.constexpr, OFFSET: tl.constexpr, ROUND_OFFSET: tl.constexpr,
    ROUNDING: tl.constexpr, EPS_OUTSIDE: tl.constexpr, GATE: tl.constexpr,
    STAGES: tl.constexpr, RELOAD_W: tl.constexpr, GAPS: tl.constexpr, FROM_OUTPUT: tl.constexpr,
):  # fmt: skip
    """A persistent program walks tiles of ROWS rows, `num_programs` apart.

    Args:
        DY, X: rows of unit stride, addressed as in `norm_forward`, each with its own inner length.
        G, DH: rows of the gate, and of what is added to dx before that is rounded, or None. Their address is other_*:
            nothing has both.
        W: (HEADS, N) or None. B: the same, and given only where a gate's gradient or FROM_OUTPUT needs it.
        RSTD, MEAN: (rows_total,) float32 from the forward; MEAN is None where nothing reads it: not CENTERED, or
            FROM_OUTPUT.
        DX, DG: (rows_total, N), contiguous, or None.
        DW, DB: (num_programs, HEADS, N) float32 partial sums, or None; program_id(1) is the head.
        STAGES: software pipeline depth of the loop (prefetch of the next tiles).
        RELOAD_W: wide rows: read the weight in every step instead of holding it, so that nothing spills.
        FLAT: as in `row_offsets`.
        GAPS: columns behind which registers hold nothing in every thread, and are known to add nothing; or 0.
    """
    cols = tl.arange(0, BLOCK)
    col_mask = (cols < N)[None, :]
    filled = (cols < GAPS)[None, :]
    DENSE: tl.constexpr = BLOCK == N and ROWS == 1
    AFTER: tl.constexpr = GATE == "silu_after" or GATE == "sigmoid_after" or GATE == "modulate_after"
    # Of wide rows dh, if it was prefetched, is added before the sum: after it, it would be one row more in registers.
    EARLY_DH: tl.constexpr = DH is not None and RELOAD_W and STAGES > 1
    # Where xhat is not rounded, rstd multiplies dy, once, and not all that dy is multiplied with.
    SCALED: tl.constexpr = CENTERED and ROUNDING == "once" and ROWS == 1 and not (AFTER or FROM_OUTPUT or RELOAD_W)
    tile_cols = tl.broadcast_to(cols[None, :], (ROWS, BLOCK))  # gives the weight x's layout, as in `norm_forward`
    head = 0
    if HEADS != 1:
        head = tl.program_id(1)
        if W is not None:
            W += head * N
        if B is not None:
            B += head * N
    # From the tile's first element, not as x's are: those are at hand stages earlier, in registers till then.
    dx_at = tl.arange(0, ROWS)[:, None] * (HEADS * N) + cols[None, :]
    if W is not None and not RELOAD_W:
        w = load(W + tile_cols, col_mask, BLOCK == N)
    if DW is not None:
        dw = tl.zeros((ROWS, BLOCK), tl.float32)
    if DB is not None:
        db = tl.zeros((ROWS, BLOCK), tl.float32)
    tiles = tl.cdiv(rows_total, ROWS * HEADS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        # A weight that is read in each step is read there: ahead, it would take as much shared memory as x.
        always = tile < tiles if STAGES > 1 and GATE is None and W is not None and W.dtype == X.dtype else True
        rows = tile * ROWS + tl.arange(0, ROWS)
        if HEADS != 1:
            rows = rows * HEADS + head
        row_mask = rows < rows_total
        mask = col_mask if ROWS == 1 else row_mask[:, None] & col_mask
        x_at = row_offsets(rows, x_len, x_outer, x_inner, UNIT, FLAT)[:, None]
        dy_at = row_offsets(rows, dy_len, dy_outer, dy_inner, UNIT, FLAT)[:, None]
        first = (tl.cast(tile, tl.int64) * (ROWS * HEADS) + head) * N
        x = load(X + x_at + cols[None, :], mask, DENSE)
        dy = load(DY + dy_at + cols[None, :], mask, DENSE)
        if G is not None:
            other_at = row_offsets(rows, other_len, other_outer, other_inner, UNIT, FLAT)[:, None]
            gate = load(G + other_at + cols[None, :], mask, DENSE)
        rstd = load(RSTD + rows, row_mask, ROWS == 1)
        x = x.to(tl.float32)
        if G is not None:
            factor, slope = activation(gate.to(tl.float32), G, GATE)
            if not AFTER:
                slope = slope * x
                x = x * factor
        if FROM_OUTPUT:
            scale = None
            if W is not None:
                if RELOAD_W:
                    w = load(W + tile_cols, col_mask, BLOCK == N, always)
                scale = scale_of(w, W, OFFSET, ROUND_OFFSET)
            xhat = hat_of_output(x, scale, B, tile_cols, col_mask, BLOCK == N)
        else:
            if CENTERED:
                x = x - load(MEAN + rows, row_mask, ROWS == 1)[:, None]
                if BLOCK != N and EPS_OUTSIDE:
                    x = tl.where(col_mask, x, 0.0)
            xhat = x if SCALED else x * rstd[:, None]
        g = dy.to(tl.float32)
        if AFTER:
            if DG is not None:
                y = round_hat(xhat, X, W, ROUNDING)
                if W is not None:
                    if RELOAD_W:
                        w = load(W + tile_cols, col_mask, BLOCK == N)
                    y = y * scale_of(w, W, OFFSET, ROUND_OFFSET)
                if B is not None:
                    y = y + load(B + tile_cols, col_mask, BLOCK == N).to(tl.float32)
                store(DG + first + dx_at, g * y * slope, mask, DENSE)
            g = g * factor
        if DB is not None:
            db = known(db + g, filled, GAPS)
        if SCALED:
            g = g * rstd[:, None]
        if DW is not None:
            dw = known(dw + g * round_hat(xhat, X, W, ROUNDING), filled, GAPS)
        if DX is not None or (DG is not None and not AFTER):
            if W is not None:
                if RELOAD_W:
                    w = load(W + tile_cols, col_mask, BLOCK == N, always)
                g = g * scale_of(w, W, OFFSET, ROUND_OFFSET)
            if DH is not None:
                other_at = row_offsets(rows, other_len, other_outer, other_inner, UNIT, FLAT)[:, None]
            if EARLY_DH:
                early = g * rstd[:, None] + load(DH + other_at + cols[None, :], mask, DENSE).to(tl.float32)
            total, along = sums(known(g, filled, GAPS), known(g * xhat, filled, GAPS), CENTERED)
            along = along * (1.0 / N)
            if EPS_OUTSIDE:
                along = along * eps_outside_factor(tl.sum(known(x * x, filled, GAPS), axis=1) * (1.0 / N), eps)
            if EARLY_DH:  # which rstd has multiplied
                g, total, along = early, total * rstd, along * rstd
            if CENTERED:
                g = g - (total * (1.0 / N))[:, None]
            # By way of x fewer values are live across the sum.
            if SCALED:
                dx = g - x * (along * rstd * rstd)[:, None]
            elif (RELOAD_W or CENTERED) and not FROM_OUTPUT:
                dx = g - x * (along * rstd)[:, None]
            else:
                dx = g - xhat * along[:, None]
            if not (SCALED or EARLY_DH):
                dx = dx * rstd[:, None]
            if GATE == "silu_before":
                if DG is not None:
                    store(DG + first + dx_at, dx * slope, mask, DENSE)
                dx = dx * factor
            if DH is not None and not EARLY_DH:
                dx = dx + load(DH + other_at + cols[None, :], mask, DENSE).to(tl.float32)
            if DX is not None:
                store(DX + first + dx_at, dx, mask, DENSE)
    partial = (tl.cast(tl.program_id(0), tl.int64) * HEADS + head) * N
    if DW is not None:
        store(DW + partial + cols, tl.sum(dw, axis=0), cols < N, BLOCK == N)
    if DB is not None:
        store(DB + partial + cols, tl.sum(db, axis=0), cols < N, BLOCK == N)


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
