"""What ranks tell each other of their options: words that say whether values mean the same."""

from __future__ import annotations

import importlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from .._gpu import no_waits


def module_of(opt, name: str) -> Any:
    return importlib.import_module(f"{opt.__name__}.{name}")


@pytest.mark.parametrize(
    ("option", "alike", "others"),
    [
        ("lr", [1, 1.0, np.float32(1), np.int64(1)], [2, 1.5, "1", None, True, torch.tensor(1.0)]),
        ("lr", [0.1, np.float64(0.1)], [np.float32(0.1), torch.tensor(0.1), torch.tensor(0.2)]),
        ("lr", [torch.tensor(0.1), torch.tensor([0.1])], [torch.tensor(0.1).double()]),
        ("rounding_seed", [2**64 - 1], [2**64 - 2]),
        ("num_heads", [{"a": 1, "b": 2}, {"b": 2, "a": 1}], [{"a": 2, "b": 1}, 1, None]),
        ("expert_keys", [("a", "b"), ("b", "a")], [("a",), None]),
        ("split_sizes", [(1, 2)], [(2, 1), {"w": (1, 2)}]),
        ("betas", [(0.9, 0.95), [0.9, 0.95]], [(0.95, 0.9)]),
        ("dtype", [torch.float16], [torch.bfloat16, None, "float16"]),
    ],
)
def test_equal_words_are_of_values_that_mean_the_same(opt, option, alike, others) -> None:
    digest = module_of(opt, "optimizers.sharded.consistency")
    words = {digest.word(digest.canonical(option, value)) for value in alike}
    assert len(words) == 1
    for other in others:
        assert digest.word(digest.canonical(option, other)) not in words, other
    assert all(0 <= word < 2**63 for word in words)


def test_only_what_may_have_changed_is_put_into_words_again(opt, monkeypatch) -> None:
    digest = module_of(opt, "optimizers.sharded.consistency")
    options = module_of(opt, "optimizers.groups.options")
    params = [nn.Parameter(torch.ones(3, 3)) for _ in range(2)]
    optimizer = opt.MuonAdamW(
        [
            {"kind": "muon", "params": params[:1], "lr": torch.tensor(0.1)},
            {"kind": "adamw", "params": params[1:], "lr": 0.1},
        ]
    )
    words, asked = digest.OptionWords([0, 1]), []
    original = digest.canonical

    def canonical(option: str, value: Any) -> str:
        asked.append(option)
        return original(option, value)

    monkeypatch.setattr(digest, "canonical", canonical)

    def renewed() -> tuple[dict[str, int], list[str]]:
        asked.clear()
        groups = [optimizer.format.options(group) for group in optimizer.param_groups]
        found = words.renew(groups, [*map(options.fingerprint, groups)])
        return dict(zip(digest.OPTIONS, found, strict=True)), sorted(asked)

    first, _ = renewed()
    assert renewed() == (first, [])
    optimizer.param_groups[0]["lr"].fill_(0.2)
    second, again = renewed()
    assert {name for name in first if first[name] != second[name]} == {"lr"}
    assert again == ["lr", "weight_decay"]
    optimizer.param_groups[1] |= {"lr": 0.3, "eps": 1e-6}
    third, again = renewed()
    assert {name for name in first if second[name] != third[name]} == {"lr", "eps"}
    assert again == ["eps", "lr", "weight_decay"]
    optimizer.param_groups[0]["ns_steps"] = 3
    fourth, _ = renewed()
    assert {name for name in first if third[name] != fourth[name]} == {"ns_steps"}


def bits_of(opt, *values: float) -> int:
    tensors = [torch.tensor(value) for value in values]
    return (
        module_of(opt, "optimizers.sharded.consistency")
        .on_device(tensors, torch.device("cpu"))
        .item()
    )


def test_numbers_of_a_device_are_compared_by_their_bits_and_order(opt) -> None:
    generator = random.Random(3)
    for _ in range(100):
        one, other = generator.random(), generator.random()
        assert bits_of(opt, one, other) == bits_of(opt, one, other)
        assert len({bits_of(opt, *pair) for pair in ((one, other), (other, one), (one, one))}) == 3
        assert bits_of(opt, one) != bits_of(opt, np.nextafter(np.float32(one), np.float32(2)))


@pytest.mark.gpu
def test_a_question_waits_for_nothing_on_the_device(opt, device) -> None:
    """Rates of a schedule, in numbers and in Tensors, and gradients that come and go."""
    agreement = module_of(opt, "optimizers.sharded.consistency")
    options = module_of(opt, "optimizers.groups.options")
    params = [nn.Parameter(torch.ones(3, device=device)) for _ in range(200)]
    rate = torch.tensor(0.1, device=device)
    optimizer = opt.MuonAdamW(
        [
            {"kind": "adamw", "params": params[:100], "lr": rate},
            {"kind": "adamw", "params": params[100:], "lr": 0.1},
        ]
    )
    layout = dict.fromkeys(agreement.LAYOUT, "")
    alone = module_of(opt, "distributed").alone()
    labelled = [(str(number), param) for number, param in enumerate(params)]
    common = agreement.Common(alone, labelled, [0, 1], layout, None)
    asking = agreement.Consistency()

    def ask(step: int) -> list[Any]:
        for number, param in enumerate(params):
            param.grad = None if (number + step) % 3 == 0 else torch.ones_like(param)
        rate.fill_(0.1 / (1 + step))
        optimizer.param_groups[1]["lr"] = 0.1 / (1 + step)
        groups = [optimizer.format.options(group) for group in optimizer.param_groups]
        return asking._ask(
            [common], groups, [*map(options.fingerprint, groups)], [None], False, False
        )

    asking._settle(ask(0), False, True)
    torch.cuda.synchronize(device)
    with no_waits():
        with torch.inference_mode():
            ask(1)
        (question,) = ask(2)
    question.check()
    place = len(agreement.LAYOUT) + agreement.OPTIONS.index("lr")
    told = question.found[0].tolist()
    assert told[place] == agreement.word(f"torch.float32 on a device; {(0.1 / 3).hex()}")
    first = len(agreement.LAYOUT) + len(agreement.OPTIONS)
    assert told[first : first + 2] == [bits_of(opt, 0.1 / 3), 0]
    assert sum(int(mask).bit_count() for mask in told[-agreement.MASKS :]) == 200 - 200 // 3 - 1
