"""From a config to a conversion plan: which tensors to centre, which norms become RMSNorms, which stay and why."""

from __future__ import annotations

import copy
import re
from collections import Counter
from dataclasses import dataclass, replace

import torch

from ... import __version__
from ...record import RECORD_KEY, make_record
from ..plan import CentringPlan, ConversionRefused, Copy, NormRecord
from .gauge import Gauge, centre, find_layer_scales, fold_layer_scales, gauge_test, input_means
from .inputs import default_inputs
from .keys import Hit, KeyMap, named_as_stored, stored_names
from .layer_norms import TwinNorm, find_layer_norms
from .run import hooked, one_line, run
from .twin import Twin, attend_to_encoder, give_weights, make_twin, new_model
from .unreached import behind_masks, refuse_if_unreached

ZERO_MEAN = 1e-10  # |mean| / RMS of a row in float64; 1e-13 in deep models once all that writes is centred
MORE_TOKENS = ((4, 64), (16, 64), (32, 96))  # tried in turn while experts are left that no token reached
_NUMBER = re.compile(r"\d+")

NOTES = (
    "Hidden states lose their mean: what reads them before the final norm (output_hidden_states) sees other numbers.",
    "Fine-tuning can move the weights off zero mean; the record in config.json lets that be checked.",
)


def discover(
    source,
    trust_remote_code: bool = False,
    *,
    model_class=None,
    inputs=None,
) -> CentringPlan:
    """What converting a checkpoint would do, found on a small random model of the same classes; no weights are read.

    Args:
        source: the folder of a model, a `PretrainedConfig`, or a `Twin` made before.
        trust_remote_code: run the model code that comes with a folder.
        model_class: instead of the class that the config names.
        inputs: makes keyword arguments of the forward for a model; needed where the forward wants other inputs than
            token ids, pixels or audio features.

    Raises:
        ConversionRefused: the model cannot be converted; the message is one line with the reason.
    """
    twin = source
    if not isinstance(twin, Twin):
        twin = make_twin(source, trust_remote_code=trust_remote_code, model_class=model_class, inputs=inputs)
    norms, silent = find_layer_norms(twin.model, twin.inputs)
    if silent and attend_to_encoder(twin):
        norms, silent = find_layer_norms(twin.model, twin.inputs)
    if not norms:
        raise ConversionRefused(f"{twin.name} computes no LayerNorm: there is nothing to convert")
    if silent:
        raise ConversionRefused(
            f"{twin.name}: the inputs reached {len(norms)} of {len(norms) + len(silent)} LayerNorms and not "
            f"{silent[0]}, so what that part of the model writes to the residual stream is unknown: pass inputs that "
            "reach all of them"
        )
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
    means = input_means(work, twin.inputs, norms)
    bad = [path for path in norms if means[path] > ZERO_MEAN]
    causes = _causes(work, twin, norms, bad, gauge, unsaved) if bad else {}
    if any(not cause.source for cause in causes.values()) and _returns_stream(work, twin, norms):
        raw = (
            "the model returns rows of the stream that no LayerNorm has read, so that their mean is part of its output"
        )
        causes = {path: cause if cause.source else Cause("", False, raw) for path, cause in causes.items()}
    _refuse_if_hopeless(twin, norms, bad, causes)
    becoming = {path: norm for path, norm in norms.items() if path not in bad}
    more, reached = behind_masks(work, twin, becoming, gauge, ZERO_MEAN)
    hits += [hit for hit in more if hit.parameter not in unsaved]
    twin.widths = _widths(twin, hits)
    refuse_if_unreached(work, twin, becoming, gauge, reached, ZERO_MEAN)
    centred = [replace(c, block=twin.widths[c.block]) for c in keys.centre(hits)]
    copies = _untie(twin, keys, hits)
    records = [_record(twin, path, norm, causes.get(path)) for path, norm in norms.items()]
    notes = list(NOTES)
    if copies:
        names = ", ".join(c.key for c in copies)
        notes.append(f"Tied tensors become tensors of their own ({names}): centring one would change the other.")
    headless = not copies and would_tie_a_head(twin.model, twin.config, hits)
    if headless:
        notes.append(
            "tie_word_embeddings becomes false: there is no head here, and one that a class with a head would tie to "
            "the centred table gives other logits; now such a class says that its head is missing."
        )
    undetermined = tuple(sorted({key for name in set(gauge.undetermined) - reached for key in keys.of(name)}))
    if undetermined:
        notes.append(
            f"No output depended on {len(undetermined)} tensors, {undetermined[0]} for one: they are copied, as they "
            "do not write to the stream."
        )
    plan = CentringPlan(
        centre=tuple(centred),
        scale=tuple(s for weight, axis, by in folds for s in keys.scale(weight, axis, by)),
        copy=copies,
        norms=tuple(records),
        config=_config(twin, hits, norms, bad, untied=bool(copies) or headless),
        undetermined=undetermined,
        margins=gauge.margins,
        notes=tuple(notes),
    )
    stored = stored_names(twin.folder) if twin.folder else ()
    return named_as_stored(plan, stored, twin.model.base_model_prefix)


