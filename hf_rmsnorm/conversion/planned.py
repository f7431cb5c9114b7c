"""What a plan makes of each tensor of a checkpoint, and of its config; a plan that does not fit it is refused."""

import json

from ..record import RECORD_KEY
from .checkpoint.source import FLOATS
from .plan import Centre, CentringPlan, ConversionError, Copy, Scale
from .tensors import Centring, Lazy, Scaling, Source, Stored, filled


def planned_tensors(plan: CentringPlan, source: Source, where: object) -> dict[str, Lazy]:
    """Every tensor of the checkpoint that a plan makes of another: scaled, then centred; the others as they are.

    A step that does not fit the tensors is refused; `where` is the folder, for that.
    """
    tensors = {name: Stored(name) for name in source.tensors}
    for copy in plan.copy:
        _check_copy(copy, source, where)
        tensors.setdefault(copy.key, Stored(copy.source))
    for scale in plan.scale:
        _check_scale(scale, tensors, source, where)
        tensors[scale.key] = tensors[scale.key].then(Scaling(scale.axis, Stored(scale.by)))
    for centre in plan.centre:
        _check_centre(centre, tensors, source, where)
        tensors[centre.key] = tensors[centre.key].then(Centring(centre.axis, centre.block, centre.blocks))
    ones = {scale.by: filled(Stored(scale.by), 1.0) for scale in plan.scale}
    return {**tensors, **ones}


def _check_copy(copy: Copy, source: Source, where: object) -> None:
    if copy.source not in source.tensors:
        raise _without(copy.source, where)
    if copy.key not in source.tensors:
        return
    there, wanted = source.tensors[copy.key], source.tensors[copy.source]
    alike = (there.dtype, there.shape) == (wanted.dtype, wanted.shape)
    if not alike or not source.read(copy.key).equal(source.read(copy.source)):
        what = f"{copy.key} is there already and differs from {copy.source}, of which the plan makes it a copy"
        cure = "set tie_word_embeddings to false if it is right, remove it if it is stale"
        raise ConversionError(f"{where}: {what}: {cure}")


def _check_scale(scale: Scale, tensors: dict[str, Lazy], source: Source, where: object) -> None:
    size = _size(scale, tensors, source, where)
    if scale.by not in source.tensors:
        raise _without(scale.by, where)
    shape, dtype = source.tensors[scale.by].shape, source.tensors[scale.by].dtype
    if tuple(shape) != (size,):
        what = f"{scale.key} has {size} elements along axis {scale.axis}, and {scale.by}, its factor, has {[*shape]}"
        raise ConversionError(f"{where}: {what}: the plan is of another checkpoint")
    if dtype not in FLOATS.values():
        cure = "convert the unquantised model, then quantise that"
        raise ConversionError(f"{where}: {scale.by} is {dtype} and multiplies another tensor: it is quantised; {cure}")


def _check_centre(centre: Centre, tensors: dict[str, Lazy], source: Source, where: object) -> None:
    size = _size(centre, tensors, source, where)
    count, rest = divmod(size, centre.block) if centre.block > 0 else (0, 1)
    if rest or any(not 0 <= index < count for index in centre.blocks or ()):
        which = "" if centre.blocks is None else f", number {' '.join(map(str, centre.blocks))}"
        what = f"axis {centre.axis} of {centre.key} has {size} elements and no blocks of {centre.block}"
        raise ConversionError(f"{where}: {what}{which}: config.json or the plan is of other weights")


def _size(step: Scale | Centre, tensors: dict[str, Lazy], source: Source, where: object) -> int:
    """Elements along the axis that a step names."""
    if step.key not in tensors:
        raise _without(step.key, where)
    shape = tensors[step.key].shape(source)
    if 0 <= step.axis < len(shape):
        return shape[step.axis]
    what = f"{step.key} has shape {[*shape]} and no axis {step.axis}"
    raise ConversionError(f"{where}: {what}: the plan is of another checkpoint")


def _without(key: str, where: object) -> ConversionError:
    return ConversionError(f"{where}: no tensor {key}, which the plan names: the plan is of another checkpoint")


def changed_config(config: dict, changes: dict) -> str:
    """Text of a config with the changes set, dictionaries in it merged but for the record of another conversion."""

    def merged(config: dict, changes: dict) -> dict:
        both = (key for key in changes if key != RECORD_KEY and isinstance(config.get(key), dict))
        inner = {key: merged(config[key], changes[key]) for key in both if isinstance(changes[key], dict)}
        return {**config, **changes, **inner}

    return json.dumps(merged(config, changes), indent=2) + "\n"
