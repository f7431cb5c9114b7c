"""What CI leaves out, some hours in all: ``python3 scripts/outside_ci.py [NAME ...]``.

Runs each command, or those that are named, and writes its date, commit and outcome to
``scripts/results/outside_ci.json``, which is committed. It needs pythons 3.10 to 3.13.
"""

import datetime
import json
import subprocess
import sys

import _bootstrap

ROOT = _bootstrap.ROOT
RESULTS = ROOT / "scripts" / "results"
FILE = RESULTS / "outside_ci.json"
PYTHON = ".venv/bin/python"
COVERAGE = f"{PYTHON} -m scripts.coverage"
SM_75 = f"HF_RMSNORM_TESTS_SM=75 {PYTHON} -m pytest --all"
# another code holds other statements that do no harm when they are gone
MUTATED = "--ignore=tests/ptx/test_broken_kernels.py"
# in a folder of its own: where it is, each import of Transformers is slower, and talks
TORCHAO = ".venv/torchao"
INSTALL_TORCHAO = f"{PYTHON} -m pip install -q --no-deps -c constraints.txt --target {TORCHAO} torchao"
QUANTISED = f"PYTHONPATH={TORCHAO} {PYTHON} -m pytest --all tests/promises/state/test_quantised.py"


def commands() -> dict[str, str]:
    """What is run, by name."""
    found = {
        "kernels for sm_75": f"{SM_75} {MUTATED} tests/ptx tests/unit/kernels",
    }
    for version in ("3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0"):
        run = f"python3 scripts/run_tests.py --triton {version} --all"
        found[f"Triton {version}"] = (
            f"{run} {MUTATED} tests/ptx tests/unit/kernels tests/tools/test_aot.py"
        )
    for name, file in (
        ("patch", "coverage-5.23.0"),
        ("diffusers", "diffusers-0.42.1"),
        ("regimes", "regimes"),
    ):
        check = f"--check scripts/results/{file}.json"
        found[f"coverage {name}"] = f"{COVERAGE} {name} {check}"
    return found | {
        # The row "newest" has no pins: it says first what a new release breaks.
        "other versions": f"{PYTHON} scripts/versions.py --no-write",
        "trainers with a YAML": f"{PYTHON} -m scripts.trainers --no-write",
        "programs": f"{PYTHON} -m scripts.programs",
        "torchao": f"{INSTALL_TORCHAO} && {QUANTISED}",
        "notebook": "python3 scripts/quickstart.py --notebook",
        "release": '.ci/release "$(mktemp -d)"',
    }


def main() -> int:
    _bootstrap.answer_help(__doc__)
    known = commands()
    names = sys.argv[1:] or list(known)
    if unknown := set(names) - set(known):
        sys.exit(
            f"there is no {', '.join(sorted(unknown))}; there are: {', '.join(known)}"
        )
    _bootstrap.ensure("quick", "all")
    for name in names:
        print(f"{name}: {known[name]}", flush=True)
        code = subprocess.run(known[name], shell=True, cwd=ROOT).returncode
        record(name, "passed" if code == 0 else f"failed, exit code {code}")
    print(summary())
    return int(any(read()[name]["outcome"] != "passed" for name in names))


def read() -> dict[str, dict]:
    """The last run of each command; ``{"outcome": "never"}`` where there was none."""
    runs = {}
    if FILE.exists():
        runs = json.loads(FILE.read_text(encoding="utf-8"))
    never = {"outcome": "never"}
    return {name: runs.get(name, never) for name in commands()}


def record(name: str, outcome: str) -> None:
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    done = {"date": today, "commit": commit.strip(), "outcome": outcome}
    lines = [
        f"{json.dumps(n)}: {json.dumps(r)}" for n, r in (read() | {name: done}).items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def summary() -> str:
    """A line for each command: when it ran last, and what came of it."""
    lines = ["Not part of CI, with the last run of each (.ci/nightly):"]
    for name, last in read().items():
        words = [last["outcome"], last.get("date", ""), last.get("commit", "")]
        lines.append(f"  {name}: " + " ".join(filter(None, words)))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
