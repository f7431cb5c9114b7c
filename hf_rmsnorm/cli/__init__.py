"""The ``hf-rmsnorm`` command: `main` parses and prints, each other module but `common`
and `models` is a subcommand.

A subcommand has ``add_arguments(parser)`` and ``run(args) -> Result``, and imports torch and transformers in `run`.
"""
