"""`convert_adapter`: a LoRA adapter goes with its base, so that the converted pair computes what the pair did."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from pathlib import Path

import torch

from ...record import RECORD_KEY, ResidualWeights
from ..checkpoint.source import FLOATS, Checkpoint, open_checkpoint
from ..folders import ADAPTER_CONFIG
from ..plan import Centre, CentringPlan, ConversionError, ConversionRefused
from ..planned import planned_tensors
from ..proxy.keys import KeyMap
from ..proxy.model import ProxyModel
from ..tensors import Centring, Scaling, Stored, constant
from ..verify.folder import SNAPSHOT, Verification, add_to_card, not_centred, provenance
from ..verify.pair import fits_memory, side_by_side
from .centred import CARD_HEADING, PLAN, PlannedSteps
from .fold import FOLDED

MERGE = "merge it into the base, and convert that"
PREFIX = "base_model.model."  # of every name in the file of an adapter
# What PEFT computes anew from the base's weights when it loads such an adapter, and takes off them.
OF_THE_BASE = ("pissa", "corda", "olora", "loftq")


@dataclass(frozen=True)
class PlannedAdapter(PlannedSteps):
    """What is done to the tensors of an adapter."""

    base: Path
    converted: Path
    factors: dict[str, torch.Tensor] = field(repr=False)  # tensor -> layer scale of the base that it takes in

    def __str__(self) -> str:
        return f"{len(self.centring.centre)} tensors centred, as those of the base that they change were."

    def tensors(self, source):
        made = super().tensors(source)
        for step in self.centring.centre:
            if step.key in self.factors:
                scaling = Scaling(step.axis, constant(self.factors[step.key]))
                made[step.key] = Stored(step.key, steps=(scaling, Centring(step.axis, step.block, step.blocks)))
        return made

    def verify(self, src, folder, how):
        if wrong := not_centred(folder, self.centring):
            return Verification(False, wrong), self
        tensors = f"{len(self.centring.centre)} changed tensors checked on disk"
        peft_there, fits = find_spec("peft") is not None, fits_memory(self.base)
        if not (how.verify and peft_there and fits):
            why = "as asked" if not how.verify else "as memory does not hold them" if peft_there else "which needs PEFT"
            return Verification(True, f"{tensors}; the pairs were not run, {why}"), self
        from peft import PeftModel

        with side_by_side(self.base, self.converted, how) as pair:
            for model, adapter in ((pair.source, src), (pair.result, folder)):
                PeftModel.from_pretrained(model, adapter).eval()  # which changes the model itself
            runs = {"as LayerNorm": pair.compare()[0], "as RMSNorm": pair.compare_as_rms()[0]}
            return Verification.of(runs, f"{tensors}; both pairs run {pair.run_on}"), self

    def describe(self, folder: Path, verdict: Verification) -> None:
        add_to_card(folder, CARD_HEADING, str(self), self.made, verdict)


def plan_adapter(src, base, converted, proxy: ProxyModel, *, allow_pickle: bool = False) -> PlannedAdapter:
    """What is done to an adapter that goes with its base, whose proxy is given; the rest is as in `convert_adapter`."""
    adapter = open_checkpoint(src, allow_pickle=allow_pickle, adapter=True)
    if more := [name for name in adapter.others if os.path.basename(name) == ADAPTER_CONFIG]:
        raise ConversionError(f"{adapter.folder}: holds another adapter too, {more[0]}: give each a folder of its own")
    model = open_checkpoint(base, allow_pickle=allow_pickle)
    planner = _Planner(adapter, model, Path(converted), proxy)
    centring, factors = planner.plan()
    made = {**provenance(src), "base": provenance(base)["source"]}
    return PlannedAdapter(made, centring, Path(base), Path(converted), factors)


class _Planner:
    """Says of each tensor of an adapter what is done to it; refuses what is not exact."""

    def __init__(self, adapter: Checkpoint, model: Checkpoint, converted: Path, proxy: ProxyModel):
        self.adapter, self.model, self.converted, self.proxy = adapter, model, converted, proxy
        self.done = _plan_of_base(model, converted)
        planned_tensors(self.done, model, model.folder)  # whether it is of this base
        self.who = f"{adapter.folder} ({adapter.config.get('peft_type')})"
        self.tied = {key: copy.source for copy in self.done.copy for key in (copy.key, copy.source)}
        self.prefix = f"{proxy.model.base_model_prefix}."
        self.rename, self.residual_weights = _named_as_recorded(self.done, proxy, self.prefix)
        self.parameters = {self.rename(name): name for name in proxy.shapes}
        self.shapes = {name: proxy.shapes[parameter] for name, parameter in self.parameters.items()}
        self.keys = KeyMap(proxy.model)

    def plan(self) -> tuple[CentringPlan, dict[str, torch.Tensor]]:
        """What is done to the adapter's tensors, and the layer scales of the base that they take in."""
        centre: list[Centre] = []
        factors: dict[str, torch.Tensor] = {}
        for name in self.adapter.tensors:
            home, change = self._change(name)
            key = self._key_of(home)
            if home in self.shapes:
                self._check_whole(name, key)
            if change is None:
                continue
            self._check_dtype(name, key)
            blocks = change["blocks"]
            centre.append(Centre(name, change["axis"], change["block"], None if blocks is None else tuple(blocks)))
            for scale in self.done.scale:
                if scale.key == key:
                    factors[name] = Stored(scale.by).wide(self.model)
        _check_config(self.who, self.adapter.config, bool(centre), bool(self.tied))
        return CentringPlan(tuple(centre), config=self._settings()), factors

    def _change(self, name: str) -> tuple[str, dict | None]:
        """(what a tensor is added to or stands in for, axis, block and blocks to centre it along, if it is to be)."""
        path = self.rename(name.removeprefix(PREFIX))
        home = self.residual_weights.home(path)
        if not home or not _fits(self.adapter, name, home, self.shapes):
            what = f"fits no tensor of {self.proxy.name} in {self.model.folder}"
            cure = "pass the base, and the model_class, that it was trained on"
            raise ConversionRefused(f"{self.who}: {name} {what}: {cure}")
        try:
            change = self.residual_weights.changed_by(path)
        except ValueError as error:
            why = ", as DoRA scales by the norm of the weight" if "lora_magnitude" in name else ""
            raise ConversionRefused(f"{self.who}: {error}{why}: {MERGE}") from error
        return home, None if change is None else change[1]

    def _key_of(self, home: str) -> str | None:
        """The tensor of the base that holds a parameter, or the weight of a module."""
        parameter = self.parameters.get(home if home in self.shapes else f"{home}.weight")
        stored = self.model.tensors.keys() | self.tied.keys()
        for key in self.keys.of(parameter):
            for name in (key, key.removeprefix(self.prefix), self.prefix + key):
                if name in stored:
                    return name
        return None

    def _check_whole(self, name: str, key: str | None) -> None:
        """Refuse a full tensor that replaces a folded layer scale, or one half of what was tied."""
        if key in {scale.by for scale in self.done.scale}:
            raise ConversionRefused(f"{self.who}: {name} is a layer scale, which the converted base has folded away")
        modules = self.adapter.config.get("modules_to_save") or ()  # which leave what is tied to them as it was
        copied = ".base_layer." not in name and any(f".{module}." in f".{name}" for module in modules)
        if copied or key not in self.tied:
            return
        # Tied embeddings that the adapter only repeats are the head's too; others would be the embeddings' alone.
        if not torch.equal(Stored(name).wide(self.adapter), Stored(self.tied[key]).wide(self.model)):
            untied = "changes tied embeddings, which the converted base has untied"
            raise ConversionRefused(f"{self.who}: {name} {untied}: {MERGE}")

    def _check_dtype(self, name: str, key: str | None) -> None:
        if key in self.model.tensors and _eps(self.adapter, name) > _eps(self.model, key):
            finer = f"is stored in a narrower dtype than {key}, so that its rounding leaves more of a mean"
            raise ConversionRefused(f"{self.who}: {name} {finer}: save the adapter in the dtype of the base")

    def _settings(self) -> dict:
        """Of adapter_config.json: which base it goes with."""
        hub = SNAPSHOT.search(Path(os.path.realpath(self.converted)).as_posix())
        name = hub["id"].replace("--", "/") if hub else os.fspath(self.converted)
        return {"base_model_name_or_path": name, "revision": hub and hub["commit"]}


