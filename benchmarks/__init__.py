"""Measurements of this package, not part of its wheel: ``python -m benchmarks --help``
from the root of a checkout.

Every number was measured in the run that reports it. A value that a machine cannot
measure is None, with the reason. No file here is a program by itself: started by its
path, this folder would be searched for imports, and its ``kernels.py`` would hide the
library `kernels`.
"""
