"""Apply a plan to the tensors of a checkpoint and to its config; a plan that does not
fit is refused.
"""

import json

from ..record import RECORD_KEY
from .plan import Centre, CentringPlan, ConversionError, Copy, Scale
from .tensors import Centring, Lazy, Scaling, Source, Stored, filled


def planned_tensors(
    plan: CentringPlan, source: Source, where: object
) -> dict[str, Lazy]:
    """Every tensor of the checkpoint that a plan makes of another: scaled, then
    centred; the others as they are.

    A step that does not fit the tensors is refused; `where` is the folder, for that.
    """
    _check_names(plan, source, where)
    tensors: dict[str, Lazy] = {name: Stored(name) for name in source.tensors}
    for copy in plan.copy:
        if copy.key in tensors:
            _check_equal(copy, source, where)
        else:
            tensors[copy.key] = Stored(copy.source)
    for scale in plan.scale:
        size = _size(scale, tensors, source)
        if tuple(source.tensors[scale.by].shape) != (size,):
            raise _of_other_weights(scale, where)
        step = Scaling(scale.axis, Stored(scale.by))
        tensors[scale.key] = tensors[scale.key].then(step)
    for centre in plan.centre:
        size = _size(centre, tensors, source)
        count, rest = divmod(size, centre.block)
        if rest or max(centre.blocks or (0,)) >= count:
            raise _of_other_weights(centre, where)
        step = Centring(centre.axis, centre.block, centre.blocks)
        tensors[centre.key] = tensors[centre.key].then(step)
    for scale in plan.scale:
        tensors[scale.by] = filled(Stored(scale.by), 1.0)
    return tensors


def _check_names(plan: CentringPlan, source: Source, where: object) -> None:
    """Refuse a plan that names a tensor which the checkpoint lacks."""
    named = {step.key for step in (*plan.centre, *plan.scale)}
    named -= {copy.key for copy in plan.copy}
    named |= {copy.source for copy in plan.copy}
    named |= {scale.by for scale in plan.scale}
    missing = sorted(named - source.tensors.keys())
    if missing:
        what = f"no tensor {missing[0]}, which the plan names"
        raise ConversionError(f"{where}: {what}: the plan is of another checkpoint")


def _check_equal(copy: Copy, source: Source, where: object) -> None:
    """Refuse a checkpoint that has a tensor already, with other values than the plan
    gives it.
    """
    if source.read(copy.key).equal(source.read(copy.source)):
        return
    what = f"{copy.key} is there already and differs from {copy.source}, of which the plan makes it a copy"
    cure = "set tie_word_embeddings to false if it is right, remove it if it is stale"
    raise ConversionError(f"{where}: {what}: {cure}")


def _size(step: Scale | Centre, tensors: dict[str, Lazy], source: Source) -> int:
    """Elements along the axis that a step names; 0 if there is no such axis."""
    shape = tensors[step.key].shape(source)
    return shape[step.axis] if step.axis < len(shape) else 0


def _of_other_weights(step: Scale | Centre, where: object) -> ConversionError:
    what = f"{step.key} has another shape than the plan says"
    return ConversionError(
        f"{where}: {what}: config.json or the plan is of other weights"
    )


def changed_config(config: dict, changes: dict) -> str:
    """Text of a config with the changes set; dictionaries are merged, except for the
    record of a conversion.
    """

    def merged(config: dict, changes: dict) -> dict:
        both = (
            key
            for key in changes
            if key != RECORD_KEY and isinstance(config.get(key), dict)
        )
        inner = {
            key: merged(config[key], changes[key])
            for key in both
            if isinstance(changes[key], dict)
        }
        return {**config, **changes, **inner}

    return json.dumps(merged(config, changes), indent=2) + "\n"
