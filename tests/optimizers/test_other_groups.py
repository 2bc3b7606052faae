"""Groups as other code makes them: without marks, with keys of its own, of other optimizers."""

import copy
import logging
import re

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer

from .._compare import assert_all_same_bits, assert_error_at_most
from ._steps import (
    CLASSES,
    PlainMuon,
    TinyTransformer,
    marked,
    new_gradients,
    parameters,
    train,
    values,
)

KELLER_JORDAN = (3.4445, -4.7750, 2.0315)
EMA = {"momentum_form": "ema", "adjust_lr_fn": "original", "rows": [KELLER_JORDAN] * 5}


def kinds(optimizer) -> list[tuple[bool, int]]:
    return [(group["use_muon"], len(group["params"])) for group in optimizer.param_groups]


def test_groups_without_a_mark_go_by_shape(opt, device, said) -> None:
    """As torch.optim.AdamW's callers and Trainer make them; one warning lists the shapes."""
    params = parameters([(4, 3), (3,), (8, 4), (4,), (1, 4)], device=device)
    optimizer = opt.Muon([{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}])
    assert kinds(optimizer) == [(True, 1), (True, 2), (False, 2)]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0, 0.0]
    (message,) = said("go by shape")
    assert "(4, 3) to muon; (1, 4), (8, 4) to muon; (3,), (4,) to adamw" in message
    assert "get_default_muon_param_groups(model)" in message


@pytest.mark.parametrize("form", ["pairs", "names", "param_names", "named_parameters"])
def test_names_decide_by_the_default_rule(opt, said, form) -> None:
    model = TinyTransformer()
    named = dict(model.named_parameters())
    given = {
        "pairs": lambda: [{"params": list(named.items())}],
        "names": lambda: [{"params": list(named.values()), "names": list(named)}],
        "param_names": lambda: [{"params": list(named.values()), "param_names": list(named)}],
        "named_parameters": model.named_parameters,
    }[form]()
    optimizer = opt.Muon(given)
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]
    assert not said("go by shape")
    muon = optimizer.parameter_names(0)
    assert muon == [n for n, p in named.items() if opt.default_is_muon(n, p)]
    assert {"embed_tokens.weight", "lm_head.weight"} <= set(optimizer.parameter_names(1))
    saved = optimizer.state_dict()["param_groups"]
    assert saved[0].get("param_names") == (None if form == "names" else muon)


@pytest.mark.parametrize("name", ["Muon", "MuonAdamW", "DistMuonAdamW"])
def test_param_names_are_those_that_torch_keeps(opt, name) -> None:
    """Of pairs, in groups, copies and state; loaded ones replace them, and none leaves them."""
    named = dict(zip(("a.weight", "a.bias"), parameters([(4, 3), (4,)]), strict=True))
    of_torch = torch.optim.AdamW(named.items())
    assert of_torch.param_groups[0]["param_names"] == ["a.weight", "a.bias"]
    expected = [["a.weight"], ["a.bias"]]
    kwargs = {"lr": 1e-3} if name == "Muon" else {"lr": 1e-3, "adamw_lr": 1e-3}
    optimizer = getattr(opt, name)([{"params": iter(named.items())}], **kwargs)

    def kept(groups) -> list[list[str]]:
        return [group["param_names"] for group in groups]

    for made in (optimizer, copy.deepcopy(optimizer)):
        assert kept(made.param_groups) == kept(made.state_dict()["param_groups"]) == expected
    saved = optimizer.state_dict()
    other = getattr(opt, name)([{"params": [("x.weight", named["a.weight"])]}], **kwargs)
    other.add_param_group({"params": [("x.bias", named["a.bias"])], "use_muon": False})
    assert kept(other.param_groups) == [["x.weight"], ["x.bias"]]
    other.load_state_dict(saved)
    assert kept(other.param_groups) == expected
    for group in saved["param_groups"]:
        del group["param_names"]
    other.load_state_dict(saved)
    assert kept(other.param_groups) == expected
    (later,) = parameters([(5, 4)])
    with pytest.raises(ValueError, match="with/without names"):
        of_torch.add_param_group({"params": [later]})
    with pytest.raises(ValueError, match=r"group 2 has no names and group 0 has.*give \(name, "):
        optimizer.add_param_group({"params": [later], "use_muon": True})
    assert len(optimizer.param_groups) == 2
    unnamed = getattr(opt, name)(marked(list(named.values()), 1), **kwargs)
    unnamed.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"group 2 has no names and group 0 has.*give \(name, "):
        unnamed.add_param_group({"params": [later], "use_muon": True})


