"""Sets up the project's virtual environment, ``.venv``, with the standard library
alone.

The versions come from ``constraints.txt``, the packages from wherever pip is configured
to look. An environment is used again as it is while ``constraints.txt``,
``pyproject.toml``, ``scripts/requirements`` and the checkout's place stay the same.
Otherwise, or after a run that did not finish, it is made again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
# its presence says that the environment is ours, its content that it is complete
STAMP = VENV / "hf-rmsnorm.json"

REQUIREMENTS = ("torch", "transformers", "accelerate", "safetensors", "filelock")
REQUIREMENTS += ("setuptools",)  # builds the project
# The tests' packages, a file for each tier: EXTRAS / "quick.txt" and so on.
EXTRAS = Path(__file__).resolve().parent / "requirements"
# Other patchers to meet in the tests of --all. Without their dependencies: they ask for a triton
# by name, and would bring one to a ROCm torch that has its own.
BARE_EXTRAS = ("liger-kernel",)
# Only for a torch that brings none: the last triton that supports each Python.
TRITON = (
    "triton==3.9.0; python_version >= '3.11'",
    "triton==3.8.0; python_version < '3.11'",
)


def answer_help(usage: str) -> None:
    """Print `usage` and exit if the command line asks for help, before an environment
    is made.
    """
    if {"-h", "--help"}.intersection(sys.argv[1:]):
        print(usage.strip())
        sys.exit(0)


def python() -> Path:
    """The environment's interpreter."""
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def ensure(*extras: str) -> Path:
    """Make `.venv` hold the project, its requirements and those of `extras`, names of
    files in scripts/requirements; return its interpreter. If that is impossible, exits
    with one line that says how to cure it.
    """
    if sys.version_info < (3, 10):  # noqa: UP036 - this file is what meets an older Python
        sys.exit(
            f"Python 3.10 or newer is needed, this is {platform.python_version()}: run it with a newer python3"
        )
    fingerprint = _fingerprint()
    stamp = _read_stamp()
    done = set()
    if stamp.get("fingerprint") == fingerprint and _runs():
        done = set(stamp["extras"])
        if done.issuperset(extras):
            return python()
    else:
        _make_venv()
    wanted = sorted(done.union(extras))
    # until the end, this run counts as interrupted
    STAMP.write_text("{}", encoding="utf-8")
    _install(wanted)
    stamp = {"fingerprint": fingerprint, "extras": wanted}
    STAMP.write_text(json.dumps(stamp) + "\n", encoding="utf-8")
    return python()


def _fingerprint() -> str:
    files = [ROOT / "constraints.txt", ROOT / "pyproject.toml", Path(__file__)]
    files += sorted(EXTRAS.glob("*.txt"))
    contents = [path.read_bytes() for path in files]
    return hashlib.sha256(b"\0".join([str(ROOT).encode(), *contents])).hexdigest()


def _read_stamp() -> dict:
    try:
        return json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # none yet, or cut short: nothing is known to be installed
        return {}


def _runs() -> bool:
    return (
        python().exists() and subprocess.run([str(python()), "-c", ""]).returncode == 0
    )


def _make_venv() -> None:
    if VENV.exists():
        if not STAMP.exists() and any(VENV.iterdir()):
            sys.exit(
                f"{VENV} was not made by this script: move it away and run this again"
            )
        for entry in VENV.iterdir():
            # all but the stamp, so that this too can be interrupted
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != STAMP:
                entry.unlink()
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit(
            "this Python has no ensurepip to make virtual environments with: install it (on Debian and Ubuntu the "
            "package python3-venv) and run this again"
        )
    print(f"Making {VENV}", flush=True)
    VENV.mkdir(exist_ok=True)
    STAMP.write_text("{}", encoding="utf-8")
    venv.create(VENV, symlinks=os.name != "nt", with_pip=True)


def _install(extras: list[str]) -> None:
    words = "the first time this takes minutes, most of them torch"
    print(f"Installing what constraints.txt pins ({words})", flush=True)
    pinned = ("-c", str(ROOT / "constraints.txt"))
    listed = []
    for extra in extras:
        listed += "-r", str(EXTRAS / f"{extra}.txt")
    _pip(*pinned, *REQUIREMENTS, *listed)
    if "all" in extras:
        _pip(*pinned, "--no-deps", *BARE_EXTRAS)
    if _lacks_triton():
        # CUDA and ROCm builds of torch bring the triton they were built with; only a
        # CPU build comes without.
        _pip("--no-deps", *TRITON)
    # --no-deps: everything is there, and a ROCm torch's triton goes by another name
    # that pip would add to.
    _pip("--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def with_triton(version: str) -> dict[str, str]:
    """The environment of a process that finds this Triton before that of `.venv`, for
    which it is installed in a folder of its own.
    """
    folder = VENV / "tritons" / version
    if not (folder / "triton").exists():
        _pip("--no-deps", "--target", str(folder), f"triton=={version}")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def _lacks_triton() -> bool:
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        # there are no wheels: the package works without, on torch's own forward
        return False
    test = "import importlib.util as u, sys; sys.exit(u.find_spec('triton') is None)"
    return subprocess.run([str(python()), "-c", test]).returncode != 0


def _pip(*args: str) -> None:
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    options = ("--disable-pip-version-check", *quiet)
    command = [str(python()), "-m", "pip", "install", *options, *args]
    if subprocess.run(command).returncode:
        sys.exit("pip failed (its message is above): solve that, and run this again")