def _gauge_of_all(work, twin: Twin, norms) -> Gauge:
    """The gauge test, with more tokens while a parameter stays unreached whose like in another layer is a writer."""
    try:
        gauge = gauge_test(work, twin.inputs, norms)
    except (AssertionError, RuntimeError) as error:
        raise ConversionRefused(
            f"{twin.name}: its forward cannot be differentiated in eval mode, which finding what writes to the "
            f"residual stream needs ({one_line(error)})"
        ) from error
    for tokens in MORE_TOKENS if twin.made_inputs else ():
        if not _unreached(gauge):
            return gauge
        attended = any(name.startswith("encoder_") for name in twin.inputs)
        twin.inputs = default_inputs(twin.model, tokens=tokens)
        if attended:
            attend_to_encoder(twin)
        gauge = gauge_test(work, twin.inputs, norms)
    if left := _unreached(gauge):
        raise ConversionRefused(
            f"{twin.name}: no input reached {left[0]!r}"
            + (f" and {len(left) - 1} more" if len(left) > 1 else "")
            + ", though others of its kind write to the residual stream: pass inputs that reach every expert"
        )
    return gauge


def _confirmed(gauge: Gauge, twin: Twin, norms, folds) -> Gauge:
    """What holds with other weights too: an activation that is saturated everywhere passes for a linear function."""
    other = copy.deepcopy(twin.model)
    give_weights(other, seed=5, lean=0.0)
    fold_layer_scales(other, folds)
    second = gauge_test(other, twin.inputs, norms)
    known = {(hit.parameter, hit.axis, hit.block): hit.blocks for hit in second.hits}
    hits = []
    for hit in gauge.hits:
        blocks = hit.blocks
        if hit.parameter not in second.undetermined:
            also = known.get((hit.parameter, hit.axis, hit.block), ())
            blocks = tuple(block for block in blocks if block in also)
        if blocks:
            hits.append(replace(hit, blocks=blocks))
    dropped = {hit.parameter for hit in gauge.hits} - {hit.parameter for hit in hits}
    margins = {
        "gauge_max": max(gauge.margins["gauge_max"], second.margins["gauge_max"]),
        "nongauge_min": min(gauge.margins["nongauge_min"], second.margins["nongauge_min"]),
    }
    return replace(gauge, hits=hits, bound=gauge.bound | dropped, margins=margins)


def _unreached(gauge: Gauge) -> list[str]:
    writers = {_NUMBER.sub("*", hit.parameter) for hit in gauge.hits}
    return [name for name in gauge.undetermined if _NUMBER.sub("*", name) in writers]


@dataclass(frozen=True)
class Cause:
    """Why the input of a norm keeps a mean.

    Args:
        source: path of the first module whose output has just that mean; "" if there is none.
        norm: whether that module is a LayerNorm.
        reason: for people.
    """

    source: str
    norm: bool
    reason: str


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
        if torch.is_tensor(first) and first.is_floating_point() and first.ndim and first.shape[-1] in widths:
            outputs.append((path, first.mean(-1)))

    with hooked(work, [path for path in modules if path], note):
        run(work, twin.inputs)
    return causes


@torch.no_grad()
def _returns_stream(work, twin: Twin, norms: dict[str, TwinNorm]) -> bool:
    """Whether an output as wide as the rows of a norm is the output of none."""
    normed: list[torch.Tensor] = []
    with hooked(work, norms, lambda path, args, output: normed.append(output)):
        outputs = run(work, twin.inputs)
    wide = [o for o in outputs if o.ndim > 2 and o.shape[-1] in {y.shape[-1] for y in normed}]
    return not all(any(o.shape == y.shape and torch.equal(o, y) for y in normed) for o in wide)


def _same_mean(mean: torch.Tensor, x: torch.Tensor) -> bool:
    wanted, size = x.mean(-1), x.square().mean(-1).sqrt().max()
    if mean.ndim > wanted.ndim or any(
        a not in (1, b) for a, b in zip(mean.shape[::-1], wanted.shape[::-1], strict=False)
    ):
        return False
    return bool(((mean - wanted).abs() <= ZERO_MEAN * size).all())


