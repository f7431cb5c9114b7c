"""From a config to a conversion plan: which tensors to centre, which norms become RMSNorms, which stay and why."""

import copy
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import torch

from ... import __version__
from ...record import RECORD_KEY, make_record
from ...verification.context import default_inputs, is_float, one_line
from ..plan import CentringPlan, ConversionRefused, NormRecord, rms_norms
from .gauge import ZERO_MEAN, Gauge, centre, find_layer_scales, fold_layer_scales, gauge_test, with_mean
from .keys import Hit, KeyMap, named_as_stored, stored_names
from .layer_norms import TwinNorm, find_layer_norms
from .run import alike, and_more, run
from .twin import Twin, attend_to_encoder, give_weights, make_twin, new_model
from .unreached import behind_masks, refuse_if_unreached

MORE_TOKENS = ((4, 64), (16, 64), (32, 96))  # tried in turn while experts are left that no token reached

NOTES = (
    "Hidden states lose their mean, and so does what a tower returns beside the model's own outputs: what reads them "
    "before the final norm (output_hidden_states) sees other numbers.",
    "Fine-tuning can move the weights off zero mean; the record in config.json lets that be checked.",
)


def discover(source, **how) -> CentringPlan:
    """What converting a checkpoint would do, found on a small random model of the same classes; no weights are read.

    `source` is a `Twin` made before, or with `how` what `make_twin` takes.
    """
    twin = source if isinstance(source, Twin) else make_twin(source, **how)
    norms, silent = find_layer_norms(twin.model, twin.inputs)
    if silent and attend_to_encoder(twin):
        norms, silent = find_layer_norms(twin.model, twin.inputs)
    if not norms:
        raise ConversionRefused(f"{twin.name} computes no LayerNorm: there is nothing to convert")
    if silent:
        reached = f"the inputs reached {len(norms)} of {len(norms) + len(silent)} LayerNorms and not {silent[0]}"
        raise ConversionRefused(f"{twin.name}: {reached}, so what writes there is unknown: pass inputs that reach all")
    keys = KeyMap(twin.model)
    work = copy.deepcopy(twin.model)
    folds = find_layer_scales(work, twin.inputs)
    fold_layer_scales(work, folds)
    gauge = _confirmed(_gauge_of_all(work, twin, norms), twin, norms, folds)
    unsaved = keys.unsaved()
    hits = [h for h in gauge.hits if h.parameter not in unsaved]
    used = {hit.parameter for hit in hits}
    scales = {by for parameter, _, by in folds if parameter in used}
    folds = [fold for fold in folds if fold[2] in scales]
    centre(work, hits)
    bad = with_mean(work, twin.inputs, norms)
    causes = _causes(work, twin, norms, bad, gauge, unsaved) if bad else {}
    if any(not cause.source for cause in causes.values()) and _returns_stream(work, twin, norms):
        raw = "the model returns rows of the stream that no LayerNorm has read: their mean is part of its output"
        causes = {path: cause if cause.source else cause._replace(reason=raw) for path, cause in causes.items()}
    _refuse_if_hopeless(twin, norms, bad, causes)
    becoming = {path: norm for path, norm in norms.items() if path not in bad}
    more, reached = behind_masks(work, twin, becoming, gauge)
    hits += [hit for hit in more if hit.parameter not in unsaved]
    twin.widths = _widths(twin, hits)
    refuse_if_unreached(work, twin, becoming, gauge, reached)
    centred = [replace(c, block=twin.widths[c.block]) for c in keys.centre(hits)]
    tied = new_model(type(twin.model), twin.config)
    names = {name: id(p) for name, p in tied.named_parameters(remove_duplicate=False)}
    shared = Counter(names.values())  # where no writer is tied, nothing has to be untied
    copies = keys.untie(KeyMap(tied)) if any(shared[names.get(hit.parameter)] > 1 for hit in hits) else ()
    reasons = {path: cause.reason for path, cause in causes.items()}
    sizes = {path: twin.widths.get(n.hidden_size, n.hidden_size * twin.factor) for path, n in norms.items()}
    records = [NormRecord(p, sizes[p], n.spec.eps, p not in causes, reasons.get(p, "")) for p, n in norms.items()]
    notes = list(NOTES)
    if getattr(twin.config, RECORD_KEY, None) is not None:
        notes.append("It was converted before, as config.json says: what training has not moved since stays as it is.")
    if copies:
        names = ", ".join(c.key for c in copies)
        notes.append(f"Tied tensors become tensors of their own ({names}): centring one would change the other.")
    if headless := not copies and would_tie_a_head(twin.model, twin.config, hits):
        why = "a head tied to the centred table would give other logits"
        notes.append(f"tie_word_embeddings becomes false: {why}; a class with a head now says that it is missing.")
    if undetermined := tuple(sorted({key for name in set(gauge.undetermined) - reached for key in keys.of(name)})):
        which = f"{len(undetermined)} tensors, {undetermined[0]} for one"
        notes.append(f"No output depended on {which}: they are copied, as they do not write to the stream.")
    record = make_record(twin.writers(hits), rms_norms(records), twin.shapes, norms)
    config: dict = {RECORD_KEY: {"converted_by": f"hf-rmsnorm {__version__}", **record}}
    if copies or headless:
        config["tie_word_embeddings"] = False
    scale = tuple(s for weight, axis, by in folds for s in keys.scale(weight, axis, by))
    steps = tuple(centred), scale, copies, tuple(records)
    plan = CentringPlan(*steps, config, undetermined, gauge.margins, tuple(notes))
    stored = stored_names(twin.folder) if twin.folder else ()
    return named_as_stored(plan, stored, twin.model.base_model_prefix)


