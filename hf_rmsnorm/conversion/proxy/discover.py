"""From a proxy model to a conversion plan: which tensors to centre, which norms become
RMSNorms, which stay and why. `plan_centring` asks, and then has the plan proven.

The order: the LayerNorms (`layer_norms.py`); the residual weights, by the test of
`shift_invariance.py`; a copy of the proxy with these centred, on which each norm's
input either has zero mean or stays; and the parts without inputs (`unreached.py`).
"""

import copy
from collections import Counter
from collections.abc import Iterable

import torch

from ...converted.record import RECORD_KEY, make_record
from ...paths import error_line
from ...verification.context import is_float
from ..errors import ConversionRefused
from ..plan import CentringPlan, Copy, NormRecord, rms_norms
from .keys import centred_blocks, keys_of, untied
from .layer_norms import NO_LAYER_NORM, Norms, find_layer_norms, why_no_layer_norm
from .model import ProxyModel, new_model, token_table
from .run import alike, and_more, run
from .shift_invariance import (
    ZERO_MEAN,
    Blocks,
    ShiftTest,
    centre,
    input_means,
    shift_invariance_test,
)
from .unreached import refuse_if_unreached

NOTES = (
    "output_hidden_states differs: its mean is removed. So do features of a vision or audio encoder.",
    "Fine-tuning can move the weights off zero mean. patch_model checks that by the record in config.json.",
)
MASKED = "with masked patches or frames, run the result as LayerNorm: as RMSNorm it would differ"


def discover(proxy: ProxyModel) -> CentringPlan:
    """The plan for a checkpoint, found on a small random model of the same classes; no
    weights are read. Its steps have the keys and blocks of the proxy's own checkpoint;
    `in_checkpoint` puts them into those of the other one, by `proxy.checkpoint_widths`.
    """
    norms = _reached_norms(proxy)
    test = _test_all(proxy, norms)
    keys = keys_of(proxy.model)
    weights = {n: how for n, how in test.residual_weights.items() if keys[n]}
    proxy.checkpoint_widths = _widths(proxy, weights)
    centred = copy.deepcopy(proxy.model)
    centre(centred, weights)
    reasons = _why_norms_stay(centred, proxy, norms)
    lengths = {norm.hidden_size for path, norm in norms.items() if path not in reasons}
    masks = refuse_if_unreached(proxy, lengths, test)
    norm_records = []
    for path, norm in norms.items():
        why = reasons.get(path, "")
        norm_records.append(NormRecord(path, norm.spec.eps, not why, why))
    entries = {
        name: proxy.checkpoint_blocks(name, how) for name, how in weights.items()
    }
    record = make_record(
        entries, rms_norms(norm_records), proxy.checkpoint_shapes, norms
    )
    config: dict = {RECORD_KEY: record}
    copies = _untied(proxy, weights)
    notes = [*NOTES]
    if tie := _note_on_ties(proxy, weights, copies):
        config["tie_word_embeddings"] = False
        notes.append(tie)
    if masks:
        notes.append(f"{and_more(masks)} stays as it is: {MASKED}.")
    undetermined = {key for name in test.undetermined for key in keys[name]}
    return CentringPlan(
        centre=tuple(centred_blocks(centred, proxy.checkpoint_widths)),
        copy=tuple(copies),
        norms=tuple(norm_records),
        config=config,
        undetermined=tuple(sorted(undetermined)),
        notes=tuple(notes),
    )


def _reached_norms(proxy: ProxyModel) -> Norms:
    """The LayerNorms of the proxy model; refused if the inputs do not reach all, or
    there is none.
    """
    norms, silent = find_layer_norms(proxy.model, proxy.inputs)
    if silent:
        raise ConversionRefused(
            f"{proxy.name}: the inputs reached {len(norms)} of "
            f"{len(norms) + len(silent)} LayerNorms and not {silent[0]}: pass "
            "inputs=... that reach all"
        )
    if not norms:
        why = why_no_layer_norm(proxy.model) or NO_LAYER_NORM
        raise ConversionRefused(f"{proxy.name}: {why}")
    return norms


def _test_all(proxy: ProxyModel, norms: Norms) -> ShiftTest:
    """The shift-invariance test; refused if some weights that are like those which are
    centred are unreached.
    """
    try:
        test = shift_invariance_test(proxy.model, proxy.inputs, norms)
    except (AssertionError, RuntimeError) as error:
        raise ConversionRefused(
            f"{proxy.name}: its forward cannot be differentiated in eval mode, which "
            f"finding residual weights needs ({error_line(error)})"
        ) from error
    places = {alike(name) for name in test.residual_weights}
    left = [name for name in test.unreached if alike(name) in places]
    if left:
        raise ConversionRefused(
            f"{proxy.name}: no input reached {and_more(left)}, though the same weights "
            "of other layers or experts write to the stream: pass inputs=... that "
            "reach all of them"
        )
    return test


