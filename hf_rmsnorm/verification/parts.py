"""Compares parts of a model, its norms or its fused layers, when they are called.

`verify_equivalence` runs the candidate with a `Parts` of each kind: `checks.py` judges
the outputs of a call, `gradients.py` its gradients.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from ..fused.norm import recipe_of
from ..patching.swap import layer_part
from .calls import Call, keeps_formula
from .checks import Check, check_outputs, worst
from .context import is_float
from .gradients import check_gradients

NOT_REACHED = "not reached by these inputs"
Modules = dict[str, nn.Module]


class Parts:
    """The comparison of modules with the originals: at the first call of each that has
    one row, and at the first that has several.

    Attributes:
        modules: by path, with the fused pieces of a layer.
        originals: what they are compared with, by path; a module without one is
            compared with itself, unpatched.
        gradients: the checks of gradients, where these are asked for.
    """

    def __init__(self, modules: Modules, originals: Modules, backward: bool):
        self.modules = modules
        self.originals = originals
        self.gradients = []
        self._backward = backward
        self._checks = {}  # by path, and whether the input had several rows
        self._busy = False

    def checks(self) -> list[Check]:
        """The worst check of each patched norm and layer, and of each other module that
        gives another output than the reference's.
        """
        checks = {path: Check(path, True, NOT_REACHED) for path in self.modules}
        for (path, _), check in self._checks.items():
            checks[path] = worst([check, checks[path]])
        shown = []
        for path, check in checks.items():
            module = self.modules[path]
            has_fault = check.differing or not check.passed
            if has_fault or recipe_of(module) or layer_part(type(module)):
                shown.append(check)
        return shown

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, the modules are compared when they are called."""
        with ExitStack() as stack:
            for path, module in self.modules.items():
                before = partial(self._before, path)
                hook = module.register_forward_pre_hook(before, with_kwargs=True)
                stack.callback(hook.remove)
            yield

    def _before(self, path, module, args: tuple[Any, ...], kwargs: dict) -> None:
        if self._busy:
            return
        arguments = dict(enumerate(args)) | kwargs
        for place, value in arguments.items():
            if is_float(value) and value.dim() and value.numel():
                original = self.originals.get(path)
                self._compare(Call(path, module, original, arguments, place))
                return

    def _compare(self, call: Call) -> None:
        has_rows = call.x.shape[:-1].numel() > 1
        if (call.path, has_rows) in self._checks:
            return
        module = call.module
        has_gradients = keeps_formula(module) or layer_part(type(module))
        self._busy = True
        try:
            self._checks[call.path, has_rows] = check_outputs(call)
            if self._backward and has_rows and has_gradients:
                self.gradients += check_gradients(call)
        finally:
            self._busy = False
