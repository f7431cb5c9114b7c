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
from ..plan import ConversionRefused, Scale
from ..proxy.keys import KeyMap, naming, saved_tensors, stored_names
from ..proxy.layer_norms import find_layer_norms
from ..proxy.model import ProxyModel, attend_to_encoder, give_weights, new_model
from ..proxy.prove import BOUND, difference, load_tensors
from ..proxy.run import run
from ..proxy.shift_invariance import gradients
from ..tensors import InMemory, Lazy, Scaling, Stored, computed, filled, folded_bias
from ..verify.folder import Verification, add_to_card
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


def plan_fold(proxy: ProxyModel) -> FoldPlan:
    """What can be folded in a checkpoint, proven on its proxy; refused where that is nothing, or not exact."""
    cls = type(proxy.model)
    attend_to_encoder(proxy)
    model = new_model(cls, proxy.config)  # tied where the checkpoint is: a tied table reads and is read
    give_weights(model, seed=3)
    folds, kept = _Finder(model, proxy.inputs).find()
    if not folds:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in list(kept.items())[:3])
        raise ConversionRefused(f"{cls.__name__}: no norm can be folded exactly ({reasons or 'it has no LayerNorm'})")
    tensors = saved_tensors(model)
    made = computed(folded(folds, {name: Stored(name) for name in tensors}), InMemory(tensors))
    original, result = (load_tensors(cls, proxy.config, state) for state in (tensors, made))
    with torch.no_grad():
        expected, got = run(original, proxy.inputs), run(result, proxy.inputs)
    plan = FoldPlan(tuple(folds), kept, difference(expected, got))
    if not plan.passed:
        raise ConversionRefused(f"{cls.__name__}: {str(plan).splitlines()[0]}: nothing is folded")
    return plan


def with_folds(planned: PlannedCentring, proxy: ProxyModel) -> PlannedFold:
    """The same conversion, with norms folded in the same pass; refused as by `plan_fold`."""
    fold = plan_fold(proxy)
    name = naming(stored_names(proxy.folder), proxy.model)
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


class _Stays(Exception):
    """Why a norm is not folded."""


@dataclass(frozen=True)
class _Sums:
    """What random losses say of the linears that may read norms of one width.

    Args:
        columns: (parameter, axis) of each that has this width.
        products: a row for each loss and channel, a column for each of `columns`: sum_r W_rj dL/dW_rj.
        gradients: of all vectors, for each loss.
        silent: parameters that no loss depends on, so that it is unknown whether they read a norm.
    """

    columns: list[tuple[str, int]]
    products: torch.Tensor
    gradients: list[dict[str, torch.Tensor]]
    silent: list[str]


