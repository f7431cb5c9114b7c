"""Post-norm models (BERT, BART, OPT-350m): what of them converts exactly, and the rest by least squares.

A norm after the sum reads ``FFN(x) + x``, and the x there is another norm's output, whose mean no weight takes away.
But ``act(z) - act(-z) = z`` for GELU, ReLU and SiLU: two neurons more, that read the mean of x as z and as -z and write
it with opposite signs to every feature, cancel it exactly. So FFN norms and embedding norms become RMSNorms with equal
outputs. For attention norms no such form is known; `fit_post_norm` subtracts what is linear in the attention output.
"""

import inspect
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import PreTrainedModel

from .... import __version__
from ....record import RECORD_KEY, make_record
from ....verification.context import default_inputs, max_positions
from ...checkpoint.expressions import Expression, Stored
from ...checkpoint.layout import split
from ...checkpoint.shard import changed
from ...checkpoint.values import Values, open_values
from ...checkpoint.write import changed_config
from ...judge.folder import NOT_RUN, Verification, add_to_card, provenance
from ...judge.pair import side_by_side, tokenizer_of
from ...plan import ConversionRefused, NormRecord, rms_norms
from ...twin.gauge import ZERO_MEAN, input_means
from ...twin.keys import Hit, saved_tensors
from ...twin.layer_norms import Norms, find_layer_norms
from ...twin.prove import BOUND, difference, run_as_rms
from ...twin.run import loaded, run, weight_axis
from ...twin.twin import config_and_class
from ..centred import PlannedConversion
from .build import NEURONS, Structure, Sum, as_double, converted, hits_of, look, put_neurons, tie_changes

REMAINS = 'post_norm="fit" remains'
ANOTHERS = "another norm's output, whose mean no weight removes"
OTHER = "its input is the work of several modules or of an activation"
HELD_OUT = 5  # every fifth batch is measured, not fitted
RIDGE = 1e-6  # of the mean diagonal of the normal equations
SENTENCES = 256
TOKENS = 64
CARD_HEADING = "## Post-norm model with RMSNorms"
CARD_TEXTS = {
    "exact": """Two more neurons in every FFN take the mean off its skip: the FFN norms and the embedding norm may run
as RMSNorm with the original's outputs, the others stay LayerNorm.""",
    "fit": """**Approximate.** What is linear in the input of each norm's writer was taken off by least squares on
text, without training. With its LayerNorms the result gives the original's outputs; as RMSNorm it is near them, as
measured below.""",
}


@dataclass(frozen=True)
class PostNormReport:
    """What a post-norm conversion did, and how far the result is from the original.

    Args:
        measured: for ``fit``: over held-out batches, the loss of the result (``fit``), of swapping every norm of the
            model as it is (``naive``), and of the choice that was not taken (``other``, where there was one).
    """

    level: str  # ``exact`` or ``fit``
    model_class: str
    norms: tuple[NormRecord, ...]
    neurons: int  # FFNs that got two
    stock: float  # max |difference| of the outputs with the model's own LayerNorms, over the largest; float64
    rms: float  # the same with RMSNorms; for ``fit`` on the first batch that was held out
    rounded: float  # `rms`, once the tensors are rounded to the checkpoint's dtype
    measured: dict

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        swapped = sum(n.becomes_rms for n in self.norms)
        head = f"{self.model_class}, {self.level}: {swapped} of {len(self.norms)} norms become RMSNorm"
        head += f", {self.neurons} FFNs get {NEURONS} neurons more" if self.neurons else ", same shapes"
        equal = f"float64 outputs as LayerNorm differ by {self.stock:.1e} of their scale, RMSNorm {self.rms:.1e}"
        losses = [
            f"{name}: cosine {loss['cosine_mean']:.6f} mean, {loss['cosine_min']:.6f} worst, relative RMS error "
            f"{loss['relative_rms']:.1e} on {loss['rows']:,} held-out rows"
            for name, loss in self.measured.items()
        ]
        stays = [f"{n.path} stays: {n.reason}" for n in self.norms if not n.becomes_rms]
        return "\n  ".join([head, equal, *losses, *stays])


@dataclass(frozen=True)
class PostNormConversion:
    """A converted post-norm model, as a checkpoint: all its tensors in the model's dtypes, and config keys to set."""

    tensors: dict[str, torch.Tensor] = field(repr=False)
    config: dict
    report: PostNormReport