def _plan_of_base(model: Checkpoint, converted: Path) -> CentringPlan:
    if (converted / PLAN).is_file():
        plan = CentringPlan.from_json((converted / PLAN).read_text(encoding="utf-8"))
        made = open_checkpoint(converted)
        record = made.config.get(RECORD_KEY) or {}
        # What was made of a converted checkpoint has its plan too, but other tensors that read the norms.
        folded = any(FOLDED in metadata for metadata in made.metadata.values())
        whole = made.tensors.keys() == model.tensors.keys() | {copy.key for copy in plan.copy}
        if whole and not folded and record.get("residual_weights") == plan.config[RECORD_KEY]["residual_weights"]:
            return plan
    cure = "pass what converting it with no other options gave; native and folded results take no adapters"
    raise ConversionError(f"{converted}: no conversion of {model.folder} that takes its adapters: {cure}")


def _named_as_recorded(
    done: CentringPlan, proxy: ProxyModel, prefix: str
) -> tuple[Callable[[str], str], ResidualWeights]:
    """What names of the proxy's class are called in the record, and the record's residual weights."""
    # A checkpoint saved with a head may be used without, or the reverse: then a prefix is missing or too much.
    for rename in (str, lambda name: prefix + name, lambda name: name.removeprefix(prefix)):
        residual_weights = ResidualWeights(done.config[RECORD_KEY], map(rename, proxy.shapes))
        if residual_weights.how:
            return rename, residual_weights
    raise ConversionRefused(f"{proxy.name} has none of the tensors that write to the stream of the converted base")


