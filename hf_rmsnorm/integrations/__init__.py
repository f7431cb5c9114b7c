"""Integrations with other libraries, a file for each: Trainers, and trainers configured
by YAML.
"""
