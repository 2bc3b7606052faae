"""load_quantized and save_pretrained of experts in few bits: who reads what."""

import copy
import logging
import pickle
from types import SimpleNamespace
from unittest import mock

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3MoeConfig,
)
from transformers.quantizers import auto
from transformers.trainer_utils import validate_quantization_for_training

from .._compare import assert_same_bits, assert_same_tensors, relative_error
from ._models import (
    OPTIONS,
    STACKS,
    build,
    experts_of,
    logits,
    parametrize_4_bits,
    set_random_lora,
    set_stacks,
    tokens,
    trained,
)

# Whose files may hold more. Every class of transformers is loaded, and its logits are compared with
# those of rounded experts, in test_transformers.py::test_a_class_does_what_its_row_says.
EXTRA = ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_vlm")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of tiny models, as save_pretrained writes them."""
    made = {}

    def folder(name: str):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            build(name).save_pretrained(made[name])
        return made[name]

    return folder


@pytest.fixture
def load(opt):
    """load_quantized, in float32 on the CPU where nothing else is said."""
    return lambda source, **options: opt.integrations.load_quantized(source, **OPTIONS | options)


def rewritten(source, folder, change):
    """A copy of a saved model, its tensors changed by a function of their dict."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file(change(load_file(source / "model.safetensors")), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", EXTRA)
def test_logits_are_those_of_from_pretrained_with_rounded_experts(
    load, saved, tmp_path, name, nested
):
    """Heads for multi-token prediction are left out, and so is what is around a text model."""
    extra = {"mtp.layers.0.mlp.experts.0.up_proj.weight": torch.ones(2, 2)}
    folder = rewritten(saved(name), tmp_path / name, lambda tensors: tensors | extra)
    loaded = load(folder, nested=nested)
    dense = AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="eager", dtype=torch.float32
    )
    for packed, experts in zip(experts_of(loaded), experts_of(dense), strict=True):
        for target in STACKS:
            decoded = getattr(packed, target).decode(dtype=torch.float32)
            assert 0 < relative_error(decoded, getattr(experts, target)) < 0.15
    set_stacks(dense, loaded)
    assert relative_error(logits(loaded), logits(dense)) < 1e-5
    quantised = [m for m in loaded.modules() if type(m).__name__ == "QuantizedExperts"]
    assert len(quantised) == 2 * len(experts_of(loaded))


def test_experts_in_the_order_of_their_numbers(opt, load, tmp_path):
    """Expert 10 comes after 9, not after 1; in files of the base model without `model.` too."""
    model = build("qwen3_moe", num_experts=12)
    model.save_pretrained(tmp_path / "whole")
    opt.integrations.quantize_experts(model)

    def of_the_base(tensors):
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}

    base = rewritten(tmp_path / "whole", tmp_path / "base", of_the_base)
    for folder in (tmp_path / "whole", base):
        assert_same_tensors(load(folder).state_dict(), model.state_dict())


@pytest.mark.parametrize("kept", ["both", "head", "embedding"])
def test_tied_weights_under_any_of_their_names(load, tmp_path, kept):
    model = build("qwen3_moe", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "tied")
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"

    def change(tensors):
        weight = tensors.pop(embedding)
        names = {"both": (embedding, head), "head": (head,), "embedding": (embedding,)}[kept]
        return tensors | {name: weight.clone() for name in names}

    folder = rewritten(tmp_path / "tied", tmp_path / "named", change)
    loaded = load(folder)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same_bits(loaded.lm_head.weight, model.lm_head.weight)


def test_saved_and_loaded_without_quantising_again(load, saved, tmp_path, monkeypatch, submodule):
    """By ours and by transformers, in a format that no default gives."""
    first = load(saved("qwen3_moe"), nested=True, quant_type="fp4", blocksize=32)
    first.save_pretrained(tmp_path / "packed")
    refuse = mock.Mock(side_effect=AssertionError("quantised again"))
    monkeypatch.setattr(submodule("kernels.quant.formats"), "nf4_quantize", refuse)
    for again in (load(tmp_path / "packed"), from_pretrained(tmp_path / "packed")):
        assert_same_tensors(again.state_dict(), first.state_dict())


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", torch.bfloat16], ids=str)
def test_dtypes_as_from_pretrained_takes_them(opt, tmp_path, monkeypatch, dtype):
    """By name too; what the class keeps or a module makes in float32 stays so."""
    model = build("qwen3_moe", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    kind = type(model.model.norm)
    original = kind.__init__

    def wide(self, *arguments, **options):
        original(self, *arguments, **options)
        self.weight = torch.nn.Parameter(self.weight.detach().float())

    monkeypatch.setattr(kind, "__init__", wide)
    monkeypatch.setattr(type(model), "_keep_in_fp32_modules_strict", {"lm_head"})
    loaded = opt.integrations.load_quantized(tmp_path, dtype=dtype, device_map="cpu")
    assert loaded.model.embed_tokens.weight.dtype == torch.bfloat16
    assert loaded.lm_head.weight.dtype == loaded.model.norm.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dtype": "bf16"}, ValueError, "dtype must be .*floating.* got 'bf16'"),
        ({"dtype": torch.int8}, ValueError, "dtype must be .*floating.* got torch.int8"),
        ({"torch_dtype": "auto"}, TypeError, "keyword argument 'torch_dtype'; it is called dtype"),
        ({"load_in_4bit": True}, TypeError, "'load_in_4bit'; experts become NF4 without it"),
        ({"attn_implementation": "sdpa"}, TypeError, r"model.set_attn_implementation\(...\)"),
        ({"token": "x"}, TypeError, "'token'; log in with .*HF_TOKEN"),
        ({"model_class": "AutoModel"}, TypeError, "model_class must be a class .* got 'AutoModel'"),
        ({"model_class": Qwen3MoeConfig}, TypeError, "model_class must be a class .*Config"),
        ({"device_map": "gpu"}, ValueError, "device_map='gpu' names no device"),
    ],
)
def test_wrong_options_are_refused(opt, saved, options, error, words):
    with pytest.raises(error, match=words):
        opt.integrations.load_quantized(saved("qwen3_moe"), **OPTIONS | options)


def test_files_with_lora_beside_experts_of_16_bits(opt, tmp_path):
    model = build("qwen3_moe")
    opt.integrations.attach_lora(model, 3, 7)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"expert_lora.* has not; .* save_peft_adapter, detach"):
        opt.integrations.load_quantized(tmp_path, **OPTIONS)


def test_files_that_are_no_safetensors(opt, saved, tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"no model.safetensors; .* save_pretrained"):
        opt.integrations.load_quantized(tmp_path)
    for absent in (str(tmp_path / "absent"), "nobody/nothing"):  # of which nothing is known
        with pytest.raises(FileNotFoundError, match=r"no folder here|cache") as missing:
            opt.integrations.load_quantized(absent, local_files_only=True)
        assert "safetensors" not in str(missing.value)


def test_names_and_shapes_that_do_not_fit_are_named(load, saved, tmp_path):
    source = saved("qwen3_moe")
    tensors = load_file(source / "model.safetensors")
    norm = "model.norm.weight"
    gone = {k: None for k in tensors if ".experts." in k and "down_proj" in k}
    experts = "model.layers.0.mlp.experts"
    for number, (changes, words) in enumerate(
        (
            ({norm: None}, f"lacks 1 tensors of Qwen3MoeForCausalLM: {norm}"),
            ({"model.extra": torch.zeros(2)}, "has model.extra, which Qwen3MoeForCausalLM has not"),
            ({norm: torch.zeros(3)}, r"model.norm.weight is \(3,\)"),
            (gone, rf"lacks 2 tensors .*{experts}\.down_proj"),
            ({f"{experts}.3.down_proj.weight": None}, rf"cannot make {experts}\.down_proj|is \("),
            ({"norm.weight": tensors[norm].clone()}, f"have {norm} twice"),
        )
    ):
        kept = {key: value for key, value in (tensors | changes).items() if value is not None}
        folder = rewritten(source, tmp_path / str(number), lambda _, kept=kept: kept)
        with pytest.raises(ValueError, match=words):
            load(folder)
    with pytest.raises(ValueError, match="belongs to a Hub id"):
        load(source, revision="main")


def test_sharded_hub_id_with_its_index_pinned_and_offline(load, saved, tmp_path, monkeypatch):
    """Files and an index in the layout of the Hub's cache, found without a network."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / commit
    build("qwen3_moe").save_pretrained(snapshot, max_shard_size="30KB")
    assert (snapshot / "model.safetensors.index.json").is_file()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    loaded = load("org/tiny", revision=commit)
    assert_same_tensors(loaded.state_dict(), load(saved("qwen3_moe")).state_dict())


