"""Commands in a process of their own."""

import os
import subprocess
import sys

from places import PYTHONPATH, ROOT


def ran(*command, cwd=ROOT, **environment) -> subprocess.CompletedProcess:
    """A finished command, with what it wrote as texts. Triton compiles there, unless the
    environment asks for its interpreter.
    """
    inherited = {**os.environ, "PYTHONPATH": PYTHONPATH}
    inherited.pop("TRITON_INTERPRET", None)
    options = {"cwd": cwd, "env": inherited | environment}
    return subprocess.run(
        list(map(str, command)), **options, capture_output=True, text=True
    )


def python(*arguments, **how) -> str:
    """What ``python *arguments`` prints; it must end well."""
    done = ran(sys.executable, *arguments, **how)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
