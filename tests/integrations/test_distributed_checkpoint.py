"""torch.distributed.checkpoint in one process: state goes out and comes back without loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from .._compare import assert_same_bits
from ..optimizers._steps import TinyTransformer, language_loss


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


def train(model, optimizer, steps, seed) -> None:
    for step in range(steps):
        language_loss(model, seed + step).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(one, other) -> None:
    pairs = zip(one.param_groups, other.param_groups, strict=True)
    for mine, theirs in pairs:
        assert {k: v for k, v in mine.items() if k != "params"} == {
            k: v for k, v in theirs.items() if k != "params"
        }
        for p, q in zip(mine["params"], theirs["params"], strict=True):
            assert_same_bits(p.detach(), q.detach())
            assert one.state[p].keys() == other.state[q].keys()
            for key, value in one.state[p].items():
                assert_same_bits(value.cpu(), other.state[q][key].cpu())


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
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = build(opt, name, device, offload=offload, lr=0.05)
    train(model, optimizer, 3, seed=0)
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    twin, other = build(opt, name, device, offload=not offload, lr=0.9)
    weights, state = get_state_dict(twin, other, options=options)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_state_dict(
        twin,
        other,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=options,
    )
    assert other.offloaded != offload
    assert_same(optimizer, other)
    train(model, optimizer, 3, seed=50)
    train(twin, other, 3, seed=50)
    assert_same(optimizer, other)


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
