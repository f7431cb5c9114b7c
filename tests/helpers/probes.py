"""Scripts beside the tests that find out something in a process of their own."""

import json
from functools import cache
from pathlib import Path

from processes import python


@cache
def facts(script, target):
    """What a script prints as JSON of launches for a target."""
    return json.loads(python(Path(__file__).with_name(script), target))
