"""Apply a plan to the tensors of a checkpoint; a plan that does not fit is refused."""

from collections.abc import Container

from .plan import Centre, CentringPlan, ConversionError
from .tensors import Centring, Lazy, Source, Stored


def planned_tensors(
    plan: CentringPlan, source: Source, where: object
) -> dict[str, Lazy]:
    """Every tensor of a result: copied, centred, or as it is.

    A step that does not fit the tensors is refused; `where` is the folder, for that.
    """
    tensors: dict[str, Stored] = {}
    for name in source.tensors:
        tensors[name] = Stored(name)
    for copy in plan.copy:
        _check_there(copy.source, tensors, where)
        if copy.key in tensors:
            _check_equal(copy.key, copy.source, source, where)
        else:
            tensors[copy.key] = Stored(copy.source)
    for step in plan.centre:
        _check_there(step.key, tensors, where)
        if not _fits(step, tensors[step.key].shape(source)):
            what = f"{step.key} has another shape than the plan says"
            cure = "config.json or the plan is of other weights"
            raise ConversionError(f"{where}: {what}: {cure}")
        centring = Centring(step.axis, step.block, step.blocks)
        tensors[step.key] = tensors[step.key].then(centring)
    return tensors


def _check_there(key: str, names: Container[str], where: object) -> None:
    if key not in names:
        what = f"no tensor {key}, which the plan names"
        raise ConversionError(f"{where}: {what}: the plan is of another checkpoint")


def _check_equal(key: str, tied: str, source: Source, where: object) -> None:
    """Refuse a checkpoint that has a tied tensor already, with other values."""
    if not source.read(key).equal(source.read(tied)):
        what = f"{key} is there already and differs from {tied}, to which config.json ties it"
        cure = "set tie_word_embeddings to false if it is right, or remove it"
        raise ConversionError(f"{where}: {what}: {cure}")


def _fits(step: Centre, shape: tuple[int, ...]) -> bool:
    if step.axis >= len(shape):
        return False
    count, rest = divmod(shape[step.axis], step.block)
    last = max(step.blocks or (0,))
    return rest == 0 and last < count
