"""What a norm reads from the objects that it holds, a config, a table, a list: nobody sees them change."""

import enum
import types

import torch

# These cannot be changed, or are code, or are looked at by themselves.
_FIXED = (enum.Enum, frozenset, bytes, complex, range, slice, types.FunctionType, types.ModuleType, type, property,
          staticmethod, classmethod, torch.Tensor, torch.nn.Module)  # fmt: skip


class Held:
    """Stands in for an object: gives the numbers and flags in it, or others; any other read fails and is noted."""

    __class__ = property(lambda self: type(self._held))
    # What tells of the whole, its length or its truth, fails.
    __bool__ = __eq__ = __iter__ = __len__ = __contains__ = __call__ = None

    def __init__(self, value, others: bool = False, notes: list | None = None):
        self._held, self._others, self.unproven = value, others, [] if notes is None else notes

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._read(lambda: getattr(self._held, name))

    def __getitem__(self, key):
        return self._read(lambda: self._held[key])

    def get(self, key, default=None):
        return self[key]

    def _read(self, read):
        try:
            value = read()
        except Exception:  # what is absent may come; a user's property may raise anything
            value = None
        if type(value) in (bool, int, float):
            return otherwise(value) if self._others else value
        inside = isinstance(value, (dict, list, tuple)) or (hasattr(value, "__dict__") and not callable(value))
        if inside and not isinstance(value, _FIXED):
            return Held(value, self._others, self.unproven)
        self.unproven.append(value)
        raise TypeError("what this object holds cannot be proven")


def otherwise(value):
    """Another number or flag, or a tuple of others; None for anything else."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return 2 * value + 1
    found = [(v, otherwise(v)) for v in value] if type(value) is tuple else []
    return tuple(v if o is None else o for v, o in found) if any(o is not None for _, o in found) else None


def may_change(value, module: torch.nn.Module) -> bool:
    """Whether an attribute of a module is an object that may hold something else later."""
    owner = getattr(value, "__self__", None)
    if isinstance(value, types.BuiltinFunctionType):  # a method, perhaps, of a table or a list
        return type(owner).__hash__ is None or isinstance(owner, torch.Tensor)
    return not (isinstance(value, _FIXED) or owner is module or isinstance(owner, type))