def _gauge_of_all(work, twin: Twin, norms) -> Gauge:
    """The gauge test, with more tokens while a parameter stays unreached whose like in another layer is a writer."""
    try:
        gauge = gauge_test(work, twin.inputs, norms)
    except (AssertionError, RuntimeError) as error:
        what = "its forward cannot be differentiated in eval mode, which finding what writes to the stream needs"
        raise ConversionRefused(f"{twin.name}: {what} ({one_line(error)})") from error
    for tokens in MORE_TOKENS if twin.made_inputs else ():
        if not _unreached(gauge):
            return gauge
        attended = any(name.startswith("encoder_") for name in twin.inputs)
        twin.inputs = default_inputs(twin.model, tokens=tokens)
        if attended:
            attend_to_encoder(twin)
        gauge = gauge_test(work, twin.inputs, norms)
    if left := _unreached(gauge):
        what = f"no input reached {and_more(left)}, though others of its kind write to the residual stream"
        raise ConversionRefused(f"{twin.name}: {what}: pass inputs that reach every expert")
    return gauge


def _confirmed(gauge: Gauge, twin: Twin, norms, folds) -> Gauge:
    """What holds with other weights too: an activation that is saturated everywhere passes for a linear function."""
    other = copy.deepcopy(twin.model)
    give_weights(other, seed=5, lean=0.0)
    fold_layer_scales(other, folds)
    second = gauge_test(other, twin.inputs, norms)
    known = {(h.parameter, h.axis, h.block, block) for h in second.hits for block in h.blocks}
    hits = []
    for h in gauge.hits:
        unknown = h.parameter in second.undetermined
        blocks = tuple(b for b in h.blocks if unknown or (h.parameter, h.axis, h.block, b) in known)
        hits += [replace(h, blocks=blocks)] if blocks else []
    dropped = {hit.parameter for hit in gauge.hits} - {hit.parameter for hit in hits}
    picks = (("gauge_max", max), ("nongauge_min", min))
    margins = {name: pick(gauge.margins[name], second.margins[name]) for name, pick in picks}
    return replace(gauge, hits=hits, bound=gauge.bound | dropped, margins=margins)


def _unreached(gauge: Gauge) -> list[str]:
    writers = {alike(hit.parameter) for hit in gauge.hits}
    return [name for name in gauge.undetermined if alike(name) in writers]


