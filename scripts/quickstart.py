"""From a fresh clone to a patched LLaMA, proven equal: ``python3
scripts/quickstart.py``.

Makes ``.venv`` with everything pinned, then runs ``examples/generate.py`` with the
arguments given here:

    --model PATH_OR_ID      a local folder or a hub id (default: the embedded LLaMA)
    --prompt TEXT
    --max-new-tokens N      how many tokens to generate (default 100, on a CPU 20)
    --temperature T         0 takes the likeliest token each time (default 0.7)

With ``--notebook`` alone it runs ``examples/quickstart.ipynb`` instead, in minutes, and
writes ``runs/quickstart-executed.ipynb``.
"""

import subprocess
import sys

import _bootstrap

EXAMPLES = _bootstrap.ROOT / "examples"
RUNS = _bootstrap.ROOT / "runs"  # git ignores it, and no test looks there


def command(arguments: list[str]) -> list[str]:
    """What to run, once the environment has what it needs."""
    if arguments == ["--notebook"]:
        execute = _bootstrap.ensure("notebook").with_name("jupyter-execute")
        RUNS.mkdir(exist_ok=True)
        output = f"--output={RUNS / 'quickstart-executed.ipynb'}"
        return [str(execute), str(EXAMPLES / "quickstart.ipynb"), output]
    python = _bootstrap.ensure()
    return [str(python), str(EXAMPLES / "generate.py"), *arguments]


if __name__ == "__main__":
    _bootstrap.answer_help(__doc__)
    sys.exit(subprocess.run(command(sys.argv[1:])).returncode)