def _widths(proxy: ProxyModel, weights: Blocks) -> dict[int, int]:
    """Length of a block here -> in the checkpoint."""
    widths = {}
    for name, how in weights.items():
        wide = proxy.checkpoint_blocks(name, how)["block"]
        if widths.setdefault(how["block"], wide) != wide:
            raise ConversionRefused(
                f"{proxy.name}: rows of {name!r} are narrowed in another way than "
                "others"
            )
    return widths


def _why_norms_stay(work, proxy: ProxyModel, norms: Norms) -> dict[str, str]:
    """Path -> reason of each norm whose input keeps a mean; refused if that is all, or most in a post-norm model."""
    means = input_means(work, proxy.inputs, norms)
    bad = [path for path, mean in means.items() if mean > ZERO_MEAN]
    if not bad:
        return {}
    causes = _causes(work, proxy, bad)
    # In a post-norm model nearly each norm reads the output of another one, and in
    # others many that of one.
    by_norm = [source for source in causes.values() if source in norms]
    is_most = 2 * len(bad) > len(norms) > 1
    if is_most and 3 * len(set(by_norm)) > 2 * len(bad):
        raise ConversionRefused(
            f"{proxy.name} is a post-norm model: {len(by_norm)} of its {len(norms)} "
            "LayerNorms read a sum with another's output, whose mean no weight "
            "removes: examples/postnorm converts such models in memory"
        )
    reasons = {}
    for path, source in causes.items():
        kind = type(work.get_submodule(source)).__name__
        why = "has a mean that no weight sets alone, or that the model's outputs depend on"
        if source in norms:
            why = f"carries the output of the LayerNorm {source} ({kind}), whose mean no weight removes"
        elif source:
            why = f"has the mean of {source} ({kind}), which no weight sets alone, or the model's outputs depend on it"
        reasons[path] = f"its input {why}"
    if len(bad) == len(norms):
        reason, _ = Counter(reasons.values()).most_common(1)[0]
        raise ConversionRefused(
            f"{proxy.name}: all {len(norms)} LayerNorms would stay, {bad[0]} for one: "
            f"{reason}"
        )
    return reasons


@torch.no_grad()
def _causes(work, proxy: ProxyModel, bad: list[str]) -> dict[str, str]:
    """For each norm whose input keeps a mean: path of the first module whose output has
    exactly that mean; "" if there is none.
    """
    means = []  # (path of a module, means of the rows of its output), in order
    causes = {}

    def note(path, args, output):
        if path in bad and path not in causes:
            causes[path] = _first_with_mean(args[0], means)
        if isinstance(output, tuple) and output:
            output = output[0]
        if is_float(output):
            means.append((path, output.mean(-1)))

    _, *paths = [path for path, _ in work.named_modules()]
    run(work, proxy.inputs, paths, note)
    return causes


def _first_with_mean(x: torch.Tensor, means) -> str:
    """Path of the first module of `_causes` whose rows have the means of those of x."""
    wanted = x.mean(-1)
    error = ZERO_MEAN * x.square().mean(-1).sqrt().max()
    for path, mean in means:
        try:
            gaps = mean.expand_as(wanted) - wanted
        except RuntimeError:  # rows of another tensor
            continue
        if gaps.abs().max() <= error:
            return path
    return ""


def _untied(proxy: ProxyModel, weights: Blocks) -> list[Copy]:
    """Tensors that are stored twice in the result, as a residual weight is tied to
    another parameter.
    """
    tied = new_model(type(proxy.model), proxy.config)
    every = [id(p) for _, p in tied.named_parameters(remove_duplicate=False)]
    if any(every.count(id(tied.get_parameter(name))) > 1 for name in weights):
        return untied(tied, copy.deepcopy(proxy.model))
    return []


def _note_on_ties(proxy: ProxyModel, weights: Blocks, copies: list[Copy]) -> str:
    """A note for the plan, if a tied tensor is stored twice; else ""."""
    if copies:
        names = ", ".join(copy.key for copy in copies)
        why = "centring one would change the other"
        return f"Tied tensors are stored twice ({names}): {why}."
    if would_tie_a_head(proxy.model, proxy.config, weights):
        return (
            "tie_word_embeddings becomes false: a head tied to the centred table would "
            "give other logits; a class with a head now says that it is missing."
        )
    return ""


def would_tie_a_head(model, config, residual_weights: Iterable[str]) -> bool:
    """Whether a class with a head would tie it to the table of tokens, which is
    centred, and this one has none.
    """
    is_tied = getattr(config, "tie_word_embeddings", False)
    table = token_table(model)
    if not is_tied or table is None or model.get_output_embeddings() is not None:
        return False
    return any(model.get_parameter(name) is table.weight for name in residual_weights)
