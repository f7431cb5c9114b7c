"""Run each promise once under every version that is served: ``python3
scripts/versions.py [ROW ...] [options]``.

A row is PYTHON/TRANSFORMERS/TORCH/TRITON, as in 3.11/4.57.6/2.13.0/3.9.0; without any,
all rows below. Each gets an environment of its own with the newest packages that these
versions allow, and runs tests/promises/test_versions.py in it, kernels by Triton's
interpreter. Then tests/ptx/test_bits.py executes the kernels that its Triton compiles,
`hf-rmsnorm env` says how they are started, and `python -m benchmarks ratios` what that
costs the host. The results are kept in scripts/results/versions.json, from which `python
-m scripts.tables --write` makes the table of docs/supported.md. An environment with a
torch for CUDA takes 6 GB, and one with a torch for CPUs, from an index that has those,
takes 1 GB.

A row that is a Transformers alone, as in 4.57.6, has this Python, and links to the
torch and the Triton that it has. It takes a minute. The row "newest"
has this Python and no pins: what `pip install .` brings.

    --folder FOLDER    keeps the environments there (default: each is removed when its row is done)
    --no-write         prints what came of it, and writes nothing
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts/results/versions.json"
NEWEST = "newest"
# torch, and the Triton that its build for CUDA pins. A build for CPUs has none: there
# the named one is put beside it.
ROWS = (
    "3.10/4.57.6/2.8.0/3.4.0",
    "3.11/5.24.0/2.8.0/3.4.0",
    "3.11/5.24.0/2.9.1/3.5.1",
    "3.11/5.24.0/2.10.0/3.6.0",
    "3.12/5.9.0/2.11.0/3.6.0",
    "3.11/5.24.0/2.12.1/3.7.1",
    "3.11/5.24.0/2.13.0/3.7.1",
    "3.11/5.24.0/2.14.1/3.8.0",
    "3.11/4.57.6/2.13.0/3.9.0",
    "3.11/5.5.4/2.13.0/3.9.0",
    "3.11/5.9.0/2.13.0/3.9.0",
    "3.11/5.14.1/2.13.0/3.9.0",
    "3.11/5.17.0/2.13.0/3.9.0",
    "3.11/5.23.0/2.13.0/3.9.0",
    "3.13/4.57.6/2.15.0/3.9.0",
    "3.13/5.23.0/2.15.0/3.9.0",
    NEWEST,
)
OTHERS = ("accelerate", "safetensors", "pytest", "hypothesis")
TESTS = ("--all", "tests/promises/test_versions.py")
BITS = ("tests/ptx/test_bits.py",)
NAMES = ("torch", "transformers", "triton", "accelerate", "safetensors")


class Unavailable(Exception):
    """A row cannot be made here, in one line."""


def interpreter(wanted: str) -> str:
    """The command of a Python, as in 3.12: from PATH, or one that pyenv has."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [shutil.which(f"python{wanted}"), sys.executable]
    candidates += sorted(pyenv.glob(f"{wanted}.*/bin/python"))
    for command in filter(None, candidates):
        # pyenv puts commands on PATH that do not run.
        said = subprocess.run([command, "--version"], capture_output=True, text=True)
        if said.stdout.startswith(f"Python {wanted}."):
            return str(command)
    raise Unavailable(f"there is no python{wanted} on PATH, nor in {pyenv}")


def install(python: str, *arguments: str) -> None:
    """pip's, of what is not there yet: what an earlier run left may lack something."""
    options = ("--quiet", "--no-compile", "--disable-pip-version-check")
    command = [python, "-m", "pip", "install", *options, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(last_line(done))


def last_line(done: subprocess.CompletedProcess) -> str:
    """What a program said last, on stdout and then on stderr."""
    return (done.stdout + done.stderr).strip().rpartition("\n")[2]


def versions_in(python: str, names: tuple[str, ...]) -> dict[str, str]:
    """The versions that an environment has: of its Python, and of packages by name."""
    code = (
        "import json, platform, sys; from importlib.metadata import version; "
        "print(json.dumps({'python': platform.python_version()} | {n: version(n) for n in sys.argv[1:]}))"
    )
    return json.loads(subprocess.check_output([python, "-c", code, *names]))


def link_torch(place: Path) -> None:
    """Let an environment see this one's torch and Triton and what these need, and
    nothing else that is here.
    """
    links, wanted, seen = place / "linked", ["torch", "triton"], set()
    links.mkdir(exist_ok=True)
    while wanted:
        seen.add(name := wanted.pop())
        with contextlib.suppress(PackageNotFoundError):  # it is for another system
            found = distribution(name)
            for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
                if not (links / top).exists():
                    (links / top).symlink_to(found.locate_file(top))
            needs = [line for line in found.requires or () if "extra ==" not in line]
            wanted += {re.match(r"[\w.-]+", line)[0] for line in needs} - seen
    # A path of its own, behind the environment's packages: pip writes nothing there.
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "linked.pth").write_text(f"{links}\n")


