"""A small random model of the same classes as a checkpoint: on it, what to centre is
found and proven in float64.
"""
