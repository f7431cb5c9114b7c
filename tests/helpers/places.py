"""Where things lie in the checkout, and what a child process of a test needs on its
path.
"""

import os
from pathlib import Path

HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = ROOT / "scripts"
# What is asked for goes first: it may be another Triton.
PYTHONPATH = os.pathsep.join(
    filter(None, [os.environ.get("PYTHONPATH"), str(ROOT), str(HELPERS)])
)
