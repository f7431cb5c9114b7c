"""Convert a post-norm model (BERT, BART, OPT-350m) in memory, exactly in part or
approximately in full.

    python examples/postnorm/convert.py ENCODER converted --text sentences.txt
    python examples/postnorm/convert.py ENCODER converted --level exact

A norm after the sum reads ``FFN(x) + x``, and the x there is another norm's output,
whose mean no weight removes. But ``act(z) - act(-z) = z`` for GELU, ReLU and SiLU: two
more neurons, which read the mean of x as z and as -z and write it with opposite signs
to every feature, cancel it exactly. So FFN norms and embedding norms become RMSNorms
with equal outputs (``exact``). For attention norms no such form is known; ``fit``
subtracts what is linear in the writer's input. `hf_rmsnorm.patch_model` runs the result
as RMSNorm; a plain load gives the original's outputs.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers
from structure import (
    NEURONS,
    Structure,
    Sum,
    as_double,
    converted,
    look,
    put_neurons,
    residual_weights_of,
    tie_changes,
    weight_axis,
)
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel

from hf_rmsnorm import __version__
from hf_rmsnorm.conversion.errors import ConversionRefused
from hf_rmsnorm.conversion.plan import NormRecord, rms_norms
from hf_rmsnorm.conversion.proxy.keys import saved_tensors
from hf_rmsnorm.conversion.proxy.layer_norms import Norms, find_layer_norms
from hf_rmsnorm.conversion.proxy.model import with_settings
from hf_rmsnorm.conversion.proxy.prove import BOUND, difference, run_as_rms
from hf_rmsnorm.conversion.proxy.run import run
from hf_rmsnorm.conversion.proxy.shift_invariance import ZERO_MEAN, input_means
from hf_rmsnorm.converted.record import RECORD_KEY, make_record
from hf_rmsnorm.verification.context import default_inputs, max_positions

REMAINS = "--level fit remains"
ANOTHERS = "another norm's output, whose mean no weight removes"
OTHER = "its input is the work of several modules or of an activation"
HELD_OUT = 5  # every fifth batch is measured, not fitted
RIDGE = 1e-6  # of the mean diagonal of the normal equations
TOKENS = 64


@dataclass(frozen=True)
class PostNormReport:
    """What a post-norm conversion did, and how far the result is from the original.

    Args:
        measured: for ``fit``: over held-out batches, the loss of the result (``fit``),
            of swapping every norm of the model as it is (``naive``), and of the choice
            that was not taken (``other``, where there was one).
    """

    level: str  # ``exact`` or ``fit``
    model_class: str
    norms: tuple[NormRecord, ...]
    neurons: int  # FFNs that got two
    # max |difference| of the outputs with the model's own LayerNorms, over the largest;
    # float64
    stock: float
    # the same with RMSNorms; for ``fit`` on the first batch that was held out
    rms: float
    rounded: float  # `rms`, once the tensors are rounded to the checkpoint's dtype
    measured: dict

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        swapped = sum(n.becomes_rms for n in self.norms)
        head = f"{self.model_class}, {self.level}: {swapped} of {len(self.norms)} norms become RMSNorm"
        head += (
            f", {self.neurons} FFNs get {NEURONS} neurons more"
            if self.neurons
            else ", same shapes"
        )
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
    """A converted post-norm model, as a checkpoint: all its tensors in the model's
    dtypes, and config keys to set.
    """

    tensors: dict[str, torch.Tensor] = field(repr=False)
    config: dict
    report: PostNormReport


def exact_post_norm(
    model: PreTrainedModel, inputs: dict | None = None
) -> PostNormConversion:
    """Two neurons for every FFN: embedding and FFN norms become RMSNorms with equal
    outputs, attention norms stay.

    A plain Transformers loads the result, with an FFN width grown by 2, to the
    original's outputs.

    Args:
        model: a loaded model of any dtype, on the CPU; it is not changed.
        inputs: keyword arguments of its forward for the proof; random ones without it.
    """
    found = look(model)
    if not found.ffns:
        why = (
            found.unfit[0]
            if found.unfit
            else "no linear, activation, linear is added to its own input before a norm"
        )
        raise ConversionRefused(
            f"{found.proxy.name} has no FFN that two neurons serve: {why}; {REMAINS}"
        )
    if found.grown is None:
        what = f"no config key widens {found.ffns[0].first} by {NEURONS} and leaves all else its shape"
        raise ConversionRefused(f"{found.proxy.name}: {what}; {REMAINS}")
    chosen = found.zero | {f.norm for f in found.ffns}
    residual_weights = residual_weights_of(
        found.proxy, {path: found.norms[path] for path in chosen}
    )[0]
    inputs = inputs or default_inputs(model)
    work = converted(model, found, residual_weights, found.grown)
    norms, _ = find_layer_norms(work, inputs)
    means = input_means(work, inputs, norms)
    if missed := sorted(
        path for path in chosen if means.get(path, math.inf) > ZERO_MEAN
    ):
        raise ConversionRefused(
            f"{found.proxy.name}: the input of {missed[0]} still has a mean with the two neurons"
        )
    return _finish(
        model, found, work, residual_weights, chosen, norms, inputs, found.grown
    )


def fit_post_norm(
    model: PreTrainedModel, batches: Sequence[dict]
) -> PostNormConversion:
    """All norms become RMSNorms, approximately: what is linear in each writer's input
    is taken off by least squares.

    Nothing is trained. With its LayerNorms the result still has the original's outputs,
    since only what those remove has changed; with RMSNorms it is near them, and how
    near is measured. The two neurons of `exact_post_norm` are added where that measures
    better.

    Args:
        model: a loaded model of any dtype, on the CPU; it is not changed.
        batches: keyword arguments of its forward, of text like that it will see; every
            fifth is measured, not fitted.
    """
    if not (held_out := batches[HELD_OUT - 1 :: HELD_OUT]):
        raise ValueError(f"fit_post_norm needs {HELD_OUT} batches or more")
    found = look(model)
    if not (rest := [s for s in found.sums if s.norm not in found.zero]):
        raise ConversionRefused(
            f"{found.proxy.name}: no norm reads a sum with another norm's output: nothing to fit"
        )
    plain_work = converted(model, found, found.residual_weights, {})
    norms, _ = find_layer_norms(plain_work, held_out[0])
    fits = fit_means(
        plain_work,
        [b for i, b in enumerate(batches) if i % HELD_OUT != HELD_OUT - 1],
        rest,
        norms,
    )
    original = as_double(model)
    expected = [[o.detach() for o in run(original, b)] for b in held_out]
    naive = measure(
        original, held_out, expected, find_layer_norms(original, held_out[0])[0]
    )
    tried = []
    for with_neurons in (False, True) if found.grown else (False,):
        work = (
            converted(model, found, found.residual_weights, found.grown)
            if with_neurons
            else plain_work
        )
        exact = {f.norm for f in found.ffns} if with_neurons else set()
        subtract(work, {s: fits[s.norm] for s in rest if s.norm not in exact})
        chosen = found.zero | exact | fits.keys()
        norms, _ = find_layer_norms(work, held_out[0])
        loss = measure(work, held_out, expected, {path: norms[path] for path in chosen})
        tried.append((work, chosen, norms, loss, found.grown if with_neurons else {}))
    (work, chosen, norms, loss, grown), *others = sorted(
        tried, key=lambda each: each[3]["relative_rms"]
    )
    measured = {"fit": loss, "naive": naive} | (
        {"other": others[0][3]} if others else {}
    )
    return _finish(
        model,
        found,
        work,
        found.residual_weights,
        chosen,
        norms,
        held_out[0],
        grown,
        measured,
    )


@torch.no_grad()
def _finish(
    model,
    found: Structure,
    work,
    residual_weights: dict[str, dict],
    chosen,
    norms,
    inputs: dict,
    grown: dict,
    measured=None,
) -> PostNormConversion:
    """Prove `work` in float64, round it, and write down what it is; `measured` is None
    where it is exact.
    """
    expected = run(as_double(model), inputs)
    stock = difference(expected, run(work, inputs))
    rms = difference(expected, run_as_rms(work, inputs, norms, chosen))
    if stock > BOUND or (measured is None and rms > BOUND):
        off = f"in float64 its outputs differ by {max(stock, rms):.1e} of their scale, which is more than {BOUND:g}"
        raise ConversionRefused(f"{type(model).__name__} converted is not equal: {off}")
    named = (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    )
    dtypes = {name: t.dtype for name, t in itertools.chain(*named)}
    for name, t in itertools.chain(work.named_parameters(), work.named_buffers()):
        t.data = t.data.to(dtypes[name])
    if grown:
        put_neurons(work, found.ffns)
    tensors = saved_tensors(work)
    work.double()
    norms = find_layer_norms(work, inputs)[0]
    rounded = difference(
        expected, run_as_rms(work, inputs, norms, norms.keys() & chosen)
    )
    reasons = {
        s.norm: f"it reads {s.writer} plus {ANOTHERS}" for s in found.sums
    } | dict.fromkeys(chosen, "")
    reason = {path: reasons.get(path, OTHER) for path in norms}
    records = [
        NormRecord(p, n.spec.eps, p in chosen, reason[p]) for p, n in norms.items()
    ]
    records += [
        NormRecord(path, 0, 0.0, False, "no input reached it: nothing is known of it")
        for path in found.silent
    ]
    level = "exact" if measured is None else "fit"
    paths = [path for path, _ in work.named_modules()]
    # Neither neurons nor fitted weights have zero mean, so that `patch_model` checks
    # none.
    record = make_record({}, rms_norms(records), (), paths)
    record |= {
        "converted_by": f"hf-rmsnorm {__version__}",
        "post_norm": level,
        "computes": "rms_norm",
    }
    if measured is not None:
        record |= {"approximate": True, "measured": measured}
    config = {
        **grown,
        **tie_changes(model, residual_weights, found.undetermined),
        RECORD_KEY: record,
    }
    neurons, name = len(found.ffns) if grown else 0, type(model).__name__
    report = PostNormReport(
        level, name, tuple(records), neurons, stock, rms, rounded, measured or {}
    )
    return PostNormConversion(tensors, config, report)


def _masked(x: torch.Tensor, inputs: dict) -> torch.Tensor:
    """The rows of x, without those that an attention mask among the inputs marks as
    padding.
    """
    rows = x.flatten(0, -2)
    masks = [
        v
        for k, v in inputs.items()
        if k.endswith("attention_mask") and torch.is_tensor(v) and v.ndim == 2
    ]
    masks = [
        m
        for m in masks
        if m.numel() == len(rows) and (x.ndim == 2 or m.shape == x.shape[:-1])
    ]
    if x.ndim == 3 and inputs.get("decoder_input_ids") is not None and len(masks) != 1:
        return rows  # which of the two stacks it belongs to is not known
    return rows[masks[0].flatten().bool()] if masks else rows


@torch.no_grad()
def fit_means(
    model, batches: Iterable[dict], sums: list[Sum], norms
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Norm -> (w, a) with mean(input of the norm) = w . (input of its writer) + a, as near as may be.

    Rows count by the inverse of their variance: that is how the norm scales what is
    left of the mean; those that an attention mask excludes do not count. The model is
    in float64, its writers centred.
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
        rows = _masked(
            rows
            * (x.var(-1, unbiased=False, keepdim=True) + norms[path].spec.eps).rsqrt(),
            inputs,
        )
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
def subtract(
    model: torch.nn.Module, fits: dict[Sum, tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Take ``w . h + a`` off every feature that a writer gives, in place."""
    for s, (w, a) in fits.items():
        writer = model.get_submodule(s.writer)
        reads = 1 - weight_axis(writer)
        writer.weight -= w if reads else w[:, None]
        if writer.bias is not None:
            writer.bias -= a


