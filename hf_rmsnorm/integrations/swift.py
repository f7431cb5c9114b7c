"""ms-swift's callback ``hf_rmsnorm``, for a plugin file that its YAML names under
``external_plugins:``.
"""

from swift.callbacks import callbacks_map

from .trainer import HfRmsNormCallback


def register(**options) -> None:
    """Register `HfRmsNormCallback` with these arguments as ``callbacks: hf_rmsnorm``;
    raises the callback's errors.
    """
    # a wrong option is an error now, not after the model is loaded
    HfRmsNormCallback(**options)
    callbacks_map["hf_rmsnorm"] = lambda args, trainer: HfRmsNormCallback(**options)
