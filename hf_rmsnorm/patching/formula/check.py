"""Proves a recipe on inputs of every number of dimensions, on longer rows, and on
strided ones.
"""

from dataclasses import replace

from ...fused.recipe import Recipe
from .refusals import NotInFamily, Unusable
from .trial import ALL_BF16, ALL_FP32, Trial

MOST_DIMS = 6


def prove_layouts(trial: Trial, recipe: Recipe) -> Recipe:
    """The recipe, with the memory order of its results; NotInFamily where module and
    formula differ.
    """
    if recipe.weight is None and recipe.hidden_size is None:
        size = 3 * trial.size + 40
        if not trial.agrees(recipe, trial.normal(4, size)):
            raise NotInFamily(
                f"on rows of {size} elements its result is not that of {recipe.spec}"
            )
    row_major = not _keeps_strides(trial, recipe)
    _check_dims(trial, recipe)
    return replace(recipe, row_major=row_major)


def _check_dims(trial: Trial, recipe: Recipe) -> None:
    """Compare module and formula on inputs of every number of dimensions that the
    module takes: Falcon-H1's gated norms raise on some.
    """
    fewest = 1 if trial.head_dim is None else 2
    dtypes = [ALL_FP32]
    if not recipe.only_float32:
        dtypes.append(ALL_BF16)
    for dims in range(fewest, MOST_DIMS + 1):
        trial.dims = dims
        rows = trial.normal(2 ** (dims - fewest), trial.size)
        try:
            agrees = trial.agrees(recipe, rows, dtypes)
            # of one row, as some code drops dimensions of one element
            agrees = agrees and trial.agrees(recipe, rows[:1])
        except Unusable as error:
            if error.__cause__ is None:  # it returned something else
                raise
            continue
        if not agrees:
            raise NotInFamily(
                f"on {dims}-dimensional input its result is not that of {recipe.spec}"
            )


def _keeps_strides(trial: Trial, recipe: Recipe) -> bool:
    """Whether the output of a permuted input has the strides of the formula's output;
    else it is contiguous.
    """
    trial.draw_tensors()
    rows = trial.normal(8, trial.size)
    x = trial.present(rows).contiguous()
    x = x.transpose(0, 1).contiguous().transpose(0, 1)
    y = trial.call(x, None if recipe.gate is None else trial.gates(x))
    expected = x
    if recipe.spec.functional:
        # torch's own norms give row-major rows
        expected = x.contiguous()
    # the strides of dimensions with one element do not matter
    if y.squeeze().stride() == expected.squeeze().stride():
        return True
    if not y.is_contiguous():
        raise NotInFamily("its output lies in memory in an order of its own")
    return False
