"""Post-norm models (BERT, BART, OPT-350m): what of them converts exactly, and the rest by least squares.

A norm after the sum reads ``FFN(x) + x``, and the x there is another norm's output, whose mean no weight takes away.
But ``act(z) - act(-z) = z`` for GELU, ReLU and SiLU: two neurons more, that read the mean of x as z and as -z and write
it with opposite signs to every feature, cancel it exactly. So FFN norms and embedding norms become RMSNorms with equal
outputs. For attention norms no such form is known; `fit_post_norm` subtracts what is linear in the attention output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch
from transformers import PreTrainedModel

from .... import __version__
from ....record import RECORD_KEY, make_record
from ...plan import ConversionRefused, NormRecord
from ...twin.discover import ZERO_MEAN
from ...twin.gauge import input_means
from ...twin.inputs import default_inputs
from ...twin.keys import Hit, saved_tensors
from ...twin.layer_norms import TwinNorm, find_layer_norms
from ...twin.prove import BOUND, difference
from ...twin.run import quiet, run
from .build import (
    NEURONS,
    Structure,
    as_double,
    changed,
    converted,
    hits_of,
    look,
    put_neurons,
    real_hit,
    refuse_without_neurons,
    tie_changes,
)
from .fit import fit_means, measure, run_as_rms, subtract

OTHER = "its input is the work of several modules or of an activation"
HELD_OUT = 5  # every fifth batch is measured, not fitted


@dataclass(frozen=True)
class PostNormReport:
    """What a post-norm conversion did, and how far the result is from the original.

    Args:
        level: ``exact`` or ``fit``.
        model_class: of the model.
        norms: every LayerNorm; `reason` says why one stays.
        neurons: FFNs that got two neurons.
        stock: max |difference| of the outputs with the model's own LayerNorms, over the largest; float64.
        rms: the same with RMSNorms; for ``fit`` on the first batch that was held out.
        rounded: `rms`, once the tensors are rounded to the checkpoint's dtype.
        measured: for ``fit``: over held-out batches, the loss of the result (``fit``), of swapping every norm of the
            model as it is (``naive``), and of the choice that was not taken (``other``, where there was one).
    """

    level: str
    model_class: str
    norms: tuple[NormRecord, ...]
    neurons: int
    stock: float
    rms: float
    rounded: float
    measured: dict = field(default_factory=dict)

    def to_dict(self) -> dict:
        """JSON data."""
        return asdict(self)

    def __str__(self) -> str:
        swapped = sum(n.becomes_rms for n in self.norms)
        head = f"{self.model_class}, {self.level}: {swapped} of {len(self.norms)} norms become RMSNorm"
        head += f", {self.neurons} FFNs get {NEURONS} neurons more" if self.neurons else ", same shapes"
        lines = [
            head,
            f"  float64 outputs as LayerNorm differ by {self.stock:.1e} of their scale, RMSNorm {self.rms:.1e}",
        ]
        for name, loss in self.measured.items():
            lines.append(
                f"  {name}: cosine {loss['cosine_mean']:.6f} mean, {loss['cosine_min']:.6f} worst, relative RMS error "
                f"{loss['relative_rms']:.1e} on {loss['rows']:,} held-out rows"
            )
        for n in self.norms:
            if not n.becomes_rms:
                lines.append(f"  {n.path} stays: {n.reason}")
        return "\n".join(lines)


@dataclass(frozen=True)
class PostNormConversion:
    """A converted post-norm model, as a checkpoint.

    Args:
        tensors: the whole checkpoint by key, in the model's dtypes.
        config: keys of config.json to set: the FFN width, untied embeddings, and the record of this package.
        report: what was done and measured.
    """

    tensors: dict[str, torch.Tensor] = field(repr=False)
    config: dict
    report: PostNormReport
    _norms: dict[str, TwinNorm] = field(repr=False)

    def build(self, model: PreTrainedModel, rms: bool = False) -> PreTrainedModel:
        """The converted model, of the class and dtype of the original, in eval mode.

        Args:
            model: the model that was converted; it stays as it is.
            rms: compute the RMSNorms, in float64, instead of the LayerNorms of the class.
        """
        config = changed(model.config, self.config)
        with quiet():
            how = {"config": config, "dtype": model.dtype}
            result = type(model).from_pretrained(None, state_dict=dict(self.tensors), **how).eval()
        for path, norm in self._norms.items() if rms else ():
            result.get_submodule(path).register_forward_hook(
                lambda module, args, output, norm=norm: norm.as_rms(args[0].double()).to(output.dtype)
            )
        return result


def exact_post_norm(model: PreTrainedModel, inputs: dict | None = None) -> PostNormConversion:
    """Two neurons for every FFN: embedding and FFN norms become RMSNorms with equal outputs, attention norms stay.

    Args:
        model: a loaded model of any dtype, on the CPU; it is not changed.
        inputs: keyword arguments of its forward for the proof; random ones without it.

    Returns:
        The checkpoint; a plain Transformers loads it, with an FFN width grown by 2, to the original's outputs.

    Raises:
        ConversionRefused: there is no FFN of that form, no config key for its width, or the outputs are not equal.
    """
    found = look(model)
    refuse_without_neurons(found)
    chosen = found.zero | {f.norm for f in found.ffns}
    hits = hits_of(found.twin, {path: found.norms[path] for path in chosen})[0]
    inputs = inputs or default_inputs(model)
    work = converted(model, found, hits, found.grown)
    norms, _ = find_layer_norms(work, inputs)
    means = input_means(work, inputs, norms)
    missed = sorted(path for path in chosen if means.get(path, math.inf) > ZERO_MEAN)
    if missed:
        raise ConversionRefused(f"{found.twin.name}: the input of {missed[0]} still has a mean with the two neurons")
    return _finish(model, found, work, hits, chosen, norms, inputs, found.grown)


def fit_post_norm(
    model: PreTrainedModel,
    batches: Sequence[dict],
    held_out: Sequence[dict] | None = None,
    neurons: bool | None = None,
) -> PostNormConversion:
    """All norms become RMSNorms, approximately: what is linear in each writer's input is taken off by least squares.

    Nothing is trained. With its LayerNorms the result still has the original's outputs, since only what those remove
    has changed; with RMSNorms it is near them, and how near is measured.

    Args:
        model: a loaded model of any dtype, on the CPU; it is not changed.
        batches: keyword arguments of its forward, of text like that it will see.
        held_out: batches to measure on; without it every fifth of `batches`, which is then not fitted.
        neurons: add the two neurons of `exact_post_norm`; None for whatever measures better.

    Raises:
        ConversionRefused: no norm can be fitted, the neurons that were asked for are impossible, or a sum is not found.
        ValueError: there are too few batches.
    """
    batches = list(batches)
    if held_out is None:
        held_out = batches[HELD_OUT - 1 :: HELD_OUT]
        batches = [b for i, b in enumerate(batches) if i % HELD_OUT != HELD_OUT - 1]
    if not batches or not held_out:
        raise ValueError(f"fit_post_norm needs {HELD_OUT} batches or more, or some and others as held_out")
    found = look(model)
    if neurons:
        refuse_without_neurons(found)
    rest = [s for s in found.sums if s.norm not in found.zero]
    if not rest:
        raise ConversionRefused(f"{found.twin.name}: no norm reads a sum with another norm's output: nothing to fit")
    plain_work = converted(model, found, found.hits, {})
    norms, _ = find_layer_norms(plain_work, held_out[0])
    fits = fit_means(plain_work, batches, rest, norms)
    choices = [False, True] if neurons is None and found.grown else [bool(neurons)]
    original = as_double(model)
    expected = [[o.detach() for o in run(original, b)] for b in held_out]
    naive = measure(original, held_out, expected, find_layer_norms(original, held_out[0])[0])
    tried = {}
    for with_neurons in choices:
        work = converted(model, found, found.hits, found.grown) if with_neurons else plain_work
        exact = {f.norm for f in found.ffns} if with_neurons else set()
        subtract(work, {s: fits[s.norm] for s in rest if s.norm not in exact})
        chosen = found.zero | exact | fits.keys()
        norms, _ = find_layer_norms(work, held_out[0])
        loss = measure(work, held_out, expected, {path: norms[path] for path in chosen})
        tried[with_neurons] = work, chosen, norms, loss
    best = min(tried, key=lambda each: tried[each][3]["relative_rms"])
    work, chosen, norms, loss = tried[best]
    measured = {"fit": loss, "naive": naive}
    if len(tried) > 1:
        measured["other"] = tried[not best][3]
    grown = found.grown if best else {}
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
        raise ConversionRefused(
            f"{type(model).__name__}: the converted model's outputs differ by {max(stock, rms):.1e} of their scale in "
            f"float64, which is more than {BOUND:g}: it is not equal"
        )
    of_model = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    dtypes = {name: t.dtype for name, t in itertools.chain(*of_model)}
    for name, t in itertools.chain(work.named_parameters(), work.named_buffers()):
        t.data = t.data.to(dtypes[name])
    put = put_neurons(work, found.ffns) if grown else {}
    tensors = saved_tensors(work)
    work.double()
    norms = find_layer_norms(work, inputs)[0]
    as_rms = {path: norms[path] for path in norms if path in chosen}
    rounded = difference(expected, run_as_rms(work, inputs, as_rms, as_rms))
    neurons = len(found.ffns) if grown else 0
    reasons = {
        s.norm: f"it reads {s.writer} plus another norm's output, whose mean no weight removes" for s in found.sums
    }
    records = [
        NormRecord(path, n.hidden_size, n.spec.eps, path in chosen, "" if path in chosen else reasons.get(path, OTHER))
        for path, n in norms.items()
    ]
    records += [
        NormRecord(path, 0, 0.0, False, "no input reached it, so nothing is known of it") for path in found.silent
    ]
    level = "exact" if measured is None else "fit"
    record = {
        "converted_by": f"hf-rmsnorm {__version__}",
        "post_norm": level,
        **_record(work, found, hits, as_rms, put, measured),
    }
    config = {**grown, **tie_changes(model, hits, found.undetermined), RECORD_KEY: record}
    name = type(model).__name__
    report = PostNormReport(level, name, tuple(records), neurons, stock, rms, rounded, measured or {})
    return PostNormConversion(tensors, config, report, as_rms)


def _record(work, found: Structure, hits: list[Hit], norms: dict[str, TwinNorm], put: dict, measured) -> dict:
    parameters = [name for name, _ in work.named_parameters(remove_duplicate=False)]
    writers: dict[str, dict] = {}
    for hit in hits if measured is None else ():  # what was fitted is not centred, and is not checked
        real = real_hit(found.twin, hit)
        whole = len(hit.blocks) * real.block == found.twin.shapes[hit.parameter][hit.axis]
        how = {"axis": hit.axis, "block": real.block, "blocks": None if whole else list(hit.blocks)}
        if put.get(hit.parameter, {}).get("axis", hit.axis) != hit.axis:
            how["but"] = {key: put[hit.parameter][key] for key in ("axis", "first")}
        writers[hit.parameter] = how
    rms = {path: {"eps": n.spec.eps, "hidden_size": n.hidden_size} for path, n in norms.items()}
    paths = [path for path, _ in work.named_modules()]
    record = make_record(writers, rms, parameters, paths, put if measured is None else None)
    return record if measured is None else {**record, "computes": "rms_norm", "approximate": True, "measured": measured}
