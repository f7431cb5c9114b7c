"""From a config to a conversion plan: which tensors to centre, which norms become
RMSNorms, which stay and why.
"""

import copy
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ... import __version__
from ...patching.plan import list_norms
from ...record import RECORD_KEY, make_record
from ...verification.context import is_float, one_line
from ..plan import CentringPlan, ConversionRefused, Copy, NormRecord, rms_norms
from .inputs import made_inputs
from .keys import KeyMap, ResidualWeight, named_as_stored, stored_names
from .layer_norms import Norms, find_layer_norms
from .model import ProxyModel, attend_to_encoder, give_weights, make_proxy, new_model
from .run import alike, and_more, run
from .shift_invariance import (
    ZERO_MEAN,
    ShiftTest,
    centre,
    find_layer_scales,
    fold_layer_scales,
    shift_invariance_test,
    with_mean,
)
from .unreached import refuse_if_unreached

# rows and lengths that are tried while no token reaches some experts
MORE_TOKENS = ((4, 64), (16, 64), (32, 96))

NOTES = (
    "output_hidden_states differs: its mean is removed. So do features of a vision or audio encoder.",
    "Fine-tuning can move the weights off zero mean. patch_model checks that by the record in config.json.",
)


@dataclass
class Discovery:
    """The result of the tests on a proxy model.

    Args:
        residual_weights: the residual weights that can be centred, and are in the
            checkpoint.
        scales: layer scales that are folded, as `find_layer_scales` gives them.
        reasons: path of a norm -> why it stays a LayerNorm.
        masks: parameters that take the place of masked patches or frames.
    """

    proxy: ProxyModel
    norms: Norms
    keys: KeyMap
    test: ShiftTest
    residual_weights: list[ResidualWeight]
    scales: list[tuple[str, int, str]]
    reasons: dict[str, str]
    masks: list[str]


def discover(source, **how) -> CentringPlan:
    """The plan for a checkpoint, found on a small random model of the same classes; no
    weights are read.

    `source` is a `ProxyModel`, or with `how` the arguments of `make_proxy`.
    """
    proxy = source if isinstance(source, ProxyModel) else make_proxy(source, **how)
    norms = _reached_norms(proxy)
    keys = KeyMap(proxy.model)
    work = copy.deepcopy(proxy.model)
    scales = find_layer_scales(work, proxy.inputs)
    fold_layer_scales(work, scales)
    test = _confirmed(_test_all(work, proxy, norms), proxy, norms, scales)
    unsaved = keys.unsaved()
    residual_weights = [
        weight for weight in test.residual_weights if weight.parameter not in unsaved
    ]
    centre(work, residual_weights)
    reasons = _why_norms_stay(work, proxy, norms, unsaved | set(test.undetermined))
    becoming = {path: norm for path, norm in norms.items() if path not in reasons}
    proxy.widths = _widths(proxy, residual_weights)
    masks = refuse_if_unreached(proxy, becoming, test)
    scales = _scales_of(residual_weights, scales)
    return _plan(
        Discovery(proxy, norms, keys, test, residual_weights, scales, reasons, masks)
    )


def _scales_of(
    residual_weights: list[ResidualWeight], scales: list
) -> list[tuple[str, int, str]]:
    """The layer scales behind linears that are centred."""
    centred = {weight.parameter for weight in residual_weights}
    folded = {by for weight, _, by in scales if weight in centred}
    return [scale for scale in scales if scale[2] in folded]


def _reached_norms(proxy: ProxyModel) -> Norms:
    """The LayerNorms of the proxy model; refused if the inputs do not reach all, or
    there is none.
    """
    norms, silent = find_layer_norms(proxy.model, proxy.inputs)
    if silent and attend_to_encoder(proxy):
        norms, silent = find_layer_norms(proxy.model, proxy.inputs)
    if silent:
        reached = f"the inputs reached {len(norms)} of {len(norms) + len(silent)} LayerNorms and not {silent[0]}"
        raise ConversionRefused(
            f"{proxy.name}: {reached}: pass inputs=... that reach all"
        )
    if not norms:
        raise ConversionRefused(f"{proxy.name}: {_nothing_to_convert(proxy.model)}")
    return norms


