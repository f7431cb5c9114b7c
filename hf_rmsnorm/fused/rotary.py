"""How a model's rotary function rotates q and k: found by running it, once for each
dtype, device and number of columns that it is called with.

`patching.layers.rotary_code` has read the function: it computes along the last
dimension alone, whatever the others are. So a few heads and tokens are enough. They
are random: on the first token of a text, cos is 1 and sin is 0, and every formula fits.
"""

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType
from typing import NamedTuple

import torch
from torch import Tensor

from ..formula import Rotation
from ..ops.backend import device_refusal, host_may_wait, starts_kernels
from ..ops.qk import Rotary
from ..reference import rotated

_PAIRS = Rotation(reads_pairs=True, writes_pairs=True)
_FIRST = _PAIRS._replace(tables="first")
_TWICE = {"once": True, "casts_twice": True}
WAYS = (  # that models have, each with one
    Rotation(),  # LLaMA
    Rotation(reads_pairs=True, tables="first"),  # DeepSeek V3
    Rotation(**_TWICE),  # OLMo 2
    _FIRST,  # GLM
    _PAIRS._replace(once=True),  # Cohere
    _PAIRS,  # BLT
    _FIRST._replace(**_TWICE),  # Ernie 4.5
    _PAIRS._replace(**_TWICE),  # Ernie 4.5 VL
    Rotation(tables="half"),  # GPT-OSS
    Rotation(once=True),  # HunYuan VL
)
_SIZES = (3, 5, 7, 11, 13, 17)
_UNSEEN = object()


class RotaryCall(NamedTuple):
    """How a forward calls a rotary function.

    Args:
        one: with one tensor instead of q and k, in front of cos and sin.
        named: the constants behind them, by name.
    """

    one: bool = False
    named: tuple[tuple, ...] = ()


PAIR = RotaryCall()
ONE = RotaryCall(True, named=(("unsqueeze_dim", 2),))


class RotaryCase(NamedTuple):
    """All that decides a result, besides values and the sizes of other dimensions."""

    called: RotaryCall
    head_dim: int
    columns: int  # of cos and sin
    dtype: torch.dtype
    table_dtype: torch.dtype
    device: torch.device


@dataclass(eq=False)
class RotaryProof:
    """What reading and running a rotary function has shown.

    Args:
        names: the globals that it and its helpers read, as (namespace, name, value).
        functions: it and its helpers, as (function, code, defaults).
        found: by their `RotaryCase`, what launches compute; None where they do not.
    """

    names: tuple[tuple[dict, str, object], ...]
    functions: tuple[tuple[FunctionType, CodeType, tuple | None], ...]
    found: dict[RotaryCase, Rotary | None] = field(default_factory=dict)

    def still_holds(self) -> bool:
        """Whether the functions are those that were read."""
        for namespace, name, value in self.names:
            if namespace.get(name) is not value:
                return False
        for function, code, defaults in self.functions:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                return False
        return True


rotary_proofs: dict[FunctionType, RotaryProof] = {}


def rotary_of(
    rotate: Callable, called: RotaryCall, q: Tensor, dtype: torch.dtype, cos: Tensor
) -> Rotary | None:
    """How a function rotates heads like q, once these have a dtype, by tables like cos.

    None where it does so in none of `WAYS`, was not read or has changed since, or where
    it cannot be run to see: then a later call finds out.
    """
    if type(rotate) is not FunctionType:
        return None
    proof = rotary_proofs.get(rotate)
    if proof is None or not proof.still_holds():
        return None
    case = called, q.shape[-1], cos.shape[-1], dtype, cos.dtype, q.device
    rotary = proof.found.get(case, _UNSEEN)
    if rotary is not _UNSEEN:
        return rotary
    if not can_probe(q.device):
        return None
    return probe(proof, rotate, RotaryCase(RotaryCall(*called), *case[1:]))


def can_probe(device: torch.device) -> bool:
    """Whether a function can be run on a device here and now: kernels are started there,
    and the host may wait for results.
    """
    if not starts_kernels() or device_refusal(device.type, device.index) is not None:
        return False
    return host_may_wait(device.type == "cuda")


def probe(proof: RotaryProof, rotate: FunctionType, case: RotaryCase) -> Rotary | None:
    """How a function that was read rotates in a case; None if in none of `WAYS`."""
    if case in proof.found:
        return proof.found[case]
    # A new thread has none of the caller's modes, hooks and transforms.
    with ThreadPoolExecutor(1) as thread:
        rotary = thread.submit(_probe, rotate, case).result()
    proof.found[case] = rotary
    return rotary


def _probe(rotate: FunctionType, case: RotaryCase) -> Rotary | None:
    operands = _random_operands(case)
    called = case.called
    # called with nothing else, q and k of this order have three dimensions
    orders = (False, True) if called.named else (False,)
    for transposed in orders:
        function = partial(_on_heads, rotate, called, transposed)
        try:
            expected = _results(function, *operands)
        except Exception:  # a function of something else may raise anything
            continue
        for way in WAYS:
            with contextlib.suppress(RuntimeError):  # such tables are not read so
                results = _results(partial(_by_formula, way), *operands)
                pairs = zip(results, expected, strict=True)
                if all(_same(*pair) for pair in pairs):
                    return Rotary(way, function, transposed)
    return None


def _random_operands(case: RotaryCase) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and k of different numbers of heads, cos and sin. No two dimensions that differ
    have the same size.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype) -> Tensor:
        values = torch.randn(
            shape, generator=generator, dtype=torch.float32, device="cpu"
        )
        return values.to(case.device, dtype)

    columns = case.head_dim, case.columns
    batch, length, *heads = [size for size in _SIZES if size not in columns][:4]
    rows = []
    for count in heads:
        x = random(batch, length, count, case.head_dim, dtype=case.dtype)
        if case.dtype != torch.float16:  # whose range has no such values
            x[:, 1] *= 2.0**20
            x[:, 2] *= 2.0**-30
        rows.append(x.transpose(1, 2).requires_grad_())
    cos, sin = random(2, batch, length, case.columns, dtype=case.table_dtype)
    return *rows, cos, sin


def _on_heads(
    rotate: Callable, called: RotaryCall, transposed: bool, q, k, cos, sin
) -> Iterable[Tensor]:
    """q and k, (batch, heads, length, head_dim), through a function that is called
    so.
    """
    if not transposed:
        return _call(rotate, called, (q, k), cos, sin)
    heads = q.transpose(1, 2), k.transpose(1, 2)
    results = _call(rotate, called, heads, cos, sin)
    return [y.transpose(1, 2) for y in results]


def _call(rotate: Callable, called: RotaryCall, heads, cos, sin) -> Iterable[Tensor]:
    named = dict(called.named)
    if called.one:
        return [rotate(x, cos, sin, **named) for x in heads]
    return rotate(*heads, cos, sin, **named)


def _by_formula(way: Rotation, q, k, cos, sin) -> tuple[Tensor, Tensor]:
    return rotated(q, cos, sin, way), rotated(k, cos, sin, way)


def _results(function: Callable, q, k, cos, sin) -> list[Tensor]:
    """q and k through a function, and the gradients of both."""
    yq, yk = function(q, k, cos, sin)
    # not ones, whose products with cos and sin are exact
    gradients = yq.detach(), yk.detach()
    return [yq, yk, *torch.autograd.grad((yq, yk), (q, k), gradients)]


def _same(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(x, y)