def _same_mean(mean: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether these are the means of the rows of x."""
    wanted, size = x.mean(-1), x.square().mean(-1).sqrt().max()
    pairs = zip(mean.shape[::-1], wanted.shape[::-1], strict=False)
    if mean.ndim > wanted.ndim or any(a not in (1, b) for a, b in pairs):
        return False
    return bool(((mean - wanted).abs() <= ZERO_MEAN * size).all())


class Cause(NamedTuple):
    """Why the input of a norm keeps a mean."""

    source: str  # path of the first module whose output has just that mean; "" if there is none
    norm: bool  # whether that module is a LayerNorm
    reason: str  # for people


@torch.no_grad()
def _causes(work, twin: Twin, norms: dict[str, TwinNorm], bad: list[str], gauge: Gauge, unsaved) -> dict[str, Cause]:
    """For each norm whose input keeps a mean: where the mean comes from, told by equal means of tensors."""
    outputs: list[tuple[str, torch.Tensor]] = []
    causes: dict[str, Cause] = {}
    modules = dict(work.named_modules())
    widths = {norm.hidden_size for norm in norms.values()}

    def note(path, args, output):
        if path in bad and path not in causes:
            source = next((p for p, mean in outputs if p != path and _same_mean(mean, args[0])), "")
            causes[path] = _explain(source, modules.get(source), norms, gauge, unsaved)
        first = output[0] if isinstance(output, tuple) and output else output
        if is_float(first) and first.ndim and first.shape[-1] in widths:
            outputs.append((path, first.mean(-1)))

    run(work, twin.inputs, [path for path in modules if path], note)
    return causes


@torch.no_grad()
def _returns_stream(work, twin: Twin, norms: dict[str, TwinNorm]) -> bool:
    """Whether an output as wide as the rows of a norm is the output of none."""
    normed: list[torch.Tensor] = []
    outputs = run(work, twin.inputs, norms, lambda path, args, output: normed.append(output))
    wide = [o for o in outputs if o.ndim > 2 and o.shape[-1] in {y.shape[-1] for y in normed}]
    return not all(any(o.shape == y.shape and torch.equal(o, y) for y in normed) for o in wide)


def _explain(source: str, module, norms, gauge: Gauge, unsaved: set[str]) -> Cause:
    if not source:
        return Cause("", False, "its input has a mean that is the work of several modules or of an activation")
    what = f"{source} ({type(module).__name__})"
    if source in norms:
        carried = f"its input carries the output of the LayerNorm {what}, whose mean no weight removes"
        return Cause(source, True, carried)
    own = {f"{source}.{name}" for name, _ in module.named_parameters()}
    if own & unsaved:
        why = "whose table is not in the checkpoint"
    elif own and own <= set(gauge.undetermined):
        why = "which no output follows smoothly: it is undetermined"
    elif own & gauge.bound:
        why = "and the model's outputs depend on that mean"
    else:
        why = "which no weight alone sets" if own else "which is computed and no weight's"
    return Cause(source, False, f"its input has the mean of {what}, {why}")


def _refuse_if_hopeless(twin: Twin, norms, bad: list[str], causes: dict[str, Cause]) -> None:
    sources = {causes[path].source for path in bad if causes[path].norm}
    by_norm = sum(causes[path].norm for path in bad)
    if len(sources) > 1 and 2 * by_norm > len(bad) and 2 * len(bad) > len(norms):
        which = f"{by_norm} of its {len(norms)} LayerNorms read a sum with another's output"
        cure = "examples/postnorm converts such models in memory"
        raise ConversionRefused(f"{twin.name} is a post-norm model: {which}, whose mean no weight removes: {cure}")
    if len(bad) < len(norms):
        return
    reason, _ = Counter(causes[path].reason for path in bad).most_common(1)[0]
    raise ConversionRefused(f"{twin.name}: all {len(norms)} LayerNorms would stay, {bad[0]} for one: {reason}")


def _widths(twin: Twin, hits: list[Hit]) -> dict[int, int]:
    """Length of a block here -> in the checkpoint."""
    widths: dict[int, int] = {}
    for hit in hits:
        here = twin.model.get_parameter(hit.parameter).shape[hit.axis]
        there = twin.shapes[hit.parameter][hit.axis] * hit.block
        if there % here or widths.setdefault(hit.block, there // here) != there // here:
            raise ConversionRefused(f"{twin.name}: rows of {hit.parameter!r} are narrowed in another way than others")
    if len(set(widths.values())) != len(widths):
        raise ConversionRefused(f"{twin.name}: rows of different lengths when narrowed are equal in the checkpoint")
    return widths


def would_tie_a_head(model, config, hits: list[Hit]) -> bool:
    """Whether a class with a head would tie it to the table of tokens, which is centred, and this one has none."""
    try:
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # there are no tokens
        return False
    centred = any(model.get_parameter(hit.parameter) is table for hit in hits)
    return centred and head is None and bool(getattr(config, "tie_word_embeddings", False))
