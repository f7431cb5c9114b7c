"""Trainers that are told by a YAML: Axolotl's plugin and ms-swift's callback, against
the interfaces that they publish.

The packages themselves are run by scripts/trainers.py. What stands for them here has
the names, the arguments and the order of calls of axolotl 0.19.0
(`axolotl/integrations/base.py`, `config.py`, `core/builders/base.py`) and of ms-swift
4.6.0 (`swift/callbacks/mapping.py`, `swift/trainers/mixin.py`).
"""

import importlib
import sys
import types

import pytest
import tiny_models
from transformers import Trainer, TrainingArguments

INTEGRATIONS = "hf_rmsnorm.integrations"
KERNELS = "runs on cpu: Triton kernels in Triton's interpreter, exact but slow"


def build(folder, callbacks):
    ids = tiny_models.token_ids(2)
    arguments = TrainingArguments(
        str(folder), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    return Trainer(
        tiny_models.build("qwen3"), arguments, train_dataset=rows, callbacks=callbacks
    )


@pytest.fixture
def installed(monkeypatch):
    """Puts modules where an import finds them, by dotted name."""

    def put(**named):
        for name, content in named.items():
            module = types.ModuleType(name := name.replace("__", "."))
            module.__dict__.update(content)
            monkeypatch.setitem(sys.modules, name, module)

    for name in ("axolotl", "swift"):
        monkeypatch.delitem(sys.modules, f"{INTEGRATIONS}.{name}", raising=False)
    yield put
    for name in ("axolotl", "swift"):
        sys.modules.pop(f"{INTEGRATIONS}.{name}", None)


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


def axolotl_trains(folder, written):
    plugin, cfg = axolotl_reads(written)
    trainer = build(folder, plugin.add_callbacks_pre_trainer(cfg, None))
    plugin.post_trainer_create(cfg, trainer)
    return trainer


def plugin(**more):
    return {"plugins": [f"{INTEGRATIONS}.axolotl.HfRmsNormPlugin"], **more}


@pytest.fixture
def axolotl(installed):
    installed(
        axolotl={},
        axolotl__integrations={},
        axolotl__integrations__base={"BasePlugin": BasePlugin},
    )


def test_axolotl_trains_a_patched_model(axolotl, tmp_path, capsys, fused_calls):
    trainer = axolotl_trains(tmp_path, plugin())
    assert (
        capsys.readouterr().err
        == f"hf_rmsnorm: 9 norms swapped, 0 skipped; {KERNELS}\n"
    )
    trainer.train()
    assert len(fused_calls) == 9


def test_axolotls_yaml_has_the_options(axolotl, tmp_path, capsys):
    axolotl_trains(
        tmp_path, plugin(hf_rmsnorm={"exclude": "*.q_norm", "memory_efficient": True})
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


@pytest.fixture
def swift(installed):
    """ms-swift's registry, and what its trainers make of ``callbacks:``."""
    callbacks_map = {}
    installed(swift={}, swift__callbacks={"callbacks_map": callbacks_map})

    def trains(folder, names):
        args, trainer = object(), object()
        return build(folder, [callbacks_map[name](args, trainer) for name in names])

    return trains


def test_swift_trains_a_patched_model_where_the_yaml_names_the_callback(
    swift, tmp_path, capsys, fused_calls
):
    importlib.import_module(f"{INTEGRATIONS}.swift").register(exclude="*.q_norm")
    swift(tmp_path, [])
    assert capsys.readouterr().err == ""
    trainer = swift(tmp_path, ["hf_rmsnorm"])
    assert (
        capsys.readouterr().err
        == f"hf_rmsnorm: 7 norms swapped, 2 skipped; {KERNELS}\n"
    )
    trainer.train()
    assert len(fused_calls) == 7


def test_a_wrong_option_is_told_when_swift_reads_the_plugin(swift):
    with pytest.raises(TypeError, match="no 'memory'; did you mean memory_efficient?"):
        importlib.import_module(f"{INTEGRATIONS}.swift").register(memory=True)


@pytest.mark.parametrize("name", ["axolotl", "swift"])
def test_nothing_of_a_trainer_is_imported_until_it_asks(name):
    assert f"{INTEGRATIONS}.{name}" not in sys.modules
