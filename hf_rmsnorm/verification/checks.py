"""Compares one norm with the original, almost bit for bit."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..formula import HALF_DTYPES
from .context import one_line
from .norms import Expected, NormCall
from .tolerance import ulp

MAX_OFF_HALF = 1e-3
MAX_OFF_FLOAT = 1e-2
MAX_ULP = 2.0
WORST_ULP = 4.0
NOT_REACHED = "not reached by these inputs"
NOT_COMPARED = "not compared: it does not map a tensor to one of the same shape"
# of elements in rows nearly constant; a wrong rounding order changes five times as many
_MAX_AMPLIFIED = 0.05


@dataclass(frozen=True)
class NormCheck:
    """One module: its output against the original's on the same input.

    At most 0.1 % of the values in half precision and 1 % in float32 (or one value) may
    be off, and none by more than 4 ulp. In half precision a value is off if it differs
    at all. If the norm is centred, 0.1 % grows by 1 + |mean|/std of its rows. In
    float32 a value is off beyond 2 ulp. There an ulp is 2^-23 of the largest term in
    its row: weight * rstd * x, bias, and for a centred norm weight * rstd * mean.
    docs/correctness.md gives the reasons.
    """

    path: str
    class_name: str
    # the coarser dtype of input and output, which is where the original rounds
    dtype: str = ""
    # that were compared; 0 if the module did not run, or changes the shape of its input
    elements: int = 0
    differing: int = 0  # how many of them are not equal
    off: int = 0  # how many are off, as defined above
    allowed: int = 0  # how many may be
    # the largest difference, in ulp of the value in half precision, or of float32 as
    # above
    worst_ulp: float = 0.0
    passed: bool = True
    reason: str = ""  # why it failed, or why nothing was compared

    @property
    def reached(self) -> bool:
        """Whether the inputs ran the module at all."""
        return self.reason != NOT_REACHED

    @property
    def was_compared(self) -> bool:
        """Whether there is a result: values that were compared, or a failure."""
        return self.elements > 0 or not self.passed

    @property
    def words(self) -> str:
        """The line of a report."""
        if not self.elements:
            return self.reason
        counts = f"{self.off} of {self.elements} values {_how_far(self.dtype)} (limit {self.allowed})"
        if not self.differing:
            return counts
        text = f"{counts}; largest difference {self.worst_ulp:.2g} rounding steps"
        return f"{self.reason}; {text}" if self.worst_ulp > WORST_ULP else text


def check_norm(path: str, class_name: str, calls: list[NormCall]) -> NormCheck:
    """Run the candidate's module on the recorded calls, and compare all its outputs at
    once.
    """
    compared = []
    for call in calls:
        if call.expected is None or not call.expected.y.numel():
            continue
        try:
            with torch.no_grad():
                y = call.run(call.candidate)
        except Exception as error:
            # whatever a broken kernel or forward raises is the verdict on it
            return _failed(path, class_name, f"raises {one_line(error)}")
        compared.append((y, call.expected))
    if not compared:
        return NormCheck(
            path, class_name, reason=NOT_COMPARED if calls else NOT_REACHED
        )
    return _judge(path, class_name, compared)


def _failed(path: str, class_name: str, reason: str, dtype: str = "") -> NormCheck:
    return NormCheck(
        path, class_name, dtype, worst_ulp=math.inf, passed=False, reason=reason
    )


@torch.no_grad()
def _judge(path: str, class_name: str, compared: list[tuple]) -> NormCheck:
    """Compare outputs, each with its expected one."""
    elements = differing = off = 0
    worst = amplified = 0.0
    for y, expected in compared:
        theirs = expected.y
        dtype = max(expected.dtype, theirs.dtype, key=lambda d: torch.finfo(d).eps)
        name = str(dtype).removeprefix("torch.")
        kinds = _kinds_differ(y, theirs)
        if kinds:
            return _failed(path, class_name, kinds, name)
        distance = _distance(y, expected, dtype)
        worst = max(worst, distance.ulps)
        off += distance.off
        differing += distance.differing
        elements += y.numel()
        amplified += expected.amplification.mean().item() * y.numel()
    half = dtype in HALF_DTYPES
    share = (
        min(MAX_OFF_HALF * amplified / elements, _MAX_AMPLIFIED)
        if half
        else MAX_OFF_FLOAT
    )
    allowed = max(1, int(share * elements))
    reason = ""
    if worst > WORST_ULP:
        reason = f"a value is {worst:.3g} rounding steps away (limit {WORST_ULP:g})"
    elif off > allowed:
        reason = f"{off} of {elements} values {_how_far(name)} (limit {allowed})"
    return NormCheck(
        path,
        class_name,
        name,
        elements,
        differing,
        off,
        allowed,
        worst,
        not reason,
        reason,
    )


def _how_far(dtype: str) -> str:
    """How far a value may be from the original's before it counts."""
    half = dtype in ("float16", "bfloat16")
    return "differ" if half else f"are more than {MAX_ULP:g} rounding steps away"


def _kinds_differ(y, theirs: torch.Tensor) -> str:
    """The difference in type, dtype or shape from the original's output; "" if there is
    none.
    """
    if not isinstance(y, torch.Tensor):
        return f"returns a {type(y).__name__}, the original a tensor"
    if y.dtype != theirs.dtype or y.shape != theirs.shape:
        return f"returns {y.dtype} {tuple(y.shape)}, the original {theirs.dtype} {tuple(theirs.shape)}"
    return ""


class _Distance(NamedTuple):
    """How many elements are not equal, how many are off, and the largest difference in
    ulp; see `NormCheck`.
    """

    differing: int
    off: int
    ulps: float


def _distance(y: torch.Tensor, expected: Expected, dtype: torch.dtype) -> _Distance:
    rounds_last = y.dtype in HALF_DTYPES
    y, theirs = y.double(), expected.y.double()
    unequal = (y != theirs) & ~(y.isnan() & theirs.isnan())
    difference = torch.where(unequal, (y - theirs).abs(), 0.0).nan_to_num(
        nan=math.inf, posinf=math.inf
    )
    fine = (
        expected.largest_term
        * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    )
    coarse = torch.maximum(ulp(theirs, dtype), fine) if dtype in HALF_DTYPES else fine
    # half-precision output is rounded last; other output may be multiplied by the
    # weight after the rounding
    off = unequal if rounds_last else difference > MAX_ULP * fine
    ulps = (difference / coarse.clamp_min(1e-300)).max().item()
    return _Distance(unequal.sum().item(), off.sum().item(), ulps)
