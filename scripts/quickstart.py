"""From a fresh clone to a patched LLaMA, proven equal: ``python3 scripts/quickstart.py``.

Makes ``.venv`` with everything pinned, then runs ``examples/generate.py`` with the arguments given here.
"""

import subprocess
import sys

import _bootstrap

if __name__ == "__main__":
    python = _bootstrap.ensure()
    sys.exit(subprocess.run([str(python), str(_bootstrap.ROOT / "examples" / "generate.py"), *sys.argv[1:]]).returncode)
