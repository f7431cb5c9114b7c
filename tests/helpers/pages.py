"""The documentation as the tests read it: its pages, the blocks of code in them, and
what stands between backquotes.
"""

import re
from typing import NamedTuple

from places import ROOT

NAMES = ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")
FILES = [*(ROOT / f"{name}.md" for name in NAMES), *sorted(ROOT.glob("docs/*.md"))]
FILES += [ROOT / f"{folder}/README.md" for folder in ("benchmarks", "scripts")]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in FILES
}
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_OUTPUT = re.compile(r"\s*^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced block. `output` is the block of text that follows it with nothing
    between; "" where none does.
    """

    page: str
    line: int
    code: str
    output: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks(language: str) -> list[Block]:
    """Every block of a language, on all pages."""
    result = []
    for page, text in PAGES.items():
        for match in _BLOCK.finditer(text):
            if match[1] != language:
                continue
            line = text.count("\n", 0, match.start()) + 1
            output = _OUTPUT.match(text, match.end())
            shown = ""
            if output:
                shown = output[1]
            result.append(Block(page, line, match[2], shown))
    return result


def shown_behind(page: str, words: str) -> str:
    """The block of text behind a sentence of a page."""
    _, _, behind = PAGES[page].partition(f"{words}\n\n```text\n")
    assert behind, words
    return behind.partition("```")[0]


def is_as_shown(shown: str, printed: str) -> bool:
    """Whether an output is as on a page, where `...` stands for anything in a line."""
    pattern = re.escape(shown).replace(re.escape("..."), ".*")
    return re.fullmatch(pattern, printed) is not None


def commands() -> list[tuple[str, str]]:
    """(page and line, command) for every line of every block of shell."""
    found = []
    for block in blocks("sh"):
        for line in block.code.splitlines():
            if line.strip() and not line.startswith("#"):
                found.append((str(block), line))
    return found


def without_blocks(page: str) -> str:
    return _BLOCK.sub("", PAGES[page])


def code_spans(page: str) -> list[str]:
    """What stands between backquotes on a page, each on one line."""
    return [" ".join(span.split()) for span in _SPAN.findall(without_blocks(page))]


def links(page: str) -> list[str]:
    return _LINK.findall(without_blocks(page))


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(page), re.MULTILINE)
    words = [re.sub(r"[^\w -]", "", heading).strip() for heading in headings]
    return {heading.lower().replace(" ", "-") for heading in words}


def row(page: str, start: str) -> list[str]:
    """The cells of the one table row of a page that starts with `start`, without its
    first.
    """
    row = rf"^\| {re.escape(start)} \|(.*)\|$"
    (cells,) = re.findall(row, PAGES[page], re.M)
    return [cell.strip() for cell in cells.split("|")]
