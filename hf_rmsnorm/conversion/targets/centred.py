"""The target ``same``: the checkpoint's own architecture, its writers centred, so that LayerNorm is RMSNorm."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from ...paths import compact_paths
from ...record import RECORD_KEY
from ..checkpoint.expressions import Expression
from ..checkpoint.files import changed_config
from ..checkpoint.layout import as_source
from ..checkpoint.steps import planned_tensors
from ..checkpoint.values import Values
from ..judge.folder import Verification, verify_folder
from ..judge.publish import add_to_card, provenance
from ..plan import CentringPlan, ConversionRefused
from ..twin.discover import discover
from ..twin.prove import ProofReport, prove
from ..twin.twin import Twin
from .planned import PlannedConversion

CARD_HEADING = "## Converted from LayerNorm to RMSNorm"
PLAN = "conversion_plan.json"


@dataclass(frozen=True)
class PlannedCentring(PlannedConversion):
    """A plan, and its proof in float64 on a small random model of the same classes."""

    keeps_shards = True

    centring: CentringPlan
    proof: ProofReport

    def to_dict(self) -> dict:
        return {"plan": json.loads(self.centring.to_json()), "proof": self.proof.to_dict()}

    def __str__(self) -> str:
        plan = self.centring
        lines = [str(self.proof), f"tensors centred ({len(plan.centre)}):"]
        groups: dict[str, list[str]] = {}
        for c in plan.centre:
            blocks = "" if c.blocks is None else f", blocks {', '.join(map(str, c.blocks))}"
            groups.setdefault(f"along dimension {c.axis} in blocks of {c.block}{blocks}", []).append(c.key)
        for how, keys in groups.items():
            lines += [f"  {how}:", *(f"    {path}" for path in compact_paths(keys))]
        for scale in plan.scale:
            lines.append(f"  {scale.key} takes in the layer scale {scale.by}, which becomes ones")
        lines += [f"new tensor {copy.key}, a copy of {copy.source} as it is" for copy in plan.copy]
        becoming = [norm.path for norm in plan.norms if norm.becomes_rms]
        lines += [f"norms that become RMSNorm ({len(becoming)}):", *(f"    {path}" for path in compact_paths(becoming))]
        staying: dict[str, list[str]] = {}
        for norm in plan.norms:
            if not norm.becomes_rms:
                staying.setdefault(norm.reason, []).append(norm.path)
        for reason, paths in staying.items():
            lines += [f"norms that stay LayerNorm: {reason}", *(f"    {path}" for path in compact_paths(paths))]
        if plan.undetermined:
            lines += ["tensors that nothing depends on, copied as they are:"]
            lines += [f"    {key}" for key in compact_paths(plan.undetermined)]
        return "\n".join([*lines, *plan.notes])

    def tensors(self, values: Values) -> dict[str, Expression]:
        """Every tensor of the result."""
        return planned_tensors(self.centring, values, values.checkpoint.folder)

    def metadata(self) -> dict[str, str]:
        """For ``__metadata__`` of the shards."""
        return {RECORD_KEY: json.dumps(self.made, sort_keys=True)}

    def result(self, values, max_shard_size):
        config = changed_config(values.checkpoint.config, self.centring.config)
        return as_source(self.tensors(values), values, self.metadata()), config

    def judge(self, src, folder, how):
        verdict, plan = verify_folder(src, folder, self.centring, how)
        return verdict, replace(self, centring=plan)

    def describe(self, folder: Path, verdict: Verification) -> None:
        plan = self.centring
        (folder / PLAN).write_text(plan.to_json() + "\n", encoding="utf-8")
        becoming = sum(norm.becomes_rms for norm in plan.norms)
        text = f"""Everything that writes to the residual stream was centred, so that LayerNorm and RMSNorm compute
the same: {becoming} of {len(plan.norms)} norms may run as RMSNorm. It loads like any checkpoint of its architecture and
gives the original's logits; `hf_rmsnorm.patch_model` runs it as RMSNorm. What was done is in `{PLAN}`.

```
{self.proof}
{verdict}
```
"""
        add_to_card(folder, CARD_HEADING, text, self.made)


def plan_centring(src, twin: Twin) -> PlannedCentring:
    """What centring the checkpoint in a folder would do, found and proven on its twin.

    Raises:
        ConversionRefused: it cannot be converted exactly; the message says why.
    """
    plan = discover(twin)
    proof = prove(plan, twin)
    if not proof.passed:
        raise ConversionRefused(f"{proof}: this model is not converted, as its plan is not exact")
    made = provenance(src)
    record = {**plan.config[RECORD_KEY], **made, "proof": proof.to_dict()}
    return PlannedCentring(made, replace(plan, config={**plan.config, RECORD_KEY: record}), proof)
