"""Run each promise once under every version that is served: ``python3 scripts/versions.py [ROW ...] [options]``.

A row is TRANSFORMERS/TORCH/TRITON, as in 4.57.6/2.13.0/3.9.0; without any, all rows below. Each gets an environment of
its own with the newest packages that these versions allow, and runs tests/promises/test_versions.py in it, kernels by
Triton's interpreter. What came of these rows is kept in scripts/results/versions.json and shown in docs/versions.md.

    --python COMMAND   makes the environments (default: this Python)
    --folder FOLDER    keeps them there (default: a temporary folder)
    --no-write         prints what came of it, and writes nothing
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "scripts/results/versions.json", ROOT / "docs/versions.md"
ROWS = ("4.57.6/2.13.0/3.9.0", "5.5.4/2.13.0/3.9.0", "5.9.0/2.13.0/3.9.0", "5.14.1/2.13.0/3.9.0",
        "5.17.0/2.13.0/3.9.0", "5.23.0/2.13.0/3.9.0", "5.23.0/2.13.0/3.6.0")  # fmt: skip
OTHERS = ("accelerate", "safetensors", "pytest", "hypothesis")
TESTS = "tests/promises/test_versions.py"
PLACE = re.compile(r"(<!-- versions: .*? -->\n).*?(\n<!-- end -->)", re.DOTALL)
NAMES = ("torch", "transformers", "triton", "accelerate", "huggingface_hub", "tokenizers", "safetensors", "numpy")
ASK = "import json, platform; from importlib.metadata import version; print(json.dumps({'python': " \
      f"platform.python_version()}} | {{n: version(n) for n in {NAMES}}}))"  # fmt: skip


def run_row(row: str, python: str, folder: Path) -> dict:
    """The versions of a row's environment, and what its tests said."""
    transformers, torch, triton = row.split("/")
    place = folder / row.replace("/", "-")
    own = place / "bin/python"
    pip = [str(own), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not own.exists():
        subprocess.run([python, "-m", "venv", str(place)], check=True)
    # Into an environment that is kept too: an earlier run may have been stopped before it had all.
    # Triton 3.6's interpreter takes an array of one element for a number, which NumPy 2.4 is not any more.
    numpy = "numpy<2.4" if triton.startswith("3.6.") else "numpy"
    subprocess.run([*pip, f"torch=={torch}", f"transformers=={transformers}", numpy, *OTHERS], check=True)
    # No dependencies: a torch for CUDA names the Triton that it was built with.
    subprocess.run([*pip, "--no-deps", f"triton=={triton}"], check=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
    versions = json.loads(subprocess.run([str(own), "-c", ASK], check=True, capture_output=True, text=True).stdout)
    command = [str(own), "-m", "pytest", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", TESTS]
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = (said.stdout + said.stderr).strip().splitlines()
    passed = re.search(r"(\d+) passed", said.stdout)
    failures = [line.split(" - ")[0].split("::")[-1] for line in lines if line.startswith(("FAILED", "ERROR"))]
    if said.returncode and not failures:
        failures = lines[-1:]
    return {"row": row, "versions": versions, "passed": int(passed[1]) if passed else 0, "failures": failures}


def table(results: list[dict]) -> str:
    lines = ["| Transformers | torch | Triton | NumPy | Python | passed | failed |", "|---|---|---|---|---|---|---|"]
    for each in results:
        v = each["versions"]
        failed = ", ".join(each["failures"]) or "none"
        cells = (v["transformers"], v["torch"], v["triton"], v["numpy"], v["python"], each["passed"], failed)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", default=ROWS, metavar="ROW")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    kept = {} if not RESULTS.exists() else {each["row"]: each for each in json.loads(RESULTS.read_text())}
    now = {}
    with tempfile.TemporaryDirectory() as temporary:
        for row in args.rows:
            found = now[row] = run_row(row, args.python, args.folder or Path(temporary))
            print(f"{row}: {found['passed']} passed, failed: {', '.join(found['failures']) or 'none'}", flush=True)
    if not args.no_write:
        merged = [(kept | now)[row] for row in ROWS if row in kept | now]
        RESULTS.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(PLACE.sub(lambda m: m[1] + table(merged) + m[2], page), encoding="utf-8")
    return int(any(each["failures"] for each in now.values()))


if __name__ == "__main__":
    sys.exit(main())
