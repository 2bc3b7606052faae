"""load_optimizer on files that are damaged, malformed or of another optimizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from .._compare import assert_same_bits
from ..optimizers._steps import parameters, train
from ..optimizers.test_state import SHAPES, muon, state_tensors


def rewrite(folder: Path, change) -> None:
    """Change the header or the tensors of a checkpoint."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = folder / "optimizer.safetensors"
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["optimizer"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    change(header, tensors)
    save_file(tensors, path, {"optimizer": json.dumps(header)})


def drop(tensors: dict, prefix: str) -> None:
    for name in [name for name in tensors if name.startswith(prefix)]:
        del tensors[name]


def option(header: dict, **values) -> None:
    header["groups"][0]["options"].update(values)


FAULTS = {
    "format": (lambda h, t: h.update(format=99), "has format 99, this version reads 1"),
    "class": (lambda h, t: h.update({"class": "Adam"}), "is of Adam, the optimizer Muon"),
    "groups": (
        lambda h, t: (h["groups"].pop(), drop(t, "state.1.")),
        "has 1 groups, the optimizer 2",
    ),
    "names": (
        lambda h, t: (h["groups"][0]["names"].pop(), drop(t, "state.0.3.")),
        "3 parameters were saved, 4 are present",
    ),
    "option": (
        lambda h, t: h["groups"][0]["options"].update(momentum=7),
        "group 0: momentum must lie in",
    ),
    "missing": (
        lambda h, t: t.pop("state.1.0.exp_avg"),
        "group 1, parameter 'table': the loaded state has no exp_avg",
    ),
    "shape": (
        lambda h, t: t.update({"state.0.2.momentum_buffer": torch.zeros(2)}),
        r"'wide': the loaded momentum_buffer has shape \(2,\), expected \(4, 12\)",
    ),
    "no class": (lambda h, t: h.pop("class"), "class must be a str, got None"),
    "no groups": (lambda h, t: h.pop("groups"), "groups must be a list, got None"),
    "group": (lambda h, t: h.update(groups=[1, 2]), r"groups\[0\] must be a dict, got 1"),
    "no names": (lambda h, t: h["groups"][1].pop("names"), r"groups\[1\].names must be a list"),
    "name": (
        lambda h, t: h["groups"][1].update(names=[3]),
        r"groups\[1\].names must hold strings and null, got \[3\]",
    ),
    "no options": (
        lambda h, t: h["groups"][0].pop("options"),
        r"groups\[0\].options must be a dict, got None",
    ),
    "two keys": (
        lambda h, t: option(h, lr={"tensor": "a", "dtype": "float32"}),
        r"groups\[0\].options.lr: .* is no value that save_optimizer writes",
    ),
    "lost tensor": (
        lambda h, t: option(h, lr={"tensor": "group.0.lr"}),
        r"groups\[0\].options.lr: {'tensor': 'group.0.lr'} is no value",
    ),
    "no dtype": (
        lambda h, t: option(h, dtype={"dtype": "load"}),
        r"groups\[0\].options.dtype: {'dtype': 'load'} is no value",
    ),
    "kind of value": (lambda h, t: option(h, dtype={"dict": [1]}), "is no value"),
    "type of value": (lambda h, t: option(h, momentum="much"), "group 0: momentum must be"),
    "too many parameters": (
        lambda h, t: t.update({"state.0.7.momentum_buffer": torch.zeros(2)}),
        "tensor 'state.0.7.momentum_buffer' belongs to no parameter and no option",
    ),
    "too many groups": (
        lambda h, t: t.update({"state.2.0.momentum_buffer": torch.zeros(2)}),
        "tensor 'state.2.0.momentum_buffer' belongs to no parameter",
    ),
    "a strange tensor": (lambda h, t: t.update(x=torch.zeros(2)), "tensor 'x' belongs to no"),
    "a strange name": (lambda h, t: t.update({"state.a.0.b": torch.zeros(2)}), "belongs to no"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_does_not_fit_changes_nothing(opt, device, fault, tmp_path) -> None:
    params = parameters(SHAPES, device=device)
    optimizer = muon(opt, params)
    opt.save_optimizer(optimizer, tmp_path)
    train(optimizer, params, 2)
    kept = [tensor.clone() for _, tensor in state_tensors(optimizer)]
    change, message = FAULTS[fault]
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=message) as caught:
        opt.load_optimizer(optimizer, tmp_path)
    assert str(tmp_path / "optimizer.safetensors") in str(caught.value)
    for (_, tensor), old in zip(state_tensors(optimizer), kept, strict=True):
        assert_same_bits(tensor, old)


def test_what_is_no_checkpoint(opt, tmp_path) -> None:
    from safetensors.torch import save_file

    optimizer = opt.Muon(parameters([(4, 3)]))
    with pytest.raises(FileNotFoundError, match="no optimizer checkpoint"):
        opt.load_optimizer(optimizer, tmp_path / "nowhere")
    save_file({"x": torch.zeros(1)}, tmp_path / "optimizer.safetensors")
    with pytest.raises(ValueError, match="was not written by save_optimizer"):
        opt.load_optimizer(optimizer, tmp_path)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_a_truncated_file(opt, size, tmp_path) -> None:
    optimizer = opt.Muon(parameters([(4, 3)]))
    opt.save_optimizer(optimizer, tmp_path)
    path = tmp_path / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=f"{path} is damaged or no safetensors file"):
        opt.load_optimizer(optimizer, tmp_path)


@pytest.mark.parametrize("header", ["", "{", "[]", "null"])
def test_a_header_that_is_no_json_object(opt, header, tmp_path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "optimizer.safetensors"
    save_file({}, path, {"optimizer": header})
    with pytest.raises(ValueError, match=str(path)):
        opt.load_optimizer(opt.Muon(parameters([(4, 3)])), tmp_path)
