"""What `hf-rmsnorm bench` and benchmarks/gpu_check.py measure: norms, generation, training steps, and host costs.

Every number was measured in the run that reports it. What a machine cannot measure is None, with the reason beside it.
"""
