"""From a config to a conversion plan: which tensors to centre, which norms become RMSNorms, which stay and why."""

import copy
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ... import __version__
from ...patching.plan import make_plan
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
from .unreached import behind_masks, refuse_if_unreached

MORE_TOKENS = ((4, 64), (16, 64), (32, 96))  # tried in turn while experts are left that no token reached

NOTES = (
    "Hidden states lose their mean, and so does what a tower returns beside the model's own outputs: what reads them "
    "before the final norm (output_hidden_states) sees other numbers.",
    "Fine-tuning can move the weights off zero mean; the record in config.json lets that be checked.",
)


@dataclass
class Discovery:
    """What a proxy model has shown.

    Args:
        residual_weights: the residual weights that can be centred, and are in the checkpoint.
        scales: layer scales that are folded, as `find_layer_scales` gives them.
        undetermined: parameters that no output depends on.
    """

    proxy: ProxyModel
    norms: Norms
    keys: KeyMap
    residual_weights: list[ResidualWeight]
    scales: list[tuple[str, int, str]]
    reasons: dict[str, str]  # path of a norm -> why it stays a LayerNorm
    undetermined: set[str]
    margins: dict


def discover(source, **how) -> CentringPlan:
    """What converting a checkpoint would do, found on a small random model of the same classes; no weights are read.

    `source` is a `ProxyModel` made before, or with `how` what `make_proxy` takes.
    """
    proxy = source if isinstance(source, ProxyModel) else make_proxy(source, **how)
    norms = _reached_norms(proxy)
    keys = KeyMap(proxy.model)
    unsaved = keys.unsaved()
    work = copy.deepcopy(proxy.model)
    scales = find_layer_scales(work, proxy.inputs)
    fold_layer_scales(work, scales)
    test = _confirmed(_test_all(work, proxy, norms), proxy, norms, scales)
    residual_weights = [weight for weight in test.residual_weights if weight.parameter not in unsaved]
    centre(work, residual_weights)
    reasons = _why_norms_stay(work, proxy, norms, test, unsaved)
    becoming = {path: norm for path, norm in norms.items() if path not in reasons}
    masked, reached = behind_masks(work, proxy, becoming, test.undetermined)
    centred = {weight.parameter for weight in residual_weights}
    scales = [scale for scale in scales if scale[2] in {by for weight, _, by in scales if weight in centred}]
    residual_weights += [weight for weight in masked if weight.parameter not in unsaved]
    proxy.widths = _widths(proxy, residual_weights)
    undetermined = set(test.undetermined) - reached
    refuse_if_unreached(work, proxy, becoming, undetermined)
    return _plan(Discovery(proxy, norms, keys, residual_weights, scales, reasons, undetermined, test.margins))


def _reached_norms(proxy: ProxyModel) -> Norms:
    """The LayerNorms of the proxy model; refused where the inputs do not reach all, or there is none."""
    norms, silent = find_layer_norms(proxy.model, proxy.inputs)
    if silent and attend_to_encoder(proxy):
        norms, silent = find_layer_norms(proxy.model, proxy.inputs)
    if silent:
        reached = f"the inputs reached {len(norms)} of {len(norms) + len(silent)} LayerNorms and not {silent[0]}"
        raise ConversionRefused(f"{proxy.name}: {reached}: pass inputs=... that reach all")
    if not norms:
        raise ConversionRefused(f"{proxy.name}: {_nothing_to_convert(proxy.model)}")
    return norms


def _nothing_to_convert(model: torch.nn.Module) -> str:
    """What to say of a model without a LayerNorm."""
    recipes = [entry.recipe for entry in make_plan(model.float()) if entry.recipe is not None]
    if any(not recipe.spec.centered for recipe in recipes):
        return "it uses RMSNorm already: nothing to convert; to fuse its norms, use patch_model"
    return "it has no LayerNorm: nothing to convert"


def _test_all(work, proxy: ProxyModel, norms: Norms) -> ShiftTest:
    """The shift-invariance test, with more tokens while a parameter is unreached whose like elsewhere is centred."""
    try:
        test = shift_invariance_test(work, proxy.inputs, norms)
    except (AssertionError, RuntimeError) as error:
        what = "its forward cannot be differentiated in eval mode, which finding residual weights needs"
        raise ConversionRefused(f"{proxy.name}: {what} ({one_line(error)})") from error
    for tokens in MORE_TOKENS if proxy.made_inputs else ():
        if not _unreached(test):
            return test
        attended = any(name.startswith("encoder_") for name in proxy.inputs)
        proxy.inputs = made_inputs(proxy.model, tokens)
        if attended:
            attend_to_encoder(proxy)
        test = shift_invariance_test(work, proxy.inputs, norms)
    if left := _unreached(test):
        what = f"no input reached {and_more(left)}, though others of its kind write to the residual stream"
        raise ConversionRefused(f"{proxy.name}: {what}: pass inputs=... that reach every expert")
    return test


