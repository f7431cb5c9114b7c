"""The targets of a conversion: each is planned, made of an open checkpoint, verified
and described in one file.
"""
