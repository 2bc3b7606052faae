"""The two optimizer lines of the package's description, as written there."""

from __future__ import annotations

import torch

from ._steps import TinyTransformer, language_loss


def test_the_snippet(opt, device) -> None:
    torch.manual_seed(0)
    model = TinyTransformer().to(device)

    groups = opt.muon.get_default_muon_param_groups(model)
    optim = opt.Muon(groups, lr=2e-3, weight_decay=0.1)

    first = language_loss(model, seed=0)
    first.backward()
    optim.step()
    assert language_loss(model, seed=0) < first

    muon, adamw = groups
    optim = opt.MuonAdamW(
        [
            {"kind": "muon", "params": muon["params"], "lr": 0.02},
            {"kind": "adamw", "params": adamw["params"], "lr": 3e-3},
        ]
    )
    first = language_loss(model, seed=0)
    first.backward()
    optim.step()
    assert language_loss(model, seed=0) < first


def test_public_names(opt) -> None:
    assert opt.muon.Muon is opt.Muon
    assert opt.muon.get_default_muon_param_groups is opt.get_default_muon_param_groups
    assert opt.muon.default_is_muon is opt.default_is_muon
    assert opt.integrations.checkpoint.save_optimizer is opt.save_optimizer
    assert opt.integrations.checkpoint.load_optimizer is opt.load_optimizer
