"""What the arithmetic of PTX computes: by instruction, the kinds of its operands and a
numpy function of all lanes.

Registers are arrays of bits, one element a lane, or a scalar where all lanes hold the
same. A kind is how an operand is looked at: w, d, h: unsigned of 32, 64, 16 bits; s, q:
signed of 32 and 64; f, e: float32 and float16; p: predicate. bfloat16 has no dtype and
is held as h.
"""

import re
from collections.abc import Callable

import numpy as np

u16, u32, u64, i32, i64, f16, f32, f64 = (
    np.dtype(t) for t in ("u2", "u4", "u8", "i4", "i8", "f2", "f4", "f8")
)
KINDS = dict(w=u32, d=u64, h=u16, s=i32, q=i64, f=f32, e=f16, p=np.dtype("?"))
TYPES = dict(
    b32="w",
    u32="w",
    s32="w",
    f16x2="w",
    bf16x2="w",
    b64="d",
    u64="d",
    s64="d",
    b16="h",
    u16="h",
    bf16="h",
    f32="f",
    f16="e",
    pred="p",
)
SIGNED = TYPES | dict(s32="s", s64="q")


def fma32(a, b, c):
    """a * b + c rounded once: the product is exact in float64, and only a sum on a
    float32 midpoint can round twice.
    """
    product = np.multiply(a, b, dtype=f64)
    total = product + c
    tie = (total.view(u64) & 0x1FFF_FFFF) == 0x1000_0000
    if tie.any():
        part = total - product
        lost = (product - (total - part)) + (c - part)
        towards = np.copysign(np.inf, lost)
        moved = np.nextafter(total, towards)
        total = np.where(tie & (lost != 0), moved, total)
    return total.astype(f32)


def to_bf16(a):
    bits = a.view(u32)
    out = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    out = out.astype(u16)
    odd = np.isnan(a)
    if odd.any():
        return np.where(odd, u16.type(0x7FFF), out)
    return out


def of_bf16(a):
    return (a.astype(u32) << 16).view(f32)


def _narrow(total):
    """float64 to bfloat16, by way of float32 rounded to odd, so that the second
    rounding is right.
    """
    near = total.astype(f32)
    away = np.where(total > near, np.inf, -np.inf)
    other = np.nextafter(near, away.astype(f32))
    even = near.view(u32) % 2 == 0
    inexact = (near != total) & np.isfinite(near)
    return to_bf16(np.where(inexact & even, other, near))


# by type: its kind, its way to float64, where one product or sum of a product is exact
# enough, and back
HALVES = {
    "bf16": ("h", lambda a: of_bf16(a).astype(f64), _narrow),
    "f16": ("e", lambda a: a.astype(f64), lambda a: a.astype(f16)),
}
OF_HALVES = {
    "add": ("xx", np.add),
    "sub": ("xx", np.subtract),
    "mul": ("xx", np.multiply),
    "neg": ("x", np.negative),
    "fma": ("xxx", lambda a, b, c: a * b + c),
}


def _pack(low, high):
    upper = high.view(u16).astype(u32) << 16
    return upper | low.view(u16)


def _unpack(pair):
    return pair.astype(u16), (pair >> 16).astype(u16)


def _of_half(name: str, kinds: str, function: Callable, compares: bool = False):
    """What a function of float64 is of halves of that type."""
    kind, wide, narrow = HALVES[name]

    def one(*halves):
        bits = [half.view(KINDS[kind]) for half in halves]
        result = function(*map(wide, bits))
        if compares:
            return result
        return narrow(result)

    return kinds.replace("x", kind), one


def _of_pair(name: str, kinds: str, function: Callable, compares: bool = False):
    """The same of registers with two halves each."""
    _, one = _of_half(name, kinds, function, compares)

    def both(*pairs):
        lows, highs = zip(*map(_unpack, pairs), strict=True)
        low = one(*lows)
        high = one(*highs)
        if compares:
            return (low, high)
        return _pack(low, high)

    return kinds.replace("x", "w"), both


def _rsqrt(a):
    root = np.sqrt(a.astype(f64))
    return (1.0 / root).astype(f32)


