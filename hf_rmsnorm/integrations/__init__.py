"""Integrations with other libraries, a file for each: Trainers, trainers configured by YAML, `kernels`."""
