"""The documentation as the tests read it: its pages, their prose, and the blocks of code in them."""

import re
from typing import NamedTuple

from places import ROOT

FILES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *sorted(ROOT.glob("docs/**/*.md"))]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in FILES}
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block. `output` is the block of text that follows it with nothing between; "" where none does."""

    page: str
    line: int
    language: str
    code: str
    output: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def prose(page: str) -> str:
    """A page with every run of white space as one space."""
    return " ".join(PAGES[page].split())


def blocks(language: str) -> list[Block]:
    """Every block of a language, on all pages."""
    found = []
    for page, text in PAGES.items():
        matches = list(_BLOCK.finditer(text))
        for match, following in zip(matches, [*matches[1:], None], strict=False):
            if match[1] == language:
                directly = following and following[1] == "text" and not text[match.end() : following.start()].strip()
                line = text.count("\n", 0, match.start()) + 1
                found.append(Block(page, line, language, match[2], following[2] if directly else ""))
    return found


def commands() -> list[tuple[str, str]]:
    """(page and line, command) for every line of every block of shell."""
    return [
        (f"{block.page}:{block.line}", line)
        for block in blocks("sh")
        for line in block.code.splitlines()
        if line.strip() and not line.startswith("#")
    ]


_INLINE = re.compile(r"`((?:hf-rmsnorm|python3? -m|python3? [a-z]+/|pip install) ?[^`]*)`")


def inline_commands() -> list[tuple[str, str]]:
    """(page, command) for every command within a sentence; what the changelog names may be gone."""
    return [(page, line) for page in PAGES if page != "CHANGELOG.md" for line in _INLINE.findall(prose(page))]


def section(page: str, heading: str) -> str:
    """What stands on a page between a heading and the next; "" for what comes before the first below the title."""
    text = PAGES[page] if not heading else PAGES[page].partition(f"# {heading}\n")[2]
    return re.split(r"^##+ ", text, maxsplit=1, flags=re.MULTILINE)[0]


def row(page: str, heading: str, start: str) -> list[str]:
    """The cells of the one table row in a section that starts with `start`, without its first."""
    (line,) = [line for line in section(page, heading).splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip()[1:-1].split("|")][1:]
