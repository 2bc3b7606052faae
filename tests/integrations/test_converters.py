"""State of other optimizers: the run goes on as it would have there; and of torch's checkpoints.

`Motif` and `Nanochat` have the rules and the state layout of the predecessors, in float64, written
from their published descriptions. torch.distributed.checkpoint in one process loses nothing."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from .._compare import assert_error_at_most, assert_same_bits, assert_same_tensors
from ..optimizers._steps import (
    NANOCHAT,
    PlainMuon,
    TinyTransformer,
    new_gradients,
    parameters,
    train,
)
from ..optimizers.test_offload import assert_same_values
from .test_checkpoint import options_of

MATRICES = [(12, 6), (12, 6), (6, 12), (12, 6)]
OTHERS = [(9, 3), (5,)]
NAMES = ["a.w", "b.w", "c.w", "d.w", "table", "bias"]
# float64 on both sides; our norm, our bias correction and the order of sums differ in last digits.
BUDGET = 1e-7


def zeros(state: dict, name: str, like: torch.Tensor) -> torch.Tensor:
    return state.setdefault(name, torch.zeros_like(like))


def adamw_of(groups, betas: str, eps: str) -> torch.optim.AdamW:
    """torch's, of groups whose options have other names."""
    options = {"lr": "lr", "betas": betas, "eps": eps, "weight_decay": "weight_decay"}
    return torch.optim.AdamW(
        {"params": group["params"], **{name: group[key] for name, key in options.items()}}
        for group in groups
    )


