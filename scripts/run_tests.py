"""From a fresh clone to a test result: ``python3 scripts/run_tests.py [--all] [pytest
arguments]``.

Makes ``.venv`` with everything pinned, runs the linter and then pytest. Exits with
pytest's code, or with the linter's where only that one complains. The quick tests take
minutes. ``--all`` runs every test, as CI does, and ends with their counts. On a machine
with a GPU the tests of real hardware follow, ``pytest -m gpu``. Useful pytest arguments:
``-k WORD``, ``tests/promises/cli``, ``--durations 20``.

``--triton VERSION`` before them runs tests/ptx and tests/unit/kernels, or what is named,
under another Triton.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import _bootstrap
import outside_ci

# by themselves: these processes execute compiled kernels
EXECUTED = ("tests/ptx", "tests/unit/kernels")
# what JUnit's XML has within a test that did not pass
KINDS = {"failure": "failed", "error": "failed", "skipped": "skipped"}
HAS_GPU = "import sys, torch; sys.exit(not (torch.cuda.is_available() or torch.xpu.is_available()))"


def main() -> int:
    _bootstrap.answer_help(__doc__)
    arguments = sys.argv[1:]
    extras = ["quick", "all"] if "--all" in arguments else ["quick"]
    python = str(_bootstrap.ensure(*extras))
    if arguments[:1] == ["--triton"]:
        _, version, *rest = arguments
        return run_under(version, python, rest)
    print("ruff check", flush=True)
    ruff = run([python, "-m", "ruff", "check", "."])
    tests = run_tests(python, arguments)
    return tests or ruff


def run_tests(python: str, arguments: list[str]) -> int:
    # A worker keeps one thread busy; more than four would want more memory than they
    # save time.
    workers = str(min(os.cpu_count() or 1, 4))
    pytest = [python, "-m", "pytest", "-n", workers, *arguments]
    # Tests of a file share what is costly to make. tests/conftest.py puts the longest
    # files first, and they are to stay there.
    by_file = [*pytest, "--dist", "loadfile", "--no-loadscope-reorder"]
    if not set(arguments) <= {"--all"}:
        return run(by_file)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        interpreted, executed = Path(folder, "1.xml"), Path(folder, "2.xml")
        others = [f"--ignore={part}" for part in EXECUTED]
        failed = run([*by_file, *others, f"--junit-xml={interpreted}"])
        by_test = [*pytest, "--dist", "worksteal", *EXECUTED]
        failed |= run([*by_test, f"--junit-xml={executed}"])
        print(summary([interpreted, executed]))
    print(f"Tests took {time.monotonic() - start:.0f} s")
    if "--all" in arguments:
        print(outside_ci.summary())
    if not failed and run([python, "-c", HAS_GPU]) == 0:
        failed = run([python, "-m", "pytest", "-m", "gpu"])
    return failed


def summary(reports: list[Path]) -> str:
    """How many tests passed, failed and were skipped for which reason."""
    outcomes: Counter = Counter()
    reasons: Counter = Counter()
    for report in filter(Path.exists, reports):  # none, where pytest did not come to it
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = [KINDS[part.tag] for part in case if part.tag in KINDS]
            outcomes[kinds[0] if kinds else "passed"] += 1
            for part in case.iter("skipped"):
                reasons[part.get("message")] += 1
    kinds = ("passed", "failed", "skipped")
    head = ", ".join(f"{outcomes[kind]} {kind}" for kind in kinds)
    lines = [f"  {count} skipped: {why}" for why, count in reasons.most_common()]
    return "\n".join([head, *lines])


def run_under(version: str, python: str, arguments: list[str]) -> int:
    """Run pytest under another Triton than that of `.venv`."""
    print(f"Triton {version}", flush=True)
    named = any(argument.startswith("tests/") for argument in arguments)
    command = [python, "-m", "pytest", "-n", "2", "--dist", "worksteal", *arguments]
    command += () if named else EXECUTED
    return run(command, env=_bootstrap.with_triton(version))


def run(command: list[str], env: dict[str, str] | None = None) -> int:
    return subprocess.run(command, cwd=_bootstrap.ROOT, env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
