"""What is measured of this package outside of its wheel: ``python -m benchmarks --help``, from the root of a checkout.

Every number was measured in the run that reports it. What a machine cannot measure is None, with the reason beside it.
No file here is a program by itself: started by its path, this folder would be searched for imports, and its
``kernels.py`` would stand for the library `kernels`.
"""
