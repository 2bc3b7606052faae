"""Files that somebody made by hand: adapters, their configurations, indices of checkpoints."""

# ruff: noqa: F811 - tests take the imported fixture as an argument

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ._models import build
from .test_peft import BOTH, wrap
from .test_peft_adapter import CONFIG, TENSORS, edit, saved  # noqa: F401 - a fixture

UNTRAINABLE = [torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]


def assert_refused(opt, model: nn.Module, folder: Path, *words: str) -> None:
    """Loading raises a ValueError with these words, and leaves nothing behind."""
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    modules = [name for name, _ in model.named_modules()]
    with pytest.raises(ValueError) as refusal:
        opt.integrations.load_peft_adapter(model, folder)
    for word in words:
        assert word in str(refusal.value)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert [name for name, _ in model.named_modules()] == modules
    assert model.config._experts_implementation == "eager"


@pytest.mark.parametrize("dtype", UNTRAINABLE, ids=str)
def test_factors_that_cannot_train(opt, device, saved, dtype: torch.dtype) -> None:
    model = build("qwen3_moe_square").to(device)
    tensors = load_file(saved / TENSORS)
    save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, saved / TENSORS)
    assert_refused(opt, model, saved, str(saved / TENSORS), f"got {dtype}")


@pytest.mark.parametrize("dtype", UNTRAINABLE, ids=str)
def test_attached_factors_that_cannot_train(opt, device, dtype: torch.dtype) -> None:
    model = build("qwen3_moe").to(device)
    modules = [name for name, _ in model.named_modules()]
    for quantize in (None, "nf4"):
        with pytest.raises(ValueError, match=f"dtype must be one of .*got {dtype}"):
            opt.integrations.attach_lora(model, 3, 7, quantize=quantize, dtype=dtype)
    assert [name for name, _ in model.named_modules()] == modules
    assert all(parameter.requires_grad for parameter in model.parameters())
    adapters = opt.moe.ExpertAdapters(5, 24, 20, opt.moe.ExpertsLayout())
    with pytest.raises(ValueError, match=f"got {dtype}"):
        adapters.add_adapter(r=3, alpha=7, dtype=dtype)
    assert not list(adapters.parameters())


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    "pattern",
    ["(.*)*x", "(a+)+$", "(", "[z-a]", "a{9}", "q|v", r"\w", "(?i)x", "x" * 400, ".*" * 9],
)
def test_patterns_that_could_run_for_years(opt, device, saved, pattern: str, key: str) -> None:
    model = build("qwen3_moe_square").to(device)
    edit(saved, **{key: {pattern: 3}})
    assert_refused(opt, model, saved, str(saved / CONFIG), key, pattern[:20])


def test_more_patterns_than_anybody_writes(opt, device, saved) -> None:
    model = build("qwen3_moe_square").to(device)
    edit(saved, alpha_pattern={f"{number}.*": 3 for number in range(101)})
    assert_refused(opt, model, saved, str(saved / CONFIG), "more than 100 patterns")


def test_patterns_mean_what_they_mean_to_peft(submodule) -> None:
    from peft.utils.other import get_pattern_key

    config = submodule("integrations.adapters.adapter_file")
    draw = random.Random(0)
    atoms = ["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", "0", "_"]
    hits = 0
    for _ in range(20_000):
        parts = [draw.choice(atoms) + draw.choice(["", "", "", "*", "+", "?"]) for _ in range(4)]
        pattern = draw.choice(["", "", "^"]) + "".join(parts) + draw.choice(["", "", "$"])
        name = "".join(draw.choice("ab.0_") for _ in range(draw.randint(0, 7)))
        rules = config.pattern_rules({"rank_pattern": {pattern: 1}}, "rank_pattern", Path("file"))
        expected = get_pattern_key([pattern], name) == pattern
        assert (config.by_pattern(rules, name, 0) == 1) == expected, (pattern, name)
        hits += expected
    assert hits > 1000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "no JSON"),
        ("{", "no JSON"),
        ("\xff", "no JSON"),
        ("[]", "must hold a JSON object"),
    ],
    ids=["deep", "open", "no text", "a list"],
)
def test_configurations_that_are_no_json_objects(opt, device, saved, text, words) -> None:
    model = build("qwen3_moe_square").to(device)
    (saved / CONFIG).write_text(text, encoding="latin-1")
    assert_refused(opt, model, saved, str(saved / CONFIG), words)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", None),
        ("r", "3"),
        ("r", 3.0),
        ("r", True),
        ("r", -3),
        ("lora_alpha", None),
        ("lora_alpha", [7]),
        ("lora_alpha", float("nan")),
        ("lora_alpha", 10**400),
        ("use_rslora", "false"),
        ("target_parameters", "experts.down_proj"),
        ("target_parameters", [["experts.down_proj"]]),
        ("target_parameters", {"experts.down_proj": 1}),
        ("rank_pattern", [3]),
        ("rank_pattern", {"down_proj": "3"}),
        ("alpha_pattern", {"down_proj": {}}),
        ("peft_version", 0.19),
        ("peft_version", "9" * 5000 + ".1"),
    ],
    ids=lambda value: f"{value!r:.30}",
)
def test_configurations_with_wrong_entries(opt, device, saved, key: str, value) -> None:
    model = build("qwen3_moe_square").to(device)
    edit(saved, **{key: value})
    word = {"lora_alpha": "alpha", "rank_pattern": "r", "alpha_pattern": "alpha"}.get(key, key)
    assert_refused(opt, model, saved, str(saved / CONFIG), word)


