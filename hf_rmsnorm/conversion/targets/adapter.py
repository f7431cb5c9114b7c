"""`convert_adapter`: a LoRA adapter goes with its base, so that the converted pair computes what the pair did."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path

import torch

from ...record import RECORD_KEY, Writers
from ..checkpoint.recipe import make_job
from ..checkpoint.shards import read_factors
from ..checkpoint.source import ADAPTER_FILES, FLOATS, ConversionError, Source, open_source
from ..checkpoint.staging import clear_errors
from ..checkpoint.stream import Result, carry_out
from ..judge.folder import Verification, not_centred
from ..judge.pair import fits_memory, side_by_side
from ..judge.publish import Judged, add_to_card, provenance
from ..plan import Centre, ConversionPlan, ConversionRefused, Scale
from ..twin.keys import KeyMap
from ..twin.twin import Twin, make_twin
from .centred import CARD_HEADING
from .fold import FOLDED

PLAN = "conversion_plan.json"
MERGE = "merge it into the base, and convert that"
PREFIX = "base_model.model."  # of every name in the file of an adapter
# What PEFT computes anew from the base's weights when it loads such an adapter, and takes off them.
OF_THE_BASE = ("pissa", "corda", "olora", "loftq")


@dataclass(frozen=True)
class ConvertedAdapter:
    """What `convert_adapter` did: what was written, and how it was verified."""

    result: Result
    verification: Verification

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        result = self.result
        return {
            "dst": str(result.dst),
            "tensors": result.tensors,
            "changed": list(result.changed),
            "not_copied": list(result.not_copied),
            "verification": self.verification.to_dict(),
        }

    def __str__(self) -> str:
        result = self.result
        return f"{result.dst}: {result.tensors} tensors, {len(result.changed)} changed\n{self.verification}"


def convert_adapter(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    *,
    base: str | os.PathLike,
    converted: str | os.PathLike,
    trust_remote_code: bool = False,
    model_class=None,
    inputs=None,
    prompts: list[str] | None = None,
    verify: bool = True,
    allow_pickle: bool = False,
    restart: bool = False,
) -> ConvertedAdapter:
    """Convert a LoRA adapter of PEFT that was trained on a checkpoint which `convert_checkpoint` has converted.

    LoRA adds ``B A x`` to what a linear computes. Where that writes to the residual stream, B is centred along its
    output as the weight was; full tensors that the adapter brings are centred like those they stand in for. `converted`
    with the result gives the logits of `base` with `src`, and `patch_model` runs both as RMSNorm.

    Args:
        src: a folder with adapter_config.json and adapter_model.safetensors; it is only read.
        dst: the folder to make, as in `convert_checkpoint`. Its adapter_config.json names `converted` as base.
        base: the folder of the model that the adapter was trained on.
        converted: what `convert_checkpoint` made of `base`.
        model_class: the class that the adapter was trained on, where it is not the one that the base's config names.
        trust_remote_code, inputs, prompts, allow_pickle, restart: as in `convert_checkpoint`.
        verify: run both pairs through PEFT, where it is installed, and publish only what passes.

    Raises:
        ConversionRefused: the adapter cannot be converted exactly; the message says which tensor and why.
        ConversionError: source or destination do not allow it; the message says what to do. DST does not exist then.
        VerificationFailed: what was written does not pass; it stays unpublished, beside a report.
    """
    with clear_errors(Path(src)):
        twin = make_twin(base, trust_remote_code=trust_remote_code, model_class=model_class, inputs=inputs)
        plan, factors = _plan(src, base, converted, twin, allow_pickle)

    def judge(folder: Path) -> Verification:
        if wrong := not_centred(folder, plan):
            return Verification(False, wrong)
        tensors = f"{len(plan.centre)} centred tensors read again"
        peft_there, fits = find_spec("peft") is not None, fits_memory(Path(base))
        if not (verify and peft_there and fits):
            why = "as asked" if not verify else "as memory does not hold them" if peft_there else "which needs PEFT"
            return Verification(True, f"{tensors}; the pairs were not run, {why}")
        from peft import PeftModel

        how = {"trust_remote_code": trust_remote_code, "model_class": model_class, "inputs": inputs, "prompts": prompts}
        with side_by_side(base, Path(converted), **how) as pair:
            for model, adapter in ((pair.source, src), (pair.result, folder)):
                PeftModel.from_pretrained(model, adapter).eval()  # which changes the model itself
            runs = {"as LayerNorm": pair.judge()[0], "as RMSNorm": pair.judge_as_rms()[0]}
        passed = all(figures["verdict"] == "PASS" for figures in runs.values())
        return Verification(passed, f"{tensors}; both pairs run side by side: {'PASS' if passed else 'FAIL'}", runs)

    made = {**provenance(src), "base": provenance(base)["source"]}

    def describe(folder: Path, verdict: Verification) -> None:
        what = f"{len(plan.centre)} tensors were centred, as those of the base that they change were."
        add_to_card(folder, CARD_HEADING, f"{what}\n\n```\n{verdict}\n```\n", made)

    judged = Judged(dst, judge, describe)
    result = carry_out(
        plan, src, dst, metadata={RECORD_KEY: json.dumps(made, sort_keys=True)}, allow_pickle=allow_pickle,
        check=judged.check, restart=restart, adapter=True, factors=factors,
    )  # fmt: skip
    return ConvertedAdapter(result, judged.verification)


def _plan(src, base, converted, twin: Twin, allow_pickle: bool) -> tuple[ConversionPlan, dict[str, torch.Tensor]]:
    """What is done to the adapter's tensors, and the layer scales of the base that it takes."""
    source = open_source(src, allow_pickle=allow_pickle, adapter=True)
    if more := [name for name in source.others if os.path.basename(name) == ADAPTER_FILES[0]]:
        raise ConversionError(f"{src}: holds another adapter too, {more[0]}: give each a folder of its own")
    model = open_source(base, allow_pickle=allow_pickle)
    done = _plan_of_base(model, Path(converted))
    scales = read_factors(make_job(done, model))
    tied = {key: copy.source for copy in done.copy for key in (copy.key, copy.source)}
    stored = model.tensors.keys() | tied.keys()
    prefix, who = f"{twin.model.base_model_prefix}.", f"{src} ({source.config.get('peft_type')})"
    rename, writers = _writers(done, twin, prefix)
    names = {rename(name): name for name in twin.shapes}
    shapes = {name: twin.shapes[parameter] for name, parameter in names.items()}
    keys = KeyMap(twin.model)
    centre, scale = [], []
    for name in source.tensors:
        path = rename(name.removeprefix(PREFIX))
        home = writers.home(path)
        if not home or not _fits(source, name, home, shapes):
            what = f"fits no tensor of {twin.name} in {base}"
            raise ConversionRefused(f"{who}: {name} {what}: pass the base, and the model_class, that it was trained on")
        try:
            change = writers.changed_by(path)
        except ValueError as error:
            why = ", as DoRA scales by the norm of the weight" if "lora_magnitude" in name else ""
            raise ConversionRefused(f"{who}: {error}{why}: {MERGE}") from error
        whole = home in shapes
        own = home if whole else f"{home}.weight"
        saved = [k for key in keys.of(names.get(own)) for k in (key, key.removeprefix(prefix), prefix + key)]
        key = next((k for k in saved if k in stored), None)
        if whole and key in scales:
            raise ConversionRefused(f"{who}: {name} is a layer scale, which the converted base has folded away")
        if whole and key in tied and not _is_copy(name, source.config):
            _check_equal(who, source, name, model, tied[key])
        if change is None:
            continue
        if key in model.tensors and _eps(source, name) > _eps(model, key):
            finer = f"is stored in a narrower dtype than {key}, so that its rounding leaves more of a mean"
            raise ConversionRefused(f"{who}: {name} {finer}: save the adapter in the dtype of the base")
        how = change[1]
        blocks = how["blocks"]
        centre.append(Centre(name, how["axis"], how["block"], None if blocks is None else tuple(blocks)))
        scale += [Scale(name, how["axis"], s.by) for s in done.scale if s.key == key]
    _check_config(who, source.config, bool(centre), bool(tied))
    settings = {"base_model_name_or_path": os.fspath(converted), "revision": None}
    return ConversionPlan(tuple(centre), tuple(scale), config=settings), {s.by: scales[s.by] for s in scale}


