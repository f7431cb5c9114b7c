"""Converted models: the record of a conversion, models that have one, and their
training.
"""
