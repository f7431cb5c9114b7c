"""Converted checkpoints: their LayerNorms run the RMSNorm that config.json records,
while that is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from accelerate.utils import align_module_device, has_offloaded_params
from torch.nn import Module

from ..ops.launches import TENSOR_TYPES
from .record import (
    RECORD_KEY,
    TRAINED_AS_RMS,
    VERSION,
    centred_by,
    check_centring,
    explain_missing,
    is_centred,
    matching,
    trained_as_rms,
)

STAYS = "stays the LayerNorm that it is: "
MEAN = (
    "no longer has zero mean along the residual stream: it was trained, or is in "
    'another dtype than it is stored in (load it with dtype="auto")'
)
# Modules of hooks that move tensors and do not change their values.
_HARMLESS = ("transformers.", "torch.distributed.", "hf_rmsnorm.")


class Part(NamedTuple):
    """A parameter that has to be centred; names are the model's own."""

    name: str
    how: dict  # the arguments of `centre_`
    weight: str  # the residual weight that it is, or is added to


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
    def parts(self) -> list[Part]:
        """The residual weights, and what adapters add to them; of all adapters, as
        others may become active later.

        Raises:
            ValueError: one may add a mean in another way; a residual weight is missing;
                or the record is of another version.
        """
        version = self.record.get("version")
        if version != VERSION:
            raise ValueError(
                f"the record has version {version}, this package reads version "
                f"{VERSION}: install the release that wrote it"
            )
        named = self.model.named_parameters(remove_duplicate=False)
        names = {self.head + name: name for name, _ in named}
        parts = []
        weights = {}
        for name, how, weight in centred_by(self.record, names):
            weights.setdefault(weight, names[name])
            parts.append(Part(names[name], how, weight))
        if missing := explain_missing(self.record, weights):
            raise ValueError(missing)
        return [part._replace(weight=weights[part.weight]) for part in parts]

    @cached_property
    def why_not(self) -> str:
        """That the record cannot be followed, and why; "" if it can."""
        if self.followed:
            return ""
        try:
            why_not = self.in_the_way() or self.moved()
        except ValueError as error:
            why_not = str(error)
        return why_not and f"{STAYS}{why_not}"

    def moved(self) -> str:
        """Why the residual weights, or the parameters that adapters add to them, are
        not centred; "" if all are.
        """
        if not self.record["residual_weights"]:
            return "its record names nothing that writes to the residual stream; convert the original again"
        for part in self.parts:
            module = self._module_of(part.name)
            parameter = self.model.get_parameter(part.name)
            is_lost = type(parameter) not in TENSOR_TYPES or not parameter.numel()
            if parameter.is_meta:
                is_lost = not has_offloaded_params(module)
            if is_lost:
                return (
                    f"{part.name} is not here whole; patch once the weights are loaded"
                )
            dtype = self.model.get_parameter(part.weight).dtype  # in which it writes
            with align_module_device(module):  # of a weight that is on a disk
                tensor = self.model.get_parameter(part.name).to(dtype)
            if not is_centred(tensor, **part.how):
                why = MEAN if tensor.isfinite().all() else "holds NaN or infinity"
                cure = "; merge the adapter, and convert the merged model"
                return f"{self.head}{part.name} {why}{cure if part.name != part.weight else ''}"
        return ""

    def _module_of(self, name: str) -> Module:
        return self.model.get_submodule(name.rpartition(".")[0])

    def in_the_way(self) -> str:
        """Why something besides the weights may give the residual stream a mean: a hook
        on what writes to it, or a module around the converted model; "" if nothing may.
        """
        for part in self.parts:
            module = self._module_of(part.name)
            hooks = {**module._forward_hooks, **module._forward_pre_hooks}
            for hook in hooks.values():
                if not str(hook.__module__).startswith(_HARMLESS):
                    what = f"{part.name.rpartition('.')[0]} has a hook"
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
        ValueError: the record is not one that this package writes.
    """
    for path, module in model.named_modules():
        record = _record_of(module)
        if not isinstance(record, dict) or "rms_norms" not in record:
            continue
        try:
            recorded = _read(model, path, module, record)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{RECORD_KEY} in the config of this {type(module).__name__} is no "
                "record that this package reads: convert the original again, or take "
                f"{RECORD_KEY} out"
            ) from error
        if recorded is not None:
            return recorded
    return None


def _read(outer: Module, path: str, model: Module, record: dict) -> Recorded | None:
    """A model with its record; None if it has none of the recorded norms."""
    weights = record.get("residual_weights") or {}
    for how in weights.values():
        check_centring(**how)
    # A checkpoint saved with a head may be loaded without it, and the names then lack
    # the head's prefix.
    for head in ("", f"{getattr(model, 'base_model_prefix', '')}."):
        paths = {head + inner: inner for inner, _ in model.named_modules()}
        norms = matching(record["rms_norms"], paths)
        if norms:
            before = f"{path}." if path else ""
            eps = {}
            for name, how in norms.items():
                eps[before + paths[name]] = how["eps"] + 0.0
            record = {**record, "residual_weights": weights}
            return Recorded(outer, model, head, record, eps)
    return None


def _record_of(module: Module):
    config = getattr(module, "config", None)
    return getattr(config, RECORD_KEY, None)