def make(row: str, folder: Path) -> str:
    """The interpreter of a row's environment."""
    place = folder / row.replace("/", "-")
    python = str(place / "bin/python")
    version, *pins = row.split("/") if "/" in row else [None]
    if not os.path.exists(python):
        base = interpreter(version) if version else sys.executable
        subprocess.run([base, "-m", "venv", str(place)], check=True)
    if row == NEWEST:
        install(python, "--upgrade", "torch", "transformers", *OTHERS)
    elif pins:
        transformers, torch, triton = pins
        wanted = f"torch=={torch}", f"transformers=={transformers}"
        install(python, *wanted, *OTHERS)
        # without dependencies: a torch for CUDA names the Triton that it was built with
        install(python, "--no-deps", f"triton=={triton}")
    else:
        link_torch(place)
        install(python, "torch", f"transformers=={row}", *OTHERS)
    return python


def run_row(row: str, folder: Path) -> dict:
    """The versions of a row's environment, what its tests said, and what its Triton is
    like.
    """
    python = make(row, folder)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment.pop("TRITON_INTERPRET", None)
    interpreted = environment | {"TRITON_INTERPRET": "1"}
    passed, failures = test(python, interpreted, TESTS)
    found = {"row": row, "versions": versions_in(python, NAMES), "passed": passed}
    if "/" in row or row == NEWEST:
        found["bits"], failed = test(python, environment, BITS)
        failures += failed
        env = answer(python, environment, "hf_rmsnorm", "env")
        found["launches"] = env["launches"]
        found["host"] = answer(python, environment, "benchmarks", "ratios")
    return found | {"failures": failures}


def run_in(python: str, environment: dict, *words: str) -> subprocess.CompletedProcess:
    """Run a module in the root of the checkout."""
    how = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    return subprocess.run([python, "-m", *words], **how)


def test(
    python: str, environment: dict, tests: tuple[str, ...]
) -> tuple[int, list[str]]:
    """How many tests passed, and which failed."""
    options = ("-q", "--no-header", "--tb=line", "-p", "no:cacheprovider")
    said = run_in(python, environment, "pytest", *options, *tests)
    passed = re.search(r"(\d+) passed", said.stdout)
    failed = re.findall(r"^(?:FAILED|ERROR).*", said.stdout, re.MULTILINE)
    failures = [line.split("::")[-1] for line in failed]
    if said.returncode and not failures:
        failures = [last_line(said)]
    return int(passed[1]) if passed else 0, failures


def answer(python: str, environment: dict, *command: str) -> dict:
    """The JSON that a command of this project prints."""
    said = run_in(python, environment, *command, "--json")
    if said.returncode:
        raise Unavailable(f"{' '.join(command)}: {last_line(said)}")
    return json.loads(said.stdout)


def take(rows: tuple[str, ...], run: Callable[[str, Path], dict], results: Path) -> int:
    """Take the rows of a table that the command line names; 1 where one failed or could
    not be run.

    Args:
        run: of a row, and the folder of its environment, what is kept of it; with
            ``row``, ``passed`` and ``failures``.
    """
    parser = argparse.ArgumentParser(description=f"Renews {results}.")
    parser.add_argument("rows", nargs="*", default=rows, metavar="ROW")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    kept = {row["row"]: row for row in json.loads(results.read_text())}
    failed = False
    for row in args.rows:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as temporary:
            try:
                found = run(row, args.folder or Path(temporary))
                failures = ", ".join(found["failures"])
                failed |= bool(failures)
                text = f"{found['passed']} passed, failed: {failures or 'none'}"
                kept[row] = found
            except Unavailable as error:
                failed = True
                text = f"not run: {error}"
        print(f"{row}: {text} ({time.monotonic() - start:.0f} s)", flush=True)
        if not args.no_write:
            in_order = [kept[row] for row in rows if row in kept]
            results.write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")
    if not args.no_write:
        print("python -m scripts.tables --write puts this into the documentation")
    return int(failed)


if __name__ == "__main__":
    sys.exit(take(ROWS, run_row, RESULTS))