def exact_post_norm(model: PreTrainedModel, inputs: dict | None = None) -> PostNormConversion:
    """Two neurons for every FFN: embedding and FFN norms become RMSNorms with equal outputs, attention norms stay.

    A plain Transformers loads the result, with an FFN width grown by 2, to the original's outputs.

    Args:
        model: a loaded model of any dtype, on the CPU; it is not changed.
        inputs: keyword arguments of its forward for the proof; random ones without it.
    """
    found = look(model)
    if not found.ffns:
        why = found.unfit[0] if found.unfit else "no linear, activation, linear is added to its own input before a norm"
        raise ConversionRefused(f"{found.twin.name} has no FFN that two neurons serve: {why}; {REMAINS}")
    if found.grown is None:
        what = f"no config key widens {found.ffns[0].first} by {NEURONS} and leaves all else its shape"
        raise ConversionRefused(f"{found.twin.name}: {what}; {REMAINS}")
    chosen = found.zero | {f.norm for f in found.ffns}
    hits = hits_of(found.twin, {path: found.norms[path] for path in chosen})[0]
    inputs = inputs or default_inputs(model)
    work = converted(model, found, hits, found.grown)
    norms, _ = find_layer_norms(work, inputs)
    means = input_means(work, inputs, norms)
    if missed := sorted(path for path in chosen if means.get(path, math.inf) > ZERO_MEAN):
        raise ConversionRefused(f"{found.twin.name}: the input of {missed[0]} still has a mean with the two neurons")
    return _finish(model, found, work, hits, chosen, norms, inputs, found.grown)


def fit_post_norm(model: PreTrainedModel, batches: Sequence[dict]) -> PostNormConversion:
    """All norms become RMSNorms, approximately: what is linear in each writer's input is taken off by least squares.

    Nothing is trained. With its LayerNorms the result still has the original's outputs, since only what those remove
    has changed; with RMSNorms it is near them, and how near is measured. The two neurons of `exact_post_norm` are added
    where that measures better.

    Args:
        model: a loaded model of any dtype, on the CPU; it is not changed.
        batches: keyword arguments of its forward, of text like that it will see; every fifth is measured, not fitted.
    """
    if not (held_out := batches[HELD_OUT - 1 :: HELD_OUT]):
        raise ValueError(f"fit_post_norm needs {HELD_OUT} batches or more")
    found = look(model)
    if not (rest := [s for s in found.sums if s.norm not in found.zero]):
        raise ConversionRefused(f"{found.twin.name}: no norm reads a sum with another norm's output: nothing to fit")
    plain_work = converted(model, found, found.hits, {})
    norms, _ = find_layer_norms(plain_work, held_out[0])
    fits = fit_means(plain_work, [b for i, b in enumerate(batches) if i % HELD_OUT != HELD_OUT - 1], rest, norms)
    original = as_double(model)
    expected = [[o.detach() for o in run(original, b)] for b in held_out]
    naive = measure(original, held_out, expected, find_layer_norms(original, held_out[0])[0])
    tried = []
    for with_neurons in (False, True) if found.grown else (False,):
        work = converted(model, found, found.hits, found.grown) if with_neurons else plain_work
        exact = {f.norm for f in found.ffns} if with_neurons else set()
        subtract(work, {s: fits[s.norm] for s in rest if s.norm not in exact})
        chosen = found.zero | exact | fits.keys()
        norms, _ = find_layer_norms(work, held_out[0])
        loss = measure(work, held_out, expected, {path: norms[path] for path in chosen})
        tried.append((work, chosen, norms, loss, found.grown if with_neurons else {}))
    (work, chosen, norms, loss, grown), *others = sorted(tried, key=lambda each: each[3]["relative_rms"])
    measured = {"fit": loss, "naive": naive} | ({"other": others[0][3]} if others else {})
    return _finish(model, found, work, found.hits, chosen, norms, held_out[0], grown, measured)


@torch.no_grad()
def _finish(
    model, found: Structure, work, hits: list[Hit], chosen, norms, inputs: dict, grown: dict, measured=None
) -> PostNormConversion:
    """Prove `work` in float64, round it, and write down what it is; `measured` is None where it is exact."""
    expected = run(as_double(model), inputs)
    stock = difference(expected, run(work, inputs))
    rms = difference(expected, run_as_rms(work, inputs, norms, chosen))
    if stock > BOUND or (measured is None and rms > BOUND):
        off = f"in float64 its outputs differ by {max(stock, rms):.1e} of their scale, which is more than {BOUND:g}"
        raise ConversionRefused(f"{type(model).__name__} converted is not equal: {off}")
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    dtypes = {name: t.dtype for name, t in itertools.chain(*named)}
    for name, t in itertools.chain(work.named_parameters(), work.named_buffers()):
        t.data = t.data.to(dtypes[name])
    put = put_neurons(work, found.ffns) if grown else {}
    tensors = saved_tensors(work)
    work.double()
    norms = find_layer_norms(work, inputs)[0]
    rounded = difference(expected, run_as_rms(work, inputs, norms, norms.keys() & chosen))
    reasons = {s.norm: f"it reads {s.writer} plus {ANOTHERS}" for s in found.sums} | dict.fromkeys(chosen, "")
    reason = {path: reasons.get(path, OTHER) for path in norms}
    records = [NormRecord(p, n.hidden_size, n.spec.eps, p in chosen, reason[p]) for p, n in norms.items()]
    records += [NormRecord(path, 0, 0.0, False, "no input reached it: nothing is known of it") for path in found.silent]
    # What was fitted is not centred, and is not checked.
    level, writers = ("exact", found.twin.writers(hits)) if measured is None else ("fit", {})
    for name, how in writers.items():
        if put.get(name, how)["axis"] != how["axis"]:
            how["but"] = {key: put[name][key] for key in ("axis", "first")}
    parameters = [name for name, _ in work.named_parameters(remove_duplicate=False)]
    paths = [path for path, _ in work.named_modules()]
    record = make_record(writers, rms_norms(records), parameters, paths, put if measured is None else None)
    if measured is not None:
        record |= {"computes": "rms_norm", "approximate": True, "measured": measured}
    record = {"converted_by": f"hf-rmsnorm {__version__}", "post_norm": level, **record}
    config = {**grown, **tie_changes(model, hits, found.undetermined), RECORD_KEY: record}
    neurons, name = len(found.ffns) if grown else 0, type(model).__name__
    report = PostNormReport(level, name, tuple(records), neurons, stock, rms, rounded, measured or {})
    return PostNormConversion(tensors, config, report)


