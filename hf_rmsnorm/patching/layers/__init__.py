"""Which sums, and which q and k norms, a layer computes with its norms: learned from
its own forward.

A fusion gives the model's own outputs and gradients if all this holds. Each condition has
the function that decides it, and the test that fails without it.

When the model is patched, of the source of a forward:

1. The source is what runs: compiled again, it has the bytecode of the forward.
   `source.definition_of`; `test_source.py`, a changed file is not believed.
2. The forward may be compiled again. It does not look at its variables. No decorator or
   wrapper is around it that may keep state, or that the source does not show.
   `source.forward_source`, `source.wrapper_codes`; `test_source.py`, CLASSES and
   `test_wrappers_that_the_source_does_not_show`.
   Nor does it ask for its exact class. `source._check_class`; `test_sums.py`, REFUSED.
3. No code of the user runs because there is a new class, as a registry of subclasses.
   `swap.derive`; `test_swap.py`.
4. Nothing is moved over a call that could change its inputs. Between a sum and its
   norm stand only aliases (LLaMA: ``residual = h``), and what computes with other
   variables (HunyuanVideo adds to two streams before it normalises them). A sum is put on both ways of an
   `if` only where it and the condition compute alone: GPT-2, Whisper and BART, whose
   decoders may have cross-attention. `statements.may_pass`; `test_sums.py`, REFUSED.
   No inner function, and no property of the class, may read or change a variable.
   `sums._hides_code`; `test_sums.py`, REFUSED. Between a norm of q or k and the rotation
   nothing gets hold of its rows. `qk._given_to_children_alone`; `test_qk.py`, APART.
   A helper only scales and shifts the norm. `modulation._helper_of`;
   `test_modulation.py`, OTHERS.
5. Where gradients are on, nothing else gets hold of the sum (MPT gives it to its MLP).
   A hook on it would see only a part of its gradient.
   `statements.only_adds_and_scales`, which sets ``shared``; `test_looked_at_sums.py`.
6. A rotary function computes along the last dimension alone, and nothing that it reads
   can change unseen. `rotary_code.read`; `unit/fused/test_rotary.py`, CASES and
   `test_a_function_that_cannot_be_watched`.

At each call:

7. The summands are plain tensors. `fused.sums._launch_sum`; `unit/fused/test_sums.py`,
   `test_sums_of_anything_but_plain_tensors_are_torchs`.
8. The norm is still patched, and nothing but its forward runs when it is called: no
   hook, wrapper or parametrisation. `fused.layer.operands_ahead`,
   `fused.hooks.why_called`; `test_hooks.py`.
9. The class still has the forward that was read, with the same code.
   `fused.layer.guarded`; `test_a_guarded_forward_steps_aside_for_another`.
10. A rotary function is still the one that was read. It was run on this device, and
   rotates heads of this dtype and width as a launch does. `fused.rotary.rotary_of`;
   `unit/fused/test_rotary.py`, CASES and CHANGES.

Patterns, and the models for whose sake they are there:

- ``norm(a + b)`` in one expression: BERT.
- ``h = h + gate * y``, and ``norm(h) * (1 + scale) + shift``: diffusion transformers.
- The same scale and shift in a helper: Qwen-Image. In ``1 + scale`` computed before: Z-Image.
- q and k norms in front of a rotary embedding: Qwen3; one by one: Gemma 4.
- A rotary embedding without norms: LLaMA.
"""
