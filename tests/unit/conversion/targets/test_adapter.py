"""A LoRA adapter goes with its converted base: the pairs compute the same, and
patch_model looks at adapters too.
"""

import hashlib
import json
import shutil

import pytest
import torch
from conversion_models import CONFIGS, causal_lm, config_of, trained
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Dinov2Model, GPT2Model

from hf_rmsnorm import (
    convert_adapter,
    convert_checkpoint,
    patch_model,
    unpatch_model,
    use_backend,
)
from hf_rmsnorm.cli.main import main
from hf_rmsnorm.conversion import ConversionError, ConversionRefused, VerificationFailed

peft = pytest.importorskip(
    "peft", reason="adapters come with peft, of scripts/requirements"
)

IDS = torch.arange(3, 35).view(2, 16)


def digest(folder):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
    }


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of a small model and of what it was converted to, by its name and dtype."""
    made = {}

    def make(name, dtype=torch.float64):
        if (name, dtype) not in made:
            folder = tmp_path_factory.mktemp(name)
            config = config_of(name)
            model = (
                trained(Dinov2Model(config)) if name == "dinov2" else causal_lm(config)
            )
            model.to(dtype).save_pretrained(folder / "base")
            convert_checkpoint(folder / "base", folder / "converted", verify=False)
            made[name, dtype] = (folder / "base", folder / "converted")
        return made[name, dtype]

    return make


def load(folder, adapter=None, dtype=None, cls=AutoModelForCausalLM):
    model = cls.from_pretrained(folder, dtype=dtype or "auto").eval()
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(
            model, adapter, autocast_adapter_dtype=False
        ).eval()
    return model


def train_adapter(
    base, folder, targets, cls=AutoModelForCausalLM, config=peft.LoraConfig, **options
):
    """Save an adapter whose every tensor has moved off what it starts from and has a
    mean.
    """
    if config is peft.LoraConfig:
        options = {"r": 4, "init_lora_weights": False, **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(
            load(base, cls=cls), config(target_modules=targets, **options)
        )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(
                    0.05
                    + 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
                )
    model.save_pretrained(folder)
    return folder


def output(model):
    with torch.no_grad(), use_backend("reference"):
        found = model(input_ids=IDS)
        return found.logits if hasattr(found, "logits") else found.last_hidden_state


def assert_equal(model, expected, bound=1e-12):
    assert (output(model) - expected).abs().max() <= bound * expected.abs().max()


def converted_norms(model):
    return [record.converted for record in patch_model(model).swapped]


# name -> (what LoRA is put on, options of LoraConfig, how many tensors of the adapter
# change)
ADAPTERS = {
    "gpt2": (["c_attn", "c_proj"], {}, 4),
    "gpt2, tables": (["wte", "wpe", "mlp.c_proj"], {"use_rslora": True}, 4),
    "gpt2, biases": (
        ["c_proj"],
        {"bias": "all", "modules_to_save": ["wpe", "lm_head"]},
        9,
    ),
    "gpt2, a table": (["attn.c_proj"], {"modules_to_save": ["wte"]}, 3),
    "opt": (["out_proj", "fc2", "project_in", "embed_tokens"], {}, 5),
    "gpt_neox": (["embed_in", "dense", "dense_4h_to_h", "embed_out"], {}, 5),
    "falcon_7b": (["query_key_value", "dense", "dense_4h_to_h"], {}, 4),
    "persimmon": (["query_key_value", "dense", "dense_4h_to_h"], {}, 6),
    "phi_qk": (["q_proj", "k_proj", "v_proj", "dense", "fc2"], {"lora_bias": True}, 16),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_converted_pair_computes_what_the_pair_did(name, bases, tmp_path):
    targets, options, changed = ADAPTERS[name]
    base, converted = bases(name.split(",")[0])
    adapter = train_adapter(base, tmp_path / "adapter", targets, **options)
    before = digest(adapter)
    done = convert_adapter(
        adapter, tmp_path / "out", base=base, converted=converted, verify=False
    )
    assert len(done.written.changed) == changed and digest(adapter) == before
    expected, alone = output(load(base, adapter)), output(load(base))
    assert (expected - alone).abs().max() > 1e-3 * alone.abs().max(), (
        "the adapter changes nothing"
    )
    model = load(converted, tmp_path / "out")
    assert_equal(model, expected)
    assert all(converted_norms(model))
    assert_equal(model, expected)
    unpatch_model(model)
    if "tables" not in name and name != "opt":
        # merging a table with a tied head changes the head, here and there
        merged = model.merge_and_unload()
        assert all(converted_norms(merged))
        assert_equal(merged, expected)


def test_only_the_blocks_that_write_are_centred_and_the_rest_keeps_its_bytes(
    bases, tmp_path
):
    base, converted = bases("persimmon")
    adapter = train_adapter(base, tmp_path / "adapter", ["query_key_value"])
    convert_adapter(
        adapter, tmp_path / "out", base=base, converted=converted, verify=False
    )
    before, after = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (adapter, tmp_path / "out")
    )
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        if "lora_A" in name:
            assert torch.equal(tensor, before[name])
            continue
        # heads; q, k, v
        new, old = tensor.view(4, 3, 8, 4), before[name].view(4, 3, 8, 4)
        assert torch.equal(new[:, 2], old[:, 2])
        torch.testing.assert_close(
            new[:, :2],
            old[:, :2] - old[:, :2].mean(2, keepdim=True),
            rtol=0,
            atol=1e-15,
        )


def test_an_adapter_of_the_model_without_its_head(bases, tmp_path):
    base, converted = bases("gpt2")
    adapter = train_adapter(base, tmp_path / "adapter", ["c_proj"], GPT2Model)
    with pytest.raises(
        ConversionRefused,
        match="h.0.attn.c_proj.lora_A.weight fits no tensor of GPT2LMHeadModel",
    ):
        convert_adapter(adapter, tmp_path / "out", base=base, converted=converted)
    convert_adapter(
        adapter,
        tmp_path / "out",
        base=base,
        converted=converted,
        model_class=GPT2Model,
        verify=False,
    )
    model = load(converted, tmp_path / "out", cls=GPT2Model)
    assert all(converted_norms(model))
    assert_equal(model, output(load(base, adapter, cls=GPT2Model)))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_command_verifies_both_pairs_and_names_the_converted_base(
    dtype, bases, tmp_path, capsys
):
    base, converted = bases("gpt2", dtype)
    adapter = train_adapter(base, tmp_path / "adapter", ["c_attn", "c_proj"])
    (adapter / "notes.txt").write_text("kept")
    command = [
        "convert",
        str(adapter),
        str(tmp_path / "out"),
        "--base",
        str(base),
        str(converted),
        "--json",
    ]
    assert main(command) == 0
    said = json.loads(capsys.readouterr().out)
    runs = said["verification"]["runs"]
    assert (
        said["published"]
        and len(said["changed"]) == 4
        and runs.keys() == {"as LayerNorm", "as RMSNorm"}
    )
    assert (
        all(run["verdict"] == "PASS" for run in runs.values())
        and runs["as RMSNorm"]["norms"] == "5 as RMSNorm"
    )
    old, new = (
        json.loads((f / "adapter_config.json").read_text())
        for f in (adapter, tmp_path / "out")
    )
    assert new == {**old, "base_model_name_or_path": str(converted), "revision": None}
    assert (tmp_path / "out" / "notes.txt").read_text() == "kept"
    assert "as RMSNorm: verdict PASS" in (tmp_path / "out" / "README.md").read_text()
    assert main([*command[:2], str(tmp_path / "again"), *command[3:]]) == 0
    assert digest(tmp_path / "again") == digest(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter",
        "again",
        "out",
    ]
    capsys.readouterr()
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err


def test_adapter_and_bases_of_the_hub_are_downloaded(bases, tmp_path, monkeypatch):
    base, converted = bases("gpt2")
    adapter, commit = train_adapter(base, tmp_path / "adapter", ["c_proj"]), 40 * "0"
    cache = {f"org/{folder.name}": folder for folder in (base, converted, adapter)}
    assert len(cache) == 3
    asked = []

    def download(repository, **_):
        asked.append(repository)
        name = repository.replace("/", "--")
        return str(
            shutil.copytree(
                cache[repository], tmp_path / f"models--{name}" / "snapshots" / commit
            )
        )

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("hf_rmsnorm.sources.hub_answers", lambda: False)
    ids = {folder: name for name, folder in cache.items()}
    command = [
        "convert",
        ids[adapter],
        str(tmp_path),
        "--base",
        ids[base],
        ids[converted],
        "--no-verify",
    ]
    assert main(command) == 2 and not asked  # DST exists
    assert main([*command[:2], str(tmp_path / "out"), *command[3:]]) == 0 and {
        *asked
    } == {*cache}
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (
        ids[converted],
        commit,
    )


def test_an_adapter_is_judged_in_the_dtype_of_its_base(bases, tmp_path):
    """PEFT loads adapters of half precision in float32."""
    base, converted = bases("gpt2", torch.bfloat16)
    adapter = train_adapter(base, tmp_path / "adapter", ["c_proj"])
    weights = adapter / "adapter_model.safetensors"
    save_file(
        {name: t.bfloat16() for name, t in load_file(weights).items()},
        weights,
        {"format": "pt"},
    )
    convert_adapter(adapter, tmp_path / "out", base=base, converted=converted)
    model = peft.PeftModel.from_pretrained(load(converted), tmp_path / "out")
    assert {p.dtype for name, p in model.named_parameters() if "lora_B" in name} == {
        torch.float32
    }
    assert all(converted_norms(model))
    base, converted = bases("gpt2", torch.float32)
    with pytest.raises(
        ConversionRefused,
        match="narrower dtype than transformer.h.0.attn.c_proj.weight",
    ):
        convert_adapter(adapter, tmp_path / "other", base=base, converted=converted)


def test_what_is_missing_is_said(bases, tmp_path, capsys, monkeypatch):
    base, converted = bases("gpt2")
    adapter = train_adapter(base, tmp_path / "adapter", ["c_proj"])
    out = tmp_path / "out"
    assert main(["convert", str(adapter), str(out)]) == 2
    assert "is an adapter: pass --base MODEL CONVERTED" in capsys.readouterr().err
    assert (
        main(["convert", str(adapter), "--plan", "--base", str(base), str(converted)])
        == 2
    )
    assert "--base takes an adapter and DST" in capsys.readouterr().err
    assert (
        main(["convert", str(base), str(out), "--base", str(base), str(converted)]) == 2
    )
    assert "has no adapter_config.json: --base goes with" in capsys.readouterr().err
    with pytest.raises(
        ConversionError, match="no conversion of .* that takes its adapters: pass"
    ):
        convert_adapter(adapter, out, base=base, converted=base)
    with pytest.raises(
        ConversionError,
        match="no adapter_config.json: pass the folder of a PEFT adapter",
    ):
        convert_adapter(converted, out, base=base, converted=converted)
    monkeypatch.setattr(
        "hf_rmsnorm.conversion.targets.adapter.find_spec", lambda name: None
    )
    done = convert_adapter(adapter, out, base=base, converted=converted)
    assert "the pairs were not run, which needs PEFT" in str(done)
    (adapter / "second").mkdir()
    (adapter / "second" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConversionError, match="holds another adapter too"):
        convert_adapter(adapter, tmp_path / "other", base=base, converted=converted)


@pytest.mark.full
def test_what_fails_verification_is_not_published(bases, tmp_path, capsys):
    """The conversion of another model of the same shape."""
    base, converted = bases("gpt2", torch.float32)
    other = tmp_path / "base"
    causal_lm(config_of("gpt2"), seed=1).float().save_pretrained(other)
    adapter = train_adapter(other, tmp_path / "adapter", ["c_proj"])
    assert (
        main(
            [
                "convert",
                str(adapter),
                str(tmp_path / "out"),
                "--base",
                str(other),
                str(converted),
            ]
        )
        == 3
    )
    assert (
        "not published" in capsys.readouterr().out and not (tmp_path / "out").exists()
    )
    with pytest.raises(VerificationFailed, match="verdict FAIL"):
        convert_adapter(adapter, tmp_path / "out", base=other, converted=converted)


def test_pickled_and_quantised_adapters(bases, tmp_path):
    base, converted = bases("gpt2", torch.float32)
    adapter = train_adapter(base, tmp_path / "adapter", ["c_proj"])
    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    convert_adapter(adapter, tmp_path / "out", base=base, converted=converted)
    save_file({name: (100 * t).to(torch.int8) for name, t in tensors.items()}, weights)
    with pytest.raises(
        ConversionError,
        match="lora_B.weight is I8 and is to be changed: it is quantised",
    ):
        convert_adapter(adapter, tmp_path / "other", base=base, converted=converted)
    weights.unlink()
    torch.save(tensors, adapter / "adapter_model.bin")
    with pytest.raises(
        ConversionError, match="the weights are pickles, which can run code"
    ):
        convert_adapter(adapter, tmp_path / "other", base=base, converted=converted)
    convert_adapter(
        adapter, tmp_path / "other", base=base, converted=converted, allow_pickle=True
    )
    made = [
        load_file(tmp_path / name / "adapter_model.safetensors")
        for name in ("out", "other")
    ]
    assert all(torch.equal(made[1][name], tensor) for name, tensor in made[0].items())


REFUSED = {
    "DoRA": (
        {"use_dora": True},
        r"lora_magnitude_vector changes .*, as DoRA scales by the norm of the weight",
    ),
    "PiSSA": (
        {"init_lora_weights": "pissa"},
        "init_lora_weights 'pissa' takes apart weights that centring changes",
    ),
    "tokens": (
        {"trainable_token_indices": [3]},
        r"trainable_tokens_delta changes transformer\.wte\.weight in a way",
    ),
    "ties": (
        {"ensure_weight_tying": True, "modules_to_save": ["wte"]},
        "ensure_weight_tying ties embeddings",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_exact_is_refused_by_name(name, bases, tmp_path):
    options, reason = REFUSED[name]
    base, converted = bases("gpt2", torch.float32)
    adapter = train_adapter(base, tmp_path / "adapter", ["attn.c_proj"], **options)
    with pytest.raises(ConversionRefused, match=reason) as refused:
        convert_adapter(adapter, tmp_path / "out", base=base, converted=converted)
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_what_writes_nothing_is_copied_whatever_it_is(bases, tmp_path):
    base, converted = bases("gpt2", torch.float32)
    readers = {
        "dora": {"use_dora": True},
        "ia3": {"config": peft.IA3Config, "feedforward_modules": []},
    }
    for name, options in readers.items():
        adapter = train_adapter(base, tmp_path / name, ["c_attn"], **options)
        done = convert_adapter(
            adapter, tmp_path / f"{name}-out", base=base, converted=converted
        )
        assert not done.written.changed and done.verification.runs
        assert all(converted_norms(load(converted, tmp_path / f"{name}-out")))
    writer = train_adapter(
        base,
        tmp_path / "writer",
        ["mlp.c_proj"],
        config=peft.IA3Config,
        feedforward_modules=[],
    )
    with pytest.raises(
        ConversionRefused, match=r"\(IA3\): transformer.h.0.mlp.c_proj.ia3_l changes"
    ):
        convert_adapter(writer, tmp_path / "out", base=base, converted=converted)


def test_an_adapter_with_the_tied_table_or_on_a_layer_scale_is_refused(bases, tmp_path):
    """PEFT saves the table with LoRA of it; after the conversion it would be that of
    the embeddings alone.
    """
    base, converted = bases("olmo_tied", torch.float32)
    adapter = train_adapter(base, tmp_path / "adapter", ["o_proj", "embed_tokens"])
    with pytest.raises(
        ConversionRefused,
        match="replaces tied embeddings, which the converted base has untied",
    ):
        convert_adapter(adapter, tmp_path / "other", base=base, converted=converted)
    base, converted = bases("dinov2")
    adapter = train_adapter(base, tmp_path / "vision", ["fc2"], Dinov2Model)
    with pytest.raises(
        ConversionRefused, match="into which a layer scale was folded: merge it"
    ):
        convert_adapter(adapter, tmp_path / "other", base=base, converted=converted)


def test_the_adapter_of_another_base_is_refused(bases, tmp_path):
    base, converted = bases("gpt2")
    wide, deep = (
        {**CONFIGS["gpt2"][1], **more} for more in ({"n_embd": 48}, {"n_layer": 3})
    )
    for name, options in (("wide", wide), ("deep", deep)):
        config = config_of("gpt2")
        config.update(options)
        causal_lm(config).save_pretrained(tmp_path / name)
        adapter = train_adapter(
            tmp_path / name, tmp_path / f"{name}-adapter", ["c_proj"]
        )
        with pytest.raises(
            ConversionRefused,
            match=r"\.c_proj\.lora_.* fits no tensor of GPT2LMHeadModel",
        ):
            convert_adapter(adapter, tmp_path / "out", base=base, converted=converted)
        with pytest.raises(ConversionError):
            convert_adapter(
                adapter, tmp_path / "out", base=tmp_path / name, converted=converted
            )


@pytest.fixture
def pair(bases, tmp_path):
    """A converted base, and an adapter as it was and converted."""
    base, converted = bases("gpt2")
    adapter = train_adapter(
        base, tmp_path / "adapter", ["c_proj"], layers_to_transform=[1]
    )
    convert_adapter(
        adapter, tmp_path / "out", base=base, converted=converted, verify=False
    )
    return converted, adapter, tmp_path / "out"


def note_of(model):
    report = patch_model(model)
    assert not any(record.converted for record in report.swapped)
    return report.swapped[0].notes


def test_patch_model_keeps_layer_norm_under_an_adapter_that_was_not_converted(pair):
    converted, adapter, _ = pair
    model = load(converted, adapter)
    expected = output(model)
    assert (
        "transformer.h.1.attn.c_proj.lora_B.default.weight and 1 more no longer has zero mean"
        in note_of(model)
    )
    assert torch.equal(output(model), expected)


def test_patch_model_asks_every_adapter_as_another_may_become_active(pair):
    converted, adapter, out = pair
    model = load(converted, out)
    model.load_adapter(adapter, "second", autocast_adapter_dtype=False)
    assert "convert an adapter with its base" in note_of(model)
    model.delete_adapter("second")
    unpatch_model(model)
    assert all(converted_norms(model))


def test_an_adapter_loaded_after_the_patch_is_noticed_by_the_next(pair):
    converted, adapter, _ = pair
    model = load(converted)
    assert all(converted_norms(model))
    model = peft.PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False)
    notes = patch_model(model).swapped[0].notes
    assert (
        "runs as RMSNorm, but transformer.h.1.attn.c_proj.lora_B" in notes
        and "unpatch and patch again" in notes
    )


@pytest.mark.parametrize(
    "config, reason",
    [
        (
            peft.LoraConfig(target_modules=["mlp.c_proj"], use_dora=True),
            "lora_magnitude_vector.default.weight changes",
        ),
        (
            peft.IA3Config(target_modules=["attn.c_proj"], feedforward_modules=[]),
            "ia3_l.default changes",
        ),
        (
            peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
            "prompt_encoder.default.embedding.weight is outside of",
        ),
    ],
    ids=["DoRA", "IA3", "prompt"],
)
def test_other_adapters_of_a_writer_keep_layer_norm(config, reason, pair):
    assert reason in note_of(peft.get_peft_model(load(pair[0]), config))
