"""From a plan to what is done to each tensor of a checkpoint, checked against its headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..plan import Centre, ConversionPlan, Scale
from .source import COPIED, FLOATS, ConversionError, SafetensorsShard, Source, StoredTensor


@dataclass
class Recipe:
    """What is done to one tensor, in this order; `ones` alone replaces its values.

    Args:
        scale: multiply along these axes.
        centre: all along one axis, in ranges that do not overlap.
    """

    scale: list[Scale] = field(default_factory=list)
    centre: list[Centre] = field(default_factory=list)
    ones: bool = False


@dataclass(frozen=True)
class Job:
    """A plan that fits a source.

    Args:
        recipes: what is done to a tensor of the result, by its name; the others keep their bytes.
        added: the new tensors: name to the tensor of the source whose bytes they take.
        factors: layer scales that are not tensors of the source.
    """

    source: Source
    plan: ConversionPlan
    recipes: dict[str, Recipe]
    added: dict[str, str]
    factors: Mapping[str, torch.Tensor]

    def layout(self, shard: SafetensorsShard) -> list[tuple[str, StoredTensor]]:
        """The tensors of a shard of the result in the order of their bytes, each with the one it is made from.

        A new tensor follows its source, so that every tensor stays aligned to its element size.
        """
        return [
            (name, tensor)
            for source_name, tensor in shard.tensors.items()
            for name in (source_name, *(new for new, old in self.added.items() if old == source_name))
        ]

    def tensors(self) -> list[tuple[str, StoredTensor]]:
        """The layouts of all shards, one after another."""
        return [entry for shard in self.source.shards for entry in self.layout(shard)]


def make_job(plan: ConversionPlan, source: Source, factors: Mapping[str, torch.Tensor] | None = None) -> Job:
    """Check every step of a plan against the tensors of a source, and of layer scales given besides.

    Raises:
        ConversionError: a tensor that is missing, quantised, or of a shape that a step does not fit; a copy onto a
            tensor that is there already with other values; steps that contradict each other.
    """
    added: dict[str, str] = {}
    for copy in plan.copy:
        _tensor(source, copy.source)
        if copy.key in added:
            raise ConversionError(f"the plan copies two tensors to {copy.key}: make the plan again")
        if copy.key not in source.tensors:
            added[copy.key] = copy.source
        elif not _same(source, copy.key, copy.source):
            raise ConversionError(
                f"{source.folder}: {copy.key} is there already and differs from {copy.source}, of which the plan "
                f"makes it a copy: set tie_word_embeddings to false if it is right, remove it if it is stale"
            )
    shapes = {name: tensor for name, (_, tensor) in source.tensors.items()}
    shapes |= {key: shapes[name] for key, name in added.items()}
    recipes: dict[str, Recipe] = {}
    factors = factors or {}
    for scale in plan.scale:
        by = factors.get(scale.by)
        if by is None:
            by = _tensor(source, scale.by, "multiplies another tensor")
        length = _axis(source, shapes, scale)
        if tuple(by.shape) != (length,):
            raise ConversionError(
                f"{source.folder}: the plan multiplies axis {scale.axis} of {scale.key}, which has {length} elements, "
                f"by {scale.by} of shape {list(by.shape)}: make the plan again for this checkpoint"
            )
        recipes.setdefault(scale.key, Recipe()).scale.append(scale)
        if scale.by not in factors:
            recipes.setdefault(scale.by, Recipe()).ones = True
    for centre in plan.centre:
        _check_centre(source, shapes, centre)
        recipes.setdefault(centre.key, Recipe()).centre.append(centre)
    for key, recipe in recipes.items():
        if recipe.ones and (recipe.scale or recipe.centre):
            raise ConversionError(f"the plan folds {key} into another tensor and also changes it: make the plan again")
        _check_disjoint(key, recipe.centre)
    return Job(source, plan, recipes, added, factors)


def centred_blocks(centre: Centre, length: int) -> list[int]:
    """The indices of the blocks that a `Centre` names, along an axis of that length."""
    return list(range(length // centre.block) if centre.blocks is None else centre.blocks)


def _tensor(source: Source, key: str, purpose: str | None = None) -> StoredTensor:
    if key not in source.tensors:
        raise ConversionError(f"{source.folder}: no tensor {key}, which the plan names: make the plan for this folder")
    tensor = source.tensors[key][1]
    if purpose and tensor.dtype not in FLOATS:
        raise ConversionError(
            f"{source.tensors[key][0].path}: {key} is {tensor.dtype} and {purpose}: it is quantised; convert the "
            "unquantised model, then quantise it"
        )
    return tensor


def _axis(source: Source, shapes: dict[str, StoredTensor], step: Scale | Centre) -> int:
    """Length of the axis that a step names."""
    tensor = shapes.get(step.key) or _tensor(source, step.key)
    _tensor(source, tensor.name, "is to be changed")
    if not 0 <= step.axis < len(tensor.shape):
        raise ConversionError(
            f"{source.folder}: {step.key} has shape {list(tensor.shape)} and no axis {step.axis}: make the plan again "
            "for this checkpoint"
        )
    return tensor.shape[step.axis]


def _check_centre(source: Source, shapes: dict[str, StoredTensor], centre: Centre) -> None:
    length = _axis(source, shapes, centre)
    fits = centre.block > 0 and length % centre.block == 0
    count = length // centre.block if fits else 0
    if not fits or (centre.blocks is not None and not all(0 <= index < count for index in centre.blocks)):
        which = "" if centre.blocks is None else f", number {' '.join(map(str, centre.blocks))}"
        raise ConversionError(
            f"{source.folder}: {centre.key} has {length} elements along axis {centre.axis}, which has no such blocks "
            f"of {centre.block}{which}: config.json is not of these weights, or the plan is of others"
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


def _same(source: Source, one: str, other: str) -> bool:
    (shard_a, a), (shard_b, b) = source.tensors[one], source.tensors[other]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with shard_a.reading() as read_a, shard_b.reading() as read_b:
        pieces = [(first, min(a.nbytes, first + COPIED)) for first in range(0, a.nbytes, COPIED)]
        return all(read_a(a, *piece) == read_b(b, *piece) for piece in pieces)
