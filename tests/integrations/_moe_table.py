"""docs/concepts/moe-models.md: what happens to every mixture-of-experts class of transformers.

`python -m tests.integrations._moe_table` writes the page; the test of the same name compares each
row with what the class does today.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from .._compare import relative_error
from ..conftest import ROOT
from ._models import set_random_lora
from ._moe_classes import NOT_TRIED, classes, inputs, tiny

PAGE = ROOT / "docs/concepts/moe-models.md"
HEAD = """# Mixture-of-experts models of transformers

transformers {version} has {count} language models with experts in its auto classes; {works} of
them work here. Each was built at tiny size with random weights, and it works if all of this is
right:

- `quantize_experts` gives the logits of transformers' own experts with the rounded weights;
- `load_quantized` reads what `save_pretrained` wrote of the dense model, to the same logits;
- `attach_lora` on the 4-bit experts has a gradient on every factor and on nothing else;
- what `save_pretrained` writes of that model is read by `load_quantized` and by `from_pretrained`,
  adapters included, to the same logits.

A refusal is a `ValueError` with the message that stands here.
`TRITON_INTERPRET=1 python -m tests.integrations._moe_table` writes this page from the models, and
a test compares every row.
"""
HEADER = "| class | experts | result |"
ROW = re.compile(r"^\| `(\w+)` \| (.*) \| (.*) \|$", re.MULTILINE)


def committed() -> dict[str, tuple[str, str]]:
    """(experts, result) of every class as the page has them."""
    return {name: (experts, result) for name, experts, result in ROW.findall(PAGE.read_text())}


def written_for() -> str:
    """The version of transformers that the page speaks of."""
    return re.search(r"transformers (\d+\.\d+\.\d+)", PAGE.read_text())[1]


def row(opt: Any, name: str, folder: Path) -> tuple[str, str]:
    """(experts, result) of a class: every step of the way, or the first refusal.

    Raises:
        AssertionError: a step gave another result than it should.
        Exception: a step failed without a refusal.
    """
    if name in NOT_TRIED:
        return "", f"not tried: {NOT_TRIED[name]}"
    model = tiny(name)
    kinds = dict.fromkeys(
        type(m).__name__ for m in model.modules() if "Experts" in type(m).__name__
    )
    experts = ", ".join(f"`{kind}`" for kind in kinds)
    step = "quantize_experts"
    try:
        opt.integrations.quantize_experts(model)
        logits = _logits(model)
        assert relative_error(logits, _rounded(name, model)) < 1e-4
        step = "load_quantized"
        tiny(name).save_pretrained(folder / "dense")
        loaded = _load(opt, model, folder / "dense")
        assert relative_error(_logits(loaded), logits) < 1e-6
        step = "attach_lora"
        opt.integrations.attach_lora(model, r=2, lora_alpha=4)
        set_random_lora(model)
        _train(model)
        logits = _logits(model)
        step = "save_pretrained"
        model.save_pretrained(folder / "packed")
        loaded = _load(opt, model, folder / "packed")
        assert relative_error(_logits(loaded), logits) < 1e-6
        loaded = type(model).from_pretrained(folder / "packed", dtype=torch.float32)
        assert relative_error(_logits(loaded), logits) < 1e-6
    except ValueError as error:
        return experts, f"refused by `{step}`: {error}".replace("|", "\\|").replace("\n", " ")
    return experts, "works"


def page(rows: dict[str, tuple[str, str]], version: str) -> str:
    """The text of the page."""
    works = sum(result == "works" for _, result in rows.values())
    table = "\n".join(f"| `{name}` | {e} | {result} |" for name, (e, result) in rows.items())
    head = HEAD.format(version=version, count=len(rows), works=works)
    return f"{head}\n{HEADER}\n|---|---|---|\n{table}\n"


def _load(opt: Any, model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    options = {"dtype": torch.float32, "device_map": "cpu", "model_class": type(model)}
    return opt.integrations.load_quantized(folder, **options)


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs(model), use_cache=False).logits


def _rounded(name: str, quantized: torch.nn.Module) -> torch.Tensor:
    """Logits of transformers' own experts with the 4-bit weights decoded into them."""
    model = tiny(name)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for place, stack in quantized.named_modules():
            if type(stack).__name__ == "QuantizedExperts":
                model.get_parameter(place).copy_(stack.decode(dtype=torch.float32))
    return _logits(model)


def _train(model: torch.nn.Module) -> None:
    """Every factor, and nothing else, has a gradient."""
    output = model(**inputs(model), use_cache=False).logits
    output.square().mean().backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    for name, parameter in trained.items():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    model.zero_grad()


def main() -> None:
    import os
    import tempfile

    import tomllib
    import transformers
    from kernels import get_kernel

    repo = tomllib.loads((ROOT / "build.toml").read_text())["general"]["hub"]["repo-id"]
    os.environ["LOCAL_KERNELS"] = f"{repo}={ROOT}"
    opt = get_kernel(repo, version=1, backend="cpu", trust_remote_code=True)
    rows = {}
    for name in classes():
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = row(opt, name, Path(folder))
    PAGE.write_text(page(rows, transformers.__version__))


if __name__ == "__main__":
    main()