def _fits(own: Checkpoint, name: str, home: str, shapes: dict) -> bool:
    """Whether a full tensor has the shape of the one at `home`, or B of LoRA and its A those of the weight there."""
    shape, weight = own.tensors[name].shape, shapes.get(f"{home}.weight")
    if home in shapes:
        return tuple(shape) == tuple(shapes[home])
    other = re.sub(r"lora_(embedding_)?B", r"lora_\1A", name)
    if weight is None or name.endswith(".bias") or other == name:
        return True
    if other not in own.tensors:
        return False
    a = own.tensors[other].shape
    # Which axis of the weight is its output is known of a residual weight; a square one may be stored either way.
    sizes = [(weight[axis], prod(weight) // weight[axis]) for axis in (0, 1)[: len(weight)]]
    return (shape[0], prod(a[1:])) in sizes and prod(shape[1:]) == a[0]


def _eps(source: Checkpoint, name: str) -> float:
    dtype = source.tensors[name].dtype
    return torch.finfo(dtype).eps if dtype in FLOATS.values() else 0.0


def _check_config(who: str, config: dict, changed: bool, tied: bool) -> None:
    """Refuse what is not B A x of a base that stays as it is."""
    if changed and config.get("peft_type") != "LORA":
        raise ConversionRefused(f"{who}: it changes what writes to the stream, and is not LoRA: {MERGE}")
    init = str(config.get("init_lora_weights"))
    if changed and init.startswith(OF_THE_BASE):
        raise ConversionRefused(f"{who}: init_lora_weights {init!r} takes apart weights that centring changes: {MERGE}")
    if config.get("ensure_weight_tying") and tied:
        untied = "ensure_weight_tying ties embeddings that the converted base has untied"
        raise ConversionRefused(f"{who}: {untied}: {MERGE}")