class _Finder:
    """Finds the linears that read each norm of a model."""

    def __init__(self, model, inputs):
        self.model = model
        self.norms, _ = find_layer_norms(model, inputs)
        self.parameters = dict(model.requires_grad_().named_parameters())
        self.keys = KeyMap(model)
        self.taken: set[str] = set()  # tensors that a norm was folded into
        with torch.enable_grad():
            self.outputs = run(model, inputs)

    def find(self) -> tuple[list[Fold], dict[str, str]]:
        """(what can be folded, path of each other norm -> why it stays)."""
        folds, kept = [], {}
        for width in sorted({norm.hidden_size for norm in self.norms.values()}):
            sums = self._sums(width)
            for path in (path for path, norm in self.norms.items() if norm.hidden_size == width):
                try:
                    folds.append(self._fold(path, sums))
                except (_Stays, ConversionRefused) as reason:
                    kept[path] = str(reason)
        return folds, kept

    def _sums(self, width: int) -> _Sums:
        columns = []
        for name, p in self.parameters.items():
            columns += [(name, axis) for axis in range(p.ndim) if p.ndim > 1 and p.shape[axis] == width]
        losses, rows, generator = [], [], torch.Generator().manual_seed(2)
        for _ in range(2 + 3 * len(columns) // width if columns else 0):
            grads = {}
            for name, grad in gradients(self.outputs, self.parameters, generator).items():
                grads[name] = torch.zeros_like(self.parameters[name]) if grad is None else grad
            products = [(self.parameters[n] * grads[n]).detach().movedim(a, 0).flatten(1).sum(1) for n, a in columns]
            rows.append(torch.stack(products, 1))
            losses.append({name: grad for name, grad in grads.items() if grad.ndim == 1})  # the rest is large
        products = torch.cat(rows) if rows else torch.zeros(0, 0)
        silent = [name for (name, _), column in zip(columns, products.T, strict=True) if not column.any()]
        return _Sums(columns, products, losses, silent)

    def _fold(self, path: str, sums: _Sums) -> Fold:
        if not sums.columns:  # q and k of a head: what reads them is no linear
            raise _Stays("something else than linears reads it")
        if sums.silent:
            raise _Stays(f"nothing depends on {sums.silent[0]}, so that it cannot be told whether that reads it")
        own = self._own(path)
        readers = self._readers(own, sums)
        stored = {role: self.keys.of(name) for role, name in own.items()}
        if any(len(keys) != 1 for keys in stored.values()):
            raise _Stays("it is spread over several tensors of the checkpoint")
        scales = []
        for name, axis in readers if "weight" in own else ():
            scales += self.keys.scale(name, axis, own["weight"])
        biases = self._biases(own["bias"], readers, sums) if "bias" in own else []
        changed = {scale.key for scale in scales} | {bias for bias, _, _ in biases}
        if changed & self.taken:
            raise _Stays(f"{min(changed & self.taken)} reads another norm too")
        self.taken |= changed
        weight, bias = (stored[role][0] if role in stored else None for role in ("weight", "bias"))
        return Fold(path, weight, bias, tuple(scales), tuple(biases))

    def _own(self, path: str) -> dict[str, str]:
        """ "weight" and "bias": the norm's parameters that are its gain and its bias as they stand."""
        norm, names = self.norms[path], {id(p): name for name, p in self.parameters.items()}
        if norm.spec.weight_offset:
            raise _Stays("its weight is not stored as it is applied")
        own = {}
        for role, value in (("weight", norm.weight), ("bias", norm.bias)):
            if value is None:
                continue
            for p in self.model.get_submodule(path).parameters(recurse=False):
                if p.shape == value.shape == (norm.hidden_size,) and torch.equal(p.detach().double(), value):
                    own[role] = names[id(p)]
            if role not in own:
                raise _Stays(f"its {role} is not stored as it is applied")
        if not own:
            raise _Stays("it has neither weight nor bias")
        return own

    def _readers(self, own: dict[str, str], sums: _Sums) -> list[tuple[str, int]]:
        """The linears whose sums add up to the norm's, each with the coefficient 1."""
        left = torch.cat([sum(self.parameters[n].detach() * g[n] for n in own.values()) for g in sums.gradients])
        lengths = sums.products.norm(dim=0).clamp_min(1e-300)
        solution = torch.linalg.lstsq(sums.products / lengths, left[:, None], driver="gelsd").solution[:, 0] / lengths
        chosen = (solution - 1).abs() < 0.01
        rest = sums.products[:, chosen].sum(1) - left
        if not chosen.any() or float(rest.norm()) > TOLERANCE * float(left.norm()):
            raise _Stays("something else than linears reads it too")
        return [column for column, is_one in zip(sums.columns, chosen.tolist(), strict=True) if is_one]

    def _biases(self, norm_bias: str, readers, sums: _Sums) -> list[tuple[str, str, bool]]:
        """Bias of each reader, its weight, and whether that lies as (in, out), in keys of the checkpoint."""
        total = [torch.zeros_like(g[norm_bias]) for g in sums.gradients]
        biases = []
        for name, axis in readers:
            bias, weight = self._bias_of(name, axis), self.parameters[name].detach()
            rows = weight if axis == 1 else weight.T
            total = [t + g[bias] @ rows for t, g in zip(total, sums.gradients, strict=True)]
            biases.append((self.keys.of(bias)[0], self.keys.of(name)[0], axis == 0))
        left = torch.cat([g[norm_bias] for g in sums.gradients])
        if float((torch.cat(total) - left).norm()) > TOLERANCE * float(left.norm()):
            raise _Stays("the biases of what reads it do not add up to the norm's")
        return biases

    def _bias_of(self, name: str, axis: int) -> str:
        """The bias of the linear whose weight has this name, stored in the same shape as in the model."""
        weight, prefix = self.parameters[name], name.rpartition(".")[0]
        siblings = []
        for other, p in self.parameters.items():
            beside = other.rpartition(".")[0] == prefix and p.ndim == 1 and weight.ndim == 2
            if beside and len(p) == weight.shape[1 - axis]:
                siblings.append(other)
        if len(siblings) != 1:
            raise _Stays(f"{name}, which reads it, has no bias to take the norm's")
        for tensor in (siblings[0], name):
            keys = self.keys.of(tensor)
            if len(keys) != 1 or self.keys.saved[keys[0]].shape != self.keys.shapes[tensor]:
                raise _Stays(f"{siblings[0]} is stored in another shape")
        return siblings[0]