def measure(model, batches, expected, norms: Norms) -> dict:
    """How far a model with these norms as RMSNorms is from what was expected, in rows
    that no attention mask excludes: how many ``rows``, ``cosine_mean`` and
    ``cosine_min`` of them, and ``relative_rms``, the error over the original."""
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


def saved(conversion: PostNormConversion, model: PreTrainedModel, folder: Path) -> None:
    """Write a converted model as a checkpoint of its own class, and a report beside it."""
    config = with_settings(model.config, conversion.config)
    result = type(model).from_pretrained(
        None, config=config, state_dict=dict(conversion.tensors), dtype=model.dtype
    )
    result.save_pretrained(folder)
    report = json.dumps(conversion.report.to_dict(), indent=1)
    (folder / "conversion_report.json").write_text(report + "\n", encoding="utf-8")


def batches_of(tokenizer, model: PreTrainedModel, texts: list[str]) -> list[dict]:
    """Keyword arguments of the forward, a batch for each text."""
    length = min(TOKENS, max_positions(model.config))
    names = inspect.signature(type(model).forward).parameters
    batches = []
    for text in texts:
        tokens = tokenizer(
            text, return_tensors="pt", truncation=True, max_length=length
        )
        batch = {name: value for name, value in tokens.items() if name in names}
        if model.config.is_encoder_decoder:
            batch["decoder_input_ids"] = batch["input_ids"]
        if batch["input_ids"].numel():
            batches.append(batch)
    return batches


