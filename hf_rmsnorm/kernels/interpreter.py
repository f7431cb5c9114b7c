"""Triton's interpreter, made to round as the hardware does."""

from contextlib import contextmanager


@contextmanager
def faithful_interpreter():
    """Make Triton's interpreter round to bfloat16 and add rows as GPUs do, for the
    length of one launch.

    It truncates, and hardware rounds to nearest even. Along all but the last dimension
    it adds one element after the other, and threads add in pairs: a sum of many loses
    bits.
    """
    import numpy as np
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    original, patch = interpreter._convert_float, interpreter._patch_lang
    reductions = interpreter.ReduceOps
    add = reductions.sum

    def convert(data, source, target, rounding_mode):
        shape = data.shape
        data = np.ascontiguousarray(data)
        if source == tl.float32 and target == tl.bfloat16:
            bits = data.view(np.uint32).astype(np.uint64)
            to_even = 0x7FFF + ((bits >> 16) & 1)
            rounded = ((bits + to_even) >> 16).astype(np.uint16)
            rounded[np.isnan(data)] = 0x7FC0
            return rounded.reshape(shape)
        if source == tl.bfloat16 and target == tl.float32:
            bits = data.view(np.uint16).astype(np.uint32) << 16
            return bits.reshape(shape)
        return original(data.reshape(shape), source, target, rounding_mode)

    def add_in_pairs(reduction, tile):
        data = tile.handle.data
        if reduction.axis in (None, data.ndim - 1) or reduction.keep_dims:
            return add(reduction, tile)
        data = np.moveaxis(data, reduction.axis, 0)
        while len(data) > 1:  # a power of two
            data = data[::2] + data[1::2]
        return reduction.to_tensor(data[0], tile.dtype)

    def patch_and_mend(function):
        scope = patch(function)  # which undoes the next line too
        # Triton 3.6 has what NumPy 2.4 refuses
        tl.tensor.__index__ = lambda x: int(x.handle.data.item())
        return scope

    # Under the lock no other launch sees the replacement. No warnings about inf and
    # nan: they come from the inputs.
    interpreter._convert_float = convert
    interpreter._patch_lang = patch_and_mend
    reductions.sum = add_in_pairs
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        interpreter._convert_float = original
        interpreter._patch_lang = patch
        reductions.sum = add
