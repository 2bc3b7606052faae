"""Launches of listed layers through the package's own entry, against what tools/prebuild.py finds.

In a process of its own: `python layers_of_the_list.py TOOLS`. Tensors are stand-ins, so nothing is
computed; away from a GPU the layer is told that it is on one.
"""

import contextlib
import sys
from unittest import mock

import torch

sys.path.insert(0, sys.argv[1])
import prebuild
from prebuild import load, new

MEANS = (1, 3, 20, 50, 100, 300, 1024)  # rows per expert; most are none of prebuild's


def weight(layer: prebuild.Layer, stored: tuple[int, int, int]):
    """A stack (E, N, K) as the layer holds it."""
    experts, n, k = stored
    if layer.format is None:
        return new(experts, k, n) if layer.model.oss else new(*stored)
    form = prebuild.format_of(layer)
    tensors = {name: new(count, of=kind) for name, (count, kind) in form.layout(stored).items()}
    return load("moe.quantized.expert_weights").QuantizedWeight(form, tensors, stored)


def call(layer: prebuild.Layer, tokens: int) -> None:
    """Forward without gradients, and forward and backward."""
    moe, oss = load("moe.layout"), layer.model.oss
    experts, hidden, inner, top_k, _ = layer.model
    sizes = ((experts, 2 * inner, hidden), (experts, hidden, inner))
    factors, leaves = [None, None], [new(tokens, hidden), new(tokens, top_k, of=layer.gates)]
    if layer.rank:
        lora = [
            (
                new(experts * layer.rank, k, of=layer.lora),
                new(n, experts * layer.rank, of=layer.lora),
            )
            for _, n, k in sizes
        ]
        factors = [load("moe.lora").PeftFactors(a, b, experts, 2.0) for a, b in lora]
        leaves += (one for pair in lora for one in pair)
    x, gates = leaves[:2]
    wanted = [x] * layer.wants[0] + [gates] * layer.wants[-1] + leaves[2:]
    for leaf in wanted:
        leaf.requires_grad_()
    operands = (
        *(x, new(tokens, top_k, of=torch.int64), gates),
        tuple(weight(layer, stored) for stored in sizes),
        tuple(new(experts, n) if oss else None for _, n, _ in sizes),
        moe.ExpertsLayout(
            activation="gpt_oss" if oss else "silu",
            interleaved=oss,
            transposed=oss and layer.format is None,
        ),
        *(moe.ExpertsLora(*factors), "auto"),
    )
    eager = load("moe.eager_layer").eager_layer
    with torch.no_grad():
        eager(*operands)
    out = eager(*operands)
    torch.autograd.grad(out, wanted, new(*out.shape))


def main() -> None:
    eager, packed = load("moe.eager_layer"), load("moe.quantized.eager_quantized")
    load("kernels.quant.gated_quantized_experts_triton")  # names that it imported are its own
    prepare, path = load("kernels.launch.launch_plan").prepare, load("dispatch").Path("triton", "")
    layers = [one for one in prebuild.layers() if one.rank in (0, 16) and one.lora != torch.float32]
    with prebuild.recorded() as found, contextlib.ExitStack() as stack:
        for layer in layers:
            for mean in prebuild.MEANS:
                prebuild.record(layer, max(mean * layer.model.experts // layer.model.top_k, 1))
        compiled = set(found)
        for target, name, value in (
            (eager, "_is_on_gpu", lambda _: True),
            (eager, "replayed", lambda _, *called: prepare(*called[:3])),
            (eager, "experts_path", lambda *_, **__: path),
            (eager, "check_path", lambda *_: None),
            (packed, "experts_path", lambda *_: path),
            (packed, "check_path", lambda *_: None),
            (load("moe.quantized.strategy"), "decodes_in_registers", lambda *_: True),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        for layer in layers:
            for mean in MEANS:
                call(layer, max(mean * layer.model.experts // layer.model.top_k, 1))
                late = {found[key][0].__name__ for key in set(found) - compiled}
                assert not late, f"{layer} at {mean} rows per expert launches {late}, too"
        package = load("dispatch").__name__.partition(".")[0]
        loaded = [(name, vars(sys.modules[name])) for name in list(sys.modules)]
        asked = [
            (name, names["overlaps"])
            for name, names in loaded
            if name.startswith(f"{package}.") and "overlaps" in names
        ]
        assert any(name.endswith("gated_quantized_experts_triton") for name, _ in asked)
        untold = [name for name, overlaps in asked if not overlaps(torch.device("cpu"))]
        assert not untold, f"{untold} are recorded as for a GPU without early launches"
    kinds = {str(value) for _, what, _ in found.values() for value in what.constants.values()}
    assert {"4bit", "fp8"} < kinds  # CUDA takes all products over MXFP4


if __name__ == "__main__":
    main()