def _explain(source: str, module, norms, gauge: Gauge, unsaved: set[str]) -> Cause:
    if not source:
        return Cause("", False, "its input has a mean that is the work of several modules or of an activation")
    what = f"{source} ({type(module).__name__})"
    if source in norms:
        return Cause(
            source, True, f"its input carries the output of the LayerNorm {what}, whose mean no weight removes"
        )
    own = {f"{source}.{name}" for name, _ in module.named_parameters()}
    if own & unsaved:
        return Cause(source, False, f"its input has the mean of {what}, whose table is not in the checkpoint")
    if own and own <= set(gauge.undetermined):
        return Cause(source, False, f"{what} feeds it, and no output follows smoothly from that: it is undetermined")
    if own & gauge.bound:
        return Cause(source, False, f"its input has the mean of {what}, and the model's outputs depend on that mean")
    if not own:
        return Cause(source, False, f"its input has the mean of {what}, which is computed and no weight's")
    return Cause(source, False, f"its input has the mean of {what}, which no weight alone sets")


def _refuse_if_hopeless(twin: Twin, norms, bad: list[str], causes: dict[str, Cause]) -> None:
    if 2 * len(bad) <= len(norms) and len(bad) < len(norms):
        return
    sources = {causes[path].source for path in bad if causes[path].norm}
    by_norm = sum(causes[path].norm for path in bad)
    if len(sources) > 1 and 2 * by_norm > len(bad):
        raise ConversionRefused(
            f"{twin.name} is a post-norm model: {by_norm} of its {len(norms)} LayerNorms read a sum with the output of "
            "another LayerNorm, whose mean no weight removes; --post-norm exact (equal outputs, FFN norms only, two "
            "neurons more) and --post-norm fit (all norms, approximate) are the two levels for such models"
        )
    reason, _ = Counter(causes[path].reason for path in bad).most_common(1)[0]
    raise ConversionRefused(
        f"{twin.name}: {len(bad)} of {len(norms)} LayerNorms would stay, {bad[0]} and others because {reason}"
    )


def _widths(twin: Twin, hits: list[Hit]) -> dict[int, int]:
    """Length of a block here -> in the checkpoint."""
    widths: dict[int, int] = {}
    for hit in hits:
        here = twin.model.get_parameter(hit.parameter).shape[hit.axis]
        there = twin.shapes[hit.parameter][hit.axis] * hit.block
        if there % here or widths.setdefault(hit.block, there // here) != there // here:
            raise ConversionRefused(
                f"{twin.name}: rows of {hit.parameter!r} are of another length than others of the checkpoint that the "
                "narrow model made equal"
            )
    if len(set(widths.values())) != len(widths):
        raise ConversionRefused(
            f"{twin.name}: rows of different lengths in the narrow model are equal in the checkpoint"
        )
    return widths


def _untie(twin: Twin, keys: KeyMap, hits: list[Hit]) -> tuple[Copy, ...]:
    """The copies that let every writer be centred by itself; none where no writer is tied."""
    tied = new_model(type(twin.model), twin.config)
    parameters = {name: id(p) for name, p in tied.named_parameters(remove_duplicate=False)}
    names = Counter(parameters.values())
    if not any(names[parameters.get(hit.parameter)] > 1 for hit in hits):
        return ()
    return keys.untie(KeyMap(tied))


def would_tie_a_head(model, config, hits: list[Hit]) -> bool:
    """Whether a class with a head would tie it to the table of tokens, which is centred, and this one has none."""
    try:
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # there are no tokens
        return False
    centred = any(model.get_parameter(hit.parameter) is table for hit in hits)
    return centred and head is None and bool(getattr(config, "tie_word_embeddings", False))


def _record(twin: Twin, path: str, norm: TwinNorm, cause: Cause | None) -> NormRecord:
    size = twin.widths.get(norm.hidden_size, norm.hidden_size * twin.factor)
    return NormRecord(path, size, norm.spec.eps, cause is None, "" if cause is None else cause.reason)


def _config(twin: Twin, hits: list[Hit], norms, bad, *, untied: bool) -> dict:
    writers: dict[str, dict] = {}
    for hit in hits:
        block = twin.widths[hit.block]
        whole = len(hit.blocks) * hit.block == twin.model.get_parameter(hit.parameter).shape[hit.axis]
        writers[hit.parameter] = {"axis": hit.axis, "block": block, "blocks": None if whole else list(hit.blocks)}
    rms = {
        path: {"eps": norm.spec.eps, "hidden_size": _record(twin, path, norm, None).hidden_size}
        for path, norm in norms.items()
        if path not in bad
    }
    record = make_record(writers, rms, twin.shapes, norms)
    config: dict = {RECORD_KEY: {"converted_by": f"hf-rmsnorm {__version__}", **record}}
    if untied:
        config["tie_word_embeddings"] = False
    return config
