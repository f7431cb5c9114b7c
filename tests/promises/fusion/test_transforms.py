"""Models whose sums and q/k norms are fused: weights that come for a forward, tensors
that must not stay alive, tokens of every way to generate.
"""

import gc
import weakref

from fusion_models import IDS, build, layers_of

from hf_rmsnorm import patch_model, use_backend


def test_training_steps_keep_nothing_alive():
    model, seen = build("llama"), []
    patch_model(model)

    def note(module, args):
        seen.append(weakref.ref(args[0]))

    for module in (model.model.norm, *(layer.mlp for layer in layers_of(model))):
        module.register_forward_pre_hook(note)
    with use_backend("triton"):
        output = model(IDS, labels=IDS, output_hidden_states=True)
        seen.extend(map(weakref.ref, output.hidden_states))
        output.loss.backward()
        del output
        gc.collect()
    assert [reference() for reference in seen] == [None] * len(seen)
