"""A model computed in the order of rounding of the server that generates for it. Nothing
outside of this package has to know how.
"""
