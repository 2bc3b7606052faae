"""The pages of opponents and of forced paths say what the rows say, losses included. No build."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.static

MACHINE = {"gpu": "a GPU", "driver": "1", "torch": "2"}


def row(case: str, ms: float, baseline_ms: float, variant: str = "auto", **more: object) -> dict:
    found = {"case": case, "variant": variant, "ok": True, "wall_ms": ms, "baseline": "theirs"}
    return found | {"baseline_wall_ms": baseline_ms, "speedup": baseline_ms / ms} | more


@pytest.fixture
def results() -> dict[str, dict]:
    training = {"curve": [], "steps": 4, "sweep": [1, 2], "optimizer_ms": 1.0, "loss_mean": 3.25}
    trainings = [
        row("gpt-124M/adamw", 4.0, 4.0, **training),
        row("gpt-124M/muon", 5.0, 4.0, **training),
        row("gpt-124M/dion", 10.0, 4.0, "dion", **training),
        {"case": "first_use/layer", "variant": "auto", "ok": True, "value": 1.0, "unit": "s"},
    ]
    layers = [
        row("a", 1.0, 2.0),
        row("a", 4.0, 2.0, "axolotl", peer_commit=f"axolotl {'1' * 40}"),
        row("a", 2.0, 2.0, "triton"),
        row("b", 1.0, 8.0),
        row("c", 1.0, 9.0) | {"ok": False},
        row("d", 1.0, 9.0, baseline="the same model"),
    ]
    commits = f"gram-newton-schulz {'2' * 40}, quack {'3' * 40}"
    matrices = [row("e", 1.0, 2.0), row("e", 0.5, 2.0, "gram-newton-schulz", peer_commit=commits)]
    return {
        "end_to_end": MACHINE | {"rows": trainings},
        "moe_lora": MACHINE | {"rows": layers},
        "orthogonalize": MACHINE | {"rows": matrices},
    }


def test_every_case_stands_beside_every_opponent(harness, results) -> None:
    found = [(p.case, p.opponent, p.times) for p in harness.comparison.pairs(results)]
    assert found == [
        ("gpt-124M/muon", "theirs", 0.8),
        ("gpt-124M/muon", "dion", 2.0),
        ("a", "theirs", 2.0),
        ("a", "axolotl", 4.0),
        ("b", "theirs", 8.0),
        ("e", "theirs", 2.0),
        ("e", "gram-newton-schulz with quack", 0.5),
    ]


def test_the_page_has_means_and_losses(harness, results) -> None:
    page = harness.comparison.comparison(results)
    assert "| **`Muon`** | 5 | 1 | 3.250 |" in page and "| dion | 10 | 1 | 3.250 |" in page
    assert "(h200-moe_lora.md) | theirs | 2 | 4.00 | 2.00 | 8.00 | 0 |" in page
    assert "## Where the opponent is faster: 2 of 7 cases" in page
    assert page.count("| `") == 2 and "| `gpt-124M/muon` | 5 | theirs | 4 | 0.80 |" in page
    assert "a GPU, driver 1, torch 2. Others' code: axolotl 1111111, gram-" in page
    assert page.endswith("gram-newton-schulz 2222222, quack 3333333.")


def test_forced_paths_stand_beside_the_own_one(harness, results) -> None:
    lines = harness.comparison.forced(results).splitlines()
    (line,) = [line for line in lines if line.startswith("| layers")]
    assert line == "| layers of experts with LoRA | 8.0 and newer except 9.0 | 1 | 0.50 | 1.00 |"


def test_nothing_measured_is_said(harness) -> None:
    for text in (harness.comparison.comparison({}), harness.comparison.forced({})):
        assert text == "No measurement has been committed yet."
