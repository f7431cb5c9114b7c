"""The first launch of each layout is compared with the code that it replaces, on the
tensors and the device of that call. `launches.by_kernel` calls `FirstUse.compared_results`.

- The dictionary of launches has a `FirstUse` in the place of a new launch. It
  runs the replaced code, starts the launch, compares the results, and puts the launch
  in its own place. So a known launch costs nothing more. The replaced code runs first:
  its intermediates are gone when the launch allocates.
- A forward is compared with the code that the caller gives as replaced: the module's
  own forward, a sum and that, a modulation as it is written. Without that, and in a
  backward, with the formula in plain torch and its gradients by autograd.
- Both are judged against the formula in float64 on the same operands. A result is
  refused if its error is more than twice that of the replaced code, plus two
  rounding steps: of the largest element, or by RMS. A forward is judged row by row, and
  refused as well where the replaced code is that much further, as it then computes
  another formula. A gradient is judged as a whole.
- A refused result is not used. The device is left to plain torch, by `launches.give_up`,
  and a warning says so once.
- It looks where it can: not while a CUDA graph is captured, where synchronisation is
  watched, or without data. Then the next call is compared. So too, up to `MOST_TRIES`
  times, where a result shows nothing: all zeros, or not finite, as in a first backward
  whose loss scale is too large.
- It saves nothing for autograd, no mode or hook sees it, and it synchronises once.
- Layouts that differ in the number of rows alone are compared once.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.linalg import vector_norm
from torch.utils._python_dispatch import _disable_current_modes

from ..kernels.failure import KernelUnavailable
from ..operands import Operands, Replaced, present
from .backend import host_may_wait
from .kinds import Kind, Launch

FACTOR = 2  # times the error of the replaced code
STEPS = 2  # rounding steps
TINY = 2.0**-126  # below it GPUs may flush numbers to zero
AT_ONCE = 2**20  # elements of a tensor that are copied to float64 together
MOST_TRIES = 1_000  # of comparisons of a layout, where they show nothing
MOST_WITHOUT_MEMORY = 2  # where the last of them found no memory
REPORT = "report it with what `hf-rmsnorm env` prints"
# switched off where launches are left out, whose results are no numbers
is_enabled = True
# by device, how many kernels were compared and found equal
equal_kernels: Counter[torch.device] = Counter()
_settling = threading.Lock()


@dataclass(eq=False)
class FirstUse:
    """A launch that was not compared yet.

    Args:
        launch: the new one.
        launches, key: the `Launches` that keep it, and where.
        kind: of the launch.
        layout: equal for launches that need no other comparison.
    """

    launch: Launch
    launches: object
    key: tuple
    kind: Kind
    layout: tuple

    def compared_results(
        self, operands: Operands, apply: Callable | None, replaced: Replaced | None
    ) -> Operands:
        """The results of the launch, once they are compared.

        Args:
            operands, apply, replaced: as of `launches.by_kernel`.

        Raises:
            KernelUnavailable: they differ.
            Exception: any that the replaced code raises.
        """
        theirs = difference = None
        most_tries = MOST_TRIES
        looks = can_compare(operands[0], self.kind.is_back)
        if looks:
            try:
                theirs = self.replaced_results(operands, replaced)
            except torch.OutOfMemoryError:
                most_tries = MOST_WITHOUT_MEMORY
        with torch.no_grad():
            results = self.launch.on(operands)
        if theirs is not None:
            try:
                difference = self.difference(operands, results, theirs)
            except torch.OutOfMemoryError:
                most_tries = MOST_WITHOUT_MEMORY
        if looks:
            self.settle(operands[0].device, difference, most_tries)
        if apply is None:
            return results
        # not before: a checkpoint counts the saved tensors
        return apply((self.launches, _AlreadyRun(self.launch, results)), *operands)

    def settle(
        self, device: torch.device, difference: str | None, most_tries: int
    ) -> None:
        """Put the launch in its place, or None where it differs. Where nothing was
        shown, only after so many tries.

        Raises:
            KernelUnavailable: it differs.
        """
        if difference is None:
            self.launches.tries[self.layout] += 1
            if self.launches.tries[self.layout] < most_tries:
                return
        with _settling:
            if self.launches.by_key.get(self.key) is self:
                self.launches.by_key[self.key] = None if difference else self.launch
                if not difference:
                    self.launches.compared_layouts.add(self.layout)
                if difference == "":
                    equal_kernels[device] += 1
        if difference:
            raise KernelUnavailable(
                f"{self.kind.name} on {device} differs from the code that it "
                f"replaces: {difference}\nWhat to do: {REPORT}"
            )

    def replaced_results(
        self, operands: Operands, replaced: Replaced | None
    ) -> list[Tensor]:
        """The results of the replaced code that have elements; those of the plain
        formula, if there is none.
        """
        with unseen():
            if replaced is None:
                operands = self.kind.in_rows(self.launches, operands)
                results = self.kind.results(self.launches, operands)
            else:
                function, *of_call = replaced
                results = function(*of_call)
        if isinstance(results, Tensor):
            results = (results,)
        return tensors_of(results)

    def difference(
        self, operands: Operands, results: Operands, theirs: list[Tensor]
    ) -> str | None:
        """By how much results differ from those of the replaced code; "" if they do
        not, None if that is not to be seen in them.
        """
        is_back = self.kind.is_back
        with unseen():
            operands = self.kind.in_rows(self.launches, operands)
            ours = tensors_of(results)[: len(theirs)]
            if is_back:
                pairs = zip(theirs, ours, strict=True)
                theirs = [their.to(our.dtype) for their, our in pairs]
            sizes = [(t.numel(), t.dtype) for t in ours]
            their_sizes = [(t.numel(), t.dtype) for t in theirs]
            if sizes != their_sizes:
                return f"elements and dtypes are {sizes}, not {their_sizes}"
            distances, floors = self.distances(operands, ours, theirs)
            is_off, *shows = judged(distances, floors, is_back).tolist()
            if not is_off:
                return "" if all(shows) else None
            largest = torch.cat(distances, -1)[0].nan_to_num(0.0, 0.0).amax(-1)
            steps, their_steps, size, *_ = largest.tolist()
        return (
            f"it is up to {steps * STEPS:.3g} rounding steps of 1 from float64, that code "
            f"up to {their_steps * STEPS:.3g}; the largest element is {size:.3g}"
        )

    def distances(
        self, operands: Operands, ours: list[Tensor], theirs: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Of each result its `distances_of` float64, and the floors of these. Large
        operands are copied to float64 some rows at a time.
        """
        is_back = self.kind.is_back
        weight = operands[self.kind.weight_at]
        dim = 1 if weight is None else weight.dim()
        # in which intermediate results may be rounded
        step = max(torch.finfo(t.dtype).eps for t in present(*operands, *ours))
        found = defaultdict(list)
        sums = {}
        for of_part, *pairs in _parts(dim, operands, ours, theirs):
            for at, (exact, floor) in enumerate(self.exact(of_part)):
                if exact.dim() <= dim:  # of all rows, as the gradient of a weight
                    total, floors = sums.get(at, (0.0, 0.0))
                    sums[at] = total + exact, floors + floor
                    continue
                of_result = [part[at] for part in pairs]
                of_rows = distances_of(*of_result, exact, floor, step, is_back)
                found[at].append(of_rows)
        for at, of_sum in sums.items():
            found[at].append(distances_of(ours[at], theirs[at], *of_sum, step, True))
        distances = [
            torch.cat([d for d, _ in of_parts], -1) for of_parts in found.values()
        ]
        return distances, [
            floor for of_parts in found.values() for _, floor in of_parts
        ]

    def exact(self, operands: Operands) -> list[tuple]:
        """Each result that has elements in float64, and an error of it that roundings in
        float32 explain.
        """
        wide = tuple(None if t is None else t.double() for t in operands)
        results = self.kind.results(self.launches, wide)
        floors = self.kind.floors(self.launches, wide, results)
        pairs = zip(results, floors, strict=True)
        return [(t, floor) for t, floor in pairs if _holds(t)]


