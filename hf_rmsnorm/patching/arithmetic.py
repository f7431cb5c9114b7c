"""The effects of the functions of torch, and of the methods of a tensor, that a forward
may call.

A forward is read before it is changed or trusted. A word that is not in this table is
refused: its effect is unknown.
"""

# The effects of a call. Those of a cast and of a view may be the tensor itself.
ELEMENTS = "computes each element by itself"
CAST = "gives another dtype, device or memory layout"
REDUCTION = "computes along dimensions"
VIEW = "gives all elements in another shape"
JOIN = "gives all elements, joined or repeated along a dimension"
CUT = "cuts a dimension"
PART = "gives some elements, by number"
CHOICE = "gives what values decide"
DROP = "drops dimensions of one element"
QUESTION = "gives a size, or the number of dimensions"

_WORDS = {
    ELEMENTS: """
        abs add div mul neg pow reciprocal rsqrt sigmoid silu sqrt square sub tanh
    """,
    CAST: "bfloat16 contiguous double float half to type_as",
    REDUCTION: """
        layer_norm mean norm normalize rms_norm sum var var_mean vector_norm
    """,
    VIEW: """
        expand expand_as flatten movedim permute reshape transpose unflatten unsqueeze
        view view_as
    """,
    JOIN: "cat repeat_interleave stack",
    CUT: "chunk split",
    PART: "index_select narrow unbind",
    CHOICE: "clamp where",
    DROP: "squeeze",
    QUESTION: "dim size",
}
EFFECTS = {word: effect for effect, words in _WORDS.items() for word in words.split()}

# Keywords by which a function writes to a tensor; `**arguments` may hold one.
WRITING = frozenset({"out", "inplace", None})
# Attributes that tell about a tensor without getting hold of it.
FACTS = frozenset({"device", "dtype", "ndim", "shape"})


def words_that(*effects: str) -> frozenset[str]:
    """The words with one of these effects."""
    return frozenset(word for word, effect in EFFECTS.items() if effect in effects)


# What takes all elements through the same steps, whatever they are and however many. A
# run on one row tells of dimensions that were dropped.
SAME_STEPS = words_that(ELEMENTS, CAST, REDUCTION, VIEW, JOIN, DROP)
# Methods that have no effect and are no module's. Modules are called `self.norm`, so of
# arithmetic there is `tanh` alone, which Lumina's gates call.
OF_TENSORS = words_that(CAST, VIEW, CUT, PART, CHOICE, DROP, QUESTION) | {"tanh"}
