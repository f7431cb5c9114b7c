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
from ..judge.folder import SNAPSHOT, Verification, add_to_card, not_centred, provenance
from ..judge.pair import fits_memory, side_by_side
from ..plan import Centre, CentringPlan, ConversionError, ConversionRefused
from ..planned import planned_tensors
from ..tensors import Centring, Scaling, Stored, constant
from ..twin.keys import KeyMap
from ..twin.twin import Twin
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

    def judge(self, src, folder, how):
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
            runs = {"as LayerNorm": pair.judge()[0], "as RMSNorm": pair.judge_as_rms()[0]}
            return Verification.of(runs, f"{tensors}; both pairs run {pair.run_on}"), self

    def describe(self, folder: Path, verdict: Verification) -> None:
        add_to_card(folder, CARD_HEADING, str(self), self.made, verdict)


def plan_adapter(src, base, converted, twin: Twin, *, allow_pickle: bool = False) -> PlannedAdapter:
    """What is done to an adapter that goes with its base, whose twin is given; the rest is as in `convert_adapter`."""
    own = open_checkpoint(src, allow_pickle=allow_pickle, adapter=True)
    model = open_checkpoint(base, allow_pickle=allow_pickle)
    centring, factors = _plan(own, model, converted, twin)
    made = {**provenance(src), "base": provenance(base)["source"]}
    return PlannedAdapter(made, centring, Path(base), Path(converted), factors)


def _plan(own: Checkpoint, model: Checkpoint, converted, twin: Twin) -> tuple[CentringPlan, dict[str, torch.Tensor]]:
    """What is done to the adapter's tensors, and the layer scales of the base that they take in."""
    src = own.folder
    if more := [name for name in own.others if os.path.basename(name) == ADAPTER_CONFIG]:
        raise ConversionError(f"{src}: holds another adapter too, {more[0]}: give each a folder of its own")
    done = _plan_of_base(model, Path(converted))
    planned_tensors(done, model, model.folder)  # whether it is of this base
    tied = {key: copy.source for copy in done.copy for key in (copy.key, copy.source)}
    stored = model.tensors.keys() | tied.keys()
    prefix, who = f"{twin.model.base_model_prefix}.", f"{src} ({own.config.get('peft_type')})"
    rename, writers = _writers(done, twin, prefix)
    names = {rename(name): name for name in twin.shapes}
    shapes = {name: twin.shapes[parameter] for name, parameter in names.items()}
    keys = KeyMap(twin.model)
    centre: list[Centre] = []
    factors: dict[str, torch.Tensor] = {}
    for name in own.tensors:
        path = rename(name.removeprefix(PREFIX))
        home = writers.home(path)
        if not home or not _fits(own, name, home, shapes):
            what = f"fits no tensor of {twin.name} in {model.folder}"
            raise ConversionRefused(f"{who}: {name} {what}: pass the base, and the model_class, that it was trained on")
        try:
            change = writers.changed_by(path)
        except ValueError as error:
            why = ", as DoRA scales by the norm of the weight" if "lora_magnitude" in name else ""
            raise ConversionRefused(f"{who}: {error}{why}: {MERGE}") from error
        whole = home in shapes
        parameter = names.get(home if whole else f"{home}.weight")
        saved = [k for key in keys.of(parameter) for k in (key, key.removeprefix(prefix), prefix + key)]
        key = next((k for k in saved if k in stored), None)
        if whole and key in {scale.by for scale in done.scale}:
            raise ConversionRefused(f"{who}: {name} is a layer scale, which the converted base has folded away")
        copies = own.config.get("modules_to_save") or ()  # which leave what is tied to the modules as it was
        copied = ".base_layer." not in name and any(f".{module}." in f".{name}" for module in copies)
        # Tied embeddings that the adapter only repeats are the head's too; others would be the embeddings' alone.
        shared = whole and key in tied and not copied
        if shared and not torch.equal(Stored(name).wide(own), Stored(tied[key]).wide(model)):
            untied = "changes tied embeddings, which the converted base has untied"
            raise ConversionRefused(f"{who}: {name} {untied}: {MERGE}")
        if change is None:
            continue
        if key in model.tensors and _eps(own, name) > _eps(model, key):
            finer = f"is stored in a narrower dtype than {key}, so that its rounding leaves more of a mean"
            raise ConversionRefused(f"{who}: {name} {finer}: save the adapter in the dtype of the base")
        how = change[1]
        blocks = how["blocks"]
        centre.append(Centre(name, how["axis"], how["block"], None if blocks is None else tuple(blocks)))
        factors.update((name, Stored(s.by).wide(model)) for s in done.scale if s.key == key)
    _check_config(who, own.config, bool(centre), bool(tied))
    hub = SNAPSHOT.search(Path(os.path.realpath(converted)).as_posix())
    name = hub["id"].replace("--", "/") if hub else os.fspath(converted)
    settings = {"base_model_name_or_path": name, "revision": hub and hub["commit"]}
    return CentringPlan(tuple(centre), config=settings), factors


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


def _writers(done: CentringPlan, twin: Twin, prefix: str) -> tuple[Callable[[str], str], ResidualWeights]:
    """What names of the twin's class are called in the record, and the record's writers."""
    # A checkpoint saved with a head may be used without, or the reverse: then a prefix is missing or too much.
    for rename in (str, lambda name: prefix + name, lambda name: name.removeprefix(prefix)):
        writers = ResidualWeights(done.config[RECORD_KEY], map(rename, twin.shapes))
        if writers.how:
            return rename, writers
    raise ConversionRefused(f"{twin.name} has none of the tensors that write to the stream of the converted base")


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
    # Which axis of the weight is its output is known of a writer; a square one may be stored either way.
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
