"""explain_quantized: the strategy that runs, whose products, and what is in the way."""

from __future__ import annotations

import re

import pytest
import torch


@pytest.fixture
def on_hopper(submodule, dispatch, monkeypatch):
    """Decisions as on an H200, made on tensors of the CPU."""
    module = submodule("moe.quantized.strategy")

    def pick(device, dtype, backend="auto"):
        name = "triton" if backend == "auto" else backend
        return dispatch.Path(name, "Triton on NVIDIA H200")

    monkeypatch.setattr(module, "experts_path", pick)
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: True)
    monkeypatch.setattr(module, "decodes_in_registers", lambda device, dtype: dtype.itemsize == 2)


def stack(opt, shape=(8, 1024, 2048), **options):
    return opt.moe.QuantizedExperts(shape, **options)


def explain(opt, weight, mean, **options) -> str:
    return opt.moe.explain_quantized(weight, mean * weight.shape[0], rank=16, **options)


def test_cuda_and_triton_by_rows_and_direction(opt, submodule, on_hopper, monkeypatch):
    """The rule is the kernels' own, asked with the depth of either sum."""
    asked = []

    def pays(mean, depth, *others):
        asked.append((mean, depth, others[-1]))
        return others[-1]

    monkeypatch.setattr(submodule("kernels.quant.nf4_product"), "pays", pays)
    said = explain(opt, stack(opt), 64)
    assert said == (
        "fused: 64 rows per expert, at most 512; forward by CUDA, backward by Triton, as measured"
    )
    assert asked == [(64, 2048, True), (64, 1024, False)]  # rows, depth, along the stored rows


@pytest.mark.parametrize(
    ("shape", "made", "asked", "words"),
    [
        ((8, 1024, 2048), {"nested": True}, {}, "by Triton, since.*: absmax is nested"),
        ((8, 1024, 2048), {}, {"dtype": torch.float16}, "needs bfloat16, got torch.float16"),
        ((8, 1024, 2048), {"blocksize": 32}, {}, "the blocksize must be 64 or more"),
        ((8, 1024, 2048), {}, {"backend": "triton"}, "by Triton, asked for by name"),
        ((8, 1024, 2048), {}, {"backend": "compiled"}, "by CUDA, asked for by name"),
        ((8, 1024, 96), {}, {}, "^chunked: .*blocks of 64 leave their row of 96 elements"),
        ((8, 1024, 2048), {}, {"dtype": torch.float32}, "^chunked: .*float32.* not decoded in reg"),
        ((8, 1024, 2048), {"strategy": "selective"}, {}, "^selective: asked for by name$"),
    ],
)
def test_what_is_in_the_way(opt, on_hopper, shape, made, asked, words):
    said = explain(opt, stack(opt, shape, **made), 64, **asked)
    assert re.search(words, said), said


def test_many_rows_and_none(opt, on_hopper):
    assert explain(opt, stack(opt), 513) == "chunked: 513 rows per expert, more than 512"
    assert explain(opt, stack(opt), 0) == "selective: an empty batch"


def test_other_devices(opt):
    weight = stack(opt, (4, 32, 64))
    said = opt.moe.explain_quantized(weight, 64, device="cpu")
    assert "products are reference's" in said and said.startswith("chunked: 16 rows per expert")
    weight.strategy = "fused"
    said = opt.moe.explain_quantized(weight.transpose(1, 2), 64, device="cpu")
    assert said.endswith("products are reference's, which decodes expert after expert")
    with pytest.raises(ValueError, match="blocks that do not leave their row"):
        opt.moe.explain_quantized(stack(opt, (4, 32, 48), strategy="fused"), 64)
    with pytest.raises(TypeError, match="weight must be in 4 bits, got Tensor"):
        opt.moe.explain_quantized(torch.zeros(2, 3, 4), 64)


@pytest.mark.parametrize("k", [64, 96])
@pytest.mark.parametrize("tokens", [1, 40, 900])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_is_what_runs(opt, submodule, device, monkeypatch, dtype, tokens, k):
    module, seen = submodule("moe.quantized.strategy"), []
    real = module.choose_strategy

    def spy(*arguments, **options):
        seen.append(real(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(module, "choose_strategy", spy)
    weight = torch.randn(8, 32, k, device=device)
    weight = opt.moe.QuantizedExperts.from_weight(weight)
    order = opt.moe.expert_sort(torch.randint(8, (tokens, 1), device=device), 8)
    x = torch.randn(tokens, k, device=device, dtype=dtype)
    opt.moe.grouped_lora_linear(x, weight.transpose(1, 2), order)
    said = opt.moe.explain_quantized(weight, tokens, dtype=dtype)
    assert said.startswith(f"{seen[0].name}: {seen[0].reason}")
