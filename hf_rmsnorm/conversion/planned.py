"""Apply a plan to the tensors of a checkpoint; a plan that does not fit is refused."""

from .plan import Centre, CentringPlan, ConversionError
from .tensors import Lazy, Source, Stored


def planned_tensors(
    plan: CentringPlan, source: Source, where: object
) -> dict[str, Lazy]:
    """Every tensor of a result: copied, centred, or as it is.

    A step that does not fit the tensors is refused; `where` is the folder, for that.
    """
    tensors = {name: Stored(name) for name in source.tensors}
    other = "the plan is of another checkpoint, plan this one"
    for copy in plan.copy:
        key = copy.key
        tied = copy.source
        if tied not in tensors:
            raise ConversionError(f"{where}: no tensor {tied}, to copy: {other}")
        if key not in tensors:
            tensors[key] = Stored(tied)
        elif not source.read(key).equal(source.read(tied)):
            raise ConversionError(
                f"{where}: {key} is there already and differs from {tied}, to which "
                "config.json ties it: set tie_word_embeddings to false if it is right, "
                "or remove it"
            )
    for step in plan.centre:
        key = step.key
        if key not in tensors:
            raise ConversionError(f"{where}: no tensor {key}: {other}")
        tensor = tensors[key]
        shape = tensor.shape(source)
        if not _fits(step, shape):
            raise ConversionError(
                f"{where}: {key} has another shape than the plan says: {other}"
            )
        tensors[key] = tensor.then(step)
    return tensors


def _fits(step: Centre, shape: tuple[int, ...]) -> bool:
    if step.axis >= len(shape):
        return False
    count, rest = divmod(shape[step.axis], step.block)
    last = max(step.blocks or (0,))
    return rest == 0 and last < count
