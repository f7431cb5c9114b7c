"""What a forward asks while it runs, the sizes, strides, device and values of tensors, with each answer turned round.

A forward that does one thing for short sequences and another for long ones computes one formula on every input that a
probe can afford. But it asks: `Watch` sees each comparison, and `deciding` runs the forward again with its answer
turned round. Where that gives other bits, a branch that nobody has proven decides the result.
"""

import dis
import math
import operator
import sys
from collections import Counter
from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode

from .closeness import same_bits

MAX_RUNS = 24  # with answers turned round; most norms ask nothing
SIZE, STRIDES, DEVICE, VALUES = "size", "strides", "device", "values"
LENGTH = "length"  # a size that Python makes a plain number of: whether it is compared, nobody sees
OTHER_LENGTH = 2**21 + 1
MAX_TIMES = 4  # how often one place may ask before its answers are taken together
# Methods and properties of a tensor, by what is learnt of it.
_ASKS = {
    **dict.fromkeys(("shape", "size", "numel", "nelement", "nbytes"), SIZE),
    "__len__": LENGTH,
    **dict.fromkeys(("stride", "storage_offset", "data_ptr", "is_contiguous"), STRIDES),
    **dict.fromkeys(("device", "get_device", "is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta", "type"), DEVICE),
    **dict.fromkeys(("item", "tolist", "__bool__", "is_nonzero", "equal", "allclose", "__float__", "__int__"), VALUES),
}
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_SHIMS = ("torch.overrides", "torch._tensor")  # through which some methods of a tensor come to a mode


class Watch(TorchFunctionMode):
    """Watches what runs under it.

    Args:
        fixed: sizes that belong to the module and not to one input.
        turned: places in the code whose answers are turned round.
        stand_ins: whether shapes and devices are stood in for, to watch who asks; not all code takes what stands in.
    """

    def __init__(self, fixed: tuple[int, ...] = (), turned: frozenset = frozenset(), stand_ins: bool = True):
        super().__init__()
        self.fixed, self.turned, self.stand_ins = fixed, turned, stand_ins
        self.asked: dict[tuple, str] = {}  # what was asked of a tensor, by the place that compares the answer
        self._times: Counter[tuple] = Counter()
        self.tables: set = set()  # code that looked something up by the size of a tensor
        self.unknown: str | None = None  # what was asked in a way that no answer can be turned round
        self.hooks = False  # whether one was put on a gradient

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        if name in _ASKS and not isinstance(result, torch.Tensor):
            return self._answer(name, result)
        self.hooks |= name in _HOOKS
        return result

    def _answer(self, name: str, result):
        about, place = _ASKS[name], _place(sys._getframe(2))
        if place is not None and about == VALUES:
            self.unknown = VALUES  # what it does with NaN or with 1e30 may differ, and nobody has all values
        if place is None or about == VALUES:
            return result
        if isinstance(result, bool):
            return result != self._is_turned(place, about)
        if about == LENGTH:
            return OTHER_LENGTH if self._is_turned(place, about) else result
        return _watched(result, self, about)

    def decide(self, about: str, answer, other=None):
        """The answer to a comparison; `other`, or its opposite, if it is to be turned round."""
        place = _place(sys._getframe(2))
        if place is None or not self._is_turned(place, about):
            return answer
        return not answer if other is None else other

    def give_up(self, about: str, answer):
        if _place(sys._getframe(2)) is not None:
            self.unknown = about
        return answer

    def _is_turned(self, place: tuple, about: str) -> bool:
        self._times[place] += 1
        place = *place, min(self._times[place], MAX_TIMES)
        self.asked[place] = about
        return place in self.turned


def deciding(run: Callable[[Watch], list[torch.Tensor | None]], **watching) -> tuple[str | None, Watch]:
    """What decides the result of `run(Watch(**watching))` and no probe can try out, or None; a plain run's watch."""
    watch = Watch(**watching)
    expected = run(watch)
    if watch.unknown:
        return watch.unknown, watch
    seen, todo = set(watch.asked), [(frozenset([place]), about) for place, about in watch.asked.items()]
    for _ in range(MAX_RUNS):
        if not todo:
            return None, watch
        turned, about = todo.pop()
        other = Watch(**watching, turned=turned)
        try:
            got = run(other)
        except Exception as error:  # a branch that nobody has ever taken may fail in any way
            # One that raises guards against input that the fused forward hands over too.
            if about == LENGTH or _is_raised(error.__cause__ or error):
                continue
            return about, watch
        if not all(map(same_bits, got, expected)):
            return about, watch
        todo += [(turned | {place}, other.asked[place]) for place in other.asked.keys() - seen]
        seen |= other.asked.keys()
    return (SIZE if todo else None), watch