def _unreached(test: ShiftTest) -> list[str]:
    kinds = {alike(weight.parameter) for weight in test.residual_weights}
    return [name for name in test.undetermined if alike(name) in kinds]


def _confirmed(test: ShiftTest, proxy: ProxyModel, norms: Norms, scales) -> ShiftTest:
    """What holds with other weights too: an activation that is saturated everywhere passes for a linear function."""
    other = copy.deepcopy(proxy.model)
    give_weights(other, seed=5, lean=0.0)
    fold_layer_scales(other, scales)
    second = shift_invariance_test(other, proxy.inputs, norms)
    known = {(h.parameter, h.axis, h.block, block) for h in second.residual_weights for block in h.blocks}
    residual_weights = []
    for weight in test.residual_weights:
        if weight.parameter not in second.undetermined:
            blocks = tuple(b for b in weight.blocks if (weight.parameter, weight.axis, weight.block, b) in known)
            weight = replace(weight, blocks=blocks)
        if weight.blocks:
            residual_weights.append(weight)
    dropped = {weight.parameter for weight in test.residual_weights} - {weight.parameter for weight in residual_weights}
    margins = {
        "invariant_max": max(test.margins["invariant_max"], second.margins["invariant_max"]),
        "dependent_min": min(test.margins["dependent_min"], second.margins["dependent_min"]),
    }
    return replace(test, residual_weights=residual_weights, bound=test.bound | dropped, margins=margins)


class Cause(NamedTuple):
    """Why the input of a norm keeps a mean."""

    source: str  # path of the first module whose output has just that mean; "" if there is none
    norm: bool  # whether that module is a LayerNorm
    reason: str  # for people


def _why_norms_stay(work, proxy: ProxyModel, norms: Norms, test: ShiftTest, unsaved: set[str]) -> dict[str, str]:
    """Path -> reason of each norm whose input keeps a mean; refused where that is all, or most in a post-norm model."""
    bad = with_mean(work, proxy.inputs, norms)
    if not bad:
        return {}
    causes = _causes(work, proxy, norms, bad)
    by_norm = [cause for cause in causes.values() if cause.norm]
    # In a post-norm model nearly each norm reads the output of another one, and in others many that of one.
    others = {cause.source for cause in by_norm}
    if 3 * len(others) > 2 * len(bad) and 2 * len(bad) > len(norms) > 1:
        which = f"{len(by_norm)} of its {len(norms)} LayerNorms read a sum with another's output"
        cure = "examples/postnorm converts such models in memory"
        raise ConversionRefused(f"{proxy.name} is a post-norm model: {which}, whose mean no weight removes: {cure}")
    unknown = "its input has a mean that is the work of several modules or of an activation"
    if any(not cause.source for cause in causes.values()) and _returns_stream(work, proxy, norms):
        unknown = "the model returns rows of the stream that no LayerNorm has read: their mean is part of its output"
    reasons = {}
    for path, cause in causes.items():
        reasons[path] = _explain(cause, work, test, unsaved) if cause.source else unknown
    if len(bad) == len(norms):
        reason, _ = Counter(reasons.values()).most_common(1)[0]
        raise ConversionRefused(f"{proxy.name}: all {len(norms)} LayerNorms would stay, {bad[0]} for one: {reason}")
    return reasons


@torch.no_grad()
def _causes(work, proxy: ProxyModel, norms: Norms, bad: list[str]) -> dict[str, Cause]:
    """For each norm whose input keeps a mean: where the mean comes from, as equal means of tensors show."""
    means: list[tuple[str, torch.Tensor]] = []
    causes: dict[str, Cause] = {}
    widths = {norm.hidden_size for norm in norms.values()}

    def note(path, args, output):
        if path in bad and path not in causes:
            source = next((p for p, mean in means if p != path and _same_mean(mean, args[0])), "")
            causes[path] = Cause(source, source in norms, "")
        first = output[0] if isinstance(output, tuple) and output else output
        if is_float(first) and first.ndim and first.shape[-1] in widths:
            means.append((path, first.mean(-1)))

    run(work, proxy.inputs, [path for path, _ in work.named_modules() if path], note)
    return causes


