"""Converted checkpoints: their LayerNorms run the RMSNorm that config.json records,
while that is the same.
"""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from functools import cached_property

import torch
from accelerate.utils import align_module_device, has_offloaded_params
from torch import Tensor
from torch.nn import Module

from ..ops.launches import TENSOR_TYPES
from .record import (
    RECORD_KEY,
    TRAINED_AS_RMS,
    ResidualWeights,
    explain_malformed,
    explain_violation,
    matching,
    own_names,
    trained_as_rms,
)

STAYS = "stays the LayerNorm that it is: "
# Modules of hooks that move tensors and do not change their values.
_HARMLESS = ("transformers.", "torch.distributed.", "hf_rmsnorm.")


class Weights(UserDict):
    """Parameters of a model by the names of a record; one that accelerate keeps on a
    disk is read when it is asked for. `data`: name -> the model's own name.
    """

    def __init__(self, model: Module, names: dict[str, str]):
        self.model = model
        super().__init__(names)

    def module_of(self, name: str) -> Module:
        return self.model.get_submodule(self.data[name].rpartition(".")[0])

    def parameter(self, name: str) -> torch.nn.Parameter:
        """A parameter as the model holds it."""
        return self.model.get_parameter(self.data[name])

    def __getitem__(self, name: str) -> Tensor:
        with align_module_device(self.module_of(name)):
            return self.parameter(name)


@dataclass(frozen=True)
class Recorded:
    """A model with the record of its conversion.

    Attributes:
        outer: the model that was searched; `model` is it, or inside of it.
        head: prefix of the record's names before the model's own.
        norms: module path in `outer` -> eps, of each LayerNorm that is recorded as an
            RMSNorm.
    """

    outer: Module
    model: Module
    head: str
    record: dict
    norms: dict[str, float]

    @property
    def followed(self) -> bool:
        """Whether the norms are RMSNorms whatever the weights are."""
        return self.record.get("computes") == TRAINED_AS_RMS

    @property
    def trained(self) -> bool:
        """Whether training has made the norms RMSNorms."""
        return trained_as_rms(self.record)

    @cached_property
    def weights(self) -> Weights:
        """All parameters of the model, those of adapters included."""
        named = self.model.named_parameters(remove_duplicate=False)
        return Weights(self.model, {self.head + name: name for name, _ in named})

    @cached_property
    def own(self) -> Weights:
        """The parameters that no adapter added, by the names that they have without
        one.
        """
        names = own_names(self.weights)
        own = {new: self.weights.data[old] for old, new in names.items()}
        return Weights(self.model, own)

    @cached_property
    def residual(self) -> ResidualWeights:
        """The own parameters that write to the residual stream."""
        return ResidualWeights(self.record, self.own)

    def added(self) -> dict[str, tuple[str, dict]]:
        """An adapter's parameter -> (the residual weight that it is added to, how to
        centre the parameter); of all adapters, as others may become active later.

        Raises:
            ValueError: one may add a mean in another way.
        """
        own = self.own.data.values()
        added = {}
        for name, inner in self.weights.data.items():
            if inner not in own:
                added[name] = self.residual.changed_by(name)
        return {name: change for name, change in added.items() if change}

    def to_centre(self) -> list[tuple[str, dict]]:
        """(the model's name of a parameter, how to centre it), of residual weights and
        of what adapters add to them.
        """
        own = [(self.own.data[name], how) for name, how in self.residual.how.items()]
        added = self.added().items()
        return own + [(self.weights.data[name], how) for name, (_, how) in added]

    @cached_property
    def why_not(self) -> str:
        """That the record cannot be followed, and why; "" if it can."""
        if self.followed:
            return ""
        try:
            why_not = self.not_here() or self.in_the_way() or self.moved()
        except ValueError as error:
            why_not = str(error)
        return why_not and f"{STAYS}{why_not}"

    def not_here(self) -> str:
        """That a parameter is not here whole; "" if all are."""
        for name in self.weights:
            tensor = self.weights.parameter(name)
            is_lost = type(tensor) not in TENSOR_TYPES or not tensor.numel()
            if tensor.is_meta:
                is_lost = not has_offloaded_params(self.weights.module_of(name))
            if is_lost:
                return f"{name} is not here whole; patch once the weights are loaded"
        return ""

    def moved(self) -> str:
        """Why the residual weights, or the parameters that adapters add to them, are
        not centred; "" if all are.
        """
        if not self.record["residual_weights"]:
            return "its record names nothing that writes to the residual stream; convert the original again"
        why_not = explain_violation(self.own, self.record)
        if why_not:
            return why_not
        parameters = {}
        residual_weights = {}
        for name, (weight, how) in self.added().items():
            dtype = self.own[weight].dtype  # in which it writes
            parameters[name] = self.weights[name].to(dtype)
            residual_weights[name] = how
        record = {**self.record, "residual_weights": residual_weights}
        why_not = explain_violation(parameters, record)
        return why_not and f"{why_not}; merge the adapter, and convert the merged model"

    def in_the_way(self) -> str:
        """Why something besides the weights may give the residual stream a mean: a hook
        on what writes to it, or a module around the converted model; "" if nothing may.
        """
        for name in self.residual.how:
            module = self.own.module_of(name)
            hooks = {**module._forward_hooks, **module._forward_pre_hooks}
            for hook in hooks.values():
                if not str(hook.__module__).startswith(_HARMLESS):
                    what = f"{name.rpartition('.')[0]} has a hook"
                    return f"{what}, which may change what it writes to the residual stream"
        inside = {id(parameter) for parameter in self._with_head().parameters()}
        for name, parameter in self.outer.named_parameters():
            if id(parameter) not in inside:
                what = f"{name} is outside of the {type(self.model).__name__} that was converted"
                may = "and may write to its residual stream"
                return f"{what} {may}; where it does not, patch that model by itself"
        return ""

    def _with_head(self) -> Module:
        """The converted model with its head: the first of this record by its own class.
        A wrapper, of PEFT say, may only pass the record on.
        """
        for module in self.outer.modules():
            is_model = hasattr(type(module), "base_model_prefix")
            if is_model and _record_of(module) == _record_of(self.model):
                return module
        return self.model


def conversion_of(model: Module) -> Recorded | None:
    """The conversion that the model's config, or that of a model inside it, records;
    None if there is none.

    Raises:
        ValueError: the record is not one that a conversion writes.
    """
    for path, module in model.named_modules():
        record = _record_of(module)
        if not isinstance(record, dict) or "rms_norms" not in record:
            continue
        record = {**record, "residual_weights": record.get("residual_weights") or {}}
        if malformed := explain_malformed(record):
            raise ValueError(f"{type(module).__name__}: {malformed}")
        # A checkpoint saved with a head may be loaded without it, and the names then
        # lack the head's prefix.
        for head in ("", f"{getattr(module, 'base_model_prefix', '')}."):
            paths = {head + inner: inner for inner, _ in module.named_modules()}
            norms = matching(record["rms_norms"], paths)
            if norms:
                before = f"{path}." if path else ""
                eps = {}
                for name, how in norms.items():
                    eps[before + paths[name]] = how["eps"]
                return Recorded(model, module, head, record, eps)
    return None


def _record_of(module: Module):
    config = getattr(module, "config", None)
    return getattr(config, RECORD_KEY, None)
