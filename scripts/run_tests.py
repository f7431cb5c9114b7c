"""From a fresh clone to a test result: ``python3 scripts/run_tests.py [--all |
--nightly] [pytest arguments]``.

Makes ``.venv`` with everything pinned, runs the linter and then pytest. Exits with
pytest's code, or with the linter's where only that one complains. The quick tests take
minutes. ``--all`` runs what CI runs, ``--nightly`` every test. On a machine with a GPU
the tests of real hardware follow, ``pytest -m gpu``. Useful pytest arguments: ``-k
WORD``, ``tests/promises/cli``, ``--durations 20``.

``--triton VERSION`` before them runs tests/ptx and tests/unit/kernels, or what is named,
under another Triton.
"""

import os
import subprocess
import sys
import time

import _bootstrap

# by themselves: these processes execute compiled kernels
EXECUTED = ("tests/ptx", "tests/unit/kernels")
TIERS = ("--all", "--nightly")
HAS_GPU = "import sys, torch; sys.exit(not (torch.cuda.is_available() or torch.xpu.is_available()))"


def main() -> int:
    _bootstrap.answer_help(__doc__)
    arguments = sys.argv[1:]
    python = str(_bootstrap.ensure(*extras(arguments)))
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
    if not set(arguments) <= set(TIERS):
        return run(by_file)
    start = time.monotonic()
    failed = run([*by_file, *(f"--ignore={folder}" for folder in EXECUTED)])
    failed |= run([*pytest, "--dist", "worksteal", *EXECUTED])
    if has_other_triton(python):
        failed |= run_under(_bootstrap.OTHER_TRITON, python, [])
    print(f"Tests took {time.monotonic() - start:.0f} s")
    if not failed and run([python, "-c", HAS_GPU]) == 0:
        failed = run([python, "-m", "pytest", "-m", "gpu"])
    return failed


def run_under(version: str, python: str, arguments: list[str]) -> int:
    """Run pytest under another Triton than that of `.venv`."""
    print(f"Triton {version}", flush=True)
    named = any(argument.startswith("tests/") for argument in arguments)
    command = [python, "-m", "pytest", "-n", "2", "--dist", "worksteal", *arguments]
    command += () if named else EXECUTED
    return run(command, env=_bootstrap.with_triton(version))


def has_other_triton(python: str) -> bool:
    """Whether `.venv` has a Triton, and not `OTHER_TRITON`."""
    code = "from importlib.metadata import version; print(version('triton'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() not in ("", _bootstrap.OTHER_TRITON)


def extras(arguments: list[str]) -> list[str]:
    """The files of scripts/requirements that the tier of `arguments` needs."""
    if "--nightly" in arguments:
        return ["quick", "all", "nightly"]
    return ["quick", "all"] if "--all" in arguments else ["quick"]


def run(command: list[str], env: dict[str, str] | None = None) -> int:
    return subprocess.run(command, cwd=_bootstrap.ROOT, env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
