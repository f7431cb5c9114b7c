"""What the package does with published models, from their configs alone: ``python -m
scripts.real_configs``.

``scripts/data/real_configs.json`` has the numbers of each config.json; of longrope's
factors only their count is right. Each model is built on the meta device and patched,
and its conversion is planned. A narrow copy, of the same depth with random weights in
bfloat16, is verified as `hf-rmsnorm verify` does. No weights are read. What is found
goes to ``scripts/results/real_configs.json``; `python -m scripts.tables --write` makes
the table.
"""

import argparse
import copy
import json
import os
import tempfile
from pathlib import Path

import torch

if not torch.cuda.is_available():
    # before the package finds out what serves the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

import transformers
from transformers import AutoConfig

from hf_rmsnorm import patch_model, plan_conversion, use_backend, verify_equivalence
from hf_rmsnorm.conversion import ConversionRefused
from hf_rmsnorm.conversion.proxy.model import make_proxy
from hf_rmsnorm.sources import without_weights
from hf_rmsnorm.verification.context import in_dtype_of

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "scripts" / "data" / "real_configs.json"
RESULTS = ROOT / "scripts" / "results" / "real_configs.json"


def configs() -> dict[str, dict]:
    return json.loads(CONFIGS.read_text())


def patched(config: dict) -> dict:
    """How many norms of the model are swapped and left alone, and what of its layers is
    fused with them.
    """
    config = copy.deepcopy(config)
    cls = getattr(transformers, config["architectures"][0])
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    model = without_weights(lambda: cls(config))
    report = patch_model(model)
    fused = [layer.fused for layer in report.layers if layer.fused]
    return {
        "swapped": len(report.swapped),
        "skipped": len(report.skipped),
        "sums": sum(part[0] == "+" for what in fused for part in what.split(", ")),
        "pairs": sum(what[0] != "+" for what in fused),
    }


def planned(config: dict) -> dict:
    """The verdict of `plan_conversion` on a folder that holds this config alone, and
    its reason.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        try:
            norms = plan_conversion(folder).centring.norms
        except ConversionRefused as refusal:
            reason = str(refusal).replace(folder, "the folder")
            if "it uses RMSNorm already" in reason:
                return {"verdict": "RMSNorm already", "reason": ""}
            return {"verdict": "refused", "reason": reason}
    stay = [norm.reason for norm in norms if not norm.becomes_rms]
    verdict = f"{len(norms) - len(stay)} of {len(norms)} norms become RMSNorm"
    return {"verdict": verdict, "reason": "; ".join(dict.fromkeys(stay))}


def verified(config: dict) -> str:
    """What `verify_equivalence` says of a narrow copy, its norms and what is fused with
    them run by the kernels.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        try:
            proxy = make_proxy(folder)
        except ConversionRefused as refusal:
            return f"no narrow copy: {str(refusal).replace(folder, 'the folder')}"
    proxy.model.to(torch.bfloat16)
    given = in_dtype_of(proxy.model, proxy.inputs)
    with use_backend("triton"):
        report = verify_equivalence(proxy.model, inputs=given, max_new_tokens=0)
    return report.verdict


def row(config: dict) -> dict:
    return {**patched(config), "verified": verified(config), **planned(config)}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names, with commas between them")
    return parser


def main(argv=None) -> None:
    args = build_parser().parse_args(argv)
    every = configs()
    found = json.loads(RESULTS.read_text())
    for name in args.only.split(",") if args.only else every:
        found[name] = row(every[name])
        print(name, found[name], flush=True)
        ordered = {each: found[each] for each in every if each in found}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main()
