"""ms-swift's callback ``hf_rmsnorm``, for a file of two lines that its YAML names under ``external_plugins:``."""

from swift.callbacks import callbacks_map

from .trainer import HfRmsNormCallback


def register(**options) -> None:
    """Let ``callbacks: hf_rmsnorm`` mean `HfRmsNormCallback` with these arguments; raises what that does."""
    HfRmsNormCallback(**options)  # a wrong one is an error now, and not when the model is there
    callbacks_map["hf_rmsnorm"] = lambda args, trainer: HfRmsNormCallback(**options)