def _masked(x: torch.Tensor, inputs: dict) -> torch.Tensor:
    """The rows of x, without those that an attention mask among the inputs marks as padding."""
    rows = x.flatten(0, -2)
    masks = [v for k, v in inputs.items() if k.endswith("attention_mask") and torch.is_tensor(v) and v.ndim == 2]
    masks = [m for m in masks if m.numel() == len(rows) and (x.ndim == 2 or m.shape == x.shape[:-1])]
    if x.ndim == 3 and inputs.get("decoder_input_ids") is not None and len(masks) != 1:
        return rows  # which of the two stacks it belongs to is not known
    return rows[masks[0].flatten().bool()] if masks else rows


@torch.no_grad()
def fit_means(model, batches: Iterable[dict], sums: list[Sum], norms) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Norm -> (w, a) with mean(input of the norm) = w . (input of its writer) + a, as near as may be.

    Rows count by the inverse of their variance: that is how the norm scales what is left of the mean; those that an
    attention mask excludes do not count. The model is in float64, its writers centred.
    """
    by_path = {s.norm: s for s in sums}
    last: dict[str, torch.Tensor] = {}
    grams: dict[str, torch.Tensor] = {}
    inputs: dict = {}

    def note(path, args, output):
        if path not in by_path:
            last[path] = args[0]
            return
        x = args[0]
        h = last[by_path[path].writer].reshape(*x.shape[:-1], -1)
        rows = torch.cat([h, torch.ones_like(x[..., :1]), x.mean(-1, keepdim=True)], -1)
        rows = _masked(rows * (x.var(-1, unbiased=False, keepdim=True) + norms[path].spec.eps).rsqrt(), inputs)
        grams[path] = grams.get(path, 0.0) + rows.T @ rows

    for inputs in batches:
        run(model, inputs, [*by_path, *{s.writer for s in sums}], note)
    found = {}
    for path, gram in grams.items():
        a, b = gram[:-1, :-1], gram[:-1, -1]
        damping = torch.diag(a).mean() * RIDGE * torch.eye(len(a), dtype=a.dtype)
        damping[-1, -1] = 0.0  # the average is taken off whole
        w = torch.linalg.solve(a + damping, b)
        found[path] = w[:-1], w[-1]
    return found


@torch.no_grad()
def subtract(model: torch.nn.Module, fits: dict[Sum, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Take ``w . h + a`` off every feature that a writer gives, in place."""
    for s, (w, a) in fits.items():
        writer = model.get_submodule(s.writer)
        reads = 1 - weight_axis(writer)
        writer.weight -= w if reads else w[:, None]
        if writer.bias is not None:
            writer.bias -= a


def measure(model, batches, expected, norms: Norms) -> dict:
    """How far a model with these norms as RMSNorms is from what was expected, in rows that no attention mask excludes:
    how many ``rows``, ``cosine_mean`` and ``cosine_min`` of them, and ``relative_rms``, the error over the original."""
    cosines, error, size = [], 0.0, 0.0
    for inputs, outputs in zip(batches, expected, strict=True):
        for e, o in zip(outputs, run_as_rms(model, inputs, norms, norms), strict=True):
            if e.ndim < 2 or not e.numel():
                continue
            e, o = _masked(e, inputs), _masked(o, inputs)
            cosines.append(torch.cosine_similarity(e, o, dim=-1))
            error += float((e - o).square().sum())
            size += float(e.square().sum())
    rows = torch.cat(cosines)
    return {
        "rows": rows.numel(),
        "cosine_mean": float(rows.mean()),
        "cosine_min": float(rows.min()),
        "relative_rms": (error / max(size, 1e-300)) ** 0.5,
    }


