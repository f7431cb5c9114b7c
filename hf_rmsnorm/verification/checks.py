"""Compares norms and fused layers with the originals, on the inputs that they get in
the model.

The comparison does not depend on how a layer is fused. Unfused, the layer has its
original class, and its norms stay patched.
"""

from dataclasses import dataclass

import torch

from ..formula import HALF_DTYPES
from ..patching.swap import layer_part
from ..paths import error_line
from .calls import Call
from .noise import noise_floor
from .quantised import quantised_modules
from .tolerance import ulp

# of the elements; see `judge_norm`
MAX_OFF_HALF = 1e-3
MAX_OFF_FLOAT = 1e-2
MAX_ULP = 2.0
WORST_ULP = 4.0
# of elements in rows nearly constant; a wrong rounding order changes five times as many
_MAX_AMPLIFIED = 0.05
NOT_COMPARED = "not compared: it does not map a tensor to one of the same shape"


@dataclass(frozen=True)
class Check:
    """The comparison of one part of a model: a norm, a fused layer, a gradient.

    Attributes:
        path: of the module, with the fused pieces of a layer, and the name of a
            gradient.
        passed: whether it has no fault.
        text: the result in words, or why there is none.
        compared: how many values were compared; 0 if none could be.
        differing: how many of them are not equal.
    """

    path: str
    passed: bool
    text: str
    compared: int = 0
    differing: int = 0

    @property
    def mark(self) -> str:
        """PASS or FAIL, or nothing if nothing was compared."""
        if not self.passed:
            return "FAIL"
        return "PASS" if self.compared else ""


Outputs = list[torch.Tensor]


def check_outputs(call: Call) -> Check:
    """Compare a module's outputs with the original's, without gradients and with them;
    returns the worse.
    """
    checks = []
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            checks.append(_check(call))
    return worst(checks)


def _check(call: Call) -> Check:
    try:
        ours = _run(call, call.module)
        with call.original() as original:
            theirs = _run(call, original)
    except Exception as error:
        # whatever a broken kernel or forward raises is the verdict on it
        return Check(call.path, False, f"raises {error_line(error)}")
    if _kinds(ours) != _kinds(theirs):
        kinds = f"returns {_kinds(ours)}, the original {_kinds(theirs)}"
        return Check(call.path, False, kinds)
    if layer_part(type(call.module)) is None:
        return judge_norm(call, ours, theirs)
    return judge_layer(call, ours, theirs)


def worst(checks: list[Check]) -> Check:
    """The check that failed, or has the most values that differ."""
    return min(checks, key=lambda c: (c.passed, -c.differing, -c.compared))


def _run(call: Call, module: torch.nn.Module) -> Outputs:
    x = call.x.detach().clone()
    x.requires_grad_(torch.is_grad_enabled())
    return [y.detach() for y in call.again().outputs(module, {call.place: x}, {})]


def _kinds(outputs: Outputs) -> str:
    return ", ".join(f"{y.dtype} {tuple(y.shape)}" for y in outputs)


@torch.no_grad()
def judge_norm(call: Call, ours: Outputs, theirs: Outputs) -> Check:
    """Whether a norm's output is the original's, almost bit for bit.

    At most 0.1 % of the values in half precision may be off, and 1 % in float32, or one
    value; none by more than 4 ulp. In half precision a value is off if it differs
    at all, and 0.1 % grows by 1 + |mean|/std of the rows. In float32 a value is off
    beyond 2 ulp. There an ulp is 2^-23 of the largest value in its row, times the same.
    docs/correctness.md gives the reasons.
    """
    x = call.x
    if [y.shape for y in theirs] != [x.shape]:
        return Check(call.path, True, NOT_COMPARED)
    y = ours[0].double()
    expected = theirs[0].double()
    # the coarser one is where the original rounds
    dtype = max(x.dtype, theirs[0].dtype, key=lambda dtype: torch.finfo(dtype).eps)
    finest = torch.promote_types(dtype, torch.float32)
    amplified = _amplification(x)
    sizes = expected.nan_to_num(0.0, 0.0, 0.0).abs()
    largest = sizes.amax(-1, keepdim=True)
    fine = largest * amplified * torch.finfo(finest).eps
    unequal = _unequal(y, expected)
    distance = (y - expected).abs()
    difference = torch.where(unequal, distance, 0.0)
    difference = difference.nan_to_num(torch.inf, torch.inf)
    step = torch.maximum(ulp(sizes, dtype), fine)
    steps = (difference / step).max().item()
    # half-precision output is rounded last; other output may be multiplied by the
    # weight after the rounding
    tolerated = 0.0 if ours[0].dtype in HALF_DTYPES else MAX_ULP * fine
    share = MAX_OFF_FLOAT
    if dtype in HALF_DTYPES:
        share = min(MAX_OFF_HALF * amplified.mean().item(), _MAX_AMPLIFIED)
    count = (difference > tolerated).sum().item()
    allowed = max(1, int(share * y.numel()))
    text = "{} of {} values are off (limit {}), by {:.2g} rounding steps (limit {:g})"
    text = text.format(count, y.numel(), allowed, steps, WORST_ULP)
    passed = count <= allowed and steps <= WORST_ULP
    return Check(call.path, passed, text, y.numel(), unequal.sum().item())


def _amplification(x: torch.Tensor) -> torch.Tensor:
    """How many times a row's mean enlarges the roundings of its norm: (..., 1)."""
    spread, mean = torch.std_mean(x.double(), -1, correction=0, keepdim=True)
    shift = mean.abs() / spread.clamp_min(1e-30)
    return (1 + shift).nan_to_num(1.0, 1.0)


def judge_layer(call: Call, ours: Outputs, theirs: Outputs) -> Check:
    """Whether a fused layer's outputs are those of the unfused layer, bit for bit.

    Two cases are compared by their errors against float64 instead. One is a fusion that
    does not promise equal bits, such as q and k with their rotary embedding. The other
    is a layer whose unfused runs differ among themselves.
    """
    compared = sum(y.numel() for y in theirs)
    differing = _differing(ours, theirs)
    text = f"{differing} of {compared} values differ"
    if not differing:
        return Check(call.path, True, text, compared)
    fusion = layer_part(type(call.module))._hf_rmsnorm_fusion
    if not fusion.rotates_normed:
        with call.original() as original:
            again = _run(call, original)
        if not _differing(theirs, again):
            return Check(call.path, False, text, compared, differing)
    with call.exactly() as again:
        exact = again.outputs(call.module, {}, {})
    quantised = bool(quantised_modules(call.module))
    floor = noise_floor(theirs, ours, exact, quantised)
    return Check(call.path, floor.passed, floor.text, compared, differing)


def _unequal(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Which elements are not equal; NaN equals NaN."""
    return (ours != theirs) & ~(ours.isnan() & theirs.isnan())


def _differing(ours: Outputs, theirs: Outputs) -> int:
    """How many elements are not equal."""
    pairs = zip(ours, theirs, strict=True)
    return sum(_unequal(y, expected).sum().item() for y, expected in pairs)
