"""From a config to a conversion plan: which tensors to centre, which norms become
RMSNorms, which stay and why.
"""

import copy
from collections import Counter
from dataclasses import dataclass, replace

import torch

from ... import __version__
from ...patching.formula.recognise import recognise
from ...record import RECORD_KEY, make_record
from ...verification.context import is_float, one_line
from ..checkpoint.source import open_checkpoint
from ..plan import CentringPlan, ConversionRefused, Copy, NormRecord, rms_norms
from .inputs import made_inputs
from .keys import KeyMap, ResidualWeight, named_as_stored
from .layer_norms import Norms, find_layer_norms
from .model import ProxyModel, make_proxy, new_model
from .run import alike, and_more, run
from .shift_invariance import (
    ZERO_MEAN,
    ShiftTest,
    centre,
    shift_invariance_test,
    with_mean,
)
from .unreached import refuse_if_unreached

MANY_TOKENS = (32, 96)  # tried where the usual ones leave experts unreached
NOTES = (
    "output_hidden_states differs: its mean is removed. So do features of a vision or audio encoder.",
    "Fine-tuning can move the weights off zero mean. patch_model checks that by the record in config.json.",
)


@dataclass
class Discovery:
    """The result of the tests on a proxy model.

    Args:
        residual_weights: those that can be centred, and are in the checkpoint.
        reasons: path of a norm -> why it stays a LayerNorm.
        masks: parameters that take the place of masked patches or frames.
    """

    proxy: ProxyModel
    norms: Norms
    keys: KeyMap
    undetermined: list[str]
    residual_weights: list[ResidualWeight]
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
    test = _test_all(proxy, norms)
    unsaved = keys.unsaved()
    weights = []
    for weight in test.residual_weights:
        if weight.parameter not in unsaved:
            weights.append(weight)
    work = copy.deepcopy(proxy.model)
    centre(work, weights)
    reasons = _why_norms_stay(work, proxy, norms)
    proxy.widths = _widths(proxy, weights)
    lengths = set()
    for path in norms.keys() - reasons.keys():
        lengths.add(norms[path].hidden_size)
    masks = refuse_if_unreached(proxy, lengths, test)
    return _plan(
        Discovery(proxy, norms, keys, test.undetermined, weights, reasons, masks)
    )


def _reached_norms(proxy: ProxyModel) -> Norms:
    """The LayerNorms of the proxy model; refused if the inputs do not reach all, or
    there is none.
    """
    norms, silent = find_layer_norms(proxy.model, proxy.inputs)
    if silent:
        count = f"{len(norms)} of {len(norms) + len(silent)} LayerNorms"
        what = f"the inputs reached {count} and not {silent[0]}"
        raise ConversionRefused(f"{proxy.name}: {what}: pass inputs=... that reach all")
    if not norms:
        why = "it has no LayerNorm: nothing to convert"
        for module in proxy.model.modules():
            recipe, reason, _ = recognise(module)
            if recipe is not None and not recipe.spec.centered:
                why = "it uses RMSNorm already: nothing to convert; to fuse its norms, use patch_model"
            elif reason is not None:
                name = type(module).__name__
                why = f"patch_model would not run {name} as RMSNorm: {reason}"
        raise ConversionRefused(f"{proxy.name}: {why}")
    return norms


def _test_all(proxy: ProxyModel, norms: Norms) -> ShiftTest:
    """The shift-invariance test, with more tokens if some experts are unreached and
    others are centred.
    """
    try:
        test = shift_invariance_test(proxy.model, proxy.inputs, norms)
    except (AssertionError, RuntimeError) as error:
        what = "its forward cannot be differentiated in eval mode, which finding residual weights needs"
        raise ConversionRefused(f"{proxy.name}: {what} ({one_line(error)})") from error
    if proxy.made_inputs and _unreached_experts(test):
        proxy.inputs = made_inputs(proxy.model, MANY_TOKENS)
        test = shift_invariance_test(proxy.model, proxy.inputs, norms)
    if left := _unreached_experts(test):
        what = f"no input reached {and_more(left)}, though the same weights of other experts write to the stream"
        cure = "pass inputs=... that reach every expert"
        raise ConversionRefused(f"{proxy.name}: {what}: {cure}")
    return test


def _unreached_experts(test: ShiftTest) -> list[str]:
    places = {alike(weight.parameter) for weight in test.residual_weights}
    return [name for name in test.undetermined if alike(name) in places]


def _why_norms_stay(work, proxy: ProxyModel, norms: Norms) -> dict[str, str]:
    """Path -> reason of each norm whose input keeps a mean; refused if that is all, or most in a post-norm model."""
    bad = with_mean(work, proxy.inputs, norms)
    if not bad:
        return {}
    causes = _causes(work, proxy, norms, bad)
    # In a post-norm model nearly each norm reads the output of another one, and in
    # others many that of one.
    by_norm = [source for source in causes.values() if source in norms]
    is_most = 2 * len(bad) > len(norms) > 1
    if is_most and 3 * len(set(by_norm)) > 2 * len(bad):
        which = f"{len(by_norm)} of its {len(norms)} LayerNorms read a sum with another's output"
        cure = "examples/postnorm converts such models in memory"
        what = f"is a post-norm model: {which}, whose mean no weight removes"
        raise ConversionRefused(f"{proxy.name} {what}: {cure}")
    reasons = {}
    for path, source in causes.items():
        kind = type(work.get_submodule(source)).__name__
        if source in norms:
            why = f"carries the output of the LayerNorm {source} ({kind}), whose mean no weight removes"
        elif source:
            why = f"has the mean of {source} ({kind}), which no weight sets alone, or the model's outputs depend on it"
        else:
            why = "has a mean that no weight sets alone, or that the model's outputs depend on"
        reasons[path] = f"its input {why}"
    if len(bad) == len(norms):
        reason, _ = Counter(reasons.values()).most_common(1)[0]
        what = f"all {len(norms)} LayerNorms would stay, {bad[0]} for one"
        raise ConversionRefused(f"{proxy.name}: {what}: {reason}")
    return reasons