class _AlreadyRun:
    """A launch that has run: `on` starts nothing, and gives its results once."""

    def __init__(self, launch: Launch, results: Operands):
        self.launch = launch
        self.results = results

    def on(self, operands: Operands) -> Operands:
        results = self.results
        self.results = None
        return results

    def __getattr__(self, name: str):
        return getattr(self.launch, name)


def can_compare(x: Tensor, is_back: bool) -> bool:
    """Whether results for operands like x can be compared here and now."""
    if x.is_meta:
        return False
    if is_back and is_below_autograd():
        return False
    return host_may_wait(x.is_cuda)


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


def tensors_of(results: Iterable) -> list[Tensor]:
    """The tensors among results that have elements."""
    return [t for t in results if _holds(t)]


def _holds(t: Tensor | None) -> bool:
    return t is not None and t.numel() > 0


def _parts(dim: int, operands: Operands, *others: list[Tensor]) -> Iterable[tuple]:
    """Operands and results, some rows at a time if they are large."""
    count = 1 + max(t.numel() for t in present(*operands)) // AT_ONCE
    parts = [_chunks(tensors, dim, count) for tensors in (operands, *others)]
    return zip(*parts, strict=False)


def _chunks(tensors: Iterable, dim: int, count: int) -> Iterable[tuple]:
    """Tensors in so many parts of rows; those of up to `dim` dimensions are no rows."""
    if count == 1:
        return [tensors]
    of_each = []
    for t in tensors:
        is_rows = t is not None and t.dim() > dim
        of_each.append(t.chunk(count, -1 - dim) if is_rows else repeat(t))
    return zip(*of_each, strict=False)


