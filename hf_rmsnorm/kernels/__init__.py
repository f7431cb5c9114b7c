"""Triton kernels and their launch. Importing this package does not import triton;
`norm_launch` does.
"""
