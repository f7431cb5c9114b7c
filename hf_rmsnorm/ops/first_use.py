"""The first launch of each layout is compared with the code that it replaces, on the
tensors and the device of that call.

- In the dictionary of launches a `FirstUse` stands in the place of a new launch. It
  starts the launch, compares the results, and puts the launch in its own place. So a
  known launch costs nothing more.
- A forward is compared with what the caller gives as replaced: the module's own
  forward, a sum and that, a modulation as it is written. Without that, and in a
  backward, with the formula in plain torch and its gradients by autograd.
- Equal is: the same bits, but for the share of elements that ties explain. What is not
  is judged against float64 on the same operands. It is refused where a row is more than
  twice as far from it as the replaced code, plus two rounding steps: of the largest
  element, or by RMS. A forward is also refused where the replaced code is that much
  further, as it then computes another formula.
- A refused result is not used. The device is left to plain torch, by `launches.give_up`,
  and a warning says so once.
- It looks where it can: not while a CUDA graph is captured, where synchronisation is
  watched, or without data. Then the next call is compared. So too, a few times, where a
  result shows nothing, being all zeros or not finite, as in a first backward with too
  large a loss scale.
- It saves nothing for autograd, and no mode or hook sees it. It synchronises once, and
  again where the bits differ.
- Layouts that differ in the number of rows alone are compared once.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from ..formula import HALF_DTYPES
from ..kernels.failure import KernelUnavailable
from ..operands import Kind, Launch, present

EPS32 = 2.0**-23
# Of the elements of a half-precision result, as ties may round to the other neighbour.
MOST_TIES = 8e-3
FACTOR = 2  # times the replaced code's own error
STEPS = 2  # rounding steps
TINY = 2.0**-126  # below it GPUs may flush numbers to zero
LARGE = 2.0**40  # powers of operands beyond it leave float32
NEAR_LIMIT = 0.98  # of a dtype's largest number, where one of two results may overflow
AT_ONCE = 2**24  # elements that are compared together
MOST_TRIES = 1_000  # of comparisons of a layout that show nothing
REPORT = "report it with what `hf-rmsnorm env` prints"
# switched off where launches are left out, whose results are no numbers
compares = True
# by device, how many kernels were compared and found equal
compared: Counter[torch.device] = Counter()
_settling = threading.Lock()


@dataclass(eq=False)
class FirstUse:
    """A launch that was not compared yet.

    Args:
        launch: what was made.
        launches, key: the `Launches` that keep it, and where.
        kind: of the launch.
        layout: what it has in common with launches that need no other comparison.
    """

    launch: Launch
    launches: object
    key: tuple
    kind: Kind
    layout: tuple

    def run(
        self, operands: tuple, apply: Callable | None, replaced: tuple | None
    ) -> tuple:
        """The results of the launch, once they are compared.

        Args:
            operands, apply, replaced: as of `launches.by_kernel`.

        Raises:
            KernelUnavailable: they differ.
            Exception: any that the replaced code raises.
        """
        with torch.no_grad():
            results = self.launch.on(operands)
        if can_look(operands, self.kind.family.is_back):
            try:
                difference = self.difference(operands, results, replaced)
            except torch.OutOfMemoryError:
                pass  # the next call has another try
            else:
                self.settle(operands[0].device, difference)
        if apply is None:
            return results
        # not before: a checkpoint counts what is saved
        return apply((self.launches, _Launched(self.launch, results)), *operands)

    def settle(self, device: torch.device, difference: str | None) -> None:
        """Put the launch in its place, or None where it differs. Where nothing was
        shown, only after `MOST_TRIES`.

        Raises:
            KernelUnavailable: it differs.
        """
        if difference is None:
            self.launches.tries[self.layout] += 1
            if self.launches.tries[self.layout] < MOST_TRIES:
                return
        with _settling:
            if self.launches.by_key.get(self.key) is self:
                self.launches.by_key[self.key] = None if difference else self.launch
                if not difference:
                    self.launches.compared.add(self.layout)
                if difference == "":
                    compared[device] += 1
        if difference:
            raise KernelUnavailable(
                f"{self.kind.family.name} on {device} differs from the code that it "
                f"replaces: {difference}\nWhat to do: {REPORT}"
            )

    def difference(
        self, operands: tuple, results, replaced: tuple | None
    ) -> str | None:
        """By how much results differ from those of the replaced code; "" if they do
        not, None if that is not to be seen in them.
        """
        is_back = self.kind.family.is_back
        with unseen():
            ours = tensors_of(results)
            own = tensors_of(self.replaced_results(operands, replaced))
            ours = ours[: len(own)]  # what is behind them is for the backward
            if is_back:
                own = [o.to(t.dtype) for o, t in zip(own, ours, strict=False)]
            if list(map(_size, own)) != list(map(_size, ours)):
                return f"{list(map(_size, ours))}, not {list(map(_size, own))}"
            own = [o.reshape(t.shape) for o, t in zip(own, ours, strict=True)]
            compare = is_near if is_back else is_equal
            same = [_by_parts(compare, *pair) for pair in zip(ours, own, strict=True)]
            shown = [_shows(t) for t in own]
            flags = torch.stack([*same, *shown]).tolist()
            are_same = flags[: len(same)]
            if all(flags):
                return ""
            if all(are_same) or _are_large(operands):
                return None
            return self.judge(operands, ours, own, are_same)

    def replaced_results(self, operands: tuple, replaced: tuple | None):
        """The results of the replaced code; of the plain formula, if there is none."""
        if replaced is None:
            return self.kind.family.results(self.launches, self.kind.how, operands)
        function, *of_call = replaced
        return function(*of_call)

    def judge(
        self,
        operands: tuple,
        ours: list[Tensor],
        own: list[Tensor],
        are_same: list[bool],
    ) -> str:
        """By how much the first of these results is too far from float64; "" if none
        is.
        """
        family = self.kind.family
        arguments = self.launches, self.kind.how
        wide = tuple(None if t is None else t.double() for t in operands)
        exact = tensors_of(family.results(*arguments, wide))
        floors = tensors_of(family.floors(*arguments, wide))
        rows = zip(are_same, ours, own, exact, floors, strict=False)
        for is_same, *of_result in rows:
            difference = "" if is_same else judged(*of_result, family.is_back)
            if difference:
                return difference
        return ""


class _Launched:
    """A launch that has run: it gives its results once."""

    def __init__(self, launch: Launch, results: tuple):
        self.launch = launch
        self.results = results

    def on(self, operands: tuple) -> tuple:
        results = self.results
        self.results = None
        return results

    def __getattr__(self, name: str):
        return getattr(self.launch, name)


def can_look(operands: tuple, is_back: bool) -> bool:
    """Whether results for such operands can be compared here and now."""
    x = operands[0]
    if x.is_meta:
        return False
    if is_back and is_below_autograd():
        return False
    if not x.is_cuda:
        return True
    is_watched = torch.cuda.get_sync_debug_mode()
    return not (is_watched or torch.cuda.is_current_stream_capturing())


def is_below_autograd() -> bool:
    """Whether this is an operator's kernel, in which autograd records nothing."""
    is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    return is_excluded(torch._C.DispatchKey.AutogradFunctionality)


