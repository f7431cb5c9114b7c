"""Which sums something else than a norm and a ``+`` may get hold of, by source alone."""

import ast
import textwrap

import pytest

from hf_rmsnorm.fused.source import sums
from hf_rmsnorm.patching.layers.values import is_seen, past_versions

LLAMA = """
    residual = x
    x = self.n1(x)
    x, _ = self.attention(x, mask=None)
    x = residual + x
    residual = x
    x = self.n2(x)
    x = self.mlp(x)
    x = residual + x
    return x
"""
OWN = {
    "as LLaMA writes it": LLAMA,
    "rebound on a branch": """
    h = x + self.a(x)
    if steer is not None:
        h = h + steer
    return h + self.mlp(self.n2(h))""",
    "nested in the norm": "    return self.n2(x + self.a(x))",
    "asked for its shape": """
    h = x + self.a(x)
    return h + self.mlp(self.n2(h)).view(h.shape[0], h.size(1), -1).to(h.dtype)""",
    "in a loop": """
    for _ in range(3):
        h = x + self.a(x)
        x = h + self.b(self.n2(h))
    return x""",
    "read in place by another": """
    h = x + self.a(x)
    x += h
    return x + self.mlp(self.n2(h))""",
}
SEEN = {
    "returned": "    h = x + self.a(x)\n    return h + self.mlp(self.n2(h)), h",
    "given to a module": "    h = x + self.a(x)\n    return self.mlp(self.n2(h), h)",
    "by keyword": "    h = x + self.a(x)\n    return self.mlp(self.n2(h), residual=h)",
    "through a hook point": "    h = self.point(x + self.a(x))\n    return h + self.mlp(self.n2(h))",
    "under another name": "    h = x + self.a(x)\n    kept = h\n    return self.mlp(self.n2(h), kept)",
    "written to on a branch": """
    h = x + self.a(x)
    if steer is not None:
        h += steer
    return h + self.mlp(self.n2(h))""",
    "written to by a method": "    h = x + self.a(x)\n    h.mul_(2)\n    return self.n2(h)",
    "written to by an index": "    h = x + self.a(x)\n    h[0] = 0\n    return self.n2(h)",
    "written to by a view": "    h = x + self.a(x)\n    h.view(-1).mul_(2)\n    return self.n2(h)",
    "in a list": "    h = x + self.a(x)\n    self.kept = [h]\n    return self.n2(h)",
    "on an attribute": "    self.kept = x + self.a(x)\n    return self.n2(x)",
    "in a closure": "    h = x + self.a(x)\n    f = lambda: h\n    return self.n2(h) + f()",
    "in a comprehension": "    h = x + self.a(x)\n    return self.n2(h), [h for _ in range(2)]",
    "named in passing": "    y = self.n2(h := x + self.a(x))\n    return self.mlp(y, h)",
    "from the last turn of a loop": """
    h = x
    for _ in range(2):
        self.mlp(h)
        h = x + self.a(x)
    return self.n2(h)""",
    "one of two": "    h = x + self.a(x) if steer is None else x\n    return self.mlp(self.n2(h), h)",
    "given to a norm with more": "    h = x + self.a(x)\n    return self.n2(h, h)",
    "written to by the operator's method": "    h = x + self.a(x)\n    h.__iadd__(steer)\n    return self.n2(h)",
    "written to by the index's method": "    h = x + self.a(x)\n    h.__setitem__(0, steer)\n    return self.n2(h)",
    "in a global": "    global kept\n    kept = x + self.a(x)\n    return self.n2(kept)",
    "in a global on the way": "    global kept\n    h = kept = x + self.a(x)\n    return self.n2(h)",
    "added to a list": "    h = x + self.a(x)\n    kept = steer\n    kept += [h]\n    return self.n2(h)",
    "added to a list by name": "    h = x + self.a(x)\n    y = (h,)\n    steer += y\n    return self.n2(h)",
    "added to a set": "    h = x + self.a(x)\n    steer |= {h}\n    return self.n2(h)",
    "unpacked": "    h, y = x + self.a(x), x\n    return self.mlp(self.n2(h), h)",
}


PAST = {
    "other data": "    h = x + self.a(x)\n    h.data = steer\n    return self.n2(h)",
    "by its data": "    h = x + self.a(x)\n    h.data.mul_(2)\n    return self.n2(h)",
    "by a view's data": "    h = x + self.a(x)\n    h.view(-1).data[0] = 1\n    return self.n2(h)",
    "by NumPy": "    h = x + self.a(x)\n    h.detach().numpy()[0] = 1\n    return self.n2(h)",
}


def parsed(body):
    source = f"def forward(self, x, steer=None):\n{textwrap.indent(textwrap.dedent(body), '    ')}"
    return ast.parse(source).body[0]


def seen(body):
    definition = parsed(body)
    return is_seen(definition, sums(definition)[0], "self", ["n1", "n2"])


def past_its_version(body):
    definition = parsed(body)
    return sums(definition)[0] in past_versions(definition, "self")


@pytest.mark.parametrize("body", PAST.values(), ids=PAST)
def test_a_sum_that_is_written_to_past_its_version(body):
    assert past_its_version(body)


@pytest.mark.parametrize("body", [*OWN.values(), *SEEN.values()], ids=[*OWN, *SEEN])
def test_a_sum_whose_writes_move_its_version(body):
    assert not past_its_version(body)


@pytest.mark.parametrize("body", OWN.values(), ids=OWN)
def test_a_sum_that_only_norms_and_operators_read(body):
    assert not seen(body)


@pytest.mark.parametrize("body", SEEN.values(), ids=SEEN)
def test_a_sum_that_something_else_may_get_hold_of(body):
    assert seen(body)
