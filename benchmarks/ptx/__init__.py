"""Runs the PTX that Triton compiled, on a CPU, and reports what a GPU would not say;
see README.md beside this file.
"""

from .decode import Kernel, Unknown
from .machine import Machine
from .memory import Fault

__all__ = ["Fault", "Kernel", "Machine", "Unknown"]
