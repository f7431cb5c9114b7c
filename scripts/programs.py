"""Run the programs of docs/programs.md with and without `hf-rmsnorm run`: ``.venv/bin/python
-m scripts.programs [pytest arguments]``.

They are installed in an environment of their own, which is removed afterwards, beside
the torch and the Triton of this one. tests/programs compares what they say.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from scripts import versions

ROOT = versions.ROOT
NEEDS = ("torch", "transformers", "accelerate", "safetensors", "filelock")
PROGRAMS = ROOT / "scripts" / "requirements" / "programs.txt"


def main() -> int:
    if {"-h", "--help"}.intersection(sys.argv[1:]):
        print(__doc__)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        versions.link_torch(place)
        python = str(place / "bin" / "python")
        pins = str(ROOT / "constraints.txt")
        versions.install(python, "-c", pins, *NEEDS, "-r", str(PROGRAMS))
        tests = [python, "-m", "pytest", "--all", "-v", "tests/programs"]
        return subprocess.run([*tests, *sys.argv[1:]], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