@pytest.mark.parametrize("version", ["0.17.1", "0.21.2"])
def test_factors_of_any_other_shape(opt, device, tmp_path, version: str) -> None:
    """Those of old files are exchanged, which needs a rank for every expert."""
    saved = tmp_path
    wrap(build("qwen3_moe_square").to(device), parameters=BOTH[:1]).save_pretrained(saved)
    model = build("qwen3_moe_square").to(device)
    tensors = load_file(saved / TENSORS)
    edit(saved, peft_version=version)
    first, *_ = tensors
    for wrong in (torch.ones(7, 3), torch.ones(5), torch.ones(()), torch.ones(2, 3, 4)):
        save_file(tensors | {first: wrong}, saved / TENSORS)
        assert_refused(opt, model, saved, str(saved / TENSORS), f"{tuple(wrong.shape)}")


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A folder with an index, and another one beside it that is none of its business."""
    folder = tmp_path / "models" / "checkpoint"
    folder.mkdir(parents=True)
    for place in (folder / "part.safetensors", tmp_path / "x.safetensors"):
        save_file({"weight": torch.ones(2)}, place)
    return folder


def write_index(folder: Path, file: object) -> None:
    index = {"weight_map": {"weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def files_of(submodule, folder: Path):
    return submodule("integrations.models.model_files").ModelFiles(folder)


@pytest.mark.parametrize("how", ["parent", "absolute", "backslash", "link", "linked folder"])
def test_an_index_that_leads_out_of_its_folder(submodule, checkpoint, how: str) -> None:
    outside = checkpoint.parent.parent
    file = {
        "parent": "../../x.safetensors",
        "absolute": str(outside / "x.safetensors"),
        "backslash": "..\\x.safetensors",
        "link": "link.safetensors",
        "linked folder": "folder/x.safetensors",
    }[how]
    (checkpoint / "link.safetensors").symlink_to(outside / "x.safetensors")
    (checkpoint / "folder").symlink_to(outside)
    write_index(checkpoint, file)
    with pytest.raises(ValueError, match=r"puts weight into .*leads out of the folder"):
        files_of(submodule, checkpoint)


@pytest.mark.parametrize("how", ["plain", "link inside", "folder is a link", "hub cache"])
def test_an_index_that_stays_in_its_folder(submodule, checkpoint, how: str) -> None:
    folder, file = checkpoint, "part.safetensors"
    if how == "link inside":
        file = "link.safetensors"
        (folder / file).symlink_to("part.safetensors")
    elif how == "folder is a link":
        folder = checkpoint.parent / "other"
        folder.symlink_to(checkpoint)
    elif how == "hub cache":
        repository = checkpoint.parent / "models--org--name"
        folder = repository / "snapshots" / "0123"
        folder.mkdir(parents=True)
        (repository / "blobs").mkdir()
        (checkpoint / file).rename(repository / "blobs" / "abc")
        (folder / file).symlink_to("../../blobs/abc")
    write_index(folder, file)
    with files_of(submodule, folder) as files:
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
