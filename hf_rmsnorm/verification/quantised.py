"""Finds modules with quantised weights.

Only the forward of a Linear4bit can read its codes, and that forward has no float64. So
a float64 run calls this module as the model does: with inputs rounded to the model's
dtype.
"""

import torch
from torch import nn

from ..ops.operators import is_dtensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Numbers, token ids and masks. Whatever else a module holds are codes: int8, packed
# uint8 or int32, float8.
_PLAIN = (*_FLOATS, torch.complex64, torch.complex128, torch.int64, torch.bool)


def holds_codes(value) -> bool:
    """Whether a value is a tensor of codes, or of a class that computes by itself, as
    torchao's do.
    """
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return False
    if value.dtype not in _PLAIN:
        return True
    dispatch = type(value).__torch_dispatch__
    return dispatch is not torch.Tensor.__torch_dispatch__ and not is_dtensor(value)


def _weights_of(module: nn.Module) -> list:
    """What may be a weight of the module itself: any parameter, a buffer of that name,
    and where no child has weights also other buffers and attributes.
    """
    weights = [*module._parameters.values(), module._buffers.get("weight")]
    for child in module.children():
        if [*child.parameters(), *child.buffers()]:
            # an attention, say, whose buffer of small integers is a mask
            return weights
    return [*weights, *module._buffers.values(), *vars(module).values()]


def quantised_modules(model: nn.Module) -> list[nn.Module]:
    """The model's modules with quantised weights."""
    modules = model.modules()
    return [module for module in modules if any(map(holds_codes, _weights_of(module)))]


def first_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the model's first parameter that is a number."""
    for parameter in model.parameters():
        if parameter.dtype in _FLOATS:
            return parameter.dtype
    return torch.float32
