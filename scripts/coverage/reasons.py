"""Why a module with "norm" in its class's name is not one that `patch` asks to be
swapped.
"""

from __future__ import annotations

import inspect
import re

import torch

# torch's own, by what their statistics are taken over; a subclass computes the same
# where it keeps the forward.
TORCH = (
    (
        torch.nn.modules.instancenorm._InstanceNorm,
        "normalises each channel over all places",
    ),
    (torch.nn.modules.batchnorm._NormBase, "normalises over the batch"),
    (torch.nn.GroupNorm, "normalises groups of channels over all places"),
)
REDUCTION = re.compile(
    r"\b(mean|sum|cumsum|var|std|var_mean|norm|layer_norm|rms_norm|normalize)\("
)


def why_not_a_norm(
    path: str, module: torch.nn.Module, reported: set[str]
) -> str | None:
    """A line for the module at `path`, whose name says norm and which a patch does not
    report; None if there is none.

    Args:
        reported: the paths of all modules that were swapped, or left alone with a
            reason.
    """
    inside = [(p, m) for p, m in module.named_modules(prefix=path) if p != path]
    if any(p in reported or "norm" in type(m).__name__.lower() for p, m in inside):
        return "a container: the norms inside it are listed by themselves"
    for cls, words in TORCH:
        if isinstance(module, cls):
            return words
    if inside:
        kinds = ", ".join(
            sorted({type(m).__name__ for _, m in inside if not any(m.children())})
        )
        return f"made of {kinds}, none of which is a norm"
    return _of_one_module(module)


def _of_one_module(module: torch.nn.Module) -> str | None:
    if type(module).__module__.startswith("torch.nn.utils"):
        return "computes a weight of another module, from parameters alone"
    stored = [
        name for name, _ in module.named_buffers() if re.search(r"mean|var|std", name)
    ]
    if stored:
        return f"scales by what it has stored ({', '.join(sorted(stored))}), not by statistics of its input"
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind < 2]
    if len(needed) > 1:
        return f"takes several tensors at once ({', '.join(needed)})"
    code = inspect.getsource(type(module).forward)
    if "cumsum(" in code:
        return "normalises over all places up to the present one"
    if not REDUCTION.search(code):
        return "takes no mean, sum or norm of its input"
    return None
