"""Tables in other libraries that hold a layer's exact class, where a fused layer has a
subclass.

A cache of diffusers looks up there what its blocks return. It refuses a class that is
not there.
"""

import sys
from dataclasses import replace
from weakref import WeakSet

from torch.nn import Module

# Of each class that was added to the table: the layers that have it.
_added: dict[type, WeakSet] = {}


def add(layer: Module, base: type) -> None:
    """Add a fused layer's class to the table that holds its own class, `base`."""
    table = _table()
    if table is None:
        return
    try:
        metadata = table.get(base)
    except ValueError:  # the layer's own class is not there
        return
    cls = type(layer)
    if cls not in _added:
        table.register(cls, replace(metadata))
        _added[cls] = WeakSet()
    _added[cls].add(layer)


def remove(layer: Module, cls: type) -> None:
    """Undo `add` of a layer that loses the fused class `cls`, which stays in the table
    as long as another layer has it.
    """
    layers = _added.get(cls, WeakSet())
    layers.discard(layer)
    if cls in _added and not layers:
        del _added[cls]
        _table()._registry.pop(cls, None)


def _table():
    """diffusers' table of transformer blocks; None where diffusers is not in use."""
    module = sys.modules.get("diffusers.hooks._helpers")
    return getattr(module, "TransformerBlockRegistry", None)