def _nothing_to_convert(model: torch.nn.Module) -> str:
    """The reason to refuse a model without a LayerNorm."""
    recipes = [
        entry.recipe for entry in list_norms(model.float()) if entry.recipe is not None
    ]
    if any(not recipe.spec.centered for recipe in recipes):
        return "it uses RMSNorm already: nothing to convert; to fuse its norms, use patch_model"
    return "it has no LayerNorm: nothing to convert"


def _test_all(work, proxy: ProxyModel, norms: Norms) -> ShiftTest:
    """The shift-invariance test, with more tokens while some experts are unreached and
    others are centred.
    """
    try:
        test = shift_invariance_test(work, proxy.inputs, norms)
    except (AssertionError, RuntimeError) as error:
        what = "its forward cannot be differentiated in eval mode, which finding residual weights needs"
        raise ConversionRefused(f"{proxy.name}: {what} ({one_line(error)})") from error
    for tokens in MORE_TOKENS if proxy.made_inputs else ():
        if not _unreached_experts(test):
            return test
        attended = any(name.startswith("encoder_") for name in proxy.inputs)
        proxy.inputs = made_inputs(proxy.model, tokens)
        if attended:
            attend_to_encoder(proxy)
        test = shift_invariance_test(work, proxy.inputs, norms)
    if left := _unreached_experts(test):
        what = f"no input reached {and_more(left)}, though the same weights of other experts write to the stream"
        raise ConversionRefused(
            f"{proxy.name}: {what}: pass inputs=... that reach every expert"
        )
    return test


def _unreached_experts(test: ShiftTest) -> list[str]:
    places = {alike(weight.parameter) for weight in test.residual_weights}
    return [name for name in test.undetermined if alike(name) in places]


def _confirmed(test: ShiftTest, proxy: ProxyModel, norms: Norms, scales) -> ShiftTest:
    """The blocks that pass with other weights too: an activation saturated everywhere
    looks like a linear function.
    """
    other = copy.deepcopy(proxy.model)
    give_weights(other, seed=5, lean=0.0)
    fold_layer_scales(other, scales)
    second = shift_invariance_test(other, proxy.inputs, norms)
    passed = {
        (w.parameter, w.axis, w.block, block)
        for w in second.residual_weights
        for block in w.blocks
    }
    residual_weights = []
    for weight in test.residual_weights:
        place = weight.parameter, weight.axis, weight.block
        if weight.parameter not in second.undetermined:
            weight = replace(
                weight,
                blocks=tuple(
                    block for block in weight.blocks if (*place, block) in passed
                ),
            )
        if weight.blocks:
            residual_weights.append(weight)
    margins = {
        "invariant_max": max(
            test.margins["invariant_max"], second.margins["invariant_max"]
        ),
        "dependent_min": min(
            test.margins["dependent_min"], second.margins["dependent_min"]
        ),
    }
    return replace(test, residual_weights=residual_weights, margins=margins)


class Cause(NamedTuple):
    """Why the input of a norm keeps a mean."""

    # path of the first module whose output has exactly that mean; "" if there is none
    source: str
    is_norm: bool  # whether that module is a LayerNorm


def _why_norms_stay(
    work, proxy: ProxyModel, norms: Norms, fixed: set[str]
) -> dict[str, str]:
    """Path -> reason of each norm whose input keeps a mean; refused if that is all, or most in a post-norm model."""
    bad = with_mean(work, proxy.inputs, norms)
    if not bad:
        return {}
    causes = _causes(work, proxy, norms, bad)
    _refuse_post_norm(proxy, norms, causes)
    reasons = {path: _explain(cause, work, fixed) for path, cause in causes.items()}
    if len(bad) == len(norms):
        reason, _ = Counter(reasons.values()).most_common(1)[0]
        raise ConversionRefused(
            f"{proxy.name}: all {len(norms)} LayerNorms would stay, {bad[0]} for one: {reason}"
        )
    return reasons