class Motif(torch.optim.Optimizer):
    """Heavy ball in `momentum_buffer`; AdamW in `moment1`, `moment2`, `step`."""

    def __init__(self, opt, groups, **defaults) -> None:
        self.opt = opt
        options = {"lr": 0.03, "momentum": 0.95, "nesterov": True, "ns_steps": 5}
        options |= {"none_grad": False}
        options |= {"weight_decay": 0.1, "adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8}
        super().__init__(groups, options | defaults)
        others = [group for group in self.param_groups if not group["use_muon"]]
        self.adamw = adamw_of(others, "adamw_betas", "adamw_eps")

    @torch.no_grad()
    def step(self) -> None:
        for group in (group for group in self.param_groups if group["use_muon"]):
            options = {key: group[key] for key in ("lr", "momentum", "nesterov", "ns_steps")}
            for param in (p for p in group["params"] if p.grad is not None):
                kept = {"momentum": zeros(self.state[param], "momentum_buffer", param)}
                rule = PlainMuon(param, **options, weight_decay=group["weight_decay"], state=kept)
                rule.step(self.opt, param.grad)
        self.adamw.step()
        names = {"moment1": "exp_avg", "moment2": "exp_avg_sq", "step": "step"}
        for param, state in self.adamw.state.items():
            self.state[param] = {name: state[key] for name, key in names.items()}


class Nanochat(torch.optim.Optimizer):
    """A moving average and factored second moments, stacked under the first parameter."""

    def __init__(self, opt, groups) -> None:
        self.opt = opt
        super().__init__(groups, {})
        others = [group for group in self.param_groups if group["kind"] == "adamw"]
        self.adamw = adamw_of(others, "betas", "eps")

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if group["kind"] == "muon":
                self._stack(group["params"], group)
        self.adamw.step()
        for param, state in self.adamw.state.items():
            self.state[param] = {**state, "step": int(state["step"])}

    def _stack(self, params, group) -> None:
        rows, columns = params[0].shape
        grads, state = torch.stack([p.grad for p in params]), self.state[params[0]]
        buffer = zeros(state, "momentum_buffer", grads)
        mean = grads[:, :, :1] if rows >= columns else grads[:, :1]
        second = zeros(state, "second_momentum_buffer", mean)
        names = ("lr", "momentum", "ns_steps", "beta2", "weight_decay")
        options = NANOCHAT | {name: group[name] for name in names}
        for param, momentum, moments in zip(params, buffer, second, strict=True):
            kept = {"momentum": momentum, "second": moments}
            PlainMuon(param, **options, state=kept).step(self.opt, param.grad)


def take_over(ours, theirs) -> None:
    with torch.no_grad():
        for mine, other in zip(ours, theirs, strict=True):
            mine.copy_(other)


def load_converted(opt, optimizer, saved, source: str, **options) -> None:
    optimizer.load_state_dict(opt.convert_state_dict(optimizer, saved, source=source, **options))


def assert_goes_on(optimizer, ours, other, theirs) -> None:
    """Five more steps of both; what they change agrees."""
    take_over(ours, theirs)
    start = [p.detach().clone() for p in ours]
    train(optimizer, ours, 5, seed=50)
    train(other, theirs, 5, seed=50)
    for mine, reference, old in zip(ours, theirs, start, strict=True):
        assert_error_at_most(mine.detach() - old, reference.detach() - old, BUDGET)


def motif_groups(params, **options):
    return [
        {"params": params[:4], "names": NAMES[:4], "use_muon": True, **options},
        {"params": params[4:], "use_muon": False, **options},
    ]


def nanochat_groups(params):
    muon = {"kind": "muon", "lr": 0.02, "momentum": 0.9, "ns_steps": 5, "beta2": 0.9}
    adamw = {"kind": "adamw", "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.01}
    return [
        {**adamw, "params": [params[4]], "lr": 0.2},
        {**adamw, "params": [params[5]], "lr": 0.004},
        {**muon, "params": [params[0], params[1], params[3]], "weight_decay": 0.1},
        {**muon, "params": [params[2]], "weight_decay": 0.1},
    ]


def begun(opt, device, kind, steps: int, **options):
    """Parameters for ours, the other optimizer after some steps, and its parameters."""
    theirs = parameters(MATRICES + OTHERS, dtype=torch.float64, device=device)
    ours = [nn.Parameter(p.detach().clone()) for p in theirs]
    groups = motif_groups(theirs) if kind is Motif else nanochat_groups(theirs)
    other = kind(opt, groups, **options)
    train(other, theirs, steps)
    return ours, other, theirs


@pytest.mark.parametrize("form", ["heavy_ball", "ema"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_motif(opt, device, form, nesterov) -> None:
    """Heavy-ball momentum, also into a moving average; moment1 and moment2 are renamed."""
    ours, other, theirs = begun(opt, device, Motif, 4, momentum=0.9, nesterov=nesterov)
    optimizer = opt.Muon(motif_groups(ours), momentum_form=form, method="polar_express")
    saved = copy.deepcopy(other.state_dict())
    load_converted(opt, optimizer, saved, "motif")
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.03, 0.9, nesterov)
    assert optimizer.param_groups[1]["adamw_betas"] == (0.9, 0.95)
    assert_goes_on(optimizer, ours, other, theirs)
    # MuonAdamW takes the same state; its own rule for rates and decay is another one.
    second = opt.MuonAdamW([{**g, "lr": 1.0} for g in motif_groups(ours)])
    load_converted(opt, second, saved, "motif")
    assert second.param_groups[1]["betas"] == (0.9, 0.95)
    for index in (4, 5):
        for ours_key, key in (("exp_avg", "moment1"), ("exp_avg_sq", "moment2")):
            assert_same_bits(second.state[ours[index]][ours_key], saved["state"][index][key])


def test_motif_in_another_order(opt, device) -> None:
    """Matched by name where both sides have names, through wrappers; by order elsewhere."""
    ours, other, theirs = begun(opt, device, Motif, 2)
    order = [3, 2, 0, 1]
    groups = motif_groups(ours)
    groups[0]["params"] = [ours[i] for i in order]
    groups[0]["names"] = [f"_orig_mod.{NAMES[i]}" for i in order]
    optimizer = opt.Muon(groups, method="polar_express")
    load_converted(opt, optimizer, other.state_dict(), "motif")
    assert_goes_on(optimizer, ours, other, theirs)


def test_names_that_wrappers_alone_tell_apart(opt, device) -> None:
    """By order where they are the same ones; otherwise nothing tells which is which."""
    ours, other, theirs = begun(opt, device, Motif, 2)
    names = other.param_groups[0]["names"] = [NAMES[0], f"_orig_mod.{NAMES[0]}", *NAMES[2:4]]
    groups = motif_groups(ours)
    groups[0]["names"] = [names[1], names[0], *names[2:]]
    optimizer = opt.Muon(groups, method="polar_express")
    load_converted(opt, optimizer, other.state_dict(), "motif")
    assert_goes_on(optimizer, ours, other, theirs)
    groups = motif_groups(ours)
    groups[0]["names"] = [names[0], *names[2:], names[1]]
    with pytest.raises(ValueError, match=rf"several parameters are \['{NAMES[0]}'\] without"):
        opt.convert_state_dict(opt.Muon(groups), other.state_dict(), source="motif")


@pytest.mark.parametrize("form", ["ema", "heavy_ball"])
def test_nanochat(opt, device, form) -> None:
    """Stacks under the first parameter are taken apart; the second moments are kept."""
    ours, other, theirs = begun(opt, device, Nanochat, 4)
    optimizer = opt.MuonAdamW(nanochat_groups(ours))
    for group in optimizer.param_groups:
        if group["kind"] == "muon":
            group |= {"momentum_form": form, "method": "polar_express"}
        group["lr"] = 1.0  # replaced by the saved one
    load_converted(opt, optimizer, other.state_dict(), "nanochat")
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.004, 0.02, 0.02]
    assert optimizer.state[ours[4]]["step"].item() == 4
    assert_goes_on(optimizer, ours, other, theirs)


@pytest.mark.parametrize("name", ["Muon", "MuonAdamW"])
def test_nanochat_into_a_run_without_variance_reduction(opt, device, name) -> None:
    """Its beta2 and statistics stay behind, and what is converted loads."""
    ours, other, _ = begun(opt, device, Nanochat, 2)
    groups = nanochat_groups(ours)
    for group in groups:
        if name == "Muon":
            for key in ("betas", "eps"):
                group |= {f"adamw_{key}": group.pop(key)} if key in group else {}
        if group["kind"] == "muon":
            group["beta2"] = None
    optimizer = getattr(opt, name)(groups)
    load_converted(opt, optimizer, other.state_dict(), "nanochat")
    muon = optimizer.param_groups[2]
    assert (muon["beta2"], muon["lr"], muon["momentum"]) == (None, 0.02, 0.9)
    train(optimizer, ours, 1)
    assert "second_momentum_buffer" not in optimizer.state[ours[0]]


def test_nanochat_rank_by_rank(opt, device) -> None:
    """Blocks of ceil(K / W) matrices, the last padded with zeros; slices of large AdamW state."""
    ours, other, _ = begun(opt, device, Nanochat, 3)
    whole = copy.deepcopy(other.state_dict())
    ranks = [copy.deepcopy(whole) for _ in range(2)]
    for rank, saved in enumerate(ranks):
        for first in (2, 5):  # of each Muon group
            for key in ("momentum_buffer", "second_momentum_buffer"):
                stack = whole["state"][first][key]
                block = -(-len(stack) // 2)
                padded = torch.cat([stack, torch.zeros_like(stack[:1])])
                saved["state"][first][key] = padded[rank * block : (rank + 1) * block]
        for key in ("exp_avg", "exp_avg_sq"):
            half = (slice(0, 5), slice(5, 9))[rank]
            saved["state"][0][key] = whole["state"][0][key][half]
    optimizer = opt.MuonAdamW(nanochat_groups(ours))
    expected = opt.convert_state_dict(optimizer, whole, source="nanochat")
    joined = opt.convert_state_dict(optimizer, ranks, source="nanochat")
    assert joined["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        for key, value in state.items():
            assert_same_bits(torch.as_tensor(joined["state"][index][key]), torch.as_tensor(value))
    with pytest.raises(ValueError, match="momentum_buffer holds 2 of 3 matrices; give the state"):
        opt.convert_state_dict(optimizer, ranks[:1], source="nanochat")


@pytest.mark.parametrize("form", ["ema", "heavy_ball"])
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original", None])
def test_torch(opt, device, form, adjust) -> None:
    """torch.optim.Muon beside torch.optim.AdamW.

    torch iterates in bfloat16 with a fixed triple, which errs by 1 to 6 % of the update; momentum
    in the wrong scale beside new gradients would err by far more. AdamW agrees closely.
    """
    shapes = [(32, 64), (64, 32), (24, 48), (16, 64)]
    theirs = parameters(shapes + OTHERS, device=device)
    ours = [nn.Parameter(p.detach().clone()) for p in theirs]
    muon = torch.optim.Muon(
        theirs[:4], lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn=adjust
    )
    adamw = torch.optim.AdamW(theirs[4:], lr=0.01, betas=(0.8, 0.9), weight_decay=0.2)
    for step in range(4):
        new_gradients(theirs, seed=step)
        muon.step()
        adamw.step()
    optimizer = opt.Muon(
        motif_groups(ours), method="newton_schulz", dtype=torch.float32, momentum_form=form
    )
    saved = [muon.state_dict(), adamw.state_dict()]
    load_converted(opt, optimizer, saved, "torch")
    assert optimizer.param_groups[0]["adjust_lr_fn"] == (adjust or "original")
    assert optimizer.param_groups[1]["weight_decay"] == 0.2
    factor = 1 if form == "ema" else 1 / (1 - 0.9)
    for param, index in zip(ours[:4], range(4), strict=True):
        buffer = saved[0]["state"][index]["momentum_buffer"] * factor
        assert_error_at_most(optimizer.state[param]["momentum_buffer"], buffer, 1e-6)
    take_over(ours, theirs)
    start = [p.detach().clone() for p in ours]
    new_gradients(theirs, seed=50)
    new_gradients(ours, seed=50)
    muon.step()
    adamw.step()
    optimizer.step()
    for index, (mine, other, old) in enumerate(zip(ours, theirs, start, strict=True)):
        budget = 0.1 if index < 4 else 1e-5
        assert_error_at_most(mine.detach() - old, other.detach() - old, budget)


def test_state_that_was_never_made_is_zero(opt, device) -> None:
    """Parameters that had no gradient yet have no state in the predecessors."""
    ours, other, theirs = begun(opt, device, Motif, 0)
    new_gradients(theirs, seed=0)
    theirs[1].grad = theirs[4].grad = None
    other.step()
    optimizer = opt.Muon(motif_groups(ours), method="polar_express")
    load_converted(opt, optimizer, other.state_dict(), "motif")
    assert not optimizer.state[ours[1]]["momentum_buffer"].any()
    assert optimizer.state[ours[4]]["step"].item() == 0
    assert_goes_on(optimizer, ours, other, theirs)


def test_converting_changes_nothing(opt, device) -> None:
    ours, other, _ = begun(opt, device, Motif, 1)
    optimizer = opt.Muon(motif_groups(ours), lr=0.5)
    before = copy.deepcopy(optimizer.state_dict())
    saved = other.state_dict()
    kept = copy.deepcopy(saved)
    converted = opt.convert_state_dict(optimizer, saved, source="motif", keep_options=True)
    assert converted["param_groups"] == before["param_groups"]
    for now, old in ((optimizer.state_dict(), before), (saved, kept)):
        assert now["param_groups"] == old["param_groups"]
        for index, state in old["state"].items():
            assert_same_tensors(now["state"][index], state)


def test_what_does_not_fit_is_refused(opt, device) -> None:
    ours, motif, theirs = begun(opt, device, Motif, 1)
    optimizer = opt.Muon(motif_groups(ours))
    saved = motif.state_dict()
    without = {key: {**entry, "momentum_buffer": None} for key, entry in saved["state"].items()}
    renamed, swapped = copy.deepcopy(saved), copy.deepcopy(saved)
    renamed["param_groups"][0]["names"] = ["a.w", "b.w", "c.w", "e.w"]
    swapped["state"][0], swapped["state"][2] = swapped["state"][2], swapped["state"][0]
    torchs = torch.optim.Muon(theirs[:4]).state_dict()
    sgd, amsgrad = torch.optim.SGD(theirs), torch.optim.AdamW(theirs, amsgrad=True)
    coupled = torch.optim.Adam(theirs, weight_decay=0.1)
    relatives = [torch.optim.NAdam(theirs), torch.optim.RAdam(theirs), torch.optim.Adamax(theirs)]
    for other, source, words in (
        (saved, "dion", "source must be one of torch, motif, nanochat, got 'dion'"),
        ({"lr": 1}, "motif", r"saved\[0\] is no state_dict"),
        ({**saved, "state": None}, "motif", r"saved\[0\] is no state_dict"),
        ({**saved, "state": {0: None}}, "motif", r"saved\[0\] is no state_dict"),
        ({**saved, "param_groups": [{"lr": 1}]}, "motif", r"saved\[0\] is no state_dict"),
        ({**saved, "state": without}, "motif", "a momentum_buffer must be a Tensor, got None"),
        ([saved, saved], "motif", "motif is one optimizer: give its state_dict, not 2"),
        (saved, "nanochat", "group 0 has no kind 'muon' or 'adamw'"),
        (torchs, "motif", "group 0 has no 'use_muon'"),
        (sgd.state_dict(), "torch", r"group 0 is neither of torch\.optim\.Muon"),
        (amsgrad.state_dict(), "torch", "group 0: amsgrad has no counterpart"),
        (coupled.state_dict(), "torch", "group 0: weight_decay=0.1 .* is no decoupled decay"),
        *((one.state_dict(), "torch", "group 0 is neither of") for one in relatives),
        (torchs, "torch", "kind 'adamw': 0 parameters were saved, "),
        (renamed, "motif", r"nothing was saved for \['d.w'\].*present: \['e.w'\]"),
        (swapped, "motif", r"momentum_buffer has shape \(6, 12\), expected \(12, 6"),
    ):
        error = TypeError if "is no state_dict" in words else ValueError
        with pytest.raises(error, match=words):
            load_converted(opt, optimizer, other, source)
    with pytest.raises(TypeError, match="optimizer must be a Muon or a MuonAdamW, got Adam"):
        opt.convert_state_dict(torch.optim.Adam(theirs), saved, source="motif")


def test_groups_whose_options_differ_are_not_merged_in_silence(opt, device) -> None:
    ours, other, theirs = begun(opt, device, Nanochat, 1)
    groups = [
        {"kind": "muon", "params": [ours[i] for i in (0, 1, 3, 2)], "lr": 0.1},
        {"kind": "adamw", "params": ours[4:], "lr": 0.1},
    ]
    optimizer = opt.MuonAdamW(groups)
    with pytest.raises(ValueError, match=r"group 1: .* saved with lr=0.2 and with lr=0.004; make"):
        opt.convert_state_dict(optimizer, other.state_dict(), source="nanochat")
    load_converted(opt, optimizer, other.state_dict(), "nanochat", keep_options=True)
    assert optimizer.param_groups[0]["lr"] == 0.1
    stack = other.state[theirs[0]]["momentum_buffer"]
    for place, param in enumerate((ours[0], ours[1], ours[3])):
        assert_same_bits(optimizer.state[param]["momentum_buffer"], stack[place])


def build(opt, name, device, *, offload: bool, lr: float):
    torch.manual_seed(0)
    model = TinyTransformer().to(device=device, dtype=torch.bfloat16)
    muon, adamw = opt.get_default_muon_param_groups(model, no_decay=False)
    muon["beta2"] = 0.9
    # An option per parameter name, one of a type of torch's, one that is a tuple.
    muon |= {"split_sizes": {"layers.0.qkv.weight": [8, 16]}, "momentum_dtype": torch.float32}
    optimizer = getattr(opt, name)([{**group, "lr": lr} for group in (muon, adamw)])
    if offload:
        optimizer.turn_on_cpu_offload()
    return model, optimizer


def through_dcp(saved, loading, folder, flat: bool) -> None:
    """Save a model with its optimizer, and load both into others."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(*saved, options=options)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    model, optimizer = get_state_dict(*loading, options=options)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    states = {"model_state_dict": model, "optim_state_dict": optimizer}
    set_state_dict(*loading, **states, options=options)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("name", "flat", "offload"),
    [
        ("Muon", False, False),
        ("Muon", True, True),
        ("MuonAdamW", True, False),
        ("MuonAdamW", False, True),
    ],
)
def test_a_run_goes_on_bit_for_bit(opt, device, name, flat, offload, tmp_path) -> None:
    """Also flattened to one entry per parameter; float32 state of bfloat16 parameters."""
    model, optimizer = build(opt, name, device, offload=offload, lr=0.05)
    train(optimizer, [*model.parameters()], 3)
    twin, other = build(opt, name, device, offload=not offload, lr=0.9)
    through_dcp((model, optimizer), (twin, other), tmp_path, flat)
    assert other.offloaded != offload
    assert options_of(other) == options_of(optimizer)
    assert_same_values(other, optimizer)
    train(optimizer, [*model.parameters()], 3, seed=50)
    train(other, [*twin.parameters()], 3, seed=50)
    assert_same_values(other, optimizer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True])
def test_frozen_parameters_have_no_state_there(opt, device, flat, tmp_path) -> None:
    """torch drops it while it loads; it begins with zeros if the parameter trains again."""
    model, optimizer = build(opt, "Muon", device, offload=False, lr=0.05)
    train(optimizer, [*model.parameters()], 2)
    twin, other = build(opt, "Muon", device, offload=False, lr=0.05)
    for each in (model, twin):
        each.layers[0].qkv.weight.requires_grad_(False)
    through_dcp((model, optimizer), (twin, other), tmp_path, flat)
    for param, same in zip(model.parameters(), twin.parameters(), strict=True):
        if param.requires_grad:
            assert_same_tensors(other.state[same], optimizer.state[param])
        else:
            assert not any(value.any() for value in other.state[same].values())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_its_files_do_not_grow_with_the_square_of_the_parameters(opt, submodule, tmp_path) -> None:
    """The list of names is not copied under every parameter when groups are flattened."""
    sizes = []
    for count in (20, 80):
        model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(count))
        optimizer = opt.Muon(list(model.named_parameters()))
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        _, state = get_state_dict(model, optimizer, options=options)
        dcp.save({"optimizer": state}, checkpoint_id=tmp_path / str(count))
        folder = tmp_path / str(count)
        sizes.append(sum(path.stat().st_size for path in folder.iterdir()))
    assert sizes[1] < 6 * sizes[0]
