"""Scripts beside the tests that find out something in a process of their own."""

import json
from functools import cache
from importlib.metadata import version
from pathlib import Path

from processes import python


@cache
def facts(script, target):
    """What a script prints as JSON of launches for a target."""
    return json.loads(python(Path(__file__).with_name(script), target))


def links_for_amd() -> bool:
    """Whether kernels for AMD can be linked: Triton 3.4 brings no linker."""
    has_linker = not version("triton").startswith("3.4.")
    return has_linker or Path("/opt/rocm/llvm/bin/ld.lld").exists()