@dataclass(frozen=True)
class PlannedPostNorm(PlannedConversion):
    """A converted model in memory, and the fingerprints of the files that it was made of."""

    conversion: PostNormConversion
    fingerprints: dict
    report = property(lambda self: self.conversion.report)

    def to_dict(self) -> dict:
        return {"report": self.report.to_dict()}

    def __str__(self) -> str:
        return str(self.report)

    def result(self, values: Values, max_shard_size):
        source, done = values.checkpoint, self.conversion
        if source.fingerprints != self.fingerprints:
            raise changed(source.folder)
        values.given.update(done.tensors)
        sizes = [sum(tensor.nbytes for tensor in shard.tensors.values()) for shard in source.shards]
        grown = max(sum(tensor.nbytes for tensor in done.tensors.values()) - sum(sizes), 0)
        metadata = {"format": "pt", RECORD_KEY: json.dumps(self.made, sort_keys=True)}
        record = {**done.config[RECORD_KEY], **self.made}
        config = {**done.config, "architectures": [self.report.model_class], RECORD_KEY: record}
        tensors: dict[str, Expression] = {name: Stored(name) for name in sorted(done.tensors)}
        layout = split(tensors, values, metadata, max_shard_size or max(sizes) + grown)
        return layout, changed_config(source.config, config)

    def judge(self, src, folder, how):
        if not how.verify:
            return Verification(True, NOT_RUN), self
        with side_by_side(src, folder, how) as pair:
            runs = pair.judge_both()
        if self.report.level == "fit":
            runs["as RMSNorm"]["verdict"] = "approximate, as measured"
        return Verification.of(runs, "source and result run side by side"), self

    def describe(self, folder: Path, verdict: Verification) -> None:
        described = {**self.made, **self.to_dict(), "verification": verdict.to_dict()}
        (folder / "conversion_report.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
        text = f"""{CARD_TEXTS[self.report.level]} It loads like any checkpoint of its architecture, and
`hf_rmsnorm.patch_model` runs it as RMSNorm. What was done is in `conversion_report.json`."""
        add_to_card(folder, CARD_HEADING, text, self.made, self.report, verdict)


def plan_post_norm(
    src, level: str, *, trust_remote_code: bool, model_class, texts: list[str] | None, allow_pickle: bool
) -> PlannedPostNorm:
    """Convert a post-norm model in memory; `level` is the `post_norm` of `convert_checkpoint`, as are the rest."""
    with open_values(src, allow_pickle=allow_pickle) as values:
        fingerprints = values.checkpoint.fingerprints
    config, cls = config_and_class(src, trust_remote_code, model_class)
    if getattr(config, RECORD_KEY, None) is not None:
        raise ConversionRefused(f"{src}: was converted before, as its config.json says: patch_model runs it as it is")
    model, made_up = loaded(cls, src, dtype="auto", trust_remote_code=bool(trust_remote_code))
    if made_up:
        what = f"{cls.__name__} has {made_up[0]} and the checkpoint has not"
        raise ConversionRefused(f"{src}: {what}: download it whole, or pass the model_class it was saved from")
    if level == "exact":
        return PlannedPostNorm(provenance(src), exact_post_norm(model), fingerprints)
    if not texts:
        words = " ".join(" ".join(topics[name] for name in sorted(topics)).split())
        texts = [sentence.strip() for sentence in words.split(". ") if 20 < len(sentence) < 300][:SENTENCES]
    if not (batches := _batches(src, config, cls, texts, trust_remote_code)):
        raise ConversionRefused(f"{src}: fit needs text, and there is no tokenizer: add one, or choose exact")
    if len(batches) < HELD_OUT:
        raise ConversionRefused(f"{src}: fit needs {HELD_OUT} texts or more, and {len(batches)} are here: add some")
    return PlannedPostNorm(provenance(src), fit_post_norm(model, batches), fingerprints)


def _batches(src, config, cls, texts: list[str], trust_remote_code: bool) -> list[dict]:
    """Keyword arguments of the forward, a batch for each text; none where there is no tokenizer."""
    if (tokenizer := tokenizer_of(src, cls, trust_remote_code)) is None:
        return []
    how = {"return_tensors": "pt", "truncation": True, "max_length": min(TOKENS, max_positions(config))}
    accepted = inspect.signature(cls.forward).parameters
    inputs = [{k: v for k, v in tokenizer(text, **how).items() if k in accepted} for text in texts]
    if config.is_encoder_decoder:
        inputs = [{**each, "decoder_input_ids": each["input_ids"]} for each in inputs]
    return [each for each in inputs if isinstance(each["input_ids"], torch.Tensor) and each["input_ids"].numel()]
