"""A package, so that `python -m scripts.coverage` finds it in a checkout before any
other of that name.
"""
