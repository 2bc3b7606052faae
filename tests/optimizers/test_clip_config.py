"""What QK-clip refuses: configurations at construction, logits before anything is written."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from .._compare import assert_same_bits
from ._steps import values
from .test_qk_clip import CLASSES, MHA, MLA, NAN, build, layer

CONFIGS = {
    "no mapping": ([1], TypeError, "clip_config must be a dict or None, got list"),
    "unknown": ({"heads": 1}, ValueError, "unknown key 'heads'; it takes q_indices"),
    "lengths": (MHA | {"k_indices": [0]}, ValueError, "q_indices has 3 entries and k_indices 1"),
    "one list": (MHA | {"k_indices": []}, ValueError, "q_indices has 3 entries and k_indices 0"),
    "index": (MHA | {"q_indices": [0, 1, 2.5]}, TypeError, "q_indices must hold integers, got 2.5"),
    "negative": (MHA | {"k_indices": [0, 1, -1]}, ValueError, "from 0 on, got -1"),
    "no list": (MHA | {"q_indices": 3}, TypeError, "q_indices must be a sequence"),
    "threshold": (
        MHA | {"threshold": 0},
        ValueError,
        "threshold must be finite and above 0, got 0",
    ),
    "nan": (MHA | {"threshold": NAN}, ValueError, "threshold must be finite and above 0, got nan"),
    "text": (MHA | {"threshold": "10"}, TypeError, "threshold must be a number, got '10'"),
    "head_dim": (MHA | {"head_dim": 0}, ValueError, "head_dim must be at least 1, got 0"),
    "head_dim text": (MHA | {"head_dim": "4"}, TypeError, "head_dim must be an integer, got '4'"),
    "mla": (MLA | {"v_head_dim": None}, ValueError, "v_head_dim must be given with is_mla=True"),
    "switch": (MHA | {"is_mla": 1}, TypeError, "is_mla must be True or False, got 1"),
    "two keys": (
        MHA | {"q_indices": [0, 0, 1]},
        ValueError,
        "query head 0 is given the key heads 0 and 1",
    ),
    "rows": (
        MHA | {"head_dim": 5},
        ValueError,
        r"parameter 'layers\.0\.attn\.wq\.weight': 12 rows",
    ),
    "heads": (
        MHA | {"q_indices": [0, 1, 3]},
        ValueError,
        "q_indices of clip_config names head 3, but 12 rows hold 3 heads of 4",
    ),
    "mla rows": (MLA, ValueError, "12 rows are no multiple of the 5 of a head; correct the head"),
}


@CLASSES
@pytest.mark.parametrize("case", CONFIGS)
def test_wrong_configurations_are_refused_at_construction(opt, name, case) -> None:
    config, error, message = CONFIGS[case]
    with pytest.raises(error, match=message):
        build(opt, name, layer({"wq": 12, "wk": 12}), config)


def test_a_group_that_does_not_fit_is_not_added(opt) -> None:
    optimizer = build(opt, "Muon", layer({"wq": 12, "wk": 12}), MHA)
    (other,) = layer({"q_proj": 12})
    bad = nn.Parameter(torch.ones(13, 6))
    for name, param, message in (
        ("layers.1.attn.wq.weight", bad, "13 rows are no multiple of the 4"),
        (*other, "layer 0 has a query projection on cpu beside group 0, parameter 'layers.0"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [param], "names": [name], "use_muon": True})
        assert len(optimizer.param_groups) == 1
        assert param not in optimizer.state


LOGITS = {
    "list": ([torch.ones(3)], TypeError, "qk_logits must map layer numbers to tensors"),
    "number": ({0: 5.0}, TypeError, r"qk_logits\[0\] must be a floating-point tensor, got float"),
    "integers": (
        {0: torch.ones(3).long()},
        TypeError,
        "must be a floating-point tensor, got torch.int64",
    ),
    "length": (
        {0: torch.ones(2)},
        ValueError,
        r"each of the 3 entries of q_indices, got shape \(2,\)",
    ),
    "tokens": ({0: torch.ones(3, 3)}, ValueError, r"got shape \(3, 3\)"),
    "device": ({0: torch.ones(3, device="meta")}, ValueError, "is on meta, the layer on"),
}


@CLASSES
@pytest.mark.parametrize("case", LOGITS)
def test_wrong_logits_are_refused_before_anything_is_written(opt, device, name, case) -> None:
    logits, error, message = LOGITS[case]
    named = layer({"wq": 12, "wk": 12}, device=device)
    optimizer = build(opt, name, named, MHA, lr=0.1)
    before = values(p for _, p in named)
    with pytest.raises(error, match=message):
        optimizer.step(qk_logits=logits)
    for old, (_, param) in zip(before, named, strict=True):
        assert_same_bits(param.detach(), old)
