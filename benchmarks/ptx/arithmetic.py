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

u16 = np.dtype("u2")
u32 = np.dtype("u4")
u64 = np.dtype("u8")
i32 = np.dtype("i4")
i64 = np.dtype("i8")
f16 = np.dtype("f2")
f32 = np.dtype("f4")
f64 = np.dtype("f8")
KINDS = {
    "w": u32,
    "d": u64,
    "h": u16,
    "s": i32,
    "q": i64,
    "f": f32,
    "e": f16,
    "p": np.dtype("?"),
}
# The kind of a type whose sign does not matter, as in a sum.
TYPES = {
    "b32": "w",
    "u32": "w",
    "s32": "w",
    "b64": "d",
    "u64": "d",
    "s64": "d",
    "b16": "h",
    "u16": "h",
    "f32": "f",
    "pred": "p",
}
INTEGERS = ("b16", "u16", "b32", "u32", "s32", "b64", "u64", "s64")
SIGNED = TYPES | {"s32": "s", "s64": "q"}

# By instruction: kinds of the sources, and function.
_TABLE: dict[str, tuple[str, Callable]] = {
    "shl.b32": ("ww", np.left_shift),
    "shl.b64": ("dw", np.left_shift),
    "shr.u32": ("ww", np.right_shift),
    "shr.s32": ("ss", np.right_shift),
    "shr.s64": ("qs", np.right_shift),
    "and.pred": ("pp", np.logical_and),
    "or.pred": ("pp", np.logical_or),
    "not.pred": ("p", np.logical_not),
    "add.f32": ("ff", np.add),
    "sub.f32": ("ff", np.subtract),
    "mul.f32": ("ff", np.multiply),
    "div.f32": ("ff", np.divide),
    "max.f32": ("ff", np.fmax),
    "sqrt.f32": ("f", np.sqrt),
}


def instruction(name, kinds):
    """Has an instruction computed by the function that is decorated."""

    def add(function):
        _TABLE[name] = kinds, function
        return function

    return add


@instruction("fma.f32", "fff")
def fma32(a, b, c):
    """a * b + c rounded once: the product is exact in float64, and only a sum on a
    float32 midpoint can round twice.
    """
    product = np.multiply(a, b, dtype=f64)
    total = product + c
    tie = (total.view(u64) & 0x1FFF_FFFF) == 0x1000_0000
    if tie.any():
        part = total - product
        of_product = total - part
        lost = product - of_product
        lost = lost + (c - part)
        towards = np.copysign(np.inf, lost)
        moved = np.nextafter(total, towards)
        inexact = lost != 0
        total = np.where(tie & inexact, moved, total)
    return total.astype(f32)


def _flushed(a):
    """Numbers too small to be normal become zero."""
    normal = f32.type(2.0**-126)
    return np.where(np.abs(a) < normal, 0 * a, a)


@instruction("fma.ftz.f32", "fff")
def _flushing_fma(a, b, c):
    total = fma32(_flushed(a), _flushed(b), _flushed(c))
    return _flushed(total)


@instruction("sqrt.ftz.f32", "f")
def _flushing_root(a):
    return np.sqrt(_flushed(a))


@instruction("rsqrt.ftz.f32", "f")
def _flushing_rsqrt(a):
    wide = _flushed(a).astype(f64)
    result = 1.0 / np.sqrt(wide)
    return result.astype(f32)


@instruction("ex2.f32", "f")
def _exp2(a):
    power = np.exp2(a.astype(f64))
    return power.astype(f32)


@instruction("ex2.ftz.f32", "f")
def _flushing_exp2(a):
    power = _exp2(_flushed(a))
    return _flushed(power)


@instruction("rcp.ftz.f32", "f")
def _flushing_reciprocal(a):
    one = f32.type(1)
    return _flushed(one / _flushed(a))


@instruction("div.ftz.f32", "ff")
def _flushing_quotient(a, b):
    return _flushed(_flushed(a) / _flushed(b))


@instruction("abs.ftz.f32", "f")
def _flushing_abs(a):
    return np.abs(_flushed(a))


@instruction("neg.f32", "w")
def _negative(a):
    return a ^ 0x8000_0000


@instruction("setp.nan.f32", "ff")
def _one_is_nan(a, b):
    return np.isnan(a) | np.isnan(b)


@instruction("cvt.rn.bf16.f32", "f")
def to_bf16(a):
    bits = a.view(u32)
    even = (bits >> 16) & 1
    out = (bits + even + 0x7FFF) >> 16
    out = out.astype(u16)
    odd = np.isnan(a)
    if odd.any():
        return np.where(odd, u16.type(0x7FFF), out)
    return out


