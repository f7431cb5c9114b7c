"""A plan as expressions: each tensor of the result, checked against those that are there."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ..plan import Centre, CentringPlan, Scale
from .expressions import Centred, Expression, Filled, Scaled, Stored
from .shard import ConversionError, StoredTensor
from .values import Values


def planned_tensors(
    plan: CentringPlan, values: Values, where: object, factors: Collection[str] = ()
) -> dict[str, Expression]:
    """Every tensor of the checkpoint that a plan makes of another: scaled, then centred; the others as they are.

    Args:
        where: the folder, for errors.
        factors: names of layer scales that are in `values` and not among its names.

    Raises:
        ConversionError: a tensor that is missing, quantised, or of a shape that a step does not fit; a copy onto a
            tensor that is there already with other values; steps that contradict each other.
    """
    tensors: dict[str, Expression] = {name: Stored(name) for name in values.names()}

    def stored(key: str, purpose: str | None = None) -> StoredTensor:
        if key not in values.names() and key not in factors:
            raise ConversionError(f"{where}: no tensor {key}, which the plan names: make the plan for this folder")
        return values.stored(key, purpose)

    def length(step: Scale | Centre) -> int:
        """Of the axis that a step names."""
        tensor = stored(step.key if step.key not in tensors else tensors[step.key].like, "is to be changed")
        if not 0 <= step.axis < len(tensor.shape):
            raise ConversionError(
                f"{where}: {step.key} has shape {list(tensor.shape)} and no axis {step.axis}: make the plan again for "
                "this checkpoint"
            )
        return tensor.shape[step.axis]

    copied: set[str] = set()
    for copy in plan.copy:
        stored(copy.source)
        if copy.key in copied:
            raise ConversionError(f"the plan copies two tensors to {copy.key}: make the plan again")
        if copy.key not in values.names():
            copied.add(copy.key)
            tensors[copy.key] = Stored(copy.source)
        elif not _same(values, copy.key, copy.source):
            raise ConversionError(
                f"{where}: {copy.key} is there already and differs from {copy.source}, of which the plan makes it a "
                "copy: set tie_word_embeddings to false if it is right, remove it if it is stale"
            )
    for scale in plan.scale:
        shape = stored(scale.by, "multiplies another tensor").shape
        if shape != (size := length(scale),):
            raise ConversionError(
                f"{where}: the plan multiplies axis {scale.axis} of {scale.key}, which has {size} elements, by "
                f"{scale.by} of shape {list(shape)}: make the plan again for this checkpoint"
            )
        tensors[scale.key] = Scaled(tensors[scale.key], Stored(scale.by), scale.axis)
    centres: dict[str, list[Centre]] = {}
    for centre in plan.centre:
        _check_centre(where, centre, length(centre))
        centres.setdefault(centre.key, []).append(centre)
        tensors[centre.key] = Centred(tensors[centre.key], centre.axis, centre.block, centre.blocks)
    for key, steps in centres.items():
        _check_disjoint(key, steps)
    for key in {scale.by for scale in plan.scale}.difference(factors):
        if not isinstance(tensors[key], Stored):
            raise ConversionError(f"the plan folds {key} into another tensor and also changes it: make the plan again")
        tensors[key] = Filled(tensors[key], 1.0)
    return tensors


def _check_centre(where: object, centre: Centre, length: int) -> None:
    fits = centre.block > 0 and length % centre.block == 0
    count = length // centre.block if fits else 0
    if not fits or (centre.blocks is not None and not all(0 <= index < count for index in centre.blocks)):
        which = "" if centre.blocks is None else f", number {' '.join(map(str, centre.blocks))}"
        raise ConversionError(
            f"{where}: {centre.key} has {length} elements along axis {centre.axis}, which has no such blocks of "
            f"{centre.block}{which}: config.json is not of these weights, or the plan is of others"
        )


def _check_disjoint(key: str, centres: list[Centre]) -> None:
    if len({centre.axis for centre in centres}) > 1:
        raise ConversionError(f"the plan centres {key} along two axes: centre one, then plan again on the result")
    ranges = sorted(
        (index * centre.block, (index + 1) * centre.block)
        for centre in centres
        for index in (centre.blocks if centre.blocks is not None else [0])
    )
    whole = len(centres) > 1 and any(centre.blocks is None for centre in centres)
    if whole or any(first[1] > second[0] for first, second in zip(ranges, ranges[1:], strict=False)):
        raise ConversionError(f"the plan centres a part of {key} twice: make the plan again")


def _same(values: Values, one: str, other: str) -> bool:
    a, b = values.stored(one), values.stored(other)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return all(np.array_equal(*pieces) for pieces in zip(values.raw(one), values.raw(other), strict=True))
