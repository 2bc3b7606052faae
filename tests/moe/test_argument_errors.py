"""Arguments of shapes and kinds that random calls found: each is named, nothing is left behind."""

from __future__ import annotations

import pytest
import torch


def test_a_stack_without_dimensions(opt) -> None:
    with pytest.raises(ValueError, match=r"weight must be \(E, N, K\)"):
        opt.moe.QuantizedExperts.from_weight(torch.tensor(1.0))
    with pytest.raises(ValueError, match="shape must be"):
        opt.moe.QuantizedExperts((-1, 4, 64))


def test_a_correction_on_another_device(opt) -> None:
    bias = torch.zeros(16, device="meta")
    with pytest.raises(ValueError, match="correction_bias is on meta"):
        opt.moe.group_top_k(torch.randn(5, 16), 2, correction_bias=bias, n_group=4, topk_group=2)


def test_a_factor_without_dimensions(opt) -> None:
    order = torch.arange(12)
    with pytest.raises(ValueError, match=r"lora_A must be \(r E, K\)"):
        opt.moe.parallel_linear_lora(
            torch.randn(6, 4),
            torch.randn(4, 4, 3),
            2,
            order // 3,
            order,
            torch.tensor([3, 6, 9, 12]),
            lora_A=torch.tensor(1.0),
            lora_B=torch.randn(3, 4),
        )


def test_adapters_by_twice_the_same_target_and_by_a_tensor(opt) -> None:
    experts = opt.moe.Experts(3, 4, 5)
    experts.add_adapter("one", r=2, alpha=4.0, targets=("down", "down"))
    assert [name for name, p in experts.expert_lora.items() if "one" in p.adapters] == ["down"]
    with pytest.raises(TypeError, match="dropout"):
        experts.add_adapter("two", r=2, alpha=4.0, dropout=torch.zeros(2))
    assert not any("two" in p.adapters for p in experts.expert_lora.values())