@instruction("cvt.f32.bf16", "h")
def of_bf16(a):
    upper = a.astype(u32) << 16
    return upper.view(f32)


@instruction("cvt.rn.f16.f32", "f")
def _to_f16(a):
    return a.astype(f16)


@instruction("cvt.rn.f32.s32", "s")
@instruction("cvt.f32.f16", "e")
def _to_f32(a):
    return a.astype(f32)


def _pack(low, high):
    upper = high.view(u16).astype(u32) << 16
    return upper | low.view(u16)


def _unpack(pair):
    low = pair.astype(u16)
    high = pair >> 16
    return low, high.astype(u16)


@instruction("cvt.rn.bf16x2.f32", "ff")
def _to_two_bf16(high, low):
    return _pack(to_bf16(low), to_bf16(high))


@instruction("cvt.rn.f16x2.f32", "ff")
def _to_two_f16(high, low):
    return _pack(_to_f16(low), _to_f16(high))


@instruction("cvt.u64.u32", "w")
def _to_u64(a):
    return a.astype(u64)


@instruction("cvt.s64.s32", "s")
def _to_i64(a):
    return a.astype(i64)


@instruction("cvt.u32.u64", "d")
@instruction("cvt.u32.u16", "h")
def _to_u32(a):
    return a.astype(u32)


@instruction("cvt.u16.u32", "w")
def _to_u16(a):
    return a.astype(u16)


@instruction("mul.wide.s32", "ss")
def _wide_signed_product(a, b):
    return np.multiply(a, b, dtype=i64)


@instruction("mul.wide.u32", "ww")
def _wide_product(a, b):
    return np.multiply(a, b, dtype=u64)


@instruction("mul.wide.u16", "hh")
def _wide_product_of_halves(a, b):
    return np.multiply(a, b, dtype=u32)


@instruction("mad.wide.s32", "ssq")
def _wide_signed_sum(a, b, c):
    return _wide_signed_product(a, b) + c


@instruction("mad.wide.u32", "wwd")
def _wide_sum(a, b, c):
    return _wide_product(a, b) + c


@instruction("mul.hi.s32", "ss")
def _upper_half_of_signed_product(a, b):
    upper = _wide_signed_product(a, b) >> 32
    return upper.astype(i32)


@instruction("mul.hi.u32", "ww")
def _upper_half_of_product(a, b):
    upper = _wide_product(a, b) >> 32
    return upper.astype(u32)


@instruction("shl.b16", "hw")
def _shifted_half(a, count):
    shifted = a.astype(u32) << count
    return shifted.astype(u16)


@instruction("bfe.u32", "www")
def _bits(a, first, count):
    mask = (u64.type(1) << count) - 1
    return (a >> first) & mask.astype(u32)


@instruction("bfe.s32", "sss")
def _signed_bits(a, first, count):
    at_the_top = a << (32 - first - count)
    return at_the_top >> (32 - count)


@instruction("prmt.b32", "www")
def _picked(a, b, how):
    """Four bytes of the eight of a and b, each named by four bits of `how`; the highest
    asks for that byte's sign.
    """
    both = b.astype(u64) << 32 | a
    picked = u32.type(0)
    for place in range(4):
        four = how.astype(u64) >> (4 * place)
        shift = (four & 7) * 8
        byte = (both >> shift) & 255
        sign = np.where(byte & 128, 255, 0)
        chosen = np.where(four & 8, sign, byte)
        moved = chosen.astype(u32) << (8 * place)
        picked = picked | moved
    return picked


def joined(low, high):
    return high.astype(u64) << 32 | low


def parted(both):
    low = both.astype(u32)
    high = both >> 32
    return low, high.astype(u32)


MOVES = {  # of a pair in braces, by name and whether the pair is the destination
    ("mov.b32", True): ("w", _unpack),
    ("mov.b32", False): ("hh", _pack),
    ("mov.b64", True): ("d", parted),
    ("mov.b64", False): ("ww", joined),
}


def _same(a):
    return a


def _selected(a, b, predicate):
    return np.where(predicate, a, b)


for _name, _kind in TYPES.items():
    _TABLE[f"mov.{_name}"] = _kind, _same
    _TABLE[f"selp.{_name}"] = 2 * _kind + "p", _selected


def _product_and_sum(a, b, c):
    return a * b + c


def _minus(a):
    return a.dtype.type(0) - a


def _quotient(a, b):
    return (a - np.fmod(a, b)) // b


