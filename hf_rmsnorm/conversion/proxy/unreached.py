"""Parameters that the inputs did not reach and that may yet write to the residual
stream.
"""

from collections.abc import Iterable

import torch

from ..plan import ConversionRefused
from .keys import KeyMap
from .layer_norms import Norms
from .model import ProxyModel, new_model, with_settings
from .run import alike, and_more, leaves, run, weight_axis
from .shift_invariance import ShiftTest


def refuse_if_unreached(proxy: ProxyModel, norms: Norms, test: ShiftTest) -> list[str]:
    """Refuse unreached parameters as wide as the stream, as with other inputs they may
    write to it.

    Returns:
        those that take the place of a masked patch or frame: they are left as they are.
    """
    lengths = {norm.hidden_size for norm in norms.values()}
    left = [name for name in sorted(test.unreached) if _may_write(proxy, name, lengths)]
    masks = [name for name in left if "mask" in name.rpartition(".")[2]]
    left = [name for name in left if name not in masks]
    if left:
        # their outputs are dropped, or the norms' inputs show what they write
        called = _called_leaves(proxy)
        left = [name for name in left if name.rpartition(".")[0] not in called]
        left = _not_known_otherwise(proxy, left, test.undetermined)
    if left:
        what = f"the inputs made no use of {and_more(left)}; as wide as the residual stream, it may write to it"
        raise ConversionRefused(f"{proxy.name}: {what}: pass inputs=... that use it")
    return masks


def _called_leaves(proxy: ProxyModel) -> set[str]:
    """Paths of the modules without children that the model calls."""
    called: set[str] = set()
    with torch.no_grad():
        run(
            proxy.model,
            proxy.inputs,
            leaves(proxy.model),
            lambda path, args, output: called.add(path),
        )
    return called


def _not_known_otherwise(
    proxy: ProxyModel, names: list[str], undetermined: Iterable[str]
) -> list[str]:
    """Those that have no second name, nor a parameter of the same place in another
    layer, that was reached.
    """
    reached = proxy.shapes.keys() - set(undetermined)
    places = set(map(alike, reached))
    left = [name for name in names if alike(name) not in places]
    if not left:
        return []
    # With tied embeddings a head's bias may have a second name, which is used only
    # there.
    tied = with_settings(proxy.config, {"tie_word_embeddings": True})
    aliases = KeyMap(new_model(type(proxy.model), tied)).aliases
    known = {alias for name, alias in aliases.items() if name in reached}
    return [name for name in left if aliases.get(name) not in known]


def _may_write(proxy: ProxyModel, name: str, lengths: set[int]) -> bool:
    """Whether an axis along which a parameter may write is as long as a row of the
    stream, or several.
    """
    path, _, leaf = name.rpartition(".")
    here, there = proxy.model.get_parameter(name).shape, proxy.shapes[name]
    axis = weight_axis(proxy.model.get_submodule(path)) if leaf == "weight" else None
    axes = range(len(here)) if axis is None else (axis,)
    for length in lengths:
        width = proxy.widths.get(length, length)
        if any(here[a] % length == 0 and there[a] % width == 0 for a in axes):
            return True
    return False
