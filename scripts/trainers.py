"""Train a few steps in each trainer that is told by a YAML: ``python3 -m
scripts.trainers [ROW ...] [options]``.

A row is PYTHON/TRAINER/VERSION, as in 3.11/axolotl/0.19.0; without any, all rows below.
Each gets an environment of its own with that trainer and this package, as pip resolves
them, and runs the lines of docs/training.md on the embedded LLaMA, offline and on the
CPU: with what hf-rmsnorm needs, kernels by Triton's interpreter, and again without. The
losses have to agree, and what is saved has to have the same tensors. What came of these
rows is kept in scripts/results/trainers.json, from which `python -m scripts.tables
--write` makes the table of docs/training.md. An environment takes 2 to 6 GB.

    --folder FOLDER    keeps the environments there (default: each is removed when its row is done)
    --no-write         prints what came of it, and writes nothing
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from scripts import versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts/results/trainers.json"
ROWS = (
    "3.11/axolotl/0.19.0",
    "3.11/ms-swift/4.6.0",
    "3.11/llamafactory/0.9.5",
    "3.11/trl/1.16.0",
)
NAMES = ("torch", "transformers", "accelerate", "peft", "triton")
MARK = "# What hf-rmsnorm needs:\n"  # in a YAML, above the lines to paste
STEPS = 3


class Trainer(NamedTuple):
    """How a trainer is started with hf-rmsnorm, and without: by another command, or by
    a YAML that lacks its lines.
    """

    patched: str
    unpatched: str
    besides: tuple[str, ...]  # packages


# A torch that is asked for has neighbours of its own age: LLaMA-Factory takes
# torchvision and torchaudio.
TRAINERS = {
    "axolotl": Trainer(*["axolotl train examples/trainers/axolotl.yaml"] * 2, ()),
    "ms-swift": Trainer(
        *["swift sft examples/trainers/swift.yaml"] * 2, ("torch==2.13.0",)
    ),
    "llamafactory": Trainer(
        "accelerate launch -m hf_rmsnorm run -m llamafactory.launcher examples/trainers/llamafactory.yaml",
        "llamafactory-cli train examples/trainers/llamafactory.yaml",
        ("torch==2.11.0", "torchaudio==2.11.0"),
    ),
    "trl": Trainer(
        "accelerate launch -m hf_rmsnorm run -m trl.scripts.sft --config examples/trainers/trl.yaml",
        "trl sft --config examples/trainers/trl.yaml",
        ("torch==2.13.0", "peft"),
    ),
}


class Run(NamedTuple):
    """What a run said of swapped norms, its losses, and what the tensors of its last
    checkpoint are.
    """

    swapped: str
    losses: list[float]
    tensors: dict[str, dict]


def make(trainer: str, version: str, python: str, folder: Path) -> str:
    """The interpreter of a trainer's environment."""
    place = folder / f"{python}-{trainer}-{version}"
    command = str(place / "bin/python")
    if not os.path.exists(command):
        subprocess.run(
            [versions.interpreter(python), "-m", "venv", str(place)], check=True
        )
    source = folder / "source"  # a copy: pip leaves what it has built where it builds
    shutil.copytree(ROOT / "hf_rmsnorm", source / "hf_rmsnorm", dirs_exist_ok=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    versions.install(
        command, *TRAINERS[trainer].besides, f"{trainer}=={version}", str(source)
    )
    return command


def train(words: str, yaml_without: bool, python: str, place: Path) -> Run:
    """Run a command in a folder of its own, with the examples as they are or without
    what hf-rmsnorm needs.
    """
    place.mkdir(parents=True)
    (place / "hf_rmsnorm").symlink_to(ROOT / "hf_rmsnorm")
    shutil.copytree(ROOT / "examples/trainers", place / "examples/trainers")
    if yaml_without:
        for path in place.glob("examples/trainers/*.yaml"):
            text, _, _ = path.read_text(encoding="utf-8").partition(MARK)
            path.write_text(text, encoding="utf-8")
    environment = os.environ | {
        "PATH": os.pathsep.join((str(Path(python).parent), os.environ["PATH"])),
        "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "cache"),
        "AXOLOTL_DO_NOT_TRACK": "1",
    }  # fmt: skip
    done = subprocess.run(
        words.split(), cwd=place, env=environment, capture_output=True, text=True
    )
    states = list(place.glob(f"runs/**/checkpoint-{STEPS}/trainer_state.json"))
    if done.returncode or not states:
        raise RuntimeError(f"{words}: {versions.last_line(done)}")
    swapped = re.search(r"^hf_rmsnorm: (?:\w+: )?(.*)$", done.stderr, re.MULTILINE)
    history = json.loads(states[0].read_text(encoding="utf-8"))["log_history"]
    with open(states[0].parent / "model.safetensors", "rb") as file:
        tensors = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return Run(
        swapped[1] if swapped else "nothing",
        [each["loss"] for each in history if "loss" in each],
        tensors,
    )


def run_row(row: str, folder: Path) -> dict:
    """The versions of a row's environment, and what both runs came to."""
    python, trainer, version = row.split("/")
    if trainer not in TRAINERS:
        raise versions.Unavailable(f"there is no {trainer} among {', '.join(TRAINERS)}")
    command = make(trainer, version, python, folder)
    result = {"row": row, "versions": versions.versions_in(command, NAMES), "passed": 0}
    how = TRAINERS[trainer]
    place = folder / f"runs-{trainer}"
    shutil.rmtree(place, ignore_errors=True)
    try:
        patched = train(how.patched, False, command, place / "patched")
        plain = train(how.unpatched, True, command, place / "unpatched")
    except RuntimeError as error:
        return result | {"failures": [str(error)]}
    said = r"[1-9]\d* norms swapped, \d+ skipped; runs on "
    same_length = len(plain.losses) == len(patched.losses) == STEPS
    pairs = zip(plain.losses, patched.losses, strict=False)
    close = [math.isclose(a, b, rel_tol=1e-5) for a, b in pairs]
    checks = {
        "norms are swapped": re.match(said, patched.swapped),
        "none is without": plain.swapped == "nothing",
        "losses agree": same_length and all(close),
        "tensors saved agree": plain.tensors == patched.tensors,
    }
    failures = [name for name, passed in checks.items() if not passed]
    result |= {"passed": len(checks) - len(failures), "failures": failures}
    losses = {"losses": patched.losses, "without": plain.losses}
    return result | {"swapped": patched.swapped} | losses


def main() -> int:
    return versions.take(ROWS, run_row, RESULTS)


if __name__ == "__main__":
    sys.exit(main())
