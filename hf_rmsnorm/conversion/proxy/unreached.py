"""Parameters that the inputs did not reach and that may yet write to the residual
stream: `discover` refuses these, once it has the norms that become RMSNorms.
"""

import torch

from ...verification.context import leaves_of
from ..errors import ConversionRefused
from .model import ProxyModel, token_table
from .run import alike, and_more, run
from .shift_invariance import ShiftTest


def refuse_if_unreached(
    proxy: ProxyModel, lengths: set[int], test: ShiftTest
) -> list[str]:
    """Refuse unreached parameters as long as a row of the stream, as with other inputs
    they may write to it.

    Returns:
        those that take the place of a masked patch or frame: they are left as they are.
    """
    # A module that was called has shown in the norms' inputs whether it writes. One of
    # another layer that was reached tells of its like.
    called = set()
    paths = leaves_of(proxy.model)
    with torch.no_grad():
        run(proxy.model, proxy.inputs, paths, lambda path, *_: called.add(path))
    known = {
        alike(name) for name in proxy.checkpoint_shapes if name not in test.undetermined
    }
    # Encoder and decoder have tables of their own, that are tied to this one.
    table = token_table(proxy.model) if "input_ids" in proxy.inputs else None
    masks = []
    left = []
    for name in sorted(test.unreached):
        path, _, leaf = name.rpartition(".")
        module = proxy.model.get_submodule(path)
        shape = module.get_parameter(leaf).shape
        if isinstance(module, torch.nn.Linear) and leaf == "weight":
            shape = shape[:1]  # the axis that it writes along
        if lengths.isdisjoint(shape):
            continue
        if "mask" in leaf:
            masks.append(name)
        elif path not in called and alike(name) not in known and module is not table:
            left.append(name)
    if left:
        raise ConversionRefused(
            f"{proxy.name}: the inputs made no use of {and_more(left)}; as wide as the "
            "residual stream, it may write to it: pass inputs=... that use it"
        )
    return masks
