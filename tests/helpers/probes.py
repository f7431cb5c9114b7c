"""Scripts beside the tests that find out something in a process of their own."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path


@cache
def facts(script, target):
    """What a script prints as JSON of launches for a target, outside of the
    interpreter.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).with_name(script), target]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)
