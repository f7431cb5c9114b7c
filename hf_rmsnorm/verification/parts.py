"""Compares parts of a model, its norms or its fused layers, when they are called."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import nn

from ..fused.norm import recipe_of
from ..patching.layers.layer_class import layer_part
from .calls import Call, keeps_formula
from .checks import NOT_COMPARED, Check, Judge, check_outputs, worst
from .context import is_float
from .gradients import check_gradients

NOT_REACHED = "not reached by these inputs"


class Parts:
    """The comparison of modules with the originals: at the first call of each that has
    one row, and at the first that has several.

    Attributes:
        modules: by path, with the fused pieces of a layer: each with the module to
            compare it with; None: itself, unpatched.
        gradients: the checks of gradients, where these are asked for.
    """

    def __init__(self, modules: dict[str, tuple], judge: Judge, backward: bool):
        self.modules = modules
        self.gradients = []
        self._judge = judge
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
        return [
            check
            for path, check in checks.items()
            if check.differing or not check.passed or _is_patched(self.modules[path][0])
        ]

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Inside, the modules are compared when they are called."""
        with ExitStack() as stack:
            for path, (module, original) in self.modules.items():
                before = partial(self._before, path, original)
                hook = module.register_forward_pre_hook(before, with_kwargs=True)
                stack.callback(hook.remove)
            yield

    def _before(self, path, original, module, args: tuple, kwargs: dict) -> None:
        if self._busy:
            return
        arguments = dict(enumerate(args)) | kwargs
        for place, value in arguments.items():
            if is_float(value) and value.dim() and value.numel():
                self._compare(Call(path, module, original, arguments, place))
                return
        self._checks.setdefault((path, False), Check(path, True, NOT_COMPARED))

    def _compare(self, call: Call) -> None:
        has_rows = call.x.shape[:-1].numel() > 1
        if (call.path, has_rows) in self._checks:
            return
        module = call.module
        is_fused = keeps_formula(module) or layer_part(type(module)) is not None
        self._busy = True
        try:
            self._checks[call.path, has_rows] = check_outputs(call, self._judge)
            if self._backward and has_rows and is_fused:
                self.gradients += check_gradients(call)
        finally:
            self._busy = False


def _is_patched(module: nn.Module) -> bool:
    return recipe_of(module) is not None or layer_part(type(module)) is not None
