"""`convert_checkpoint`: discover, prove, stream, verify, publish."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ...paths import compact_paths
from ...record import RECORD_KEY
from ..checkpoint.stream import Result, carry_out
from ..judge.folder import Verification, verify_folder
from ..judge.publish import Judged, add_to_card, provenance
from ..plan import ConversionPlan, ConversionRefused
from ..twin.discover import discover
from ..twin.prove import ProofReport, prove
from ..twin.twin import make_twin

CARD_HEADING = "## Converted from LayerNorm to RMSNorm"


@dataclass(frozen=True)
class PlannedConversion:
    """A plan, and its proof in float64 on a small random model of the same classes."""

    plan: ConversionPlan
    proof: ProofReport

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        proof = self.proof
        return {
            "plan": json.loads(self.plan.to_json()),
            "proof": {"passed": proof.passed, "stock": proof.stock, "rms": proof.rms, "norms": list(proof.norms)},
        }

    def __str__(self) -> str:
        plan = self.plan
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


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """What `convert_checkpoint` did: the plan and its proof, what was written, and how it was verified."""

    planned: PlannedConversion
    result: Result
    verification: Verification

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        result = self.result
        return {
            **self.planned.to_dict(),
            "dst": str(result.dst),
            "tensors": result.tensors,
            "bytes": result.bytes,
            "changed": list(result.changed),
            "added": list(result.added),
            "not_copied": list(result.not_copied),
            "shards_resumed": result.resumed,
            "verification": self.verification.to_dict(),
        }

    def __str__(self) -> str:
        result = self.result
        lines = [
            f"{result.dst}: {result.tensors} tensors, {result.bytes / 1e6:,.1f} MB, {len(result.changed)} changed, "
            f"{len(result.added)} added",
        ]
        if result.resumed:
            lines.append(f"{result.resumed} of {len(result.shards)} shards were there from a run before this one")
        if result.not_copied:
            lines.append(f"not copied, as they hold the old weights: {', '.join(result.not_copied)}")
        return "\n".join([*lines, str(self.verification)])


def plan_conversion(
    src: str | os.PathLike, *, trust_remote_code: bool = False, model_class=None, inputs=None
) -> PlannedConversion:
    """What converting `src` would do, and the proof that it is exact; nothing is written and no weight is read.

    Args:
        src: a model folder.
        trust_remote_code: run the model code that comes with it.
        model_class: the class to load it with, instead of the one its config names.
        inputs: makes keyword arguments of the forward for a model, where it takes other than token ids and pixels.

    Raises:
        ConversionRefused: it cannot be converted exactly; the message says why.
    """
    twin = make_twin(src, trust_remote_code=trust_remote_code, model_class=model_class, inputs=inputs)
    plan = discover(twin)
    proof = prove(plan, twin)
    if not proof.passed:
        raise ConversionRefused(f"{proof}: this model is not converted, as its plan is not exact")
    return PlannedConversion(plan, proof)


def convert_checkpoint(
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
    planned: PlannedConversion | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> ConvertedCheckpoint:
    """Convert a LayerNorm checkpoint into one whose LayerNorms may be RMSNorms, with the same logits.

    LayerNorm of a vector of zero mean is RMSNorm of it (Jiang et al. 2023), so everything that writes to the residual
    stream is centred. The result loads without this package and computes the same; `patch_model` runs its norms as
    RMSNorm, as its config.json records.

    Args:
        src: a model folder with safetensors, in one file or in shards; it is only read.
        dst: the folder to make. It appears whole, at the end; a run that was killed is taken up by the same call.
        trust_remote_code, model_class, inputs: as in `plan_conversion`.
        prompts: texts to verify on, where there is a tokenizer.
        verify: run source and result after writing, and publish only what passes.
        allow_pickle, restart, progress: as in `carry_out`.
        planned: what `plan_conversion` returned for `src`, if it has been called.

    Raises:
        ConversionRefused: the model cannot be converted exactly.
        ConversionError: source or destination do not allow it; the message says what to do. DST does not exist then.
        VerificationFailed: what was written does not pass; it stays unpublished, beside a report.
    """
    how = {"trust_remote_code": trust_remote_code, "model_class": model_class, "inputs": inputs}
    conversion = Publication(src, dst, planned or plan_conversion(src, **how), prompts=prompts, run=verify, **how)
    result = carry_out(
        conversion.plan, src, dst, metadata=conversion.metadata, progress=progress, allow_pickle=allow_pickle,
        check=conversion.check, restart=restart,
    )  # fmt: skip
    return ConvertedCheckpoint(conversion.planned, result, conversion.verification)


class Publication(Judged):
    """The check of a converted folder.

    Args:
        how: as in `verify_folder`.

    Attributes:
        plan: with what config.json records of this conversion.
        metadata: for ``__metadata__`` of the shards.
        planned: the plan and its proof; once checked, the plan as it was carried out.
    """

    def __init__(self, src, dst, planned: PlannedConversion, **how):
        super().__init__(dst, self._verify, self._write_card)
        self.planned, self._src, self._how = planned, src, how
        self._made = provenance(src)
        self.metadata = {RECORD_KEY: json.dumps(self._made, sort_keys=True)}
        record = {**planned.plan.config[RECORD_KEY], **self._made, "proof": planned.to_dict()["proof"]}
        self.plan = replace(planned.plan, config={**planned.plan.config, RECORD_KEY: record})

    def _verify(self, folder: Path) -> Verification:
        verdict, plan = verify_folder(self._src, folder, self.plan, **self._how)
        self.planned = replace(self.planned, plan=plan)
        return verdict

    def _write_card(self, folder: Path, verdict: Verification) -> None:
        """Add a section to the model card, and the plan beside it."""
        plan = self.planned.plan
        (folder / "conversion_plan.json").write_text(plan.to_json() + "\n", encoding="utf-8")
        becoming = sum(norm.becomes_rms for norm in plan.norms)
        text = f"""Everything that writes to the residual stream was centred, so that LayerNorm and RMSNorm compute
the same: {becoming} of {len(plan.norms)} norms may run as RMSNorm. It loads like any checkpoint of its architecture and
gives the original's logits; `hf_rmsnorm.patch_model` runs it as RMSNorm. What was done is in `conversion_plan.json`.

```
{self.planned.proof}
{verdict}
```
"""
        add_to_card(folder, CARD_HEADING, text, self._made)
