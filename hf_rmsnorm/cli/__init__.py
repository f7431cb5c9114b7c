"""The ``hf-rmsnorm`` command: `main` parses and prints, each other module but `common` and `models` is a subcommand.

A subcommand has ``add_arguments(parser)`` and ``run(args) -> Result``. It imports torch and transformers inside
`run`, so that ``--help`` answers at once.
"""
