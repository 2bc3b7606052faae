"""docs/concepts/nf4.md: its code runs as it stands, in order."""

from __future__ import annotations

import re

from .conftest import ROOT


def test_code_runs(opt, device, tmp_path) -> None:
    import torch

    from .integrations._models import build, tokens

    page = (ROOT / "docs/concepts/nf4.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 4
    found = {"opt": opt}
    exec("\n".join(blocks[:2]), found)
    found["model"] = torch.nn.Sequential(found["experts"])
    exec(blocks[2], found)
    assert not found["offload"].is_on and found["model"][0].keeper is None
    assert found["decoded"].shape == (2, 96, 64) and found["y"].shape == (4, 96)
    assert torch.equal(found["again"].packed, found["experts"].packed)
    build("qwen3_moe").save_pretrained(tmp_path)
    found["source"] = tmp_path
    exec(blocks[3].replace('"cuda"', repr(str(device))), found)
    assert found["offload"].is_on
    ids = tokens(found["model"]).to(device)
    assert found["model"](ids).logits.isfinite().all()
