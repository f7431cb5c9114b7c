"""Apply a plan to the tensors of a checkpoint; a plan that does not fit is refused."""

from .checkpoint.source import Checkpoint
from .plan import Centre, CentringPlan, ConversionError
from .tensors import Lazy, Stored

OTHER = "the plan is of another checkpoint, plan this one"


def planned_tensors(
    plan: CentringPlan, source: Checkpoint, where: object
) -> dict[str, Lazy]:
    """Every tensor of a result: copied, centred, or as it is.

    A step that does not fit the tensors is refused; `where` is the folder, for that.
    """
    tensors = {name: Stored(name) for name in source.tensors}
    for copy in plan.copy:
        if copy.source not in source.tensors:
            raise ConversionError(f"{where}: no tensor {copy.source}, to copy: {OTHER}")
        if copy.key not in source.tensors:
            tensors[copy.key] = Stored(copy.source)
        elif not source.read(copy.key).equal(source.read(copy.source)):
            raise ConversionError(
                f"{where}: {copy.key} is there already and differs from {copy.source}, "
                "to which config.json ties it: set tie_word_embeddings to false if it "
                "is right, or remove it"
            )
    for step in plan.centre:
        tensor = tensors.get(step.key)
        if tensor is None or not _fits(step, tensor.shape(source)):
            raise ConversionError(
                f"{where}: {step.key} is missing, or has another shape than the plan "
                f"says: {OTHER}"
            )
        tensors[step.key] = tensor.then(step)
    return tensors


def _fits(step: Centre, shape: tuple[int, ...]) -> bool:
    if step.axis >= len(shape):
        return False
    count, rest = divmod(shape[step.axis], step.block)
    return rest == 0 and max(step.blocks or (0,)) < count
