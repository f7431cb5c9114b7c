"""Where a result was measured: versions, device, and the commit where git knows it."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

from hf_rmsnorm.cli.env import PACKAGES, versions

PEERS = ("liger-kernel",)


def ask(*command: str) -> str | None:
    """The output of a program, or None if the program is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None


def environment(cuda: bool) -> dict:
    """Versions, platform, commit and, if `cuda`, the facts of the current GPU; None
    where unknown.
    """
    import torch

    facts = {
        "versions": versions(PACKAGES + PEERS),
        "platform": platform.platform(),
        "device": None,
        "driver": None,
    }
    if cuda and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        asked = "--query-gpu=driver_version", "--format=csv,noheader"
        facts |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": ask("nvidia-smi", *asked),
        }
    root = str(Path(__file__).resolve().parents[1])
    commit = ask("git", "-C", root, "describe", "--always", "--dirty", "--abbrev=12")
    return facts | {"commit": commit}
