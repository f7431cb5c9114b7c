"""Python in a process of its own."""

import os
import subprocess
import sys

from places import PYTHONPATH, ROOT


def python(*arguments, cwd=ROOT, **environment) -> str:
    """What ``python *arguments`` prints; it must end well. Triton compiles there, unless
    the environment asks for its interpreter.
    """
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**inherited, "PYTHONPATH": PYTHONPATH, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
