"""docs/nf4.md: its code runs as it stands, in order."""

from __future__ import annotations

import re

from .conftest import ROOT


def test_code_runs(opt) -> None:
    import torch

    page = (ROOT / "docs" / "nf4.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 3
    found = {"opt": opt}
    exec("\n".join(blocks[:2]), found)
    found["model"] = torch.nn.Sequential(found["experts"])
    exec(blocks[2], found)
    assert not found["offload"].is_on and found["model"][0].keeper is None
    assert found["decoded"].shape == (2, 96, 64) and found["y"].shape == (4, 96)
    assert torch.equal(found["again"].packed, found["experts"].packed)
