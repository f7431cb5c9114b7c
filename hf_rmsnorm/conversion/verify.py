"""Source and result side by side: the last step before a converted checkpoint is published."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from safetensors import safe_open

from ..invariant import is_centred
from .plan import Centre, ConversionPlan
from .twin import _resolve, _tensors, default_inputs, quiet

PROMPTS = (
    "The following table lists the statements that may be used in a function.",
    "An expression is evaluated before the result is bound to a name; if it raises an exception, the name keeps the "
    "value that it had.",
)
TOKENS = 64


@dataclass(frozen=True)
class Verification:
    """What was compared before publication.

    Args:
        passed: the verdict.
        summary: one line for people.
        runs: figures of each run: as LayerNorm and as RMSNorm.
    """

    passed: bool
    summary: str
    runs: dict = field(default_factory=dict)

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {"passed": self.passed, "summary": self.summary, "runs": self.runs}

    def __str__(self) -> str:
        lines = [self.summary]
        for name, run in self.runs.items():
            lines.append(f"  {name}: " + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                                                   for k, v in run.items()))  # fmt: skip
        return "\n".join(lines)


def verify_folder(
    src, folder: Path, plan: ConversionPlan, *, trust_remote_code: bool, model_class, inputs, prompts, run: bool
) -> Verification:
    """Judge a converted folder against its source.

    First every centred tensor is read again, one at a time. Then, if `run` and memory allow, both models run in the
    checkpoint's own dtype, the converted one as it loads (LayerNorm) and as RMSNorm; each is judged against a float64
    run of the source, allowed 1.5 times the source's own error (`verify_equivalence`).
    """
    wrong = _not_centred(folder, plan)
    if wrong:
        return Verification(False, f"{wrong[0]} and {len(wrong) - 1} more tensors are not centred as the plan says")
    tensors = f"{len(plan.centre)} centred tensors read again"
    if not run:
        return Verification(True, f"{tensors}; source and result were not run, as asked")
    if too_big := too_big_to_run(Path(src)):
        proof = "is that of the plan, on a small random model of the same classes"
        return Verification(True, f"{tensors}; {too_big}, so the proof {proof}")
    runs = run_both(src, folder, trust_remote_code, model_class, inputs, prompts)
    passed = all(figures["verdict"] == "PASS" for figures in runs.values())
    return Verification(passed, f"{tensors}; source and result run side by side: {'PASS' if passed else 'FAIL'}", runs)


def _not_centred(folder: Path, plan: ConversionPlan) -> list[str]:
    wanted: dict[str, Centre] = {c.key: c for c in plan.centre}
    wrong = set(wanted)
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            for key in wanted.keys() & file.keys():
                how = wanted[key]
                if is_centred(file.get_tensor(key), how.axis, how.block, how.blocks):
                    wrong.discard(key)
    return sorted(wrong)


def too_big_to_run(src: Path) -> str:
    """Why two models and a float64 copy of one do not fit into memory, roughly; "" where they do."""
    size = sum(os.path.getsize(f) for f in (*src.glob("*.safetensors"), *src.glob("*.bin")))
    need, there = size * (2 + 4), psutil.virtual_memory().available
    if need <= 0.8 * there:
        return ""
    return f"too big to run here ({need / 1e9:.1f} GB in float64, {there / 1e9:.1f} GB free)"


def run_both(
    src, folder: Path, trust_remote_code: bool, model_class, inputs, prompts, given: list[dict] | None = None
) -> dict:
    """Figures of the result as LayerNorm and as RMSNorm, against the source; `given` are batches to run on."""
    from .. import patched

    cls = model_class_of(src, trust_remote_code, model_class)
    with quiet():
        source, result = (
            cls.from_pretrained(where, dtype="auto", trust_remote_code=trust_remote_code).eval()
            for where in (src, folder)
        )
    if not given:
        given = _prompts(src, source, prompts, trust_remote_code) if inputs is None else [inputs(source)]
    given = given or [default_inputs(source)]
    given = [
        {k: v.to(source.dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
        for inputs in given
    ]
    runs = {"as LayerNorm": _judge(source, result, given)}
    with patched(result) as report:
        swapped = [record for record in report.swapped if record.converted]
        runs["as RMSNorm"] = {**_judge(source, result, given), "norms": f"{len(swapped)} as RMSNorm"}
        if not swapped:
            runs["as RMSNorm"]["verdict"] = "FAIL"
    return runs


def _judge(source, result, given: list[dict]) -> dict:
    from ..verification import verify_equivalence
    from ..verification.compare import compare_logits
    generates = source.can_generate() and not source.config.is_encoder_decoder
    if generates and all("input_ids" in inputs for inputs in given):
        report = verify_equivalence(source, result, given, norms=False, max_new_tokens=16, backend="reference")
        difference, floor, passed = report.logits, report.noise_floor, report.passed
        extra = {"greedy": "equal" if report.greedy.equal else "tie" if report.greedy.passed else "different"}
    else:
        from ..verification.float64 import in_float64

        def outputs(model):
            with torch.no_grad():
                found = [t for inputs in given for t in _tensors(model(**inputs)) if t.dim() > 1]
            return [t.flatten(0, -2) for t in found]

        own, other = outputs(source), outputs(result)
        with in_float64(source):
            exact = [t.double() for t in outputs(source)]
        difference, floor = compare_logits(own, other, exact)
        passed, extra = floor.passed, {}
    return {
        "verdict": "PASS" if passed else "FAIL",
        "dtype": floor.dtype,
        "error": floor.candidate_max,
        "source's own error": floor.reference_max,
        "allowed": floor.allowed_max,
        "KL": difference.kl_mean,
        **extra,
    }


def model_class_of(src, trust_remote_code: bool = False, model_class=None):
    """The class to load a folder with: the one its config names, where none is given."""
    return _resolve(src, trust_remote_code, model_class)[1]


def _prompts(src, model, prompts, trust_remote_code: bool) -> list[dict]:
    """What the tokenizer makes of the prompts; none where there is no tokenizer."""
    if model.main_input_name != "input_ids" or not any(Path(src).glob("*token*")):
        return []
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(src, trust_remote_code=trust_remote_code)
    texts = [{"input_ids": tokenizer(text, return_tensors="pt").input_ids[:, :TOKENS]} for text in prompts or PROMPTS]
    return [inputs for inputs in texts if inputs["input_ids"].numel()]
