"""What the pickle of a whole patched model names first, if it is from before the classes moved: it says what to do."""


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(
        "a whole model was pickled here while an older hf_rmsnorm had it patched, and its classes have moved: load "
        "it with that version, unpatch_model it and save it; or load its weights by from_pretrained and patch that"
    )
