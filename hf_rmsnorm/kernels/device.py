"""Device functions that the forward and the backward kernels share."""

import triton
import triton.language as tl


@triton.jit
def row_offsets(rows, inner, outer_stride, inner_stride, UNIT, FLAT=0):
    """Offset in elements of each row of a tensor, as a column; row r is at (r // inner,
    r % inner).

    FLAT: the elements of a row if no gaps are between rows; else 0. One address then
    serves all operands of a kernel. To compute the addresses otherwise takes a seventh
    of a backward's instructions.

    Strides arrive divided by UNIT, so that the compiler can see that they are multiples
    of it: that is what makes 16-byte loads possible without one compile per stride.
    Products are 64-bit: a tensor may pass 2^31 elements. The division is unsigned: a
    signed one costs the backward 16 registers more.
    """
    if FLAT:
        at = rows.to(tl.int64) * FLAT
    else:
        rows = rows.to(tl.uint32)
        inner = tl.cast(inner, tl.uint32)
        # The interpreter passes a small integer as 32 bits whatever the signature says,
        # so both factors are cast.
        outer_stride = tl.cast(outer_stride, tl.int64) * UNIT
        inner_stride = tl.cast(inner_stride, tl.int64) * UNIT
        at = (rows // inner).to(tl.int64) * outer_stride
        at += (rows % inner).to(tl.int64) * inner_stride
    return at[:, None]


@triton.jit
def load(pointers, mask, DENSE, always=True):
    """Load, without a mask where the tile covers only valid elements; masked lanes read
    as zero.

    always: True in each step of a loop, by a test that the compiler does not see
    through: so it does not load ahead.
    """
    if not always:
        values = tl.zeros(pointers.shape, pointers.dtype.element_ty)
    elif DENSE:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=mask, other=0.0)
    return values


@triton.jit
def load32(pointers, mask, DENSE):
    """`load` in float32."""
    return load(pointers, mask, DENSE).to(tl.float32)


@triton.jit
def rounded(value, X):
    """float32 values, rounded as a tensor of x's dtype holds them."""
    return value.to(X.dtype.element_ty).to(tl.float32)


@triton.jit
def wide(x):
    """x in float32. A bfloat16 is its upper half: written so, the assembler takes one
    instruction, not two.
    """
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(
            tl.float32, bitcast=True
        )
    else:
        return x.to(tl.float32)


@triton.jit
def store(pointers, values, mask, DENSE):
    """Store in the pointer's element type, without a mask where the tile covers only
    valid elements.
    """
    values = values.to(pointers.dtype.element_ty)
    if DENSE:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def known(values, mask, GAPS):
    """Zero behind the row: the registers there then cost no instruction, as the
    compiler knows their value.
    """
    return tl.where(mask, values, 0.0) if GAPS else values


@triton.jit
def reciprocal_root(square, eps, EPS_OUTSIDE):
    """The factor of a row, from its mean square."""
    if EPS_OUTSIDE:
        divisor = tl.sqrt_rn(square) + eps
        return tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    else:
        return tl.rsqrt(square + eps)


@triton.jit
def normalised(x, rstd, X, ROUNDING):
    """x over its root, in the operators of the formula; rstd broadcasts against x."""
    if ROUNDING == "rstd":
        return x * rounded(rstd, X)
    else:
        return x * rstd


@triton.jit
def round_hat(xhat, X, W, ROUNDING):
    """Round the normalised x where the formula does it before the weight; always
    returns float32 values.
    """
    if ROUNDING == "weight_dtype":
        xhat = rounded(xhat, W)
    elif ROUNDING != "once":
        xhat = rounded(xhat, X)
    return xhat


@triton.jit
def round_product(y, X, W, ROUNDING):
    """Round xhat * weight if that product is a tensor, of the promoted dtype of its
    factors.
    """
    if ROUNDING == "weight_dtype":
        y = rounded(y, W)
    elif ROUNDING != "once" and W.dtype.element_ty == X.dtype.element_ty:
        y = rounded(y, X)
    return y


@triton.jit
def scale_of(w, W, OFFSET, ROUND_OFFSET):
    """The factor applied to xhat, in float32: weight + OFFSET, that sum rounded where
    the formula rounds it.
    """
    scale = w.to(tl.float32)
    if OFFSET != 0.0:
        scale = scale + OFFSET
        if ROUND_OFFSET:
            scale = rounded(scale, W)
    return scale


@triton.jit
def hat_of_output(y, scale, B, cols, col_mask, DENSE):
    """xhat from the norm's output y, in float32: (y - bias) / scale; zero in masked
    columns. scale None: no weight.

    A scale of zero counts as one: y has lost xhat there, and xhat is then zero.
    """
    if B is not None:
        y = y - load32(B + cols, col_mask, DENSE)
    if scale is not None:
        y = y / tl.where(scale == 0.0, 1.0, scale)
    return y


@triton.jit
def activation(z, G, GATE):
    """(factor, its derivative) of a gate's value z, in float32; 1 + z is rounded to the
    dtype that z has in G.
    """
    sigmoid = tl.sigmoid(z)
    if GATE == "modulate_after" or GATE == "multiply_after":
        factor = rounded(1.0 + z, G) if GATE == "modulate_after" else z
        slope = tl.full(z.shape, 1.0, tl.float32)
    elif GATE == "sigmoid_after":
        factor = sigmoid
        slope = sigmoid * (1.0 - sigmoid)
    else:
        tl.static_assert(GATE == "silu_before" or GATE == "silu_after")
        factor = z * sigmoid
        slope = sigmoid * (1.0 + z * (1.0 - sigmoid))
    return factor, slope
