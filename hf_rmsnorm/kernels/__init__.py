"""Triton kernels and their launch. Importing this package does not import triton;
`launch` does.
"""