def fused(*entries: tuple[str, tuple[int, ...]]) -> list[tuple[str, torch.Tensor]]:
    names, shapes = zip(*entries, strict=True)
    return list(zip(names, parameters(list(shapes)), strict=True))


def test_fused_projections_of_names_are_split(opt, said, device, caplog) -> None:
    """As by get_default_muon_param_groups, as far as a name and a shape tell; a guess is said."""
    named = fused(
        ("h.0.attn.c_attn.weight", (12, 4)),
        ("h.0.mlp.gate_up_proj.weight", (10, 4)),
        ("h.1.self_attn.in_proj_weight", (12, 4)),
        ("h.1.mlp.experts.gate_up_proj", (3, 12, 8)),
        ("h.1.mlp.experts.down_proj", (3, 8, 6)),
        ("h.1.mlp.down_proj.weight", (4, 5)),
    )
    sizes = {
        "h.0.attn.c_attn.weight": (4, 4, 4),
        "h.0.mlp.gate_up_proj.weight": (5, 5),
        "h.1.self_attn.in_proj_weight": (4, 4, 4),
        "h.1.mlp.experts.gate_up_proj": (6, 6),
    }
    with caplog.at_level(logging.INFO):
        optimizer = opt.Muon([(name, p.to(device).detach()) for name, p in named])
    assert f"fused projections are cut, by their names: {sizes}" in caplog.text
    assert optimizer.param_groups[0]["split_sizes"] == sizes
    assert not said("looks fused")
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert re.match(
        r"h\.0\.attn\.c_attn\.weight \(12, 4\) is cut into \(4, 4, 4\).*default_muon.*split_sizes",
        record.getMessage(),
    )
    opt.Muon(named)  # says it no second time
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    for told in ({"use_muon": True}, {"num_heads": 1}, {"transposed": True}):
        kept = opt.Muon([{"params": named[:1], **told}])
        assert kept.param_groups[0]["split_sizes"] is None
    # Columns, where the caller says that matrices are (in, out)
    named = fused(("h.0.attn.c_attn.weight", (4, 12)), ("h.0.mlp.c_fc.weight", (4, 16)))
    (group,) = opt.Muon(named, transposed=True).param_groups
    assert group["split_sizes"] == {"h.0.attn.c_attn.weight": (4, 4, 4)}


def test_fused_projections_that_names_do_not_tell_are_logged_once(opt, said) -> None:
    """GPT-2's (in, out) among them: whether a matrix is of Conv1D only its module says."""
    named = fused(
        ("h.0.attn.c_attn.weight", (4, 12)),
        ("h.1.attn.c_attn.weight", (4, 12)),
        ("h.2.attn.qkv_proj.weight", (8, 4)),
        ("h.3.attn.Wqkv.weight", (12, 4)),
        ("h.4.experts.gate_up_proj", (3, 12, 8)),
    )
    optimizer = opt.Muon(named)
    assert optimizer.param_groups[0]["split_sizes"] is None
    (message,) = said("looks fused")
    assert message.startswith("h.0.attn.c_attn.weight (4, 12) and 4 more")
    assert "get_default_muon_param_groups(model)" in message


def test_experts_without_a_mark(opt) -> None:
    """By the default rule, by the caller's keys, or with flatten; else 3-D is AdamW's."""
    (stack,) = parameters([(3, 4, 5)])
    optimizer = opt.Muon([("mlp.experts.w", stack)])
    assert optimizer.param_groups[0]["expert_keys"] == ("experts",)
    assert kinds(opt.Muon([("mlp.bank.w", stack)], expert_keys=["bank"])) == [(True, 1)]
    assert kinds(opt.Muon([stack], flatten=True)) == [(True, 1)]
    assert kinds(opt.Muon([("mlp.bank.w", stack)])) == [(False, 1)]


def test_later_groups_without_a_mark(opt, device, said) -> None:
    first, *later = parameters([(4, 3), (3, 5), (5,)], device=device)
    optimizer = opt.Muon([{"params": [first], "use_muon": True}])
    before = values(later)
    with pytest.raises(ValueError, match="group 2: eps must be finite"):
        optimizer.add_param_group({"params": later, "adamw_eps": -1.0})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": later})
    assert kinds(optimizer) == [(True, 1), (True, 1), (False, 1)]
    assert len(said("go by shape")) == 1
    optimizer.step()
    assert not any(torch.equal(old, p.detach()) for old, p in zip(before, later, strict=True))