def _refuse_post_norm(
    proxy: ProxyModel, norms: Norms, causes: dict[str, Cause]
) -> None:
    """In a post-norm model nearly each norm reads the output of another one, and in
    others many that of one.
    """
    by_norm = [cause for cause in causes.values() if cause.is_norm]
    others = {cause.source for cause in by_norm}
    if 3 * len(others) > 2 * len(causes) and 2 * len(causes) > len(norms) > 1:
        which = f"{len(by_norm)} of its {len(norms)} LayerNorms read a sum with another's output"
        cure = "examples/postnorm converts such models in memory"
        raise ConversionRefused(
            f"{proxy.name} is a post-norm model: {which}, whose mean no weight removes: {cure}"
        )


@torch.no_grad()
def _causes(work, proxy: ProxyModel, norms: Norms, bad: list[str]) -> dict[str, Cause]:
    """For each norm whose input keeps a mean: where the mean comes from, as equal means
    of tensors show.
    """
    means: list[tuple[str, torch.Tensor]] = []
    causes: dict[str, Cause] = {}
    widths = {norm.hidden_size for norm in norms.values()}

    def note(path, args, output):
        if path in bad and path not in causes:
            source = next(
                (p for p, mean in means if p != path and _same_mean(mean, args[0])), ""
            )
            causes[path] = Cause(source, source in norms)
        first = output[0] if isinstance(output, tuple) and output else output
        if is_float(first) and first.ndim and first.shape[-1] in widths:
            means.append((path, first.mean(-1)))

    run(work, proxy.inputs, [path for path, _ in work.named_modules() if path], note)
    return causes


