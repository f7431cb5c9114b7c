"""Fold weight and bias of each LayerNorm into the linears that read it; who reads it is found by arithmetic.

Scaling what a norm puts out is scaling the columns of what reads it: with y = gain * xhat + bias, for each channel j,

    gain_j dL/dgain_j + bias_j dL/dbias_j  =  sum over readers W, rows r:  W_rj dL/dW_rj

for every loss L. So the readers are those parameters whose column sums add up to the left side, with coefficients that
come out as 0 or 1; where something else reads the norm too (a skip, a tied table), nothing adds up and the norm stays.
In the same way the bias of a reader is told by dL/dbias_j = sum_r W_rj dL/db_r.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from ..checkpoint.expressions import Centred, Expression, Filled, FoldedBias, Scaled, Stored, Transposed
from ..checkpoint.files import merged
from ..checkpoint.recipe import Job, Recipe, make_job
from ..checkpoint.source import open_source
from ..checkpoint.write import MAX_SHARD_SIZE, Written, write_computed
from ..judge.folder import Verification
from ..judge.publish import Judged, add_to_card, provenance
from ..plan import ConversionRefused, Scale
from ..twin.keys import KeyMap, saved_tensors
from ..twin.layer_norms import find_layer_norms
from ..twin.prove import BOUND, difference, load_tensors
from ..twin.twin import Twin, attend_to_encoder, give_weights, make_twin, new_model, run
from .centred import PlannedConversion, Publication
from .native import Memory, judge_folders

CARD_HEADING = "## Norms folded into the linears that read them"
FOLDED = "hf_rmsnorm_folded"  # in the metadata of the shards
TOLERANCE = 1e-8  # of the left side, for what the readers add up to


@dataclass(frozen=True)
class Fold:
    """A norm whose weight becomes ones and whose bias zeros, in keys of the checkpoint.

    Args:
        path: of the norm's module.
        weight, bias: of the norm; None where it has none.
        scales: which tensors read the norm, and along which axis.
        biases: bias of a reader, its weight, and whether that lies as (in, out).
    """

    path: str
    weight: str | None
    bias: str | None
    scales: tuple[Scale, ...]
    biases: tuple[tuple[str, str, bool], ...]


@dataclass(frozen=True)
class FoldPlan:
    """What is folded, which norms stay as they are and why, and the difference in float64 of a small random model.

    Args:
        difference: max |difference| of its outputs, over their scale.
    """

    folds: tuple[Fold, ...]
    kept: dict[str, str] = field(default_factory=dict)
    difference: float = float("inf")

    @property
    def passed(self) -> bool:
        """The difference is within 1e-12 of the scale."""
        return self.difference <= BOUND

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        reasons = [f"  {path} stays: {reason}" for path, reason in self.kept.items()]
        folded = f"{len(self.folds)} of {len(self.folds) + len(self.kept)} norms folded into the linears that read them"
        return "\n".join([f"{folded}, float64 outputs differ by {self.difference:.1e} of their scale", *reasons])


@dataclass(frozen=True)
class FoldedCheckpoint:
    """What `write_folded` did."""

    plan: FoldPlan
    written: Written
    verification: Verification
    conversion: PlannedConversion | None = None

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        conversion = self.conversion.to_dict() if self.conversion else {}
        done = {**self.written.to_dict(), "verification": self.verification.to_dict()}
        return {**conversion, "fold": self.plan.to_dict(), **done}

    def __str__(self) -> str:
        return f"{self.written}\n{self.verification}"


def plan_fold(src, *, trust_remote_code: bool = False, model_class=None, inputs=None) -> FoldPlan:
    """What can be folded in a checkpoint, and the proof on a small random model of the same classes.

    Args:
        src: a model folder, or a config.
        trust_remote_code, model_class, inputs: as in `plan_conversion`.

    Raises:
        ConversionRefused: no norm can be folded, or the proof fails; the message says why.
    """
    return fold_of(make_twin(src, trust_remote_code=trust_remote_code, model_class=model_class, inputs=inputs))


def fold_of(twin: Twin) -> FoldPlan:
    """As `plan_fold`, for a twin."""
    cls = type(twin.model)
    attend_to_encoder(twin)
    model = new_model(cls, twin.config)  # tied where the checkpoint is: a tied table reads and is read
    give_weights(model, seed=3)
    folds, kept = _find(model, twin.inputs)
    if not folds:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in list(kept.items())[:3])
        raise ConversionRefused(f"{cls.__name__}: no norm can be folded exactly ({reasons or 'it has no LayerNorm'})")
    tensors = saved_tensors(model)
    values = Memory(tensors, {})
    expressions = folded(folds, {name: Stored(name) for name in tensors})
    made = {name: torch.cat(list(e.pieces(values))) for name, e in expressions.items() if not isinstance(e, Stored)}
    original, result = (load_tensors(cls, twin.config, {**tensors, **changed}) for changed in ({}, made))
    with torch.no_grad():
        expected, got = run(original, twin.inputs), run(result, twin.inputs)
    scale = max(float(o.abs().max()) for o in expected if o.numel())
    plan = FoldPlan(tuple(folds), kept, difference(expected, got) / scale)
    if not plan.passed:
        raise ConversionRefused(f"{cls.__name__}: {str(plan).splitlines()[0]}: nothing is folded")
    return plan


def folded(folds, tensors: dict[str, Expression]) -> dict[str, Expression]:
    """Every tensor of a checkpoint once norms are folded, from those before."""
    done = dict(tensors)
    for fold in folds:
        for scale in fold.scales:
            done[scale.key] = Scaled(tensors[scale.key], tensors[scale.by], scale.axis)
        for bias, weight, lies_in_out in fold.biases:
            rows = Transposed(tensors[weight]) if lies_in_out else tensors[weight]
            done[bias] = FoldedBias(rows, tensors[fold.bias], tensors[bias])
        for name, number in ((fold.weight, 1.0), (fold.bias, 0.0)):
            if name is not None:
                done[name] = Filled(tensors[name], number)
    return done


def converted(job: Job) -> dict[str, Expression]:
    """Every tensor of a checkpoint as a conversion plan makes it."""
    tensors: dict[str, Expression] = {}
    for name, stored in job.tensors():
        recipe, made = job.recipes.get(name, Recipe()), Stored(stored.name)
        for scale in recipe.scale:
            made = Scaled(made, Stored(scale.by), scale.axis)
        for centre in recipe.centre:
            made = Centred(made, centre.axis, centre.block, centre.blocks)
        tensors[name] = Filled(made, 1.0) if recipe.ones else made
    return tensors


def _find(model, inputs) -> tuple[list[Fold], dict[str, str]]:
    norms, _ = find_layer_norms(model, inputs)
    parameters = dict(model.named_parameters())
    for p in parameters.values():
        p.requires_grad_(True)
    keys = KeyMap(model)
    folds: list[Fold] = []
    kept: dict[str, str] = {}
    taken: set[str] = set()
    with torch.enable_grad():
        outputs = run(model, inputs)
    for width in sorted({norm.hidden_size for norm in norms.values()}):
        columns = [(name, axis) for name, p in parameters.items() if p.ndim > 1
                   for axis in range(p.ndim) if p.shape[axis] == width]  # fmt: skip
        paths = [path for path, norm in norms.items() if norm.hidden_size == width]
        if not columns:  # q and k of a head: what reads them is no linear
            kept |= dict.fromkeys(paths, "something else than linears reads it")
            continue
        probes, rows = [], []
        for g in _probes(outputs, parameters, 2 + 3 * len(columns) // width):
            rows.append(torch.stack([_sum(parameters[n] * g[n], a) for n, a in columns], 1))
            probes.append({name: t for name, t in g.items() if t.ndim == 1})  # the rest is large
        sums = torch.cat(rows)
        silent = [name for (name, _), column in zip(columns, sums.T, strict=True) if not column.any()]
        lengths = sums.norm(dim=0).clamp_min(1e-300)
        for path in paths:
            try:
                if silent:
                    raise _Stays(f"nothing depends on {silent[0]}, so that it cannot be told whether that reads it")
                own = _own(model, path, norms[path], parameters)
                left = torch.cat([sum(parameters[n].detach() * g[n] for n in own.values()) for g in probes])
                found = torch.linalg.lstsq(sums / lengths, left[:, None], driver="gelsd").solution[:, 0] / lengths
                chosen = (found - 1).abs() < 0.01
                if float((sums[:, chosen].sum(1) - left).norm()) > TOLERANCE * float(left.norm()) or not chosen.any():
                    raise _Stays("something else than linears reads it too")
                readers = [column for column, is_one in zip(columns, chosen.tolist(), strict=True) if is_one]
                fold = _fold(path, own, readers, parameters, probes, keys)
                changed = {scale.key for scale in fold.scales} | {bias for bias, _, _ in fold.biases}
                if changed & taken:
                    raise _Stays(f"{sorted(changed & taken)[0]} reads another norm too")
                taken |= changed
                folds.append(fold)
            except (_Stays, ConversionRefused) as reason:
                kept[path] = str(reason)
    return folds, kept


class _Stays(Exception):
    """Why a norm is not folded."""


def _probes(outputs, parameters, count: int) -> Iterator[dict[str, torch.Tensor]]:
    """Gradients of `count` random losses; zeros where nothing depends on a parameter."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        loss = sum((torch.randn(o.shape, generator=generator, dtype=o.dtype) * o).sum() for o in outputs)
        grads = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
        yield {
            name: torch.zeros_like(p) if g is None else g
            for (name, p), g in zip(parameters.items(), grads, strict=True)
        }  # fmt: skip