INTEGER = {  # x and y are the type as unsigned and as it is
    "add": ("xx", np.add),
    "sub": ("xx", np.subtract),
    "mul.lo": ("xx", np.multiply),
    "and": ("xx", np.bitwise_and),
    "or": ("xx", np.bitwise_or),
    "xor": ("xx", np.bitwise_xor),
    "min": ("yy", np.minimum),
    "max": ("yy", np.maximum),
    "mad.lo": ("xxx", _product_and_sum),
    "neg": ("x", _minus),
    "div": ("yy", _quotient),
    "rem": ("yy", np.fmod),
    "setp.eq": ("yy", np.equal),
    "setp.ne": ("yy", np.not_equal),
    "setp.lt": ("yy", np.less),
    "setp.le": ("yy", np.less_equal),
    "setp.gt": ("yy", np.greater),
    "setp.ge": ("yy", np.greater_equal),
}
for _head, (_kinds, _function) in INTEGER.items():
    for _name in INTEGERS:
        _of_type = _kinds.replace("x", TYPES[_name])
        _of_type = _of_type.replace("y", SIGNED[_name])
        _TABLE[f"{_head}.{_name}"] = _of_type, _function


def _bf16_to_f64(a):
    return of_bf16(a).astype(f64)


def _f64_to_bf16(total):
    """By way of float32 rounded to odd, so that the second rounding is right."""
    near = total.astype(f32)
    away = np.where(total > near, np.inf, -np.inf)
    other = np.nextafter(near, away.astype(f32))
    even = near.view(u32) % 2 == 0
    inexact = (near != total) & np.isfinite(near)
    odd = np.where(inexact & even, other, near)
    return to_bf16(odd)


def _f16_to_f64(a):
    return a.view(f16).astype(f64)


# By type: its kind, and its ways to float64, where one product or sum of a product is
# exact enough, and back.
HALVES = {
    "bf16": ("h", _bf16_to_f64, _f64_to_bf16),
    "f16": ("e", _f16_to_f64, _to_f16),
}
OF_HALVES = {
    "add": (2, np.add),
    "sub": (2, np.subtract),
    "mul": (2, np.multiply),
    "neg": (1, np.negative),
    "fma": (3, _product_and_sum),
}


def _less_or_nan(a, b):
    return ~np.greater_equal(a, b)


COMPARED = {
    "eq": np.equal,
    "neu": np.not_equal,
    "lt": np.less,
    "ltu": _less_or_nan,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _of_half(name, function):
    """What a function of float64 is of halves of that type."""
    _, widen, narrow = HALVES[name]

    def one(*halves):
        result = function(*map(widen, halves))
        return narrow(result)

    return one


def _of_pair(one):
    """What a function of halves is of registers with two halves each."""

    def both(*pairs):
        lows, highs = zip(*map(_unpack, pairs), strict=True)
        return _pack(one(*lows), one(*highs))

    return both


def _comparison_of_halves(name, function):
    _, widen, _ = HALVES[name]

    def compare(a, b):
        return function(widen(a), widen(b))

    return compare


for _name, (_kind, *_) in HALVES.items():
    for _head, (_count, _function) in OF_HALVES.items():
        _one = _of_half(_name, _function)
        _TABLE[f"{_head}.{_name}"] = _count * _kind, _one
        _TABLE[f"{_head}.{_name}x2"] = _count * "w", _of_pair(_one)
    for _head, _function in COMPARED.items():
        _compare = _comparison_of_halves(_name, _function)
        _TABLE[f"setp.{_head}.{_name}"] = 2 * _kind, _compare
for _head, _function in COMPARED.items():
    _TABLE[f"setp.{_head}.f32"] = "ff", _function


def operation(name):
    """(kinds of the sources, function) of an arithmetic instruction, None if this is
    none that is known.

    What is approximate is exact here unless it is to be blurred.
    """
    unrounded = re.sub(r"\.(rn|full|approx)(?=\.)", "", name)
    return _TABLE.get(name) or _TABLE.get(unrounded)


def blurred(value):
    """float32 values moved by -1, 0 or 1 ulp, by a hash of their bits."""
    bits = value.view(u32)
    exponent = bits & 0x7F80_0000
    mixed = (bits ^ (bits >> 15)) * u32.type(0x9E37_79B1)
    mixed = mixed ^ (mixed >> 13)
    moved = bits + mixed % 3 - 1
    keeps = (exponent == 0) | (exponent == 0x7F80_0000)
    chosen = np.where(keeps, bits, moved)
    return chosen.view(f32)
