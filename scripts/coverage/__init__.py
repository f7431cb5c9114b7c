"""Tiny random models of every type in Transformers, patched or converted: ``python -m
scripts.coverage --help``.

It is run as a module: by its path, its files would be found under names of well-known
packages, `timm` for one.
"""
