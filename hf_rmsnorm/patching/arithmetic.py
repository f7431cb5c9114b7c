"""What the functions of torch and the methods of a tensor do that a forward may call.

A forward is read before it is changed or trusted. A word that is not in this table is
refused: nothing is known of what it does.
"""

# The effects of a call.
NEW = "makes a new tensor, of all elements by the same steps"
VIEW = "gives all elements, perhaps in the same memory"
PART = "gives some elements, chosen by number, perhaps in the same memory"
DROPS = "drops dimensions of one element"
CHOICE = "gives what values decide"
ASKS = "gives a number: a size, or how many dimensions there are"

_WORDS = {
    NEW: """
        abs add cat div layer_norm mean mul neg norm normalize pow reciprocal
        repeat_interleave rms_norm rsqrt sigmoid silu sqrt square stack sub sum tanh var
        var_mean vector_norm
    """,
    VIEW: """
        bfloat16 contiguous double expand expand_as flatten float half movedim permute
        reshape to transpose type_as unflatten unsqueeze view view_as
    """,
    PART: "chunk narrow split unbind",
    DROPS: "squeeze",
    CHOICE: "clamp index_select where",
    ASKS: "dim size",
}
EFFECTS = {word: effect for effect, words in _WORDS.items() for word in words.split()}

# Attributes that tell about a tensor without getting hold of it.
FACTS = frozenset({"device", "dtype", "ndim", "shape"})


def words_that(*effects: str) -> frozenset[str]:
    """The words with one of these effects."""
    return frozenset(word for word, effect in EFFECTS.items() if effect in effects)


# After a run at some sizes, these give nothing new at others; a run on one row tells of
# those that drop dimensions,
ALL_ELEMENTS = words_that(NEW, VIEW, DROPS)
# these nothing new at the same sizes,
SAME_STEPS = words_that(NEW, VIEW, DROPS, PART)
# and whatever they give, these change nothing.
NO_EFFECT = frozenset(EFFECTS)
