"""How models are run to be compared: in evaluation mode, by their likeliest words, within their context."""

import sys
from contextlib import ExitStack, contextmanager

# For `generate`, whatever the model's own generation_config asks for.
GREEDY = {"do_sample": False, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}


@contextmanager
def evaluating(model):
    """Have a model in evaluation mode, and each of its modules in its own mode again afterwards."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        yield


def max_positions(config) -> int:
    """The most tokens that a model of this config takes; `sys.maxsize` where that is not said."""
    text = config.get_text_config()
    found = [getattr(text, key, None) for key in ("max_position_embeddings", "n_positions", "max_seq_len")]
    return min((value for value in found if isinstance(value, int) and value > 0), default=sys.maxsize)


def prompt_length(config, tokens: int, new_tokens: int) -> int:
    """How many of `tokens` to give where `new_tokens` are then to be generated; half of a context that is too short."""
    most = max_positions(config)
    return max(1, min(tokens, max(most - new_tokens, most // 2)))


@contextmanager
def hooked(model, paths, hook):
    """Inside, ``hook(path, args, output)`` is called after each forward of the modules at `paths`, before other hooks.

    What the hook returns, where it is not None, becomes the output.
    """
    with ExitStack() as stack:
        for path in paths:

            def called(module, args, kwargs, output, path=path):
                return hook(path, (*args, *kwargs.values()), output)

            stack.enter_context(model.get_submodule(path).register_forward_hook(called, prepend=True, with_kwargs=True))
        yield


def one_line(error: BaseException) -> str:
    """An error as others name it: its type, and what it says without line ends."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
