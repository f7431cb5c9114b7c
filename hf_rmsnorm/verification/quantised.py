"""Finds modules with quantised weights, and the dtype that each is called in.

Only the forward of a Linear4bit can read its codes, and that forward has no float64. So
a float64 run calls such a module as the model does: with inputs rounded to the dtype
that they have there.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ..ops.loading import is_dtensor

# Numbers, token ids and masks. Whatever else a module holds are codes: int8, packed
# uint8 or int32, float8.
_NUMBERS = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
_PLAIN = (*_NUMBERS, torch.int64, torch.bool)


def holds_codes(value) -> bool:
    """Whether a value is a tensor of codes, or of a class that computes by itself, as
    torchao's do.
    """
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return False
    if value.dtype not in _PLAIN:
        return True
    return type(
        value
    ).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not is_dtensor(
        value
    )


def is_quantised(module: nn.Module) -> bool:
    """Whether the module itself, and none of its children, has a weight of codes."""
    if any(map(holds_codes, module._parameters.values())) or holds_codes(
        module._buffers.get("weight")
    ):
        return True
    if callable(getattr(type(module), "weight", None)):
        # torch.ao packs a weight away, and unpacks it by a method
        return True
    inner = (
        t
        for child in module.children()
        for t in (*child.parameters(), *child.buffers())
    )
    if next(inner, None) is not None:
        # an attention, say, whose buffer of small integers is a mask
        return False
    return any(map(holds_codes, (*module._buffers.values(), *vars(module).values())))


def quantised_modules(model: nn.Module) -> list[nn.Module]:
    """The model's modules with quantised weights."""
    return [module for module in model.modules() if is_quantised(module)]


def counted(modules: list[nn.Module]) -> dict[str, int]:
    """How many modules there are of each class, by its name."""
    return dict(Counter(type(module).__name__ for module in modules))


def own_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the model's first parameter that is a number."""
    return next(
        (p.dtype for p in model.parameters() if p.dtype in _NUMBERS), torch.float32
    )


@contextmanager
def recording_dtypes(
    modules: list[nn.Module],
) -> Iterator[dict[nn.Module, torch.dtype]]:
    """Inside, record for each module that is called the dtype of its first floating
    input.
    """
    dtypes: dict[nn.Module, torch.dtype] = {}

    def record(module: nn.Module, args: tuple, kwargs: dict) -> None:
        values = (*args, *kwargs.values())
        floats = [
            v.dtype
            for v in values
            if isinstance(v, torch.Tensor) and v.is_floating_point()
        ]
        if floats:
            dtypes.setdefault(module, floats[0])

    with ExitStack() as stack:
        for module in modules:
            handle = module.register_forward_pre_hook(record, with_kwargs=True)
            stack.callback(handle.remove)
        yield dtypes