def _place(frame) -> tuple | None:
    """Where in the code outside of torch an answer is asked for, from here or through a shim; torch asks for itself."""
    while frame is not None and frame.f_globals.get("__name__") in (__name__, *_SHIMS):
        frame = frame.f_back
    return None if frame is None or _of_torch(frame) else (frame.f_code, frame.f_lasti)


def _of_torch(frame) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"


def _is_raised(error: BaseException) -> bool:
    """Whether an error comes from a `raise` or `assert` in Python outside of torch."""
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    if _of_torch(trace.tb_frame):
        return False
    raising = {i.offset for i in dis.get_instructions(trace.tb_frame.f_code) if i.opname == "RAISE_VARARGS"}
    return trace.tb_lasti in raising


def _watched(value, watch: Watch, about: str):
    """A value whose comparisons `watch` sees, and what is computed from it; any other type as it is."""
    if isinstance(value, torch.Size):
        sizes = [_watched(v, watch, about) for v in value]
        return _Shape(sizes) if watch.stand_ins else torch.Size(sizes)
    if isinstance(value, (tuple, list)):
        return type(value)([_watched(v, watch, about) for v in value])
    if isinstance(value, torch.device):
        return _Device(value, watch) if watch.stand_ins else value
    kind = _KINDS.get(type(value))
    if kind is None or (about == SIZE and value in watch.fixed):
        return value
    made = kind(value)
    made.watch, made.about = watch, about
    return made


def _operation(compute: Callable, decides: bool, kinds: tuple[type, ...] = (int, float), swapped: bool = False):
    def method(self, *others):
        if not all(isinstance(other, kinds) for other in others):
            return NotImplemented
        operands = [_bare(value) for value in (self, *others)]
        value = compute(*(reversed(operands) if swapped else operands))
        return self.watch.decide(self.about, value) if decides else _watched(value, self.watch, self.about)

    return method


def _bare(value):
    kind = next(kind for kind in (int, float, str) if isinstance(value, kind))
    return getattr(kind, f"__{kind.__name__}__")(value)


_COMPARE = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
_OF_ONE = {"neg": operator.neg, "abs": abs, "round": round, "ceil": math.ceil, "floor": math.floor, "trunc": math.trunc}
_OF_TWO = {name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}
_OF_TWO |= {"divmod": divmod}
_OF_BITS = {"lshift": operator.lshift, "rshift": operator.rshift, "and": operator.and_, "or": operator.or_}


def _given_up(method):
    return lambda self, *args: self.watch.give_up(self.about, method(self, *args))


def _kind(base: type) -> type:
    def looked_up(self):
        self.watch.tables.add(sys._getframe(1).f_code)
        return base.__hash__(self)

    def converted(self):
        value = _bare(self)
        return self.watch.decide(LENGTH, value, OTHER_LENGTH) if self.about == SIZE else value

    kinds = (str,) if base is str else (int, float)
    members = {f"__{name}__": _operation(compare, True, kinds) for name, compare in _COMPARE.items()}
    members["__hash__"] = looked_up
    for name in _WORDS if base is str else ():
        members[name] = _given_up(getattr(str, name))
    if base is not str:
        members |= {"__bool__": _operation(operator.truth, True), f"__{base.__name__}__": converted}
        members |= {f"__{name}__": _operation(compute, False) for name, compute in _OF_ONE.items()}
        for name, compute in (_OF_TWO | (_OF_BITS if base is int else {})).items():
            members[f"__{name}__"] = _operation(compute, False)
            members[f"__r{name}__"] = _operation(compute, False, swapped=True)
    return type(base.__name__, (base,), members)


_WORDS = ("__contains__", "__getitem__", "__format__", "startswith", "endswith", "find", "split", "partition")
_KINDS = {base: _kind(base) for base in (int, float, str)}


class _Shape(tuple):
    """Stands in for a torch.Size."""

    __class__ = property(lambda self: torch.Size)

    def numel(self):
        return math.prod(self)

    def __getitem__(self, place):
        found = super().__getitem__(place)
        return _Shape(found) if isinstance(place, slice) else found


class _Device:
    """Stands in for a torch.device."""

    __class__ = property(lambda self: torch.device)

    def __init__(self, device: torch.device, watch: Watch):
        self._device, self._watch = device, watch

    type = property(lambda self: _watched(self._device.type, self._watch, DEVICE))
    index = property(lambda self: self._watch.give_up(DEVICE, self._device.index))
    __repr__ = __str__ = lambda self: self._watch.give_up(DEVICE, str(self._device))

    def __eq__(self, other):
        return self._watch.decide(DEVICE, self._device == getattr(other, "_device", other))

    def __hash__(self):
        return hash(self._device)
