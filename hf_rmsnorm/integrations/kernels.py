"""The fused norms in the shape that Hugging Face's `kernels` library takes, for models with ``use_kernels=True``.

Transformers gives one name to norms of different formulas: LLaMA's "RMSNorm" rounds before the weight, OLMo 2's rounds
once. So a layer here has no fixed formula. It recognises its module once, as `patch_model` does. If it cannot, it runs
the module's own forward.

    >>> from kernels import Mode, kernelize, use_kernel_mapping                               # doctest: +SKIP
    >>> with use_kernel_mapping(kernel_mapping()):                                            # doctest: +SKIP
    ...     kernelize(model, mode=Mode.TRAINING)

In Transformers, ``from_pretrained(..., use_kernels=True, kernel_config=kernel_config())``. Nothing is downloaded.
"""

import inspect
from dataclasses import dataclass

import torch

from ..fused.norm import fused_forward, fused_part
from ..patching.formula.recognise import recognise

DEVICES = ("cuda", "rocm", "xpu", "cpu")
_KEPT = "_hf_rmsnorm_kernel"


class _Known:
    """The forward that a module runs, stored on it. Copies and pickles drop it and find it again."""

    forward = None

    def __reduce__(self):
        return _Known, ()


def _recognised(module: torch.nn.Module) -> _Known:
    known = module.__dict__.get(_KEPT)
    if known is None or known.forward is None:
        module.__dict__.pop(_KEPT, None)  # an attribute of unknown meaning
        known = _Known()
        cls = type(module)
        recipe = None if fused_part(cls) else recognise(module).recipe
        known.forward = cls.forward if recipe is None else fused_forward(cls, recipe)
        module.__dict__[_KEPT] = known
    return known


@torch.compiler.assume_constant_result
def _while_compiling(module: torch.nn.Module) -> bool:
    """Recognise a module outside of the graph that is being traced."""
    return _recognised(module) is not None


def _run(self, args: tuple, kwargs: dict):
    if torch.compiler.is_compiling():
        _while_compiling(self)
        return getattr(self, _KEPT).forward(self, *args, **kwargs)
    return _recognised(self).forward(self, *args, **kwargs)


# A layer of `kernels` is a module class with a forward, two flags and nothing else; its forward is bound to modules of
# other classes, whose parameters have names of their own. It takes anything, and shows the arguments of another
# forward, by which `kernels` compares layers.
class RMSNorm(torch.nn.Module):
    """For "RMSNorm" and "RMSNormZeroCentered" of Transformers, and for any norm of one input."""

    has_backward = can_torch_compile = True

    def forward(self, *args, **kwargs):
        return _run(self, args, kwargs)

    forward.__signature__ = inspect.signature(lambda self, hidden_states: None)


class RMSNormGated(RMSNorm):
    """For "RMSNormGated" of Transformers, whose second input is a gate."""

    def forward(self, *args, **kwargs):
        return _run(self, args, kwargs)

    forward.__signature__ = inspect.signature(lambda self, hidden_states, gate=None: None)


LAYERS = {"RMSNorm": RMSNorm, "RMSNormZeroCentered": RMSNorm, "RMSNormGated": RMSNormGated}


@dataclass(frozen=True)
class InstalledLayer:
    """What `kernels` calls a repository: it is asked to load a layer, and this one is here already."""

    layer_name: str

    def load(self) -> type[torch.nn.Module]:
        return LAYERS[self.layer_name]

    def __str__(self) -> str:
        return f"hf_rmsnorm (layer `{self.layer_name}`)"


def kernel_mapping(*, devices: tuple[str, ...] = DEVICES) -> dict[str, dict[str, InstalledLayer]]:
    """For `kernels.use_kernel_mapping`, for all modes: layer's name in Transformers -> device of these -> the layer."""
    return {name: dict.fromkeys(devices, InstalledLayer(name)) for name in LAYERS}


def kernel_config():
    """A `KernelConfig` of Transformers with `kernel_mapping`; other layers keep the mapping of Transformers.

    It serves training and inference; Transformers gives both their kernels whenever a model changes between them.
    """
    from transformers import KernelConfig

    class HfRmsNormKernels(KernelConfig):
        """The layers are here: there is no repository's name to check, or to turn into a mapping."""

        def sanitize_kernel_mapping(self, model):
            self.store_registered_layer_names(model)

        def create_compatible_mapping(self, model, compile=False):
            self.kernel_mapping = kernel_mapping()

    return HfRmsNormKernels()
