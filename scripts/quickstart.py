"""From a fresh clone to a patched LLaMA, proven equal: ``python3
scripts/quickstart.py``.

Makes ``.venv`` with everything pinned, then runs ``examples/generate.py`` with the
arguments given here:

    --model PATH_OR_ID      a local folder or a hub id (default: the embedded LLaMA)
    --prompt TEXT
    --max-new-tokens N      how many tokens to generate (default 100)
    --temperature T         0 takes the likeliest token each time (default 0.7)
"""

import subprocess
import sys

import _bootstrap

if __name__ == "__main__":
    _bootstrap.answer_help(__doc__)
    python = _bootstrap.ensure()
    sys.exit(
        subprocess.run(
            [
                str(python),
                str(_bootstrap.ROOT / "examples" / "generate.py"),
                *sys.argv[1:],
            ]
        ).returncode
    )
