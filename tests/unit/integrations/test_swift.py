"""ms-swift's callback against the interface that ms-swift publishes.

ms-swift itself is run by scripts/trainers.py. What stands for it here has the names,
the arguments and the order of calls of ms-swift 4.6.0 (`swift/callbacks/mapping.py`,
`swift/trainers/mixin.py`).
"""

import importlib
import sys

import pytest

MODULE = "hf_rmsnorm.integrations.swift"
KERNELS = "runs on cpu: Triton kernels in Triton's interpreter, exact but slow"


@pytest.fixture
def swift(installed, build):
    """ms-swift's registry, and what its trainers make of ``callbacks:``."""
    callbacks_map = {}
    installed(swift={}, swift__callbacks={"callbacks_map": callbacks_map})

    def trains(names):
        args, trainer = object(), object()
        return build([callbacks_map[name](args, trainer) for name in names])

    return trains


def test_swift_trains_a_patched_model_where_the_yaml_names_the_callback(
    swift, capsys, fused_calls
):
    importlib.import_module(MODULE).register(exclude="*.q_norm")
    swift([])
    assert capsys.readouterr().err == ""
    trainer = swift(["hf_rmsnorm"])
    assert (
        capsys.readouterr().err
        == f"hf_rmsnorm: 7 norms swapped, 2 skipped; {KERNELS}\n"
    )
    trainer.train()
    assert len(fused_calls) == 7


def test_a_wrong_option_is_told_when_swift_reads_the_plugin(swift):
    with pytest.raises(TypeError, match="no 'memory'; did you mean memory_efficient?"):
        importlib.import_module(MODULE).register(memory=True)


def test_nothing_of_swift_is_imported_until_it_asks():
    assert MODULE not in sys.modules
