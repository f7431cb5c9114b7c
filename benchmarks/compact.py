"""JSON of results that are committed: an entry a line, and no digit that a measurement
does not repeat.
"""

from __future__ import annotations

import json
from pathlib import Path

from hf_rmsnorm.cli.common import CliError

DIGITS = 5  # of a float
WIDTH = 800  # characters of a line


def compact_json(value, width: int = WIDTH, indent: int = 0) -> str:
    """The JSON of a value. A value too long for one line has each of its parts on a
    line.
    """
    value = _rounded(value)
    line = json.dumps(value, separators=(",", ":"))
    if len(line) <= width or not isinstance(value, (dict, list)):
        return line
    end = "\n" + " " * indent
    if isinstance(value, list):
        parts = [compact_json(part, width, indent + 1) for part in value]
        return f"[{end} {f',{end} '.join(parts)}{end}]"
    parts = []
    for key, part in value.items():
        parts.append(f"{json.dumps(key)}:{compact_json(part, width, indent + 1)}")
    return f"{{{end} {f',{end} '.join(parts)}{end}}}"


def write_result(file: Path, data: dict, width: int = WIDTH) -> None:
    """Write a result as JSON.

    Raises:
        CliError: the file cannot be written.
    """
    try:
        file.write_text(compact_json(data, width) + "\n", encoding="utf-8")
    except OSError as error:
        raise CliError(
            f"cannot write {file}: {error.strerror}; pass another file with --out"
        ) from error


def _rounded(value):
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return value