def _plan_of_base(model: Source, converted: Path) -> ConversionPlan:
    if (converted / PLAN).is_file():
        plan = ConversionPlan.from_json((converted / PLAN).read_text(encoding="utf-8"))
        made = open_source(converted)
        record = made.config.get(RECORD_KEY) or {}
        # What was made of a converted checkpoint has its plan too, but other tensors that read the norms.
        folded = any(FOLDED in (shard.metadata or {}) for shard in made.shards)
        whole = made.tensors.keys() == model.tensors.keys() | {copy.key for copy in plan.copy}
        if whole and not folded and record.get("writers") == plan.config[RECORD_KEY]["writers"]:
            return plan
    raise ConversionError(
        f"{converted}: not what an adapter of {model.folder} goes with: pass the folder that `hf-rmsnorm convert "
        f"{model.folder} CONVERTED` wrote; native, folded and post-norm conversions take no adapters"
    )


def _writers(done: ConversionPlan, twin: Twin, prefix: str) -> tuple[Callable[[str], str], Writers]:
    """What names of the twin's class are called in the record, and the record's writers."""
    # A checkpoint saved with a head may be used without, or the reverse: then a prefix is missing or too much.
    for rename in (str, lambda name: prefix + name, lambda name: name.removeprefix(prefix)):
        writers = Writers(done.config[RECORD_KEY], map(rename, twin.shapes))
        if writers.how:
            return rename, writers
    raise ConversionRefused(f"{twin.name} has none of the tensors that write to the stream of the converted base")


