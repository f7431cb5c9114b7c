"""Transformers' own ``use_kernels=True`` with these layers, in a process of its own, as it looks for `kernels` once.

Where it asks for another version of `kernels` than there is, it is told that this one will do.
"""

import json

import transformers.utils
from transformers.utils import import_utils

accepted = import_utils.is_kernels_available()
if not accepted:
    import_utils.is_kernels_available = transformers.utils.is_kernels_available = lambda *versions: True

import tiny_models  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from hf_rmsnorm import count_launches, use_backend  # noqa: E402
from hf_rmsnorm.integrations.kernels import RMSNorm, kernel_config  # noqa: E402


def served(model):
    """Names of the norm classes that our layer serves, and how many modules there are of each."""
    ours = [type(m).__name__ for m in model.modules() if getattr(m.forward, "__func__", None) is RMSNorm.forward]
    return {name: ours.count(name) for name in ours}


def run(family, folder):
    tiny_models.build(family, torch.bfloat16).save_pretrained(folder)
    ids = tiny_models.token_ids()
    expected = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    model = AutoModelForCausalLM.from_pretrained(folder, use_kernels=True, kernel_config=kernel_config())
    found = {"inference": served(model)}
    with use_backend("triton"), count_launches() as launches:
        found["equal"] = torch.equal(model(ids).logits, expected)
    found["launches"] = launches["norm_forward"]
    found["training"] = served(model.train())
    with use_backend("triton"), count_launches() as launches:
        model(ids, labels=ids).loss.backward()
    found["backward"] = launches["norm_backward"]
    return found


if __name__ == "__main__":
    import sys

    runs = {family: run(family, f"{sys.argv[1]}/{family}") for family in ("llama", "olmo2")}
    print(json.dumps({"accepted": accepted, **runs}))
