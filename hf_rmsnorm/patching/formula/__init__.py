"""Finds the formula of a module: it runs on chosen inputs, and its outputs are compared
with a family of formulas.
"""