def layout_of(kind: Kind, operands: Operands, aligned: bool) -> tuple:
    """What launches have in common that differ in the number of rows alone."""
    weight = operands[kind.weight_at]
    of_weight = None if weight is None else weight.shape
    of_each = [t if t is None else _layout(t) for t in operands]
    return type(kind), kind.without_rows(), aligned, of_weight, *of_each


def _layout(t: Tensor) -> tuple:
    by_stride = []
    if not t.is_contiguous():
        real = [d for d in range(t.dim()) if t.shape[d] > 1]
        by_stride = sorted(real, key=lambda d: (-t.stride(d), d))
    of_columns = t.shape[-1:], t.stride()[-1:]
    return t.dtype, t.device, of_columns, tuple(by_stride)


def distances_of(
    ours: Tensor, theirs: Tensor, exact: Tensor, floor, step: float, is_whole: bool
):
    """The distances, (2, 4, rows): the largest element, and the RMS times the root of 12,
    in each row or of all at once: of the error of ours, and of that of the replaced
    code, both over `STEPS` rounding steps of 1; of exact; of ours. A rounding error has
    by that the same largest element and RMS.

    And, over as much, an error of each row that is no fault, (rows,).

    Args:
        floor: an error of each row, or of all, that roundings in float32 explain.
        step: the rounding step of 1.
    """
    info = torch.finfo(ours.dtype)
    if theirs.shape != ours.shape:
        theirs = theirs.reshape(ours.shape)
    if exact.shape != ours.shape:
        exact = exact.reshape(ours.shape)
    ours = ours.clamp(-info.max, info.max)  # where one of both overflows
    rows = torch.stack((ours - exact, theirs - exact, exact, ours))
    if is_whole:
        rows = rows.flatten(1)
    largest = vector_norm(rows, torch.inf, dim=-1)
    rms = vector_norm(rows, dim=-1) * (12 / rows.shape[-1]) ** 0.5
    found = torch.stack((largest, rms)).view(2, 4, -1)
    unit = STEPS * step
    found[:, :2].div_(unit)
    found[1, 2] *= 1 + rows.shape[-1] ** -0.5  # of few elements it varies more
    least = max(TINY / unit, info.tiny)
    row_count = found.shape[-1:]
    if not isinstance(floor, Tensor):
        return found, found.new_full(row_count, floor / unit + least)
    if floor.dim():
        floor = floor.amax() if is_whole else floor.flatten()
    return found, (floor / unit + least).expand(row_count)


def judged(distances: list[Tensor], floors: list[Tensor], is_back: bool) -> Tensor:
    """(whether results are too far from float64; of each, whether it shows anything), as
    one tensor.

    Args:
        distances, floors: what `distances_of` returns.
    """
    error, their_error, size, ours = torch.cat(distances, -1).unbind(1)
    largest, rms = size
    # a wrong statistic of the forward may make it infinite, or NaN: it then excuses nothing
    floor = torch.cat(floors).nan_to_num(0.0, 0.0)
    allowed = torch.stack((largest + floor, rms / 12**0.5 + floor))
    is_finite = their_error < torch.inf
    lesser = their_error
    if not is_back:
        lesser = torch.minimum(error, their_error)
        error = torch.maximum(error, their_error)
    is_off = is_finite & ~(error <= FACTOR * lesser + allowed)
    if not is_back:
        is_off |= size.isnan() > ours.isnan()
    shows = is_finite & (size > 0)
    counts = [t.shape[-1] for t in distances]
    return torch.stack([t.any() for t in (is_off, *shows.split(counts, -1))])


def summary(device: torch.device) -> str:
    """The result of the comparisons on a device, in words; "" before the first."""
    count = equal_kernels[device]
    if not count:
        return ""
    kernels = "kernel" if count == 1 else "kernels"
    return (
        f"{count} {kernels} compared with the model's own code on {device} at their "
        "first use: equal"
    )
