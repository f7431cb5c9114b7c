"""The forwards of patched modules: norms, layers with their sums, attentions with their
q and k norms.
"""
