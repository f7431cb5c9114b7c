"""Python in a process of its own."""

import os
import subprocess
import sys

from places import PYTHONPATH, ROOT


def python(*arguments, cwd=ROOT, **environment) -> str:
    """What ``python *arguments`` prints; it must end well. Triton compiles there, unless
    the environment asks for its interpreter.
    """
    inherited = {**os.environ, "PYTHONPATH": PYTHONPATH}
    inherited.pop("TRITON_INTERPRET", None)
    command = [sys.executable, *map(str, arguments)]
    options = {"cwd": cwd, "env": inherited | environment}
    done = subprocess.run(command, **options, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
