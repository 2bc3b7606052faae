"""Calls of what puts our experts into models of transformers."""

from __future__ import annotations

import random
from typing import Any

import torch

from ._arguments import Call
from ._calls import Package, call, finite
from ._runs import DifferenceError

FAMILIES = ("qwen3_moe", "qwen3_moe_square")
WORDS = ("model", "expert", "adapter", "lora", "LoRA", "quantize")


def tiny(generator: random.Random) -> Any:
    from ..integrations import _models

    torch.manual_seed(generator.randrange(1000))
    return getattr(_models, generator.choice(FAMILIES))()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[1, 2, 3]])).logits


@call("integrations.attach_lora")
def attach_lora(package: Package, generator: random.Random) -> Call:
    model = tiny(generator)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = logits(model)

    def attach(**arguments: Any) -> Any:
        given = arguments.pop("model")
        try:
            package.opt.integrations.attach_lora(given, **arguments)
        except (ValueError, TypeError):
            if model.state_dict().keys() != before.keys():
                raise DifferenceError("a refused attach_lora left tensors behind") from None
            raise
        return given

    def check(given: Any) -> None:
        if (logits(given) - plain).abs().max() > 0.1:
            raise DifferenceError("attach_lora: a new adapter changed the model")

    arguments = {
        "model": model,
        "r": 2,
        "alpha": 4.0,
        "targets": ("gate_up_proj", "down_proj"),
        "rslora": False,
        "quantize": generator.choice([None, None, "nf4"]),
        "adapter": "default",
        "dtype": torch.float32,
    }
    return Call("integrations.attach_lora", attach, arguments, None, words=WORDS)


@call("integrations.use_in_transformers")
def use_in_transformers(package: Package, generator: random.Random) -> Call:
    model = tiny(generator)

    def use(model: Any) -> Any:
        package.opt.integrations.use_in_transformers(model)
        return model

    def check(given: Any) -> None:
        finite(logits(given))

    return Call("integrations.use_in_transformers", use, {"model": model}, check, words=WORDS)


@call("integrations.quantize_experts")
def quantize_experts(package: Package, generator: random.Random) -> Call:
    model = tiny(generator)

    def quantize(**arguments: Any) -> Any:
        package.opt.integrations.quantize_experts(**arguments)
        package.opt.integrations.use_in_transformers(model)
        return model

    def check(given: Any) -> None:
        finite(logits(given))

    arguments = {"model": model, "quant_type": "nf4", "blocksize": 64}
    return Call("integrations.quantize_experts", quantize, arguments, check, words=WORDS)


@call("integrations.set_lora")
def switches(package: Package, generator: random.Random) -> Call:
    """The functions that take a model with adapters, in any order."""
    integrations, model = package.opt.integrations, tiny(generator)
    if generator.random() < 0.8:
        integrations.attach_lora(model, 2, 4.0)
    names = ["disable_lora", "enable_lora", "merge_lora", "unmerge_lora", "detach_lora", "set_lora"]
    names += ["lora_disabled", "save_peft_adapter", "load_peft_adapter", "save_quantized"]
    folder = package.folder / f"adapter{generator.random()}"
    chosen = [generator.choice(names) for _ in range(4)]

    def play(model: Any, adapter: Any) -> Any:
        for name in chosen:
            function = getattr(integrations, name)
            if name == "set_lora":
                function(model, adapter)
            elif name == "lora_disabled":
                with function(model):
                    logits(model)
            elif name in ("save_peft_adapter", "load_peft_adapter", "save_quantized"):
                function(model, folder)
            else:
                function(model)
        return model

    def check(given: Any) -> None:
        finite(logits(given))

    arguments = {"model": model, "adapter": "default"}
    words = (*WORDS, "merged", str(folder), "quantized", "quantised")
    return Call("integrations.set_lora", play, arguments, check, also=(OSError,), words=words)


@call("integrations.load_peft_adapter")
def load_peft_adapter(package: Package, generator: random.Random) -> Call:
    """Of a folder whose two files may be damaged."""
    integrations, model = package.opt.integrations, tiny(generator)
    integrations.attach_lora(model, 2, 4.0)
    folder = package.folder / f"peft{generator.random()}"
    integrations.save_peft_adapter(model, folder)
    integrations.detach_lora(model)
    before = model.state_dict().keys()
    file = generator.choice([*sorted(folder.iterdir())])
    data = file.read_bytes()
    if generator.random() < 0.7:
        place = generator.randrange(len(data))
        data = generator.choice(
            [data[:place], data[place:], b"", data[:place] + b"\x00" + data[place:]]
        )
        if file.suffix == ".json":
            text = file.read_text()
            old = generator.choice(
                ['"r": 2', '"lora_alpha": 4.0', '"LORA"', "gate_up_proj", "null"]
            )
            new = generator.choice(['"r": -1', '"lora_alpha": "x"', "[]", "nowhere", "{}", "1e999"])
            data = text.replace(old, new).encode()

    def load(model: Any, adapter: Any, content: bytes) -> Any:
        file.write_bytes(content)
        try:
            integrations.load_peft_adapter(model, folder, adapter=adapter, local_files_only=True)
        except (ValueError, TypeError, OSError):
            if hasattr(model, "state_dict") and model.state_dict().keys() != before:
                raise DifferenceError("a refused adapter left tensors behind") from None
            raise

    arguments = {"model": model, "adapter": "default", "content": data}
    words = (*WORDS, str(folder), "json", "safetensors")
    return Call(
        "integrations.load_peft_adapter", load, arguments, None, (), (OSError,), words, ("content",)
    )