def _flushed(a):
    """Numbers too small to be normal become zero."""
    normal = f32.type(2.0**-126)
    return np.where(np.abs(a) < normal, 0 * a, a)


FLOAT = {
    "add": ("ff", np.add),
    "sub": ("ff", np.subtract),
    "mul": ("ff", np.multiply),
    "fma": ("fff", fma32),
    "div": ("ff", np.divide),
    "sqrt": ("f", np.sqrt),
    "rsqrt": ("f", _rsqrt),
    "rsqrt.ftz": ("f", lambda a: _rsqrt(_flushed(a))),
    "ex2": ("f", lambda a: np.exp2(a.astype(f64)).astype(f32)),
    "ex2.ftz": ("f", lambda a: _flushed(np.exp2(_flushed(a).astype(f64)).astype(f32))),
    "rcp.ftz": ("f", lambda a: _flushed(f32.type(1) / _flushed(a))),
    "fma.ftz": ("fff", lambda a, b, c: _flushed(fma32(*map(_flushed, (a, b, c))))),
    "abs.ftz": ("f", lambda a: np.abs(_flushed(a))),
    "neg": ("w", lambda a: a ^ 0x8000_0000),
    "min": ("ff", np.fmin),
    "max": ("ff", np.fmax),
}
COMPARE = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
INTEGERS = ("b16", "u16", "b32", "u32", "s32", "b64", "u64", "s64")
INTEGER = {  # x and y are the type as unsigned and as it is
    "add": ("xx", np.add),
    "sub": ("xx", np.subtract),
    "mul.lo": ("xx", np.multiply),
    "and": ("xx", np.bitwise_and),
    "or": ("xx", np.bitwise_or),
    "xor": ("xx", np.bitwise_xor),
    "not": ("x", np.invert),
    "min": ("yy", np.minimum),
    "mad.lo": ("xxx", lambda a, b, c: a * b + c),
    "neg": ("x", lambda a: a.dtype.type(0) - a),
    "max": ("yy", np.maximum),
    "div": ("yy", lambda a, b: (a - np.fmod(a, b)) // b),
    "rem": ("yy", np.fmod),
}


def _picked(a, b, how):
    """Four bytes of the eight of a and b, each named by four bits of `how`; the highest
    asks for that byte's sign.
    """
    both = b.astype(u64) << 32 | a
    picked = u32.type(0)
    for place in range(4):
        four = how.astype(u64) >> (4 * place)
        byte = (both >> ((four & 7) * 8)) & 255
        sign = np.where(byte & 128, 255, 0)
        chosen = np.where(four & 8, sign, byte)
        picked = picked | chosen.astype(u32) << (8 * place)
    return picked


EXACT = {
    "prmt.b32": ("www", _picked),
    "mul.wide.s32": ("ss", lambda a, b: np.multiply(a, b, dtype=i64)),
    "mul.wide.u32": ("ww", lambda a, b: np.multiply(a, b, dtype=u64)),
    "mad.wide.s32": ("ssq", lambda a, b, c: np.multiply(a, b, dtype=i64) + c),
    "mad.wide.u32": ("wwd", lambda a, b, c: np.multiply(a, b, dtype=u64) + c),
    "mul.hi.u32": ("ww", lambda a, b: (np.multiply(a, b, dtype=u64) >> 32).astype(u32)),
    "mul.hi.s32": ("ss", lambda a, b: (np.multiply(a, b, dtype=i64) >> 32).astype(i32)),
    "shl.b32": ("ww", np.left_shift),
    "shr.u32": ("ww", np.right_shift),
    "shr.s32": ("ss", np.right_shift),
    "shl.b64": ("dw", np.left_shift),
    "shr.u64": ("dw", np.right_shift),
    "shr.s64": ("qs", np.right_shift),
    "shl.b16": ("hw", lambda a, n: (a.astype(u32) << n).astype(u16)),
    "bfe.u32": (
        "www",
        lambda a, at, n: (a >> at) & ((u64.type(1) << n) - 1).astype(u32),
    ),
    "bfe.s32": ("sss", lambda a, at, n: a << (32 - at - n) >> (32 - n)),
    "cvt.f32.bf16": ("h", of_bf16),
    "cvt.f32.f16": ("e", lambda a: a.astype(f32)),
    "cvt.rn.bf16.f32": ("f", to_bf16),
    "cvt.rn.f16.f32": ("f", lambda a: a.astype(f16)),
    "cvt.rn.bf16x2.f32": ("ff", lambda high, low: _pack(to_bf16(low), to_bf16(high))),
    "cvt.rn.f16x2.f32": (
        "ff",
        lambda high, low: _pack(low.astype(f16), high.astype(f16)),
    ),
    "cvt.u64.u32": ("w", lambda a: a.astype(u64)),
    "cvt.s64.s32": ("s", lambda a: a.astype(i64)),
    "cvt.u32.u64": ("d", lambda a: a.astype(u32)),
    "cvt.u32.u16": ("h", lambda a: a.astype(u32)),
    "cvt.rn.f32.s32": ("s", lambda a: a.astype(f32)),
    "cvt.u16.u32": ("w", lambda a: a.astype(u16)),
    "and.pred": ("pp", np.logical_and),
    "or.pred": ("pp", np.logical_or),
}
MOVES = {  # of a pair in braces, by name and whether the pair is the destination
    ("mov.b32", True): ("w", _unpack),
    ("mov.b32", False): ("hh", _pack),
    ("mov.b64", True): ("d", lambda a: (a.astype(u32), (a >> 32).astype(u32))),
    ("mov.b64", False): ("ww", lambda low, high: high.astype(u64) << 32 | low),
}


def _table() -> dict[str, tuple[str, Callable]]:
    """By instruction without its rounding: kinds of the sources, and function."""
    table = dict(EXACT)
    for name, kind in TYPES.items():
        table[f"mov.{name}"] = kind, lambda a: a
        table[f"selp.{name}"] = 2 * kind + "p", lambda a, b, p: np.where(p, a, b)
    for name in INTEGERS:
        for head, (kinds, function) in INTEGER.items():
            kinds = kinds.replace("x", TYPES[name])
            kinds = kinds.replace("y", SIGNED[name])
            table[f"{head}.{name}"] = kinds, function
        for head, function in (COMPARE | {"ne": np.not_equal}).items():
            table[f"setp.{head}.{name}"] = 2 * SIGNED[name], function
    for head, operation in FLOAT.items():
        table[f"{head}.f32"] = operation
    unordered = {"neu": np.not_equal, "nan": lambda a, b: np.isnan(a) | np.isnan(b)}
    for head, function in (COMPARE | unordered).items():
        table[f"setp.{head}.f32"] = "ff", function
        for name in HALVES:
            table[f"setp.{head}.{name}"] = _of_half(name, "xx", function, True)
            table[f"setp.{head}.{name}x2"] = _of_pair(name, "xx", function, True)
    for head, (kinds, function) in OF_HALVES.items():
        for name in HALVES:
            table[f"{head}.{name}"] = _of_half(name, kinds, function)
            table[f"{head}.{name}x2"] = _of_pair(name, kinds, function)
    return table


_TABLE = _table()


def operation(name: str) -> tuple[str, Callable] | None:
    """(kinds of the sources, function) of an arithmetic instruction, None if this is
    none that is known.

    What is approximate is exact here unless it is to be blurred.
    """
    unrounded = re.sub(r"\.(rn|full|approx)(?=\.)", "", name)
    return EXACT.get(name) or _TABLE.get(unrounded)


def blurred(value):
    """float32 values moved by -1, 0 or 1 ulp, by a hash of their bits."""
    bits = value.view(u32)
    exponent = bits & 0x7F80_0000
    mixed = (bits ^ (bits >> 15)) * u32.type(0x9E37_79B1)
    moved = bits + (mixed ^ (mixed >> 13)) % 3 - 1
    keeps = (exponent == 0) | (exponent == 0x7F80_0000)
    return np.where(keeps, bits, moved).view(f32)
