"""`convert_adapter`: convert a LoRA adapter along with its base, so that the pair keeps
its outputs.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
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
from ..verify.folder import SNAPSHOT, Verification, add_to_card, provenance
from ..verify.pair import fits_memory, side_by_side
from .centred import CARD_HEADING, PLAN, PlannedSteps

MERGE = "merge it into the base, and convert that"
PREFIX = "base_model.model."  # of every name in the file of an adapter
# Initialisations for which PEFT subtracts a part of the base's weights when it loads
# the adapter.
OF_THE_BASE = ("pissa", "corda", "olora", "loftq")


@dataclass(frozen=True)
class PlannedAdapter(PlannedSteps):
    """The steps on the tensors of an adapter."""

    base: Path
    converted: Path

    def __str__(self) -> str:
        return f"{len(self.centring.centre)} tensors centred, as those of the base that they change were."

    def verify(self, src, folder, how):
        if why := self._why_not_run(how):
            return Verification(True, f"the pairs were not run, {why}")
        from peft import PeftModel

        with side_by_side(self.base, self.converted, how) as pair:
            for model, adapter in ((pair.source, src), (pair.result, folder)):
                # which changes the model in place
                PeftModel.from_pretrained(model, adapter).eval()
            return Verification.of(pair.compare_both(), f"both pairs run {pair.run_on}")

    def _why_not_run(self, how) -> str:
        if not how.verify:
            return "as asked"
        if find_spec("peft") is None:
            return "which needs PEFT"
        return "" if fits_memory(self.base) else "as memory does not hold them"

    def describe(self, folder: Path, verdict: Verification) -> None:
        add_to_card(folder, CARD_HEADING, str(self), self.made, verdict)


def plan_adapter(
    adapter: Checkpoint, model: Checkpoint, converted: Path, proxy: ProxyModel
) -> PlannedAdapter:
    """The plan for an adapter of a model with this proxy; the other arguments are those
    of `convert_adapter`.
    """
    others = [
        name for name in adapter.others if os.path.basename(name) == ADAPTER_CONFIG
    ]
    if others:
        raise ConversionError(
            f"{adapter.folder}: holds another adapter too, {others[0]}: give each its own folder"
        )
    centring = _Planner(adapter, model, Path(converted), proxy).plan()
    made = {**provenance(adapter.folder), "base": provenance(model.folder)["source"]}
    return PlannedAdapter(made, centring, model.folder, Path(converted))


class _Planner:
    """Makes a step for each tensor of an adapter that has to be centred; refuses an
    adapter that is not exact then.
    """

    def __init__(
        self, adapter: Checkpoint, model: Checkpoint, converted: Path, proxy: ProxyModel
    ):
        self.adapter = adapter
        self.model = model
        self.converted = converted
        self.proxy = proxy
        self.done = _plan_of_base(model, converted)
        # which refuses the plan of another base
        planned_tensors(self.done, model, model.folder)
        self.who = f"{adapter.folder} ({adapter.config.get('peft_type')})"
        self.prefix = f"{proxy.model.base_model_prefix}."
        self.rename, self.residual_weights = _named_as_recorded(
            self.done, proxy, self.prefix
        )
        self.parameters = {self.rename(name): name for name in proxy.shapes}
        self.keys = KeyMap(proxy.model)
        self.tied = {
            name for copy in self.done.copy for name in (copy.key, copy.source)
        }

    def plan(self) -> CentringPlan:
        steps = [self._step(name) for name in self.adapter.tensors]
        centre = tuple(step for step in steps if step is not None)
        self._check_config(bool(centre))
        return CentringPlan(centre, config=self._settings())

    def _step(self, name: str) -> Centre | None:
        """How a tensor of the adapter is centred; None if it stays."""
        path = self.rename(name.removeprefix(PREFIX))
        home = self.residual_weights.home(path)
        if not home or not self._fits(name, home):
            what = f"fits no tensor of {self.proxy.name} in {self.model.folder}"
            cure = "pass the base, and the model_class, that it was trained on"
            raise self._refused(f"{name} {what}: {cure}")
        try:
            change = self.residual_weights.changed_by(path)
        except ValueError as error:
            why = (
                ", as DoRA scales by the norm of the weight"
                if "lora_magnitude" in name
                else ""
            )
            raise self._refused(f"{error}{why}: {MERGE}") from error
        key = self._key_of(home)
        self._check_base(name, home, key)
        if change is None:
            return None
        self._check_dtype(name, key)
        _, how = change
        blocks = None if how["blocks"] is None else tuple(how["blocks"])
        return Centre(name, how["axis"], how["block"], blocks)

    def _refused(self, what: str) -> ConversionRefused:
        return ConversionRefused(f"{self.who}: {what}")

    def _shape(self, parameter: str) -> tuple[int, ...] | None:
        """The shape of a parameter of the base, by its name in the record; None if
        there is none.
        """
        name = self.parameters.get(parameter)
        return None if name is None else tuple(self.proxy.shapes[name])

    def _fits(self, name: str, home: str) -> bool:
        """Whether a whole tensor has the shape of the one at `home`, or a matrix of
        LoRA a side as long as it.
        """
        shape = tuple(self.adapter.tensors[name].shape)
        whole, weight = self._shape(home), self._shape(f"{home}.weight")
        if whole is not None:
            return shape == whole
        matrix = re.search(r"\.lora_(?:embedding_)?([AB])(\.weight)?$", name)
        if weight is None or matrix is None:
            return True
        sides = {
            side
            for axis in (0, 1)[: len(weight)]
            for side in (weight[axis], prod(weight) // weight[axis])
        }
        outer = shape[0] if matrix[1] == "B" else prod(shape[1:])
        return outer in sides

    def _key_of(self, home: str) -> str | None:
        """The tensor of the base that holds a parameter, or the weight of a module."""
        parameter = self.parameters.get(home) or self.parameters.get(f"{home}.weight")
        stored = self.model.tensors.keys() | self.tied
        for key in self.keys.of(parameter):
            for name in (key, key.removeprefix(self.prefix), self.prefix + key):
                if name in stored:
                    return name
        return None

    def _check_base(self, name: str, home: str, key: str | None) -> None:
        """Refuse a tensor whose place in the base the conversion has folded away or
        untied.
        """
        for scale in self.done.scale:
            if key in (scale.key, scale.by):
                raise self._refused(
                    f"{name} changes {key}, into which a layer scale was folded: {MERGE}"
                )
        # which leave the tied tensor as it is
        copied = self.adapter.config.get("modules_to_save") or ()
        is_trained_copy = any(f".{module}." in f".{name}" for module in copied)
        if home in self.parameters and key in self.tied and not is_trained_copy:
            raise self._refused(
                f"{name} replaces tied embeddings, which the converted base has untied: {MERGE}"
            )

    def _check_dtype(self, name: str, key: str | None) -> None:
        if key in self.model.tensors and _eps(self.adapter, name) > _eps(
            self.model, key
        ):
            finer = f"is stored in a narrower dtype than {key}, so that its rounding leaves more of a mean"
            raise self._refused(
                f"{name} {finer}: save the adapter in the dtype of the base"
            )

    def _check_config(self, changed: bool) -> None:
        """Refuse settings by which the adapter changes more of a residual weight than
        adding B A x.
        """
        config = self.adapter.config
        if changed and config.get("peft_type") != "LORA":
            raise self._refused(
                f"it changes what writes to the stream, and is not LoRA: {MERGE}"
            )
        init = str(config.get("init_lora_weights"))
        if changed and init.startswith(OF_THE_BASE):
            raise self._refused(
                f"init_lora_weights {init!r} takes apart weights that centring changes: {MERGE}"
            )
        if config.get("ensure_weight_tying") and self.tied:
            raise self._refused(
                f"ensure_weight_tying ties embeddings that the converted base has untied: {MERGE}"
            )

    def _settings(self) -> dict:
        """The base of the result, for its adapter_config.json."""
        hub = SNAPSHOT.search(Path(os.path.realpath(self.converted)).as_posix())
        name = hub["id"].replace("--", "/") if hub else os.fspath(self.converted)
        return {"base_model_name_or_path": name, "revision": hub and hub["commit"]}


def _plan_of_base(model: Checkpoint, converted: Path) -> CentringPlan:
    if (converted / PLAN).is_file():
        plan = CentringPlan.from_json((converted / PLAN).read_text(encoding="utf-8"))
        made = open_checkpoint(converted)
        record = made.config.get(RECORD_KEY) or {}
        # A native result of a converted checkpoint has the file too, and other tensors.
        whole = made.tensors.keys() == model.tensors.keys() | {
            copy.key for copy in plan.copy
        }
        if (
            whole
            and record.get("residual_weights")
            == plan.config[RECORD_KEY]["residual_weights"]
        ):
            return plan
    cure = "pass what converting it with no other options gave; native results take no adapters"
    raise ConversionError(
        f"{converted}: no conversion of {model.folder} that takes its adapters: {cure}"
    )


def _named_as_recorded(
    done: CentringPlan, proxy: ProxyModel, prefix: str
) -> tuple[Callable[[str], str], ResidualWeights]:
    """A function from names of the proxy's class to those of the record, and the
    record's residual weights.
    """
    # A checkpoint saved with a head may be used without, or the reverse: then a prefix
    # is missing or too much.
    for rename in (
        str,
        lambda name: prefix + name,
        lambda name: name.removeprefix(prefix),
    ):
        residual_weights = ResidualWeights(
            done.config[RECORD_KEY], map(rename, proxy.shapes)
        )
        if residual_weights.how:
            return rename, residual_weights
    raise ConversionRefused(
        f"{proxy.name} has none of the tensors that write to the stream of the converted base"
    )


def _eps(source: Checkpoint, name: str) -> float:
    dtype = source.tensors[name].dtype
    return torch.finfo(dtype).eps if dtype in FLOATS.values() else 0.0
