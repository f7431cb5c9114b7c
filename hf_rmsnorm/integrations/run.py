"""Runs a training script, unedited, with `HfRmsNormCallback` in every Trainer that it makes.

``accelerate launch -m hf_rmsnorm.integrations.run [NAME=VALUE ...] SCRIPT.py ARGUMENTS``, or ``-m MODULE ARGUMENTS``.
NAME=VALUE is an argument of the callback: True, False, or globs with commas between.
"""

import os
import runpy
import sys
from importlib.util import find_spec

from transformers.trainer import DEFAULT_CALLBACKS

from .trainer import TellingCallback

if __name__ == "__main__":
    options, words = {}, sys.argv[1:]
    while words and "=" in words[0]:
        name, value = words.pop(0).split("=", 1)
        options[name] = {"True": True, "False": False}.get(value, value.split(","))
    as_module = words[:1] == ["-m"]
    program, *_ = sys.argv = words[as_module:] or ["nothing"]
    try:
        callback = TellingCallback(**options)
        if not (find_spec(program) if as_module else os.path.isfile(program)):
            raise ValueError("it is not there: name SCRIPT.py or -m MODULE, after NAME=VALUE")
    except (TypeError, ValueError, ImportError) as error:
        print(f"hf_rmsnorm.integrations.run: cannot run {program}: {error}", file=sys.stderr)
        sys.exit(2)
    DEFAULT_CALLBACKS.append(callback)
    try:
        if as_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(program))  # it was the current folder, for -m
            runpy.run_path(program, run_name="__main__")
    finally:
        DEFAULT_CALLBACKS.remove(callback)
        if callback.report is None:
            print(f"hf_rmsnorm: {program} made no Trainer here: call patch_model(model) in it", file=sys.stderr)
