"""Axolotl's plugin against the interface that Axolotl publishes.

Axolotl itself is run by scripts/trainers.py. What stands for it here has the names, the
arguments and the order of calls of axolotl 0.19.0 (`axolotl/integrations/base.py`,
`config.py`, `core/builders/base.py`).
"""

import importlib
import sys

import pytest

MODULE = "hf_rmsnorm.integrations.axolotl"
KERNELS = "runs on cpu: Triton kernels in Triton's interpreter, exact but slow"


class BasePlugin:
    """The hooks of axolotl's that its manager calls whether a plugin has its own or
    not.
    """

    def __init__(self):
        pass

    def register(self, cfg):
        pass

    def get_input_args(self):
        pass

    def add_callbacks_pre_trainer(self, cfg, model):
        return []

    def post_trainer_create(self, cfg, trainer):
        pass


class DictDefault(dict):
    """axolotl's: what is not there is None."""

    def __getattr__(self, name):
        return self.get(name)


def axolotl_reads(written):
    """What axolotl does with a YAML: load its plugins by name, then check it by their
    fields and its own.
    """
    pydantic = pytest.importorskip("pydantic", reason="a dependency of axolotl's")
    (name,) = written["plugins"]
    module, _, cls = name.rpartition(".")
    plugin = getattr(importlib.import_module(module), cls)()
    plugin.register(written)
    module, _, fields = plugin.get_input_args().rpartition(".")

    class AxolotlInputConfigBase(pydantic.BaseModel):
        plugins: list[str]

    class AxolotlInputConfig(
        AxolotlInputConfigBase, getattr(importlib.import_module(module), fields)
    ):
        pass

    return plugin, DictDefault(
        AxolotlInputConfig(**written).model_dump(exclude_none=True)
    )


def axolotl_trains(build, written):
    plugin, cfg = axolotl_reads(written)
    trainer = build(plugin.add_callbacks_pre_trainer(cfg, None))
    plugin.post_trainer_create(cfg, trainer)
    return trainer


def plugin(**more):
    return {"plugins": [f"{MODULE}.HfRmsNormPlugin"], **more}


@pytest.fixture
def axolotl(installed):
    installed(
        axolotl={},
        axolotl__integrations={},
        axolotl__integrations__base={"BasePlugin": BasePlugin},
    )


def test_axolotl_trains_a_patched_model(axolotl, build, capsys, fused_calls):
    trainer = axolotl_trains(build, plugin())
    assert (
        capsys.readouterr().err
        == f"hf_rmsnorm: 9 norms swapped, 0 skipped; {KERNELS}\n"
    )
    trainer.train()
    assert len(fused_calls) == 9


def test_axolotls_yaml_has_the_options(axolotl, build, capsys):
    axolotl_trains(
        build, plugin(hf_rmsnorm={"exclude": "*.q_norm", "memory_efficient": True})
    )
    assert (
        capsys.readouterr().err
        == f"hf_rmsnorm: 7 norms swapped, 2 skipped; {KERNELS}\n"
    )


def test_a_wrong_option_is_told_when_axolotl_reads_the_yaml(axolotl):
    with pytest.raises(TypeError, match="no 'memory'; did you mean memory_efficient?"):
        axolotl_reads(plugin(hf_rmsnorm={"memory": True}))
    with pytest.raises(ValueError, match="hf_rmsnorm\n.*valid dictionary"):
        axolotl_reads(plugin(hf_rmsnorm="memory_efficient"))


def test_nothing_of_axolotl_is_imported_until_it_asks():
    assert MODULE not in sys.modules
