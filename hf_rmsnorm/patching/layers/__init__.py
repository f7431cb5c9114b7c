"""Which sums, and which q and k norms, a layer computes with its norms: learned from
its own forward.
"""