def _sum(product: torch.Tensor, axis: int) -> torch.Tensor:
    return product.detach().movedim(axis, 0).flatten(1).sum(1)


def _own(model, path: str, norm, parameters) -> dict[str, str]:
    """ "weight" and "bias": the norm's parameters that are its gain and its bias as they stand."""
    names = {id(p): name for name, p in parameters.items()}
    own = {}
    for role, value in (("weight", norm.gain), ("bias", norm.bias)):
        if value is None:
            continue
        for p in model.get_submodule(path).parameters(recurse=False):
            if p.shape == value.shape == (norm.hidden_size,) and torch.equal(p.detach().double(), value):
                own[role] = names[id(p)]
        if role not in own:
            raise _Stays(f"its {role} is not stored as it is applied")
    if not own:
        raise _Stays("it has neither weight nor bias")
    return own


def _fold(path, own, readers, parameters, probes, keys: KeyMap) -> Fold:
    scales: list[Scale] = []
    stored = {role: keys.of(name) for role, name in own.items()}
    if any(len(found) != 1 for found in stored.values()):
        raise _Stays("it is spread over several tensors of the checkpoint")
    for name, axis in readers:
        scales += keys.scale(name, axis, own["weight"]) if "weight" in own else []
    biases: list[tuple[str, str, bool]] = []
    if "bias" in own:
        total = [torch.zeros_like(g[own["bias"]]) for g in probes]
        for name, axis in readers:
            weight = parameters[name]
            prefix = name.rpartition(".")[0]
            siblings = [n for n, p in parameters.items() if n.rpartition(".")[0] == prefix and p.ndim == 1
                        and weight.ndim == 2 and len(p) == weight.shape[1 - axis]]  # fmt: skip
            if len(siblings) != 1:
                raise _Stays(f"{name}, which reads it, has no bias to take the norm's")
            bias = siblings[0]
            saved = [keys.of(n) for n in (bias, name)]
            if any(len(k) != 1 or keys.saved[k[0]].shape != keys.shapes[n]
                   for k, n in zip(saved, (bias, name), strict=True)):  # fmt: skip
                raise _Stays(f"{bias} is stored in another shape")
            rows = weight.detach() if axis == 1 else weight.detach().T
            total = [t + g[bias] @ rows for t, g in zip(total, probes, strict=True)]
            biases.append((saved[0][0], saved[1][0], axis == 0))
        left = torch.cat([g[own["bias"]] for g in probes])
        if float((torch.cat(total) - left).norm()) > TOLERANCE * float(left.norm()):
            raise _Stays("the biases of what reads it do not add up to the norm's")
    return Fold(
        path, *(stored[r][0] if r in stored else None for r in ("weight", "bias")), tuple(scales), tuple(biases)
    )