@contextmanager
def unseen() -> Iterator[None]:
    """A context in which autograd saves nothing, and no mode or hook sees a thing."""
    hides = nullcontext()
    # None too where hooks are forbidden, as ours would be
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        hides = saved_tensors_hooks(_as_it_is, _as_it_is)
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.no_grad(),
        hides,
    ):
        yield


def _as_it_is(t: Tensor) -> Tensor:
    return t


def tensors_of(results) -> list[Tensor]:
    """The tensors among results; one may stand for a tuple of it."""
    if isinstance(results, Tensor):
        results = (results,)
    return [t.detach() for t in present(*results)]


def _size(t: Tensor) -> tuple[int, torch.dtype]:
    return t.numel(), t.dtype


def layout_of(kind: Kind, operands: tuple, aligned: bool) -> tuple:
    """What launches have in common that differ in the number of rows alone."""
    of_each = [t if t is None else _layout(t) for t in operands]
    return kind.family, kind.family.essential(*kind.how), aligned, *of_each


def _layout(t: Tensor) -> tuple:
    by_stride = []
    if not t.is_contiguous():
        real = [d for d in range(t.dim()) if t.shape[d] > 1]
        by_stride = sorted(real, key=lambda d: (-t.stride(d), d))
    of_columns = t.shape[-1:], t.stride()[-1:]
    return t.dtype, t.device, of_columns, tuple(by_stride)


