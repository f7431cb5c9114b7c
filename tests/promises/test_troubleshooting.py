"""Every error and warning of the package is in Troubleshooting, with its cause and its
cure, and the page shows no message that is gone.
"""

import ast
import re
from functools import cache

import pages
import pytest
from messages import HOLE, Message, messages
from places import ROOT

PAGE = pages.PAGES["docs/troubleshooting.md"]
FEW = 15  # letters of a message that only frames another text
# The functions whose messages do so, and what they frame.
FRAMES = {
    (
        "conversion/checkpoint/source.py",
        "_open_pickle",
    ): "a reason, for 'a pickle that'",
    ("conversion/errors.py", "clear_errors"): "what the system says, with its cure",
    ("conversion/proxy/discover.py", "_reached_norms"): "why_no_layer_norm",
    ("conversion/proxy/model.py", "config_of"): "what Transformers says",
    ("conversion/proxy/model.py", "make_proxy"): "why_no_layer_norm",
    ("formula.py", "__post_init__"): "the field of a NormSpec",
    ("integrations/trainer.py", "on_save"): "TRAINED of finetuned.py",
    ("kernels/compiled.py", "_load"): "a KernelUnavailable",
    ("patching/api.py", "_patch"): "what the report says",
    ("converted/follow.py", "parts"): "explain_missing",
    ("patching/formula/fit.py", "recipe"): "an error of NormSpec",
    ("patching/formula/plain_code.py", "_refusal"): "a verb and its object",
    ("patching/formula/plain_code.py", "read_function"): "another reason",
}
# Those whose messages only the package's own code can meet.
INTERNAL = {
    ("__init__.py", "__getattr__"),  # Python's own words
    ("ops/operators.py", "spec_args"),
    ("converted/record.py", "check_centring"),  # "is no record"
}


def rows() -> list[list[str]]:
    """The cells of each row below a head that begins with "it says"."""
    found = []
    for table in re.findall(r"^\| it says \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.M):
        for line in table.splitlines():
            found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


@cache
def patterns() -> list[list[str]]:
    """The pieces of each message that a row names, without what `...` stands for."""
    found = []
    for row in rows():
        for span in re.findall(r"`([^`]+)`", row[0]):
            pieces = [piece.strip() for piece in span.split("...")]
            found.append([piece for piece in pieces if piece])
    return found


def is_in(pieces: list[str], text: str) -> bool:
    """Whether a text has the pieces, in this order."""
    for piece in pieces:
        _, found, text = text.partition(piece)
        if not found:
            return False
    return True


def letters(message: Message) -> int:
    return len(re.findall(r"[a-z]", message.text.replace(HOLE, "")))


def test_every_message_is_on_the_page():
    assert len(messages()) > 150
    missing = []
    for message in messages():
        place = message.path, message.function
        if place in INTERNAL or (letters(message) < FEW and place in FRAMES):
            continue
        if not any(is_in(pieces, message.text) for pieces in patterns()):
            missing.append(str(message))
    assert not missing, "\n".join(["docs/troubleshooting.md lacks:", *missing])


def test_what_is_left_out_is_still_there():
    there = {(message.path, message.function) for message in messages()}
    frames = {
        (message.path, message.function)
        for message in messages()
        if letters(message) < FEW
    }
    assert there >= INTERNAL and frames >= FRAMES.keys()


def test_an_entry_names_enough_of_a_message_to_find_it():
    for pieces in patterns():
        assert len("".join(pieces)) >= 8, pieces


def test_each_entry_has_a_cause_and_a_cure():
    assert len(rows()) > 60
    for row in rows():
        assert len(row) == 3 and all(row), row


@cache
def constants() -> str:
    """Every text in the source of the package, a line each."""
    texts = []
    for path in (ROOT / "hf_rmsnorm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(" ".join(node.value.split()))
    return "\n".join(texts)


@pytest.mark.parametrize("pieces", patterns(), ids=" ... ".join)
def test_the_page_shows_no_message_that_is_gone(pieces):
    there = any(is_in(pieces, message.text) for message in messages())
    assert there or all(piece in constants() for piece in pieces)


def test_a_message_that_nobody_wrote_down_is_found():
    new = Message("a.py", "f", "ValueError", f"{HOLE} is not what was wanted here")
    assert not any(is_in(pieces, new.text) for pieces in patterns())
