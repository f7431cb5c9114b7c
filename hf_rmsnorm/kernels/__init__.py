"""Triton kernels and their launch. Importing this package does not import triton; `launch` does."""

from .counting import count_launches

__all__ = ["count_launches"]