def _by_parts(compare: Callable, ours: Tensor, own: Tensor) -> Tensor:
    """The same as `compare` finds, some rows at a time, as copies of all take memory."""
    if ours.dim() < 2 or ours.numel() <= AT_ONCE:
        return compare(ours, own)
    count = max(1, AT_ONCE // ours.shape[-1])
    parts = [t.flatten(0, -2).split(count) for t in (ours, own)]
    return torch.stack([compare(*part) for part in zip(*parts, strict=True)]).all()


def _shows(own: Tensor) -> Tensor:
    """Whether a wrong factor would be seen in a result, as a tensor: it has a number that
    is finite and not zero.
    """
    if not own.numel():
        return torch.ones((), dtype=torch.bool, device=own.device)
    return own.nan_to_num(0.0, 0.0, 0.0).any()


def _are_large(operands: tuple) -> bool:
    """Whether powers of a number among operands are none of float32."""
    largest = [t.nan_to_num(0.0, 0.0, 0.0).abs().max() for t in operands if _holds(t)]
    return torch.stack([t.double() for t in largest]).max().item() > LARGE


def _holds(t: Tensor | None) -> bool:
    return t is not None and t.numel() > 0


def is_equal(ours: Tensor, own: Tensor) -> Tensor:
    """Whether results are equal but for ties, as a tensor: nothing waits for it."""
    error, magnitudes, same = _compared(ours, own)
    small = 4 * EPS32 * magnitudes.amax(-1, keepdim=True)
    is_off = error > small
    if own.dtype not in HALF_DTYPES:
        return same & ~is_off.any()
    info = torch.finfo(own.dtype)
    allowed = magnitudes.clamp_min_(info.tiny).mul_(STEPS * info.eps).add_(small)
    is_rare = is_off.sum() <= max(2, MOST_TIES * error.numel())
    return same & is_rare & (error <= allowed).all()


def is_near(ours: Tensor, own: Tensor) -> Tensor:
    """Whether gradients are so near to each other that float64 need not be asked, as a
    tensor.
    """
    error, magnitudes, same = _compared(ours, own)
    eps = torch.finfo(ours.dtype).eps
    of_largest = error.amax(-1) <= STEPS * eps * magnitudes.amax(-1)
    of_rms = _rms(error) <= STEPS * eps / 12**0.5 * _rms(magnitudes)
    return same & (of_largest & of_rms).all()


def _compared(ours: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(error, magnitudes, whether the same elements are finite)."""
    same = (ours.isfinite() == own.isfinite()).all()
    own = own.to(torch.float32)
    error = (ours.to(torch.float32) - own).abs_().nan_to_num_(0.0, 0.0)
    return error, own.abs().nan_to_num_(0.0, 0.0), same


def judged(
    ours: Tensor, own: Tensor, exact: Tensor, floor: Tensor, is_back: bool
) -> str:
    """By how much results are too far from float64; "" where they are not.

    Args:
        floor: an error of each row, or of all, that roundings in float32 explain.
    """
    info = torch.finfo(ours.dtype)
    lost = own.isfinite() & ~ours.isfinite() & (exact.abs() < NEAR_LIMIT * info.max)
    lost |= ours.isfinite() & ~own.isfinite() & ~exact.isfinite()
    if is_back:
        # which elements of a bad row are finite depends on how rows are vectorised
        lost &= (own.isfinite() & exact.isfinite()).all(-1, keepdim=True)
    is_finite = ours.isfinite() & own.isfinite() & exact.isfinite()
    error = _error(ours, exact, is_finite)
    own_error = _error(own, exact, is_finite)
    size = exact.abs().where(is_finite, 0.0)
    step = STEPS * info.eps
    floor = floor + max(TINY, STEPS * info.tiny * info.eps)
    if is_back:
        # of all rows at once: a row of few columns may lose its digits to another's luck
        error, own_error, size = (t.flatten() for t in (error, own_error, size))
        floor = floor.amax() if isinstance(floor, Tensor) else floor
        lost = lost.flatten()
    too_far = _further(error, own_error, size, step, floor)
    if not is_back:
        too_far |= _further(own_error, error, size, step, floor)
    if not (lost.any() | too_far.any()).item():
        return ""
    largest = (ours.double() - own.double()).abs().where(is_finite, 0.0).max()
    return f"by up to {largest.item():.3g}, where the largest element is {size.max().item():.3g}"


def _error(t: Tensor, exact: Tensor, is_finite: Tensor) -> Tensor:
    return (t.double() - exact).abs().where(is_finite, 0.0)


def _further(error, other, size, step: float, floor) -> Tensor:
    """Of each row, whether its error is too large beside another."""
    largest = FACTOR * other.amax(-1) + step * size.amax(-1) + floor
    of_rms = FACTOR * _rms(other) + step / 12**0.5 * _rms(size) + floor
    return (error.amax(-1) > largest) | (_rms(error) > of_rms)


def _rms(t: Tensor) -> Tensor:
    return t.square().mean(-1).sqrt()


def summary(device: torch.device) -> str:
    """What the comparisons on a device have shown, in words; "" before the first."""
    count = compared[device]
    if not count:
        return ""
    kernels = "kernel" if count == 1 else "kernels"
    return (
        f"{count} {kernels} compared with the model's own code on {device} at their "
        "first use: equal"
    )
