"""Weights (in, out), as of transformers' Conv1D, take the steps of their transposes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from .._compare import assert_all_same_bits, assert_error_at_most
from ._steps import TinyTransformer, new_gradients, parameters, train

NAMES = ["wide", "tall", "square", "layers.experts.up"]
SHAPES = [(24, 10), (10, 24), (16, 16), (3, 12, 6)]  # (out, in)
OPTIONS = {
    "original": {"adjust_lr_fn": "original"},
    "spectral": {"adjust_lr_fn": "spectral"},
    "callable": {"adjust_lr_fn": lambda lr, rows, columns: lr * rows / columns},
    "shaped decay": {"adjust_lr_fn": "original", "shaped_decay": True, "cautious": True},
    "variance": {"beta2": 0.9},
    "rows": {"row_equilibration": True, "renormalize": True, "beta2": 0.9},
    "heads": {"num_heads": 2, "beta2": 0.9},
    "parts": {
        "split_sizes": {"wide": (4, 12, 8), "square": (8, 8), "layers.experts.up": (5, 7)},
        "beta2": 0.9,
        "row_equilibration": True,
    },
}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_steps_of_the_transposes(opt, device, options) -> None:
    """In float64, with decay: rates, statistics and cuts are of outputs and inputs."""
    plain = parameters(SHAPES, dtype=torch.float64, device=device)
    turned = [nn.Parameter(p.detach().mT.contiguous()) for p in plain]
    group = {"names": NAMES, "use_muon": True, "expert_keys": ["experts"], **options}
    one = opt.Muon([{**group, "params": plain}], lr=5e-3, weight_decay=0.5)
    other = opt.Muon([{**group, "params": turned, "transposed": True}], lr=5e-3, weight_decay=0.5)
    for seed in range(4):
        new_gradients(plain, seed=seed)
        for param, twin in zip(plain, turned, strict=True):
            twin.grad = param.grad.mT.contiguous()
        one.step()
        other.step()
    for param, twin in zip(plain, turned, strict=True):
        assert_error_at_most(twin.detach().mT, param.detach(), 1e-12)
        for key, value in one.state[param].items():
            assert other.state[twin][key].numel() == value.numel()


@pytest.mark.parametrize("rounding", ["residual", "nearest"])
def test_bfloat16_parts_in_columns(opt, device, rounding) -> None:
    """Pieces with strides, their residuals beside them; saved, loaded, and kept in host memory."""
    options = {"split_sizes": (4, 12, 8), "beta2": 0.9, "rounding": rounding, "transposed": True}
    sets = [parameters([(10, 24)], dtype=torch.bfloat16, device=device) for _ in range(2)]
    one, other = (opt.Muon([{"params": p, "use_muon": True, **options}], lr=5e-3) for p in sets)
    train(one, sets[0], 4)
    train(other, sets[1], 2)
    other.turn_on_cpu_offload()
    train(other, sets[1], 1, seed=102)
    other.load_state_dict(other.state_dict())
    train(other, sets[1], 1, seed=103)
    assert_all_same_bits(*sets)


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((10, 24), {"split_sizes": (5, 5)}, r"add up to 10, but \(10, 24\) has 24 columns"),
        ((10, 24), {"num_heads": 5}, r"num_heads=5 does not divide the 24 columns"),
        ((4, 3, 2, 2), {}, r"transposed takes matrices \(in, out\)"),
        ((10, 24), {"num_heads": 2, "rounding": "stochastic"}, "use rounding='residual'"),
        ((10, 24), {"transposed": "yes"}, "transposed must be True or False"),
    ],
)
def test_refused(opt, shape, options, words) -> None:
    group = {"params": parameters([shape]), "use_muon": True, "transposed": True, **options}
    with pytest.raises((ValueError, TypeError), match=words):
        opt.Muon([group])


def test_qk_clip_scales_rows_alone(opt) -> None:
    group = {"params": parameters([(8, 8)]), "names": ["layers.0.attn.q_proj.weight"]}
    clip = {"q_indices": [0], "k_indices": [0], "head_dim": 4}
    with pytest.raises(ValueError, match=r"'layers.0.attn.q_proj.weight'.*is transposed"):
        opt.Muon([{**group, "use_muon": True, "transposed": True}], clip_config=clip)


@pytest.fixture(scope="module")
def gpt2():
    transformers = pytest.importorskip("transformers")

    def model_of() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 16}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).double()

    return model_of


def test_gpt2(opt, gpt2) -> None:
    """c_attn (in, 3 out) is cut into Q, K and V by columns; the step is that of (out, in) parts."""
    model = gpt2()
    groups = opt.get_default_muon_param_groups(model)
    muon, _, undecayed = groups
    assert muon["transposed"] is True and model.transformer.wte.weight in set(undecayed["params"])
    name = "transformer.h.0.attn.c_attn.weight"
    attention = model.get_parameter(name)
    assert muon["split_sizes"][name] == (8, 8, 8) and len(muon["split_sizes"]) == 2
    assert "columns (8, 8, 8)" in groups.table()
    parts = [nn.Parameter(p.detach().mT.clone()) for p in attention.split(8, dim=1)]
    optimizer = opt.Muon(groups, lr=5e-3, adjust_lr_fn="original", beta2=0.9)
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    model(tokens, labels=tokens).loss.backward()
    for part, grad in zip(parts, attention.grad.split(8, dim=1), strict=True):
        part.grad = grad.mT.clone()
    optimizer.step()
    opt.Muon(parts, lr=5e-3, adjust_lr_fn="original", beta2=0.9).step()
    expected = torch.cat([part.detach() for part in parts]).mT
    assert_error_at_most(attention.detach(), expected, 1e-12)


def test_a_model_with_both_kinds(opt, gpt2) -> None:
    """Those of Conv1D are in a further group; every parameter is in one of them."""
    model = nn.ModuleDict({"text": gpt2(), "other": TinyTransformer()})
    groups = opt.get_default_muon_param_groups(model)
    assert [group.get("transposed", False) for group in groups] == [False, False, False, True]
    names = [name for group in groups for name in group["names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert all(".c_" in name for name in groups[-1]["names"])
    assert set(groups[-1]["split_sizes"]) <= set(groups[-1]["names"])
    assert opt.Muon(groups).param_groups[-1]["transposed"] is True


@pytest.mark.parametrize("wrapped", [True, False])
def test_convolutions_that_are_called_conv1d_are_none_of_gpt2(opt, gpt2, wrapped: bool) -> None:
    """As in audio models: they wrap a convolution, or are one with a weight (out, in, width)."""

    class Conv1D(nn.Module if wrapped else nn.Conv1d):
        def __init__(self) -> None:
            super().__init__(*(() if wrapped else (4, 6, 3)))
            if wrapped:
                self.conv = nn.Conv1d(4, 6, 3)

    model = nn.ModuleDict({"text": gpt2(), "c_attn": Conv1D()})
    muon, *others = opt.get_default_muon_param_groups(model)
    assert muon["transposed"] is True and all(".c_" in name for name in muon["names"])
    convolution = "c_attn.conv.weight" if wrapped else "c_attn.weight"
    assert [convolution in group["names"] for group in others] == [True, False]
    muon, *_ = opt.get_default_muon_param_groups(nn.Sequential(Conv1D(), nn.Linear(6, 4)))
    assert muon["names"] == ["1.weight"] and "transposed" not in muon
