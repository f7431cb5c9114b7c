"""Where a norm may keep its output for the backward instead of its input: what the linear behind it keeps anyway.

``xhat = (y - bias) / (weight_offset + weight)`` then stands for the normalised input, with the rounding of y. So no
scale may be so small that y has lost xhat, and no bias so large that y is mostly bias.
"""

import weakref
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..formula import NormSpec
from ..kernels.serves import unserved
from .direct import DIRECT_TYPES, capturing, is_direct, state, under_transform

LEAST_SCALE = 1e-3  # of the largest
SMALLEST_SCALE = 2.0**-14  # below it float16 keeps fewer bits of y than of xhat
LEAST_COLUMNS = 32  # in fewer, dx may be the small difference of two numbers of which y gives one
MOST_BIAS = 4.0  # times the scale: as large as the largest elements of a row, whose rounding there is in any case


def formula_refusal(spec: NormSpec) -> str | None:
    """Why norms of this formula keep their input, or None where they need not."""
    return unserved(spec, "from the output")


class _Seen(NamedTuple):
    weight: weakref.ref
    bias: weakref.ref | None
    offset: float
    state: tuple
    refusal: str | None


_seen: dict[tuple, _Seen] = {}  # by identity of the parameters, which do not hash by it


class _Steps:
    """Numbers the spans in which a norm is called once: between them weights may be written to past their versions."""

    number = 0
    ended = False  # whether a backward has read an output since
    asked: set[tuple] = set()  # the norms that were called since


def note_backward() -> None:
    """Tell that a backward has read an output: what is known of the weights holds no longer than it lasts."""
    _Steps.ended = True


def _step(key: tuple, weight: torch.Tensor) -> None:
    # Not inside a backward, where checkpoints run forwards again: no weight has changed since the forward.
    if torch._C._current_graph_task_id() == -1:
        if _Steps.ended or (key in _Steps.asked and not capturing(weight)):
            _Steps.ended = False
            _Steps.number += 1
            _Steps.asked.clear()
        _Steps.asked.add(key)


def parameters_refusal(weight: torch.Tensor | None, bias: torch.Tensor | None, spec: NormSpec) -> str | None:
    """Why a norm with these parameters keeps its input, or None where it need not.

    What was found is kept until the version of a parameter changes, a backward has run, or this is asked again: what
    writes through ``.data`` or raw pointers, as optimizers do (DeepSpeed's, bitsandbytes'), moves no version. Then all
    norms are looked at together: one synchronisation with a GPU for each forward, not one for every norm.
    """
    if weight is None:
        return None if bias is None else "it has a bias alone"
    for t in (weight, bias):
        if t is not None and (type(t) not in DIRECT_TYPES or t.is_meta or t.is_inference()):
            return "its parameters are not here as plain tensors"
        if t is not None and (hasattr(t, "ds_id") or not t.numel()):
            return "DeepSpeed gathers its parameters anew for each call"
    key = (id(weight), id(bias), spec.weight_offset)
    seen = _seen.get(key)
    if seen is None or seen.weight() is not weight or (bias is not None and seen.bias() is not bias):

        def drop(reference: weakref.ref) -> None:
            if key in _seen and _seen[key].weight is reference:
                del _seen[key]

        references = weakref.ref(weight, drop), None if bias is None else weakref.ref(bias)
        seen = _seen[key] = _Seen(*references, spec.weight_offset, (), None)
        _Steps.asked.discard(key)  # of others, gone since, that had the same identity
    _step(key, weight)
    if seen.state != (_Steps.number, state(weight), state(bias)):
        if capturing(weight):
            return "its parameters changed before a graph was captured"
        _look(weight.device)
        seen = _seen[key]
    return seen.refusal


def _look(device: torch.device) -> None:
    groups: dict[tuple, list] = {}
    for key, seen in list(_seen.items()):
        weight, bias = seen.weight(), None if seen.bias is None else seen.bias()
        if weight is None or (bias is None) != (seen.bias is None):
            _seen.pop(key, None)
        elif weight.device == device and weight.numel():
            now = _Steps.number, state(weight), state(bias)
            if now == seen.state:
                continue
            alike = (weight.shape, weight.dtype, None if bias is None else bias.dtype, seen.offset)
            groups.setdefault(alike, []).append((key, seen, now, weight, bias))
    found = []
    with torch.no_grad(), _disable_current_modes(), torch.autocast(device.type, enabled=False):
        for (*_, offset), members in groups.items():
            scale = torch.stack([m[3] for m in members]).flatten(1).float().add_(offset).abs_()
            least, largest = scale.aminmax(dim=1)
            small = (least >= LEAST_SCALE * largest) & (least >= SMALLEST_SCALE)  # False of NaN
            much = torch.ones_like(small)
            if members[0][4] is not None:
                bias = torch.stack([m[4] for m in members]).flatten(1).float().abs_()
                much = (bias <= MOST_BIAS * scale).all(dim=1)
            found.append(torch.stack((small, much), dim=1))
        verdicts = torch.cat(found).tolist()
    members = (m for group in groups.values() for m in group)
    for (key, seen, now, *_), (small, much) in zip(members, verdicts, strict=True):
        refusal = None if much else f"a bias is above {MOST_BIAS:g} times its weight"
        refusal = refusal if small else f"a weight is below {LEAST_SCALE:g} of the largest"
        _seen[key] = seen._replace(state=now, refusal=refusal)


def keeps_output(weight: torch.Tensor | None, bias: torch.Tensor | None, spec: NormSpec) -> bool:
    """Whether a call of this norm, patched with memory_efficient, shall keep its output.

    Not while compiling, where the compiler decides what is kept; nor while a CUDA graph is captured, whose replays
    nobody could tell that a weight has become small; nor under transforms, whose tensors have no address.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or under_transform():
        return False
    if weight is not None and capturing(weight):
        return False
    return formula_refusal(spec) is None and parameters_refusal(weight, bias, spec) is None


def serves_as_input(y: torch.Tensor, x: torch.Tensor, weight, bias, spec: NormSpec) -> bool:
    """Whether the backward can read y in the place of x: the same dtype, rows in the same order, and no short ones."""
    return (
        y.dtype == x.dtype
        and (spec.functional or y.stride() == x.stride())
        and y.shape[-1] >= LEAST_COLUMNS
        and is_direct(x, weight, bias)
    )
