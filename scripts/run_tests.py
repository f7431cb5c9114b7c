"""From a fresh clone to a test result: ``python3 scripts/run_tests.py [--all] [pytest arguments]``.

Makes ``.venv`` with everything pinned, runs the linter and then pytest; exits with pytest's code, or with the
linter's where only that one complains. Runs the quick tier, in minutes; ``--all`` adds the full tests, as CI does, and
``--nightly`` runs the long ones. On a machine with a GPU the tests of real hardware follow, ``pytest -m gpu``. Useful
pytest arguments: ``-k WORD``, ``tests/promises/cli``, ``--durations 20``.
"""

import os
import subprocess
import sys

import _bootstrap

EXECUTED = ("tests/ptx", "tests/unit/kernels")  # by themselves: these processes execute what is compiled of the kernels
GPU = "import sys, torch; sys.exit(not (torch.cuda.is_available() or torch.xpu.is_available()))"


def main() -> int:
    _bootstrap.answer_help(__doc__)
    python = str(_bootstrap.ensure("test"))
    print("ruff check", flush=True)
    ruff = subprocess.run([python, "-m", "ruff", "check", "."], cwd=_bootstrap.ROOT).returncode
    # The tests keep one thread busy each; more workers than four would want more memory than they save time.
    # tests/conftest.py puts the longest files first, and they are to stay there.
    workers = ["-n", str(min(os.cpu_count() or 1, 4)), "--dist", "loadfile", "--no-loadscope-reorder"]
    given, tests = sys.argv[1:], 0
    whole = set(given) <= {"--all"}
    for part in ([f"--ignore={folder}" for folder in EXECUTED], EXECUTED) if whole else ([],):
        tests |= subprocess.run([python, "-m", "pytest", *workers, *part, *given], cwd=_bootstrap.ROOT).returncode
    if whole and not tests and subprocess.run([python, "-c", GPU]).returncode == 0:
        tests = subprocess.run([python, "-m", "pytest", "-m", "gpu"], cwd=_bootstrap.ROOT).returncode
    return tests or ruff


if __name__ == "__main__":
    sys.exit(main())