def test_what_is_around_a_text_model(load, saved):
    found = load(saved("qwen3_5_moe_vlm"), model_class=Qwen3_5MoeForConditionalGeneration)
    expected = build("qwen3_5_moe_vlm").model.visual.state_dict()
    assert_same_tensors(found.model.visual.state_dict(), expected)


def test_online_hub_id_with_one_file(load, saved, monkeypatch):
    """Over the network a missing file is an error of another kind than in a folder."""
    from huggingface_hub.errors import RemoteEntryNotFoundError

    source, asked = saved("qwen3_moe"), []

    def download(repo_id, filename, *, revision, local_files_only):
        assert (repo_id, revision, local_files_only) == ("org/single", None, False)
        asked.append(filename)
        if not (source / filename).is_file():
            raise RemoteEntryNotFoundError(
                "404", response=SimpleNamespace(headers={}, request=None)
            )
        return str(source / filename)

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    loaded = load("org/single")
    assert "model.safetensors.index.json" in asked
    assert_same_tensors(loaded.state_dict(), load(source).state_dict())


@pytest.mark.sees_defect(
    "automatic placement sizes the experts by their 16 bits and moves some to the CPU"
)
def test_placement(submodule, monkeypatch, caplog):
    loading = submodule("integrations.models.quantized_loading")
    place = loading.placement
    assert place("cpu") == torch.device("cpu")
    assert place({"": 3}) == torch.device("cuda:3")
    with pytest.raises(ValueError, match=r"need one device per rank"):
        place({"model.embed": 0, "model.layers": 1})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with caplog.at_level(logging.INFO):
        assert place("auto", {"LOCAL_RANK": "2"}) == torch.device("cuda:2")
        assert place(None, {}) == torch.device("cuda:0")
        sharded = {"ACCELERATE_USE_FSDP": "true", "LOCAL_RANK": "2"}
        assert place("auto", sharded) == torch.device("cpu")
        zero = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
        assert place(None, zero) == torch.device("cpu")
        zero["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = "2"
        assert place(None, zero) == torch.device("cuda:0")
    assert "the whole model goes to cuda:2: local rank 2" in caplog.text
    assert "moves the shards itself" in caplog.text


METHOD = "quantized_experts"


@pytest.fixture
def quantized(opt):
    model = build("qwen3_moe").eval()
    opt.integrations.quantize_experts(model)
    return model


def test_defaults_of_generate_travel(opt, tmp_path) -> None:
    model = build("qwen3_moe")
    model.generation_config.update(do_sample=True, top_k=7, temperature=0.3)
    model.save_pretrained(tmp_path / "dense")
    loaded = opt.integrations.load_quantized(tmp_path / "dense", **OPTIONS)
    loaded.save_pretrained(tmp_path / "packed")
    again = opt.integrations.load_quantized(tmp_path / "packed", **OPTIONS)
    for found in (loaded.generation_config, again.generation_config):
        assert (found.do_sample, found.top_k, found.temperature) == (True, 7, 0.3)


def test_what_could_not_be_read_is_not_written(opt, quantized, tmp_path) -> None:
    def refused(model, message) -> None:
        with pytest.raises(ValueError, match=message):
            model.save_pretrained(tmp_path)
        assert not list(tmp_path.iterdir())

    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    wrapped = peft.get_peft_model(build("qwen3_moe"), config)
    opt.integrations.quantize_experts(wrapped)
    refused(wrapped.base_model.model, "wrapped by PEFT")
    both = build("qwen3_moe")
    both.hf_quantizer = object()  # of bitsandbytes, for the linear layers
    both.config.quantization_config = {"quant_method": "bitsandbytes"}
    opt.integrations.quantize_experts(both)
    refused(both, "quantised by .*bitsandbytes.* beside its experts")
    experts = quantized.model.layers[1].mlp.experts
    stack = experts._modules.pop("down_proj")
    experts.down_proj = torch.nn.Parameter(stack.decode())
    refused(quantized, r"layers\.1\.mlp\.experts\.down_proj is not in 4 bits")


def test_experts_of_bitsandbytes_become_ours(opt, tmp_path) -> None:
    """Their state is spread over keys that only bitsandbytes reads."""
    model = build("qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    parametrize_4_bits(model)
    for experts in experts_of(model):
        for name in ("gate_up_proj", "down_proj"):
            stack = opt.moe.QuantizedExperts.from_quantized(opt.moe.expert_weight(experts, name))
            torch.nn.utils.parametrize.remove_parametrizations(
                experts, name, leave_parametrized=False
            )
            del experts._parameters[name]
            experts.add_module(name, stack)
    opt.integrations.use_in_transformers(model)
    model.save_pretrained(tmp_path / "new")
    loaded = opt.integrations.load_quantized(tmp_path / "new", **OPTIONS)
    assert_same_bits(logits(loaded), logits(model.eval()))


def from_pretrained(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def test_what_trains_after_loading(opt, quantized, tmp_path) -> None:
    """Packed experts never; with adapters these alone, as attach_lora left it."""
    load = opt.integrations.load_quantized
    quantized.save_pretrained(tmp_path / "base", max_shard_size="5KB")
    assert len(list((tmp_path / "base").glob("model-*.safetensors"))) > 1
    for loaded in (load(tmp_path / "base", **OPTIONS), from_pretrained(tmp_path / "base")):
        assert_same_bits(logits(loaded), logits(quantized))
        assert trained(loaded) == {n for n, _ in loaded.named_parameters() if ".experts." not in n}
        validate_quantization_for_training(loaded)
    opt.integrations.attach_lora(
        quantized, r=2, lora_alpha=4, target_parameters=("down_proj",), use_rslora=True
    )
    opt.integrations.attach_lora(quantized, r=3, lora_alpha=5, adapter_name="second")
    opt.integrations.set_lora(quantized, "second")
    set_random_lora(quantized)
    quantized.save_pretrained(tmp_path / "adapted")
    for loaded in (load(tmp_path / "adapted", **OPTIONS), from_pretrained(tmp_path / "adapted")):
        assert trained(loaded) == {n for n, _ in loaded.named_parameters() if ".second." in n}
        assert_same_bits(logits(loaded), logits(quantized))
        opt.integrations.set_lora(loaded, "default")
        opt.integrations.set_lora(quantized, "default")
        assert_same_bits(logits(loaded), logits(quantized))
        opt.integrations.set_lora(quantized, "second")


def test_the_base_model_of_the_files(quantized, tmp_path) -> None:
    quantized.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    found, expected = (model(tokens()).last_hidden_state for model in (base, quantized.model))
    assert_same_bits(found, expected)


def test_without_this_package_from_pretrained_raises(quantized, tmp_path, monkeypatch) -> None:
    """It would go on with a warning and draw experts whose names it misses at random."""
    quantized.save_pretrained(tmp_path)
    monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, METHOD)
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, METHOD)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        from_pretrained(tmp_path)


def test_files_that_do_not_fit_are_refused(quantized, tmp_path) -> None:
    quantized.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="load it with the class and the configuration"):
        from_pretrained(tmp_path, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"the configuration asks for \(6, "):
        from_pretrained(tmp_path, num_experts=6)
    with pytest.raises(ValueError, match="need one device per rank"):
        from_pretrained(tmp_path, device_map={"model": "cpu", "lm_head": "meta"})
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj.absmax"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lacks model\.layers\.1\.mlp\.experts\.down_proj\.absmax.*describes$"
    ):
        from_pretrained(tmp_path)


def test_an_adapter_of_transformers_is_written_alone(quantized, tmp_path) -> None:
    quantized.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    quantized.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert not (tmp_path / "model.safetensors").exists()


def test_a_model_can_be_copied_and_pickled(quantized, tmp_path) -> None:
    quantized.save_pretrained(tmp_path)
    for twin in (copy.deepcopy(quantized), pickle.loads(pickle.dumps(quantized))):
        assert type(twin.hf_quantizer) is type(quantized.hf_quantizer)
        assert_same_bits(logits(twin), logits(quantized))
