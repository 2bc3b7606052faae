"""save_peft_adapter and load_peft_adapter: PEFT's files, and those that somebody made by hand."""

import json
import random
import re
import socket
from pathlib import Path
from unittest import mock

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from .._compare import assert_error_at_most, assert_same_bits, assert_same_tensors, relative_error
from ._models import (
    DISTINCT,
    FP32,
    assert_close_tensors,
    assert_read_everywhere,
    attached,
    experts_of,
    logits,
    set_random_lora,
    step,
    trained,
)
from .test_peft import BOTH, SQUARE, deltas, wrap

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
REVISION = "0123456789abcdef0123456789abcdef01234567"


def edit(folder: Path, **changes) -> Path:
    """Change entries of the configuration; None removes one."""
    config = json.loads((folder / CONFIG).read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


@pytest.fixture
def saved(opt, fresh, tmp_path) -> Path:
    """An adapter that PEFT wrote."""
    wrap(fresh("qwen3_moe_square")).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(
    ("name", "rslora"), [(name, name in ("qwen3_moe_square", "gpt_oss")) for name in DISTINCT]
)
def test_our_adapter_in_peft_and_back(opt, device, fresh, name, rslora, tmp_path) -> None:
    """Logits, and the gradients, which a file holds under PEFT's names if they are the factors."""
    model = attached(opt, fresh(name), use_rslora=rslora)
    opt.integrations.save_peft_adapter(model, tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["use_rslora"] == rslora
    loaded = peft.PeftModel.from_pretrained(fresh(name), tmp_path, is_trainable=True)
    loaded.save_pretrained(tmp_path / "theirs")
    saved = [load_file(folder / TENSORS) for folder in (tmp_path, tmp_path / "theirs")]
    assert_same_tensors(*saved)
    again = fresh(name)
    opt.integrations.load_peft_adapter(again, tmp_path / "theirs")
    assert_same_bits(logits(again), logits(model))
    (found, ours), (expected, theirs) = step(model), step(loaded)
    assert_error_at_most(found, expected, FP32)
    assert relative_error(found, logits(fresh(name))) > 0.1
    with torch.no_grad():
        for key, gradient in ours.items():
            model.get_parameter(key).copy_(gradient)
    opt.integrations.save_peft_adapter(model, tmp_path)
    gradients = load_file(tmp_path / TENSORS, device=str(device))
    gradients = {key.replace(".weight", ".default.weight"): g for key, g in gradients.items()}
    assert_close_tensors(gradients, theirs)


@pytest.mark.parametrize("target", ["gate_up_proj", "down_proj"])
def test_one_projection_has_no_base_layer_in_its_key(opt, fresh, target: str, tmp_path) -> None:
    model = attached(opt, fresh("qwen3_moe_square"), target_parameters=[target])
    assert_read_everywhere(opt, model, tmp_path, fresh, "qwen3_moe_square")
    assert not [key for key in load_file(tmp_path / TENSORS) if "base_layer" in key]


@pytest.mark.parametrize("rslora", [False, True], ids=["alpha/r", "alpha/sqrt(r)"])
def test_ranks_and_alphas_by_pattern(opt, fresh, rslora: bool, tmp_path) -> None:
    reference = wrap(
        fresh("gpt_oss"),
        use_rslora=rslora,
        rank_pattern={r"0\.mlp\.experts\.gate_up_proj": 5, "down_proj": 1},
        alpha_pattern={r".*\.gate_up_proj": 11.5},
    )
    reference.save_pretrained(tmp_path / "theirs")
    model = fresh("gpt_oss")
    opt.integrations.load_peft_adapter(model, tmp_path / "theirs")
    ranks = {
        (layer, name): entry.lora_B["default"].weight.shape[1] // 5
        for layer, experts in enumerate(experts_of(model))
        for name, entry in experts.expert_lora.items()
    }
    assert ranks == {(0, "gate_up"): 5, (1, "gate_up"): 3, (0, "down"): 1, (1, "down"): 1}
    assert_error_at_most(logits(model), logits(reference), FP32)
    assert_read_everywhere(opt, model, tmp_path / "ours", fresh, "gpt_oss")


def test_round_trip_is_exact_in_every_dtype(opt, fresh, tmp_path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = attached(opt, fresh(), dtype=dtype)
        opt.integrations.save_peft_adapter(model, tmp_path / "a")
        again = fresh()
        opt.integrations.load_peft_adapter(again, tmp_path / "a", adapter_name="other")
        opt.integrations.save_peft_adapter(again, tmp_path / "b")
        for file in (CONFIG, TENSORS):
            assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
        assert_same_bits(logits(again), logits(model))
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [CONFIG, TENSORS]


def test_names_that_torch_compile_adds_stay_out(opt, fresh, tmp_path) -> None:
    model = attached(opt, fresh())
    opt.integrations.save_peft_adapter(model, tmp_path / "a")
    opt.integrations.save_peft_adapter(torch.compile(model, backend="eager"), tmp_path / "b")
    assert load_file(tmp_path / "a" / TENSORS).keys() == load_file(tmp_path / "b" / TENSORS).keys()
    compiled = torch.compile(fresh(), backend="eager")
    opt.integrations.load_peft_adapter(compiled, tmp_path / "b")
    opt.integrations.save_peft_adapter(compiled, tmp_path / "c")
    assert (tmp_path / "a" / TENSORS).read_bytes() == (tmp_path / "c" / TENSORS).read_bytes()


def test_which_adapter_is_saved_and_trained(opt, fresh, tmp_path) -> None:
    model = attached(opt, fresh())
    opt.integrations.attach_lora(model, 2, 3, adapter_name="other")
    set_random_lora(model, seed=8)
    opt.integrations.save_peft_adapter(model, tmp_path, adapter_name="other")
    assert json.loads((tmp_path / CONFIG).read_text())["r"] == 2
    with pytest.raises(ValueError, match=r"adapter_name='third' is not attached.*default.*other"):
        opt.integrations.save_peft_adapter(model, tmp_path, adapter_name="third")
    opt.integrations.load_peft_adapter(model, tmp_path, adapter_name="third", trainable=True)
    assert {name.split(".")[8] for name in trained(model)} == {"third"}
    opt.integrations.set_lora(model, "other")
    expected = logits(model)
    opt.integrations.set_lora(model, "third")
    assert_same_bits(logits(model), expected)


@pytest.mark.sees_defect("files of PEFT up to 0.19.0 load into later ones with A and B exchanged")
@pytest.mark.parametrize(
    "version", [None, "0.17.1", "0.18.1", "0.19.0", "0.19.1", "0.21.2", "0.22.0.dev0"]
)
@pytest.mark.parametrize("name", ["qwen3_moe_square", "gpt_oss"])
def test_roles_of_a_and_b_follow_the_version_and_not_the_shape(
    opt, device, fresh, name: str, version: str | None, tmp_path
) -> None:
    """Square projections of old files load without an error either way, and then differ."""
    wrap(fresh(name, **SQUARE[name]), parameters=BOTH[:1]).save_pretrained(tmp_path)
    edit(tmp_path, peft_version=version)
    model = fresh(name, **SQUARE[name])
    transposed = experts_of(model)[0].is_transposed
    recent = version in ("0.19.1", "0.21.2", "0.22.0.dev0")
    swapped = not transposed if recent else transposed and version == "0.19.0"
    expected = fresh(name, **SQUARE[name])
    tensors = load_file(tmp_path / TENSORS, device=str(device))
    with torch.no_grad():
        for layer, experts in enumerate(experts_of(expected)):
            key = f"base_model.model.model.layers.{layer}.mlp.experts"
            pair = tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"]
            order = "eoi" if swapped else "eio"  # dimensions 1 and 2 of the parameter
            experts.gate_up_proj += 7 / 3 * deltas(*pair, experts.num_experts, order)
    opt.integrations.load_peft_adapter(model, tmp_path)
    assert_error_at_most(logits(model), logits(expected), FP32)
    opt.integrations.save_peft_adapter(model, tmp_path / "today")
    loaded = peft.PeftModel.from_pretrained(fresh(name, **SQUARE[name]), tmp_path / "today")
    assert_error_at_most(logits(loaded), logits(expected), FP32)


# What could run for years as a regular expression, and what is none.
PATTERNS = ["(.*)*x", "(a+)+$", "(", "[z-a]", "a{9}", "q|v", r"\w", "(?i)x", "x" * 400, ".*" * 9]
UNFIT = [
    ({"peft_type": "IA3"}, "'peft_type': 'IA3'"),
    ({"use_dora": True}, "'use_dora': True"),
    ({"lora_dropout": 0.1}, "'lora_dropout': 0.1"),
    ({"lora_bias": True}, "'lora_bias': True"),
    ({"bias": "all"}, "'bias': 'all'"),
    ({"modules_to_save": ["lm_head"]}, r"lm_head\.weight is missing there, \(61, 24\) here"),
    ({"target_modules": ["q_proj"]}, r"q_proj\.lora_A\.weight is missing there, \(3, 24\)"),
    ({"modules_to_save": ["(.*)*x"]}, r"'modules_to_save' has '\(\.\*\)\*x'"),
    ({"target_modules": "(.*)*x"}, r"'target_modules' has '\(\.\*\)\*x'"),
    ({"rank_pattern": {"q_proj": 10**9}, "target_modules": ["q_proj"]}, "r must be an integer"),
    ({"rank_pattern": {"q_proj": 999}, "target_modules": ["q_proj"]}, "no factor of rank 999"),
    ({"target_parameters": []}, "targets no parameters"),
    ({"target_parameters": [*BOTH, "gate.weight"]}, r"gate\.lora_A\.weight is missing there"),
    ({"target_parameters": [*BOTH, "nowhere"]}, "'nowhere'.*no parameters"),
    ({"target_parameters": [BOTH[0]]}, "unexpected.*base_layer"),
    ({"r": 4}, r"down_proj needs A \(20, 12\) and B \(24, 20\), the file has"),
    ({"r": None}, "'r' must be int, got None"),
    ({"r": True}, "'r' must be int, got True"),
    ({"r": -3}, "r must be an integer from 1"),
    ({"lora_alpha": None}, "'lora_alpha' must be int or float, got None"),
    ({"lora_alpha": float("nan")}, "lora_alpha must be a finite float32"),
    ({"lora_alpha": 10**400}, "lora_alpha must be a finite float32"),
    ({"use_rslora": "false"}, "'use_rslora' must be bool or null"),
    ({"target_parameters": BOTH[1]}, "'target_parameters' must be list or null"),
    ({"target_parameters": [[BOTH[1]]]}, "'target_parameters' must be names"),
    ({"rank_pattern": [3]}, "'rank_pattern' must be dict or null"),
    ({"rank_pattern": {"down_proj": "3"}}, "down_proj, r must be an integer"),
    ({"alpha_pattern": {"down_proj": {}}}, "down_proj, lora_alpha must be a number"),
    ({"alpha_pattern": {f"{n}.*": 3 for n in range(101)}}, "more than 100 patterns"),
    ({"peft_version": 0.19}, "'peft_version' must be str or null"),
    ({"peft_version": "9" * 5000 + ".1"}, "is no version"),
    ({"peft_version": "0.19.1.dev0@abc"}, "development version"),
]
UNFIT += [
    ({key: {pattern: 3}}, f"{key}' has {re.escape(repr(pattern)[:20])}")
    for key in ("rank_pattern", "alpha_pattern")
    for pattern in PATTERNS
]
UNFIT += [(text, "no JSON") for text in ("[" * 100_000, "{", "\xff")]
UNFIT += [("[]", "must hold a JSON object")]


def refused(opt, model: nn.Module, folder: Path) -> str:
    """The message of the ValueError that loading raises, which leaves nothing behind."""
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    modules = [name for name, _ in model.named_modules()]
    with pytest.raises(ValueError) as refusal:
        opt.integrations.load_peft_adapter(model, folder)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert [name for name, _ in model.named_modules()] == modules
    assert model.config._experts_implementation == "eager"
    return str(refusal.value)


@pytest.mark.parametrize(("changes", "words"), UNFIT, ids=lambda value: f"{value!r:.60}")
def test_unfit_configurations_are_refused(opt, fresh, saved, changes, words) -> None:
    if isinstance(changes, str):
        (saved / CONFIG).write_text(changes, encoding="latin-1")
    else:
        edit(saved, **changes)
    said = refused(opt, fresh("qwen3_moe_square"), saved)
    assert re.search(words, said) and str(saved) in said


def test_unfit_tensors_are_refused(opt, fresh, saved) -> None:
    load, file = opt.integrations.load_peft_adapter, saved / TENSORS
    model = fresh("qwen3_moe_square")
    before = set(model.state_dict())
    tensors = load_file(file)
    first, *_ = tensors
    other = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(3, 24)}
    for damaged, words in (
        (tensors | other, "unexpected.*q_proj.*what it targets is not what it holds"),
        ({k: v for k, v in tensors.items() if k != first}, f"missing.*{re.escape(first)}"),
        (tensors | {first: tensors[first].bfloat16()}, "mixes.*bfloat16.*float32"),
    ):
        save_file(damaged, file)
        with pytest.raises(ValueError, match=words):
            load(model, saved)
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ValueError, match="is damaged"):
        load(model, saved)
    file.rename(saved / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pickled.*are not read"):
        load(model, saved)
    assert set(model.state_dict()) == before
    with pytest.raises(ValueError, match="is of another model, or was saved over quantized"):
        exchanged(tensors, file)
        load(model, saved)


def exchanged(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Names as PEFT writes them over quantized experts: gate_up_proj is the outer wrapper there."""
    names = {
        key: key.replace(".base_layer", "") if "base_layer" in key else
        key.replace("experts.", "experts.base_layer.") for key in tensors
    }  # fmt: skip
    save_file({names[key]: tensor for key, tensor in tensors.items()}, file)


def test_hub_id_with_a_pinned_revision_offline(opt, fresh, saved, tmp_path, monkeypatch) -> None:
    refuse = mock.Mock(side_effect=AssertionError("the network was asked"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    cache = tmp_path / "hub"
    snapshot = cache / "models--org--adapter" / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    refs = cache / "models--org--adapter" / "refs"
    refs.mkdir()
    (refs / "v1").write_text(REVISION)
    for name in (CONFIG, TENSORS):
        (saved / name).rename(snapshot / name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    expected = fresh("qwen3_moe_square")
    opt.integrations.load_peft_adapter(expected, snapshot)
    for options in ({"revision": REVISION}, {"revision": "v1", "local_files_only": True}):
        model = fresh("qwen3_moe_square")
        opt.integrations.load_peft_adapter(model, "org/adapter", **options)
        assert_same_bits(logits(model), logits(expected))
    model = fresh("qwen3_moe_square")
    with pytest.raises(ValueError, match=r"'org/adapter' is no folder.*revision="):
        opt.integrations.load_peft_adapter(model, "org/adapter")
    for source in ("/no/such/folder", "./no_such"):
        for call in (
            lambda source=source: opt.integrations.load_quantized(source),
            lambda source=source: opt.integrations.load_peft_adapter(model, source, revision="v1"),
        ):
            with pytest.raises(FileNotFoundError, match=f"'{source}' is no folder here, and no id"):
                call()


def test_a_changed_bit_is_refused(opt, fresh, tmp_path) -> None:
    opt.integrations.save_peft_adapter(attached(opt, fresh()), tmp_path)
    content = bytearray((tmp_path / TENSORS).read_bytes())
    content[-1] ^= 1
    (tmp_path / TENSORS).write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged: the checksums of 'base_model\."):
        opt.integrations.load_peft_adapter(fresh("qwen3_moe_square"), tmp_path)


UNTRAINABLE = [torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]


@pytest.mark.parametrize("dtype", UNTRAINABLE, ids=str)
def test_factors_that_cannot_train(opt, fresh, saved, dtype: torch.dtype) -> None:
    model = fresh("qwen3_moe_square")
    tensors = load_file(saved / TENSORS)
    save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, saved / TENSORS)
    said = refused(opt, model, saved)
    assert str(saved / TENSORS) in said and f"got {dtype}" in said


def test_patterns_mean_what_they_mean_to_peft(submodule) -> None:
    from peft.utils.other import get_pattern_key

    config = submodule("integrations.adapters.adapter_config")
    draw = random.Random(0)
    atoms = ["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", "0", "_"]
    hits = 0
    for _ in range(8_000):
        signs = [draw.choice(["", "*", "+", "?"]) for _ in range(config.REPEATS)] + ["", ""]
        draw.shuffle(signs)
        parts = [draw.choice(atoms) + sign for sign in signs]
        pattern = draw.choice(["", "", "^"]) + "".join(parts) + draw.choice(["", "", "$"])
        name = "".join(draw.choice("ab.0_") for _ in range(draw.randint(0, 7)))
        rules = config.pattern_rules({"rank_pattern": {pattern: 1}}, "rank_pattern", Path("file"))
        expected = get_pattern_key([pattern], name) == pattern
        assert (config.by_pattern(rules, name, 0) == 1) == expected, (pattern, name)
        hits += expected
    assert hits > 200


@pytest.mark.parametrize("version", ["0.17.1", "0.21.2"])
def test_factors_of_any_other_shape(opt, fresh, tmp_path, version: str) -> None:
    """Those of old files are exchanged, which needs a rank for every expert."""
    saved = tmp_path
    wrap(fresh("qwen3_moe_square"), parameters=BOTH[:1]).save_pretrained(saved)
    model = fresh("qwen3_moe_square")
    tensors = load_file(saved / TENSORS)
    edit(saved, peft_version=version)
    first, *_ = tensors
    for wrong in (torch.ones(7, 3), torch.ones(5), torch.ones(()), torch.ones(2, 3, 4)):
        save_file(tensors | {first: wrong}, saved / TENSORS)
        said = refused(opt, model, saved)
        assert str(saved / TENSORS) in said and f"{tuple(wrong.shape)}" in said


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A folder with an index, and another one around it that is none of its business."""
    folder = tmp_path / "models" / "checkpoint"
    folder.mkdir(parents=True)
    for place in (folder / "part.safetensors", tmp_path / "x.safetensors"):
        save_file({"weight": torch.ones(2)}, place)
    (folder / "inside.safetensors").symlink_to("part.safetensors")
    (folder / "outside.safetensors").symlink_to(tmp_path / "x.safetensors")
    (folder / "folder").symlink_to(tmp_path)
    return folder


def files_of(submodule, folder: Path, file: str = ""):
    """The files of a folder, whose index puts the weight into that one."""
    if file:
        index = {"weight_map": {"weight": file}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return submodule("integrations.models.safetensors_reader").ModelFiles(folder)


OUTSIDE = ("../../{x}", "{root}/{x}", "..\\{x}", "outside.safetensors", "folder/{x}")


@pytest.mark.parametrize("file", OUTSIDE)
def test_an_index_that_leads_out_of_its_folder(submodule, checkpoint, file: str) -> None:
    file = file.format(x="x.safetensors", root=checkpoint.parent.parent)
    with pytest.raises(ValueError, match=r"puts weight into .*leads out of the folder"):
        files_of(submodule, checkpoint, file)


@pytest.mark.parametrize("how", ["part", "inside", "folder is a link", "hub cache"])
def test_an_index_that_stays_in_its_folder(submodule, checkpoint, how: str) -> None:
    folder, file = checkpoint, "inside.safetensors" if how == "inside" else "part.safetensors"
    if how == "folder is a link":
        folder = checkpoint.parent / "other"
        folder.symlink_to(checkpoint)
    elif how == "hub cache":
        repository = checkpoint.parent / "models--org--name"
        folder = repository / "snapshots" / "0123"
        folder.mkdir(parents=True)
        (repository / "blobs").mkdir()
        (checkpoint / file).rename(repository / "blobs" / "abc")
        (folder / file).symlink_to("../../blobs/abc")
    with files_of(submodule, folder, file) as files:
        assert files.read("weight").tolist() == [1, 1]


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "[]", "{}", "null", '{"weight_map": ["weight"]}', '{"weight_map": {"w": 3}}'],
    ids=lambda text: text[:30],
)
def test_an_index_that_is_none(submodule, checkpoint, text: str) -> None:
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(ValueError, match="is no index of safetensors") as refusal:
        files_of(submodule, checkpoint)
    assert str(index) in str(refusal.value)
