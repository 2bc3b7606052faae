"""Wrong arguments of grouped_lora_linear and parallel_linear_lora raise before any launch."""

from __future__ import annotations

import logging

import pytest
import torch

E, T, TOP_K, K, N, R = 3, 5, 2, 8, 16, 4


@pytest.fixture
def good(moe) -> dict:
    ids = torch.randint(0, E, (T, TOP_K), generator=torch.Generator().manual_seed(0))
    return {
        "x": torch.ones(T, K),
        "weight": torch.ones(E, K, N),
        "order": moe.expert_sort(ids, E),
        "lora_a": torch.ones(E, R, K),
        "lora_b": torch.ones(E, N, R),
        "bias": torch.ones(E, N),
        "gates": torch.ones(T, TOP_K),
    }


CASES = [
    ({"x": [[1.0]]}, TypeError, "x must be a dense tensor"),
    ({"x": torch.ones(T, K, dtype=torch.int64)}, TypeError, "x must have dtype"),
    ({"x": torch.ones(1, T, K)}, ValueError, "x must have 2 dimensions"),
    ({"x": torch.ones(T + 1, K)}, ValueError, "x must have T = 5 rows"),
    ({"x": torch.ones(T, K + 1)}, ValueError, r"weight must be \(E, K, N\)"),
    ({"x": torch.ones(T, K), "grouped_in": True}, ValueError, "x must have T k = 10 rows"),
    ({"weight": torch.ones(E, N, K)}, ValueError, r"weight\.transpose\(1, 2\)"),
    ({"weight": torch.ones(E + 1, K, N)}, ValueError, "E = 3"),
    ({"weight": torch.ones(E, K, 0)}, ValueError, "weight must have positive sizes"),
    ({"weight": torch.ones(E, K, N).half()}, TypeError, "weight must have dtype float32"),
    ({"weight": torch.ones(E, K, N, device="meta")}, ValueError, "weight must be on the device"),
    ({"order": (1, 2)}, TypeError, "order must be the result of expert_sort"),
    ({"lora_b": None}, ValueError, "give both or none"),
    ({"lora_a": None}, ValueError, "give both or none"),
    ({"lora_a": torch.ones(E, R, K + 1)}, ValueError, r"lora_a must be \(E, r, K\)"),
    ({"lora_a": torch.ones(E, 0, K)}, ValueError, "r >= 1"),
    ({"lora_b": torch.ones(E, R, N)}, ValueError, r"lora_b must be \(E, N, r\)"),
    ({"lora_b": torch.ones(E, N, R + 1)}, ValueError, r"lora_b must be \(E, N, r\)"),
    ({"lora_a": torch.ones(E, R, K).double()}, TypeError, "lora_a is float64"),
    ({"lora_b": torch.ones(E, N, R, device="meta")}, ValueError, "lora_b must be on the device"),
    ({"scaling": "2"}, TypeError, "scaling must be a number"),
    ({"scaling": torch.tensor(2.0)}, TypeError, "scaling must be a number"),
    ({"bias": torch.ones(N)}, ValueError, "bias must have 2 dimensions"),
    ({"bias": torch.ones(E, K)}, ValueError, r"bias must be \(E, N\)"),
    ({"gates": torch.ones(T, 1)}, ValueError, r"gates must be \(T, k\)"),
    ({"gates": torch.ones(T, TOP_K).long()}, TypeError, "gates must have dtype"),
    ({"grouped_out": True}, ValueError, "gates combine them"),
    ({"backend": "cutlass"}, ValueError, "backend must be one of"),
]


@pytest.mark.parametrize(("change", "error", "message"), CASES, ids=lambda value: str(value)[:40])
def test_wrong_arguments(moe, good, monkeypatch, submodule, change, error, message):
    def launched(*arguments, **options):
        raise AssertionError("an op was launched")

    monkeypatch.setattr(submodule("moe.grouped_linear"), "_op", launched)
    arguments = {**good, **change}
    with pytest.raises(error, match=message):
        moe.grouped_lora_linear(**arguments)


def test_two_i_equal_to_h_does_not_hide_a_swap(moe):
    """K = N: a swapped A or B has another shape unless r = K too; nothing is guessed by shape."""
    order = moe.expert_sort(torch.zeros(2, 1, dtype=torch.int64), 2)
    x, weight = torch.ones(2, 8), torch.ones(2, 8, 8)
    with pytest.raises(ValueError, match="lora_a must be"):
        moe.grouped_lora_linear(x, weight, order, torch.ones(2, 8, 4), torch.ones(2, 4, 8))


def test_expert_sort_checks_what_it_gets(moe):
    with pytest.raises(TypeError, match="expert_ids must be a dense tensor"):
        moe.expert_sort([[0, 1]], 2)
    with pytest.raises(ValueError, match="num_experts must be at least 1"):
        moe.expert_sort(torch.zeros(2, 1, dtype=torch.int64), 0)


def test_the_portable_path_says_so_once(good, moe, dispatch, caplog):
    dispatch.say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        moe.grouped_lora_linear(**good)
        moe.grouped_lora_linear(**good)
    said = [record.message for record in caplog.records if "portable path" in record.message]
    assert len([line for line in said if line.startswith("grouped_lora_linear")]) == 1


def test_explain(opt, device):
    text = opt.explain("grouped_lora_linear", device="cpu")
    assert text.startswith("reference: ")
    assert opt.explain("grouped_lora_linear", device="cpu", backend="triton").startswith("triton")
    with pytest.raises(ValueError, match="backend must be one of"):
        opt.explain("grouped_lora_linear", device="cpu", backend="cutlass")