def write_folded(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    *,
    trust_remote_code: bool = False,
    model_class=None,
    inputs=None,
    prompts: list[str] | None = None,
    verify: bool = True,
    allow_pickle: bool = False,
    restart: bool = False,
    planned: FoldPlan | None = None,
    conversion: PlannedConversion | None = None,
    progress: Callable[[int, int, int], None] | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> FoldedCheckpoint:
    """Write a checkpoint with the weight and bias of its norms folded into the linears that read them.

    The result is of the same class, with the same config and outputs; where all readers have biases the norms' weights
    are ones and their biases zeros. A converted checkpoint stays one: columns are scaled and centred rows stay centred.

    Args:
        src: a model folder with safetensors, converted or not; it is only read.
        dst: the folder to make. It appears whole, at the end; a run that was killed is taken up by the same call.
        trust_remote_code, model_class, inputs, prompts, verify, allow_pickle, restart, progress: as in
            `convert_checkpoint`.
        planned: what `plan_fold` returned for `src`, if it has been called.
        conversion: what `plan_conversion` returned for `src`: the checkpoint is converted in the same pass, and the
            values are rounded once.
        max_shard_size: bytes, or "5GB" and the like.

    Raises:
        ConversionRefused: nothing can be folded exactly; the message says why.
        ConversionError: source or destination do not allow it; the message says what to do. DST does not exist then.
        VerificationFailed: what was written does not pass; it stays unpublished, beside a report.
    """
    how = {"trust_remote_code": trust_remote_code, "inputs": inputs}
    planned = planned or plan_fold(src, model_class=model_class, **how)
    source = open_source(src, allow_pickle=allow_pickle)
    metadata = next((shard.metadata for shard in source.shards if shard.metadata), None) or {"format": "pt"}
    made = provenance(src)
    record = {**made, "norms": [fold.path for fold in planned.folds]}
    metadata = {**metadata, FOLDED: json.dumps(record, sort_keys=True)}
    how |= {"model_class": model_class, "prompts": prompts, "run": verify}
    if conversion is None:
        tensors: dict[str, Expression] = {name: Stored(name) for name in source.tensors}
        config, publication = None, Judged(dst, partial(judge_folders, src, **how), lambda folder, verdict: None)
    else:
        publication = Publication(src, dst, conversion, **how)
        tensors = converted(make_job(publication.plan, source))
        config = json.dumps(merged(source.config, publication.plan.config), indent=2) + "\n"
        metadata |= publication.metadata

    def check(folder: Path) -> None:
        publication.check(folder)
        text = f"Weights and biases of norms are ones and zeros.\n\n```\n{planned}\n{publication.verification}\n```"
        add_to_card(folder, CARD_HEADING, text, made)

    written = write_computed(
        src, dst, folded(planned.folds, tensors), config, aliases={}, check=check, metadata=metadata,
        allow_pickle=allow_pickle, restart=restart, progress=progress, max_shard_size=max_shard_size,
    )  # fmt: skip
    return FoldedCheckpoint(planned, written, publication.verification, conversion and publication.planned)