def test_zero_redundancy_optimizer(opt, one_rank) -> None:
    """It makes groups of its own, sorted by size, and copies options between the two."""
    params, twins = (parameters([(4, 3), (3, 5), (5,), (3,)]) for _ in range(2))
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}]
    optimizer = ZeroRedundancyOptimizer(groups, opt.Muon, lr=2e-3)
    marked = [{"params": twins[:2], "use_muon": True}]
    marked += [{"params": twins[2:], "use_muon": False, "weight_decay": 0.0}]
    plain = opt.Muon(marked, lr=2e-3)
    train(optimizer, params, 2)
    train(plain, twins, 2)
    for group in (*optimizer.param_groups, *plain.param_groups):
        group["lr"] = 1e-3
    train(optimizer, params, 1)
    train(plain, twins, 1)
    assert_all_same_bits(params, twins)


def test_zero_redundancy_optimizer_over_one_mixed_group(opt, one_rank) -> None:
    """A rate set in its one group would not reach both of ours; the line that is given trains."""
    model = TinyTransformer()
    line = r"group 0: ZeroRedundancyOptimizer needs groups of one kind.*if k != 'names'"
    with pytest.raises(ValueError, match=line):
        ZeroRedundancyOptimizer(model.parameters(), opt.Muon, lr=2e-3)
    split = opt.get_default_muon_param_groups(model, split_fused=False)
    groups = [{k: v for k, v in group.items() if k != "names"} for group in split]
    optimizer = ZeroRedundancyOptimizer(groups, opt.Muon, lr=2e-3)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    params = [*model.parameters()]
    before = values(params)
    train(optimizer, params, 1)
    assert_all_same_bits(before, params)
    with pytest.raises(ValueError, match=line.replace("0", "3")):
        optimizer.add_param_group({"params": parameters([(4, 3), (3,)])})


OWN_KEYS = {"name": "hidden", "lr_scale": 0.5, "initial_lr": 2e-3, "fused": True, "foreach": None}


def test_unknown_keys_are_kept_and_saved(opt) -> None:
    params = parameters([(4, 3), (3,)])
    optimizer = opt.Muon(
        [{"params": params[:1], "use_muon": True, **OWN_KEYS}, {"params": params[1:], **OWN_KEYS}]
    )
    for group in (*optimizer.param_groups, *optimizer.state_dict()["param_groups"]):
        assert OWN_KEYS.items() <= group.items()
    optimizer.step()
    other = opt.Muon(marked(params, 1))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(OWN_KEYS.items() <= group.items() for group in other.param_groups)


TAKEN = {
    "torch's arguments": {"ns_coefficients": (3.4, -4.8, 2.0), "eps": 1e-7},
    "Motif's argument": {"use_distributed_muon": False},
    "Motif's call": {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4},
}


@pytest.mark.parametrize("options", TAKEN.values(), ids=TAKEN)
def test_what_others_pass_is_taken_without_a_word(opt, said, options) -> None:
    (param,) = parameters([(4, 3)])
    opt.Muon([{"params": [("w", param)], **OWN_KEYS}], **options)
    assert not said("")


@pytest.mark.parametrize("name", ["MuonFactory", "Muon"])
def test_trainer_makes_the_optimizer(opt, said, tmp_path, name) -> None:
    """It calls the factory, no Optimizer, with the model. Given the class, it passes groups without
    names, of which one warning speaks.
    """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = TinyTransformer()
    arguments = transformers.TrainingArguments(tmp_path, report_to="none", use_cpu=True)
    trainer = transformers.Trainer(
        model, arguments, optimizer_cls_and_kwargs=(getattr(opt, name), {"lr": 1e-3})
    )
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, opt.Muon)
    by_muon = {p for g in optimizer.param_groups if g["use_muon"] for p in g["params"]}
    assert model.layers[0].qkv.weight in by_muon
    tables = {model.embed_tokens.weight, model.lm_head.weight}
    assert bool(by_muon & tables) == (name == "Muon")
    assert bool(said("go by shape")) == (name == "Muon")


def assert_three_steps(opt, optimizer, params, muon, **adamw) -> None:
    """Those of the rule with the options `muon` for matrices, of torch's AdamW for others."""
    plain = {p: PlainMuon(p.detach().clone(), **muon) for p in params if p.dim() == 2}
    others = {p: nn.Parameter(p.detach().clone()) for p in params if p.dim() != 2}
    theirs = torch.optim.AdamW([*others.values(), nn.Parameter(torch.ones(1))], **adamw)
    for seed in range(3):
        new_gradients(params, seed=seed)
        for param, rule in plain.items():
            rule.step(opt, param.grad)
        for param, twin in others.items():
            twin.grad = param.grad.clone()
        theirs.step()
        optimizer.step()
    for param, rule in plain.items():
        assert_error_at_most(param.detach(), rule.param, 1e-9)
    for param, twin in others.items():
        assert_error_at_most(param.detach(), twin.detach(), 1e-9)