@torch.no_grad()
def _causes(work, proxy: ProxyModel, norms: Norms, bad: list[str]) -> dict[str, str]:
    """For each norm whose input keeps a mean: path of the first module whose output has
    exactly that mean; "" if there is none.
    """
    means: list[tuple[str, torch.Tensor]] = []
    causes: dict[str, str] = {}
    widths = {norm.hidden_size for norm in norms.values()}

    def note(path, args, output):
        if path in bad and path not in causes:
            causes[path] = ""
            for source, mean in means:
                if not causes[path] and _same_mean(mean, args[0]):
                    causes[path] = source
        first = output[0] if isinstance(output, tuple) and output else output
        if is_float(first) and first.ndim and first.shape[-1] in widths:
            means.append((path, first.mean(-1)))

    paths = [path for path, _ in work.named_modules()]
    run(work, proxy.inputs, paths[1:], note)
    return causes


def _same_mean(mean: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether these are the means of the rows of x."""
    wanted = x.mean(-1)
    size = x.square().mean(-1).sqrt().max()
    try:
        mean = mean.expand_as(wanted)
    except RuntimeError:  # rows of another tensor
        return False
    return bool(((mean - wanted).abs() <= ZERO_MEAN * size).all())


def _widths(
    proxy: ProxyModel, residual_weights: list[ResidualWeight]
) -> dict[int, int]:
    """Length of a block here -> in the checkpoint."""
    widths: dict[int, int] = {}
    for weight in residual_weights:
        here = proxy.model.get_parameter(weight.parameter).shape[weight.axis]
        there = proxy.shapes[weight.parameter][weight.axis] * weight.block
        wide = widths.setdefault(weight.block, there // here)
        if there % here or wide != there // here:
            what = f"rows of {weight.parameter!r} are narrowed in another way"
            raise ConversionRefused(f"{proxy.name}: {what} than others")
    if len(set(widths.values())) != len(widths):
        what = "rows of different lengths when narrowed are equal in the checkpoint"
        raise ConversionRefused(f"{proxy.name}: {what}")
    return widths


def _plan(result: Discovery) -> CentringPlan:
    """The plan, in keys of the checkpoint."""
    proxy, keys, weights = result.proxy, result.keys, result.residual_weights
    norms = _norm_records(result)
    copies = _untied(result)
    is_headless = not copies and would_tie_a_head(proxy.model, proxy.config, weights)
    undetermined = {key for name in result.undetermined for key in keys.of(name)}
    centre = []
    for step in keys.centre(weights):
        centre.append(replace(step, block=proxy.widths[step.block]))
    record = make_record(
        proxy.entries(weights), rms_norms(norms), proxy.shapes, result.norms
    )
    config: dict = {RECORD_KEY: {"converted_by": f"hf-rmsnorm {__version__}", **record}}
    if copies or is_headless:
        config["tie_word_embeddings"] = False
    plan = CentringPlan(
        centre=tuple(centre),
        copy=copies,
        norms=norms,
        config=config,
        undetermined=tuple(sorted(undetermined)),
        notes=(*NOTES, *_notes(copies, is_headless, result.masks)),
    )
    if proxy.folder is None:
        return plan
    stored = open_checkpoint(proxy.folder, allow_pickle=True, weights=False)
    return named_as_stored(plan, stored.tensors, proxy.model)


def _norm_records(result: Discovery) -> tuple[NormRecord, ...]:
    proxy = result.proxy
    records = []
    for path, norm in result.norms.items():
        size = norm.hidden_size
        width = proxy.widths.get(size, size * proxy.factor)
        reason = result.reasons.get(path, "")
        records.append(NormRecord(path, width, norm.spec.eps, not reason, reason))
    return tuple(records)


def _untied(result: Discovery) -> tuple[Copy, ...]:
    """Tensors that are stored twice in the result, as a residual weight is tied to
    another parameter.
    """
    tied = KeyMap(new_model(type(result.proxy.model), result.proxy.config))
    shared = Counter(tied.aliases.values())
    for weight in result.residual_weights:
        if shared[tied.aliases.get(weight.parameter)] > 1:
            return result.keys.untie(tied)
    return ()


def would_tie_a_head(model, config, residual_weights: list[ResidualWeight]) -> bool:
    """Whether a class with a head would tie it to the table of tokens, which is
    centred, and this one has none.
    """
    try:
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # there are no tokens
        return False
    is_tied = bool(getattr(config, "tie_word_embeddings", False))
    for weight in residual_weights:
        if model.get_parameter(weight.parameter) is table:
            return head is None and is_tied
    return False


def _notes(copies: tuple[Copy, ...], is_headless: bool, masks: list[str]) -> list[str]:
    notes = []
    if copies:
        names = ", ".join(copy.key for copy in copies)
        why = "centring one would change the other"
        notes.append(f"Tied tensors are stored twice ({names}): {why}.")
    if is_headless:
        why = "a head tied to the centred table would give other logits"
        now = "a class with a head now says that it is missing"
        notes.append(f"tie_word_embeddings becomes false: {why}; {now}.")
    if masks:
        why = "with masked patches or frames, run the result as LayerNorm: as RMSNorm it would differ"
        notes.append(f"{and_more(masks)} stays as it is: {why}.")
    return notes