def _same_mean(mean: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether these are the means of the rows of x."""
    wanted, size = x.mean(-1), x.square().mean(-1).sqrt().max()
    pairs = zip(mean.shape[::-1], wanted.shape[::-1], strict=False)
    if mean.ndim > wanted.ndim or any(a not in (1, b) for a, b in pairs):
        return False
    return bool(((mean - wanted).abs() <= ZERO_MEAN * size).all())


@torch.no_grad()
def _returns_stream(work, proxy: ProxyModel, norms: Norms) -> bool:
    """Whether an output as wide as the rows of a norm is the output of none."""
    normed: list[torch.Tensor] = []
    outputs = run(work, proxy.inputs, norms, lambda path, args, output: normed.append(output))
    widths = {y.shape[-1] for y in normed}
    wide = [o for o in outputs if o.ndim > 2 and o.shape[-1] in widths]
    return not all(any(o.shape == y.shape and torch.equal(o, y) for y in normed) for o in wide)


def _explain(cause: Cause, work, test: ShiftTest, unsaved: set[str]) -> str:
    """Why centring does not remove a mean."""
    source = cause.source
    module = work.get_submodule(source)
    what = f"{source} ({type(module).__name__})"
    if cause.norm:
        return f"its input carries the output of the LayerNorm {what}, whose mean no weight removes"
    names = {f"{source}.{name}" for name, _ in module.named_parameters()}
    if not names:
        why = "which is computed and no weight's"
    elif names & unsaved:
        why = "whose table is not in the checkpoint"
    elif names <= set(test.undetermined):
        why = "which is a fixed table, or only a top-k choice depends on it"
    elif names & test.bound:
        why = "and the model's outputs depend on that mean"
    else:
        why = "which no weight alone sets"
    return f"its input has the mean of {what}, {why}"


def _widths(proxy: ProxyModel, residual_weights: list[ResidualWeight]) -> dict[int, int]:
    """Length of a block here -> in the checkpoint."""
    widths: dict[int, int] = {}
    for weight in residual_weights:
        here = proxy.model.get_parameter(weight.parameter).shape[weight.axis]
        there = proxy.shapes[weight.parameter][weight.axis] * weight.block
        if there % here or widths.setdefault(weight.block, there // here) != there // here:
            raise ConversionRefused(
                f"{proxy.name}: rows of {weight.parameter!r} are narrowed in another way than others"
            )
    if len(set(widths.values())) != len(widths):
        raise ConversionRefused(f"{proxy.name}: rows of different lengths when narrowed are equal in the checkpoint")
    return widths


def _plan(found: Discovery) -> CentringPlan:
    """The plan, in keys of the checkpoint."""
    proxy, keys, residual_weights = found.proxy, found.keys, found.residual_weights
    records = _norm_records(found)
    copies = _untied(found)
    headless = not copies and would_tie_a_head(proxy.model, proxy.config, residual_weights)
    undetermined = sorted({key for name in found.undetermined for key in keys.of(name)})
    record = make_record(proxy.entries(residual_weights), rms_norms(records), proxy.shapes, found.norms)
    config: dict = {RECORD_KEY: {"converted_by": f"hf-rmsnorm {__version__}", **record}}
    if copies or headless:
        config["tie_word_embeddings"] = False
    plan = CentringPlan(
        centre=tuple(replace(step, block=proxy.widths[step.block]) for step in keys.centre(residual_weights)),
        scale=tuple(step for weight, axis, by in found.scales for step in keys.scale(weight, axis, by)),
        copy=copies,
        norms=tuple(records),
        config=config,
        undetermined=tuple(undetermined),
        margins=found.margins,
        notes=tuple(_notes(proxy, copies, headless, undetermined)),
    )
    stored = stored_names(proxy.folder) if proxy.folder else ()
    return named_as_stored(plan, stored, proxy.model)


def _norm_records(found: Discovery) -> list[NormRecord]:
    records = []
    for path, norm in found.norms.items():
        width = found.proxy.widths.get(norm.hidden_size, norm.hidden_size * found.proxy.factor)
        reason = found.reasons.get(path, "")
        records.append(NormRecord(path, width, norm.spec.eps, not reason, reason))
    return records


def _untied(found: Discovery) -> tuple[Copy, ...]:
    """Tensors that get a copy of their own, as a residual weight is tied to another parameter."""
    tied = new_model(type(found.proxy.model), found.proxy.config)
    names = {name: id(p) for name, p in tied.named_parameters(remove_duplicate=False)}
    shared = Counter(names.values())
    if any(shared[names.get(weight.parameter)] > 1 for weight in found.residual_weights):
        return found.keys.untie(KeyMap(tied))
    return ()


def would_tie_a_head(model, config, residual_weights: list[ResidualWeight]) -> bool:
    """Whether a class with a head would tie it to the table of tokens, which is centred, and this one has none."""
    try:
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # there are no tokens
        return False
    centred = any(model.get_parameter(weight.parameter) is table for weight in residual_weights)
    return centred and head is None and bool(getattr(config, "tie_word_embeddings", False))


def _notes(proxy: ProxyModel, copies: tuple[Copy, ...], headless: bool, undetermined: list[str]) -> list[str]:
    notes = list(NOTES)
    if getattr(proxy.config, RECORD_KEY, None) is not None:
        notes.append("It was converted before, as config.json says: what training has not moved since stays as it is.")
    if copies:
        names = ", ".join(c.key for c in copies)
        notes.append(f"Tied tensors become tensors of their own ({names}): centring one would change the other.")
    if headless:
        why = "a head tied to the centred table would give other logits"
        notes.append(f"tie_word_embeddings becomes false: {why}; a class with a head now says that it is missing.")
    if undetermined:
        which = f"{len(undetermined)} tensors, {undetermined[0]} for one"
        notes.append(f"No output depended on {which}: they are copied, as they do not write to the stream.")
    return notes