def test_keller_jordans_groups(opt) -> None:
    """MuonWithAuxAdam's, with betas and eps, after the line that the refusal gives."""
    params = parameters([(12, 4), (4, 12), (5,)], dtype=torch.float64)
    groups = [
        {"params": params[2:], "lr": 0.04, "betas": (0.8, 0.95), "eps": 1e-10, "use_muon": False},
        {"params": params[:2], "lr": 0.05, "momentum": 0.9, "use_muon": True},
    ]
    for group in groups:
        group["weight_decay"] = 0.01
    with pytest.raises(
        ValueError, match=r"'betas', .* adamw_betas.*='original', .*'keller_jordan'"
    ):
        opt.Muon(groups)
    line = {"adjust_lr_fn": "original", "ns_coefficients": "keller_jordan", "weight_decay": 0.0}
    optimizer = opt.Muon(groups, lr=0.02, adamw_lr=3e-4, adamw_eps=1e-10, **line)
    rule = {"lr": 0.05, "weight_decay": 0.01, "momentum": 0.9, **EMA}
    adamw = {"lr": 0.04, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.01}
    assert_three_steps(opt, optimizer, params, rule, **adamw)


@CLASSES
def test_a_third_argument_by_position(opt, name) -> None:
    """The decay of torch.optim.Muon, the momentum of Motif's."""
    params = parameters([(4, 3)])
    with pytest.raises(TypeError, match=rf"^{name} takes only .* got 0.95 as a third.* by name"):
        getattr(opt, name)(params, 0.02, 0.95)
    with pytest.raises(TypeError, match=rf"^{name} takes only .* got a list as a third.* by name"):
        getattr(opt, name)(params, 0.02, params)


def test_moonlights_constructor(opt) -> None:
    params = parameters([(12, 4), (5,)], dtype=torch.float64)
    with pytest.raises(TypeError, match=r"for Moonlight's update write Muon\(\[\{'params': muon_p"):
        opt.Muon(lr=1e-3, wd=0.1, muon_params=params[:1], adamw_params=params[1:])
    with pytest.raises(
        TypeError, match=r"^Muon takes parameters .* got 0\.001; for Moonlight's up"
    ):
        opt.Muon(1e-3, 0.1, params[:1])
    optimizer = opt.Muon(
        marked(params, 1), lr=1e-3, weight_decay=0.1, ns_coefficients="keller_jordan"
    )
    shared = {"lr": 1e-3, "weight_decay": 0.1}
    rule = {**shared, "rows": [KELLER_JORDAN] * 5}
    assert_three_steps(opt, optimizer, params, rule, **shared, betas=(0.9, 0.95))


@pytest.mark.parametrize("key", ["algorithm", "mu", "epsilon", "adjust_lr"])
def test_dions_groups(opt, key) -> None:
    """Refused with the line whose update is that of dion's Muon."""
    params = parameters([(12, 4), (4, 12)], dtype=torch.float64)
    line = r"use_muon=True for algorithm='muon'.*nesterov=False, adjust_lr_fn='spectral'"
    with pytest.raises(ValueError, match=f"group 0: unknown key '{key}': .*{line}"):
        opt.Muon([{"params": params, "use_muon": True, key: 0.9}])
    if key != "algorithm":
        with pytest.raises(TypeError, match=f"it is called .* here.*{line}"):
            opt.Muon(params, **{key: 0.9})
    rule = {"nesterov": False, "adjust_lr_fn": "spectral", "lr": 0.01, "weight_decay": 0.01}
    optimizer = opt.Muon(params, momentum=0.95, ns_coefficients="you", **rule)
    rows = opt.COEFFICIENT_SETS["you"].rows
    assert_three_steps(opt, optimizer, params, {**rule, "rows": rows})


def test_empty_groups_load_through_distributed_checkpoint(opt) -> None:
    """A model with a tied head and no biases has nothing for AdamW with decay."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4, bias=False))
    optimizer = opt.Muon(opt.get_default_muon_param_groups(model))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0, 1]
    model(torch.tensor([1, 2])).square().mean().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False, False]