def _same_mean(mean: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether these are the means of the rows of x."""
    wanted = x.mean(-1)
    size = x.square().mean(-1).sqrt().max()
    sides = zip(mean.shape[::-1], wanted.shape[::-1], strict=False)
    if mean.ndim > wanted.ndim or any(a not in (1, b) for a, b in sides):
        return False
    return bool(((mean - wanted).abs() <= ZERO_MEAN * size).all())


def _explain(cause: Cause, work, fixed: set[str]) -> str:
    """Why centring does not remove a mean; `fixed` are parameters that a conversion
    cannot change.
    """
    if not cause.source:
        return "its input has a mean that no weight sets alone, or that the model's outputs depend on"
    module = work.get_submodule(cause.source)
    what = f"{cause.source} ({type(module).__name__})"
    if cause.is_norm:
        return f"its input carries the output of the LayerNorm {what}, whose mean no weight removes"
    weights = {f"{cause.source}.{name}" for name, _ in module.named_parameters()}
    if not weights:
        return f"its input has the mean of {what}, which is computed and no weight's"
    if weights <= fixed:
        why = "which is not in the checkpoint, or at most a top-k choice depends on it"
        return f"its input has the mean of {what}, {why}"
    return f"its input has the mean of {what}, which no weight sets alone, or the model's outputs depend on it"


def _widths(
    proxy: ProxyModel, residual_weights: list[ResidualWeight]
) -> dict[int, int]:
    """Length of a block here -> in the checkpoint."""
    widths: dict[int, int] = {}
    for weight in residual_weights:
        here = proxy.model.get_parameter(weight.parameter).shape[weight.axis]
        there = proxy.shapes[weight.parameter][weight.axis] * weight.block
        if (
            there % here
            or widths.setdefault(weight.block, there // here) != there // here
        ):
            what = (
                f"rows of {weight.parameter!r} are narrowed in another way than others"
            )
            raise ConversionRefused(f"{proxy.name}: {what}")
    if len(set(widths.values())) != len(widths):
        raise ConversionRefused(
            f"{proxy.name}: rows of different lengths when narrowed are equal in the checkpoint"
        )
    return widths


def _plan(found: Discovery) -> CentringPlan:
    """The plan, in keys of the checkpoint."""
    proxy, keys, residual_weights = found.proxy, found.keys, found.residual_weights
    records = _norm_records(found)
    copies = _untied(found)
    headless = not copies and would_tie_a_head(
        proxy.model, proxy.config, residual_weights
    )
    undetermined = tuple(
        sorted({key for name in found.test.undetermined for key in keys.of(name)})
    )
    record = make_record(
        proxy.entries(residual_weights), rms_norms(records), proxy.shapes, found.norms
    )
    config: dict = {RECORD_KEY: {"converted_by": f"hf-rmsnorm {__version__}", **record}}
    if copies or headless:
        config["tie_word_embeddings"] = False
    scales = [
        step
        for weight, axis, by in found.scales
        for step in keys.scale(weight, axis, by)
    ]
    plan = CentringPlan(
        centre=tuple(
            replace(step, block=proxy.widths[step.block])
            for step in keys.centre(residual_weights)
        ),
        scale=tuple(scales),
        copy=copies,
        norms=tuple(records),
        config=config,
        undetermined=undetermined,
        margins=found.test.margins,
        notes=tuple(_notes(found, copies, headless, undetermined)),
    )
    stored = stored_names(proxy.folder) if proxy.folder else ()
    return named_as_stored(plan, stored, proxy.model)


def _norm_records(found: Discovery) -> list[NormRecord]:
    records = []
    for path, norm in found.norms.items():
        width = found.proxy.widths.get(
            norm.hidden_size, norm.hidden_size * found.proxy.factor
        )
        reason = found.reasons.get(path, "")
        records.append(NormRecord(path, width, norm.spec.eps, not reason, reason))
    return records


def _untied(found: Discovery) -> tuple[Copy, ...]:
    """Tensors that are stored twice in the result, as a residual weight is tied to
    another parameter.
    """
    tied = new_model(type(found.proxy.model), found.proxy.config)
    names = {name: id(p) for name, p in tied.named_parameters(remove_duplicate=False)}
    shared = Counter(names.values())
    if any(
        shared[names.get(weight.parameter)] > 1 for weight in found.residual_weights
    ):
        return found.keys.untie(KeyMap(tied))
    return ()


def would_tie_a_head(model, config, residual_weights: list[ResidualWeight]) -> bool:
    """Whether a class with a head would tie it to the table of tokens, which is
    centred, and this one has none.
    """
    try:
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # there are no tokens
        return False
    centred = any(
        model.get_parameter(weight.parameter) is table for weight in residual_weights
    )
    return (
        centred and head is None and bool(getattr(config, "tie_word_embeddings", False))
    )


def _notes(
    found: Discovery,
    copies: tuple[Copy, ...],
    headless: bool,
    undetermined: tuple[str, ...],
) -> list[str]:
    notes = list(NOTES)
    if getattr(found.proxy.config, RECORD_KEY, None) is not None:
        notes.append(
            "It was converted before, as config.json says: weights that training has not moved stay."
        )
    if copies:
        names = ", ".join(c.key for c in copies)
        notes.append(
            f"Tied tensors are stored twice ({names}): centring one would change the other."
        )
    if headless:
        why = "a head tied to the centred table would give other logits"
        notes.append(
            f"tie_word_embeddings becomes false: {why}; a class with a head now says that it is missing."
        )
    if found.masks:
        why = "with masked patches or frames, run the result as LayerNorm: as RMSNorm it would differ"
        notes.append(f"{and_more(found.masks)} stays as it is: {why}.")
    if undetermined:
        which = f"{len(undetermined)} tensors, {undetermined[0]} for one"
        notes.append(f"No output depended on {which}: they are copied.")
    return notes