def class_of(source: str) -> type[PreTrainedModel]:
    """The class that a checkpoint was saved from."""
    architectures = AutoConfig.from_pretrained(source).architectures or []
    return getattr(transformers, architectures[0]) if architectures else AutoModel


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("source", help="a local folder or a hub id")
    parser.add_argument("folder", type=Path, help="the folder to make")
    parser.add_argument(
        "--level", choices=["exact", "fit"], default="fit", help="default fit"
    )
    parser.add_argument(
        "--text", type=Path, help="with fit: what to fit on, one example a line"
    )
    args = parser.parse_args(argv)
    if args.folder.exists():
        parser.error(f"{args.folder} exists already: choose another folder")
    if args.level == "fit" and args.text is None:
        parser.error("--level fit needs --text FILE, with one example a line")
    model = class_of(args.source).from_pretrained(args.source, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(args.source)
    try:
        if args.level == "exact":
            conversion = exact_post_norm(model)
        else:
            lines = [
                line
                for line in args.text.read_text(encoding="utf-8").splitlines()
                if line.strip()
            ]
            conversion = fit_post_norm(model, batches_of(tokenizer, model, lines))
    except ValueError as error:
        parser.error(str(error))
    saved(conversion, model, args.folder)
    tokenizer.save_pretrained(args.folder)
    print(conversion.report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
