"""A call of a norm or a fused layer in a model, which can be made again on the same
arguments: as it is, by the original, and in float64. `parts.py` makes one of each call
that it compares.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..fused.norm import patch_of
from ..ops import use_backend
from ..patching.swap import restore, unfuse_all, unswap_norm
from .context import is_float
from .float64 import in_float64


@dataclass
class Call:
    """One call of a module.

    Attributes:
        path: of the module, and its fused pieces.
        reference: the module that it is compared with. None: itself, with its own class.
        arguments: by position or by name.
        place: of the input, among the arguments.
    """

    path: str
    module: nn.Module
    reference: nn.Module | None
    arguments: dict
    place: int | str

    @property
    def x(self) -> torch.Tensor:
        """The module's input."""
        return self.arguments[self.place]

    def name_of(self, place: int | str) -> str:
        """The name of the argument at a place among the gradients."""
        return "input"

    def again(self) -> "Call":
        """The same call with copies of its arguments: a layer may write to a cache
        among them.
        """
        return replace(self, arguments=copy.deepcopy(self.arguments))

    def outputs(
        self, module: nn.Module, inputs: dict, parameters: dict
    ) -> list[torch.Tensor]:
        """The floating tensors that a module returns for other inputs, by their places
        among the arguments, and for other parameters where these are named.
        """
        named = self.arguments | inputs
        args = tuple(named.pop(key) for key in self.arguments if isinstance(key, int))
        returned = torch.func.functional_call(module, parameters, args, named)
        return [y for y in tree_leaves(returned) if is_float(y) and y.dim()]

    @contextmanager
    def original(self) -> Iterator[nn.Module]:
        """The module to compare with: that of the reference, or this one unpatched."""
        if self.reference is not None:
            yield self.reference
        else:
            with unpatched(self.module):
                yield self.module

    @contextmanager
    def exactly(self) -> Iterator["Call"]:
        """Inside, the original is in float64, with its norms in plain torch. The call
        is a copy, as copies are not made in float64.
        """
        again = self.again()
        with (
            self.original() as original,
            use_backend("reference"),
            in_float64(original),
        ):
            yield again


@contextmanager
def unpatched(*modules: nn.Module) -> Iterator[None]:
    """Inside, norms and fused layers among these modules have their own classes. Norms
    within a layer stay patched.
    """
    before = unfuse_all(modules)
    for module in modules:
        unswap_norm(module)
    try:
        yield
    finally:
        restore(before)


def keeps_formula(norm: nn.Module) -> bool:
    """Whether this is a patched norm that computes what its own class does; a converted
    checkpoint's does not.
    """
    patch = patch_of(norm)
    return patch is not None and not patch.asked.as_rms