def _fits(source: Source, name: str, home: str, shapes: dict) -> bool:
    """Whether a full tensor has the shape of the one at `home`, or B of LoRA and its A those of the weight there."""
    shape, weight = source.tensors[name][1].shape, shapes.get(f"{home}.weight")
    if home in shapes:
        return tuple(shape) == tuple(shapes[home])
    other = re.sub(r"lora_(embedding_)?B", r"lora_\1A", name)
    if weight is None or name.endswith(".bias") or other == name:
        return True
    if other not in source.tensors:
        return False
    a = source.tensors[other][1].shape
    # Which axis of the weight is its output is known of a writer; a square one may be stored either way.
    sizes = [(weight[axis], prod(weight) // weight[axis]) for axis in (0, 1)[: len(weight)]]
    return (shape[0], prod(a[1:])) in sizes and prod(shape[1:]) == a[0]


def _eps(source: Source, name: str) -> float:
    dtype = FLOATS.get(source.tensors[name][1].dtype)
    return torch.finfo(dtype).eps if dtype else 0.0


def _is_copy(name: str, config: dict) -> bool:
    """Whether a full tensor is the trained copy of a module, and so leaves what is tied to that module as it was."""
    saved = config.get("modules_to_save") or ()
    return ".base_layer." not in name and any(f".{module}." in f".{name}" for module in saved)


def _check_equal(who: str, source: Source, name: str, model: Source, key: str) -> None:
    """Tied embeddings that the adapter only repeats are the head's too; others would be the embeddings' alone."""
    values = []
    for shard, tensor in (source.tensors[name], model.tensors[key]):
        with shard.reading() as read:
            values.append(torch.frombuffer(read(tensor, 0, tensor.nbytes), dtype=FLOATS[tensor.dtype]).double())
    if not torch.equal(*values):
        untied = "changes tied embeddings, which the converted base has untied"
        raise ConversionRefused(f"{who}: {name} {untied}: {MERGE}")


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
