"""Fold weight and bias of each LayerNorm into the linears that read it; who reads it is found by arithmetic.

Scaling what a norm puts out is scaling the columns of what reads it: with y = gain * xhat + bias, for each channel j,

    gain_j dL/dgain_j + bias_j dL/dbias_j  =  sum over readers W, rows r:  W_rj dL/dW_rj

for every loss L. So the readers are those parameters whose column sums add up to the left side, with coefficients that
come out as 0 or 1; where something else reads the norm too (a skip, a tied table), nothing adds up and the norm stays.
In the same way the bias of a reader is told by dL/dbias_j = sum_r W_rj dL/db_r.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ..checkpoint.source import Checkpoint
from ..judge.folder import Verification, add_to_card
from ..plan import ConversionRefused, Scale
from ..tensors import InMemory, Lazy, Scaling, Stored, computed, filled, folded_bias
from ..twin.gauge import gradients
from ..twin.keys import KeyMap, naming, saved_tensors, stored_names
from ..twin.layer_norms import find_layer_norms
from ..twin.prove import BOUND, difference, load_tensors
from ..twin.run import run
from ..twin.twin import Twin, attend_to_encoder, give_weights, new_model
from .centred import PlannedCentring

CARD_HEADING = "## Norms folded into the linears that read them"
FOLDED = "hf_rmsnorm_folded"  # in the metadata of the shards
TOLERANCE = 1e-8  # of the left side, for what the readers add up to


@dataclass(frozen=True)
class Fold:
    """A norm whose weight becomes ones and whose bias zeros, in keys of the checkpoint."""

    path: str
    weight: str | None
    bias: str | None
    scales: tuple[Scale, ...]  # which tensors read the norm, and along which axis
    biases: tuple[tuple[str, str, bool], ...]  # bias of a reader, its weight, and whether that lies as (in, out)


@dataclass(frozen=True)
class FoldPlan:
    """What is folded, which norms stay as they are and why, and the difference in float64 of a small random model."""

    folds: tuple[Fold, ...]
    kept: dict[str, str]
    difference: float  # the largest of its outputs, over their scale

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
class PlannedFold(PlannedCentring):
    """As `PlannedCentring`, with norms folded in the same pass: each value is rounded once.

    Where all readers have biases the norms' weights become ones and their biases zeros. Columns are scaled, so that
    centred rows stay centred.
    """

    fold: FoldPlan

    def to_dict(self):
        return {**super().to_dict(), "fold": self.fold.to_dict()}

    def __str__(self):
        return f"{super().__str__()}\n{self.fold}"

    def tensors(self, source: Checkpoint) -> dict[str, Lazy]:
        return folded(self.fold.folds, super().tensors(source))

    def metadata(self):
        record = {**self.made, "norms": [fold.path for fold in self.fold.folds]}
        return {**super().metadata(), FOLDED: json.dumps(record, sort_keys=True)}

    def describe(self, folder: Path, verdict: Verification) -> None:
        super().describe(folder, verdict)
        text = "Weights and biases of norms are ones and zeros."
        add_to_card(folder, CARD_HEADING, text, self.made, self.fold, verdict)


def plan_fold(twin: Twin) -> FoldPlan:
    """What can be folded in a checkpoint, proven on its twin; refused where that is nothing, or not exact."""
    cls = type(twin.model)
    attend_to_encoder(twin)
    model = new_model(cls, twin.config)  # tied where the checkpoint is: a tied table reads and is read
    give_weights(model, seed=3)
    folds, kept = _find(model, twin.inputs)
    if not folds:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in list(kept.items())[:3])
        raise ConversionRefused(f"{cls.__name__}: no norm can be folded exactly ({reasons or 'it has no LayerNorm'})")
    tensors = saved_tensors(model)
    made = computed(folded(folds, {name: Stored(name) for name in tensors}), InMemory(tensors))
    original, result = (load_tensors(cls, twin.config, state) for state in (tensors, made))
    with torch.no_grad():
        expected, got = run(original, twin.inputs), run(result, twin.inputs)
    plan = FoldPlan(tuple(folds), kept, difference(expected, got))
    if not plan.passed:
        raise ConversionRefused(f"{cls.__name__}: {str(plan).splitlines()[0]}: nothing is folded")
    return plan


def with_folds(planned: PlannedCentring, twin: Twin) -> PlannedFold:
    """The same conversion, with norms folded in the same pass; refused as by `plan_fold`."""
    fold = plan_fold(twin)
    name = naming(stored_names(twin.folder), twin.model)
    folds = tuple(
        replace(
            each,
            weight=each.weight and name(each.weight),
            bias=each.bias and name(each.bias),
            scales=tuple(replace(s, key=name(s.key), by=name(s.by)) for s in each.scales),
            biases=tuple((name(bias), name(weight), lies) for bias, weight, lies in each.biases),
        )
        for each in fold.folds
    )
    return PlannedFold(planned.made, planned.centring, planned.proof, replace(fold, folds=folds))


def folded(folds, tensors: dict[str, Lazy]) -> dict[str, Lazy]:
    """Every tensor of a checkpoint once norms are folded, from those before."""
    done = dict(tensors)
    for fold in folds:
        for scale in fold.scales:
            done[scale.key] = tensors[scale.key].then(Scaling(scale.axis, tensors[scale.by]))
        for bias, weight, lies_in_out in fold.biases:
            rows = replace(tensors[weight], transposed=lies_in_out)
            done[bias] = folded_bias(rows, tensors[fold.bias], tensors[bias])
        for name, number in ((fold.weight, 1.0), (fold.bias, 0.0)):
            if name is not None:
                done[name] = filled(tensors[name], number)
    return done


def _find(model, inputs) -> tuple[list[Fold], dict[str, str]]:
    norms, _ = find_layer_norms(model, inputs)
    parameters = dict(model.requires_grad_().named_parameters())
    keys = KeyMap(model)
    folds, kept, taken = [], {}, set()
    with torch.enable_grad():
        outputs = run(model, inputs)
    for width in sorted({norm.hidden_size for norm in norms.values()}):
        columns = [(name, axis) for name, p in parameters.items() if p.ndim > 1
                   for axis in range(p.ndim) if p.shape[axis] == width]  # fmt: skip
        paths = [path for path, norm in norms.items() if norm.hidden_size == width]
        if not columns:  # q and k of a head: what reads them is no linear
            kept |= dict.fromkeys(paths, "something else than linears reads it")
            continue
        probes, rows, generator = [], [], torch.Generator().manual_seed(2)
        for _ in range(2 + 3 * len(columns) // width):  # random losses
            found = gradients(outputs, parameters, generator)
            g = {name: torch.zeros_like(parameters[name]) if t is None else t for name, t in found.items()}
            products = [(parameters[n] * g[n]).detach().movedim(a, 0).flatten(1).sum(1) for n, a in columns]
            rows.append(torch.stack(products, 1))
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


def _own(model, path: str, norm, parameters) -> dict[str, str]:
    """ "weight" and "bias": the norm's parameters that are its gain and its bias as they stand."""
    names = {id(p): name for name, p in parameters.items()}
    own = {}
    if norm.spec.weight_offset:
        raise _Stays("its weight is not stored as it is applied")
    for role, value in (("weight", norm.weight), ("bias", norm.bias)):
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
    stored = {role: keys.of(name) for role, name in own.items()}
    if any(len(found) != 1 for found in stored.values()):
        raise _Stays("it is spread over several tensors of the checkpoint")
    scaled = readers if "weight" in own else ()
    scales = [scale for name, axis in scaled for scale in keys.scale(name, axis, own["weight"])]
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
            if any(len(keys.of(n)) != 1 or keys.saved[keys.of(n)[0]].shape != keys.shapes[n] for n in (bias, name)):
                raise _Stays(f"{bias} is stored in another shape")
            rows = weight.detach() if axis == 1 else weight.detach().T
            total = [t + g[bias] @ rows for t, g in zip(total, probes, strict=True)]
            biases.append((keys.of(bias)[0], keys.of(name)[0], axis == 0))
        left = torch.cat([g[own["bias"]] for g in probes])
        if float((torch.cat(total) - left).norm()) > TOLERANCE * float(left.norm()):
            raise _Stays("the biases of what reads it do not add up to the norm's")
    weight, bias = (stored[role][0] if role in stored else None for role in ("weight", "bias"))
    return Fold(path, weight, bias, tuple(scales), tuple(biases))
