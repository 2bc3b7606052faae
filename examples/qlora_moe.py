"""QLoRA on a mixture of experts: packed frozen experts, LoRA on top, no 16-bit stack at any time.

    python examples/qlora_moe.py             # two layers of Qwen3-30B-A3B's shapes; wants a GPU
    python examples/qlora_moe.py --full      # all 48 layers and the vocabulary of 151,936
    python examples/qlora_moe.py --format mxfp4    # the same of gpt-oss-20b, in its format
    python examples/qlora_moe.py --tiny      # seconds on two CPU cores

A model of transformers, Qwen3-MoE or for MXFP4 gpt-oss, gets random weights: its experts are drawn
and quantised one by one, so that none of them exists in 16 bits for longer than that takes. LoRA on
the experts is then trained on the source of Python's standard library, byte by byte, with
`--target-modules q_proj v_proj` on attention too, through PEFT; `--offload` keeps the experts in
host memory, two layers of them on the device. On a GPU the time and the memory of a training step
are printed, AdamW's update included; of NF4, where bitsandbytes is installed, beside those of the
usual way: decode everything with bitsandbytes, then torch's grouped_mm. At 2,048 tokens the GPU
waits for transformers and PEFT, which launch some 400 kernels a layer: `--compile` compiles the
decoder layers, which share one graph, and `--cuda-graph` replays forward and backward. Random
weights have nothing to be fine-tuned; the numbers are about the machine.

It writes adapter/ (PEFT's format), loss.png and results.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo.command_line import exit_status, positive_integer
from demo.config import DemoError
from demo.corpus import read_corpus, windows
from demo.device import device_name, prepare_device
from demo.package import Package, load_package
from finetune_moe_lora import Run, Size, plot, sized
from torch import Tensor, nn

PROJECTIONS = ("gate_up_proj", "down_proj")
MEASURED = 10  # steps
OURS, USUAL = "ours", "bitsandbytes + grouped_mm"


QWEN3_30B_A3B = {
    "hidden": 2048,
    "heads": (32, 4, 128),
    "experts": (128, 8, 768),
    "context": 512,
    "batch": 4,
    "max_bytes": 8 << 20,
}
GPT_OSS_20B = QWEN3_30B_A3B | {"hidden": 2880, "heads": (64, 8, 64), "experts": (32, 4, 2880)}
SIZES = {
    "tiny": sized(
        2, 64, (2, 2, 32), (8, 2, 64), context=32, batch=8, lora_steps=60, max_bytes=1 << 20
    ),
    "real": sized(2, **QWEN3_30B_A3B, lora_steps=100),
    "full": sized(48, **QWEN3_30B_A3B, vocabulary=151_936, lora_steps=20),
    "real mxfp4": sized(2, **GPT_OSS_20B, lora_steps=100),
    "full mxfp4": sized(24, **GPT_OSS_20B, vocabulary=201_088, lora_steps=20),
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    size = parser.add_mutually_exclusive_group()
    for name, words in (("tiny", "the size of the tests"), ("full", "all layers")):
        size.add_argument(
            f"--{name}", action="store_const", const=name, dest="size", default="real", help=words
        )
    add("--format", choices=("nf4", "mxfp4", "fp8"), default="nf4", help="of the experts")
    add("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    add("--steps", type=positive_integer, help="of LoRA (default: the size's)")
    add("--rank", type=positive_integer, default=16, help="of LoRA (default: 16)")
    add("--alpha", type=float, default=32.0, help="the update is scaled by alpha / rank")
    add("--target-modules", nargs="*", metavar="NAME", help="LoRA on these beside the experts")
    add("--lr", type=float, help="peak learning rate (default: 1e-3, of --tiny 1e-2)")
    add("--nested", action="store_true", help="quantise absmax, too: 4.13 bits instead of 4.5")
    add("--checkpointing", action="store_true", help="run layers again in the backward pass")
    add("--offload", action="store_true", help="keep the experts in host memory")
    add("--compile", action="store_true", help="run the decoder layers under torch.compile")
    add(
        "--cuda-graph", action="store_true", help="replay forward and backward (not tried on a GPU)"
    )
    add("--corpus", type=Path, metavar="DIR", help="train on the *.py files below DIR")
    add("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    add("--threads", type=positive_integer, help="CPU threads (default: torch's choice)")
    add("--out-dir", type=Path, default=Path("qlora_out"), help="default: qlora_out")
    options = parser.parse_args(arguments)
    if options.nested and options.format != "nf4":
        parser.error(f"--nested is of --format nf4: {options.format} has no absmax")
    if options.offload and (options.compile or options.cuda_graph):
        parser.error("--offload moves experts between the layers of an eager model alone")
    if options.lr is None:  # at a hidden size of 2048 1e-2 makes the loss jump
        options.lr = 1e-2 if options.size == "tiny" else 1e-3
    return options


def build_model(
    size: Size,
    package: Package,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int,
    nested: bool,
    quant_type: str = "nf4",
) -> nn.Module:
    """A random model over bytes, its experts quantised while they are drawn."""
    import transformers

    kind = "GptOss" if quant_type == "mxfp4" else "Qwen3Moe"
    attention = None if quant_type == "mxfp4" else without_mask()  # gpt-oss has windows
    config = getattr(transformers, f"{kind}Config")(
        max_position_embeddings=size.context,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **size.model,
    )
    implementation = package.module.integrations.use_in_transformers()
    with torch.device("meta"):  # shapes alone
        model = getattr(transformers, f"{kind}ForCausalLM")._from_config(
            config,
            experts_implementation=implementation,
            attn_implementation=attention,
            dtype=dtype,
        )
    stacks = {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            for target in PROJECTIONS:
                stacks[module, target] = tuple(getattr(module, target).shape)
                delattr(module, target)
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1)  # a norm's
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)

    def experts(count: int, rows: int, columns: int) -> Iterator[Tensor]:
        for _ in range(count):
            drawn = torch.randn(rows, columns, device=device, dtype=dtype, generator=generator)
            yield drawn * columns**-0.5

    quantized = package.module.moe.QuantizedExperts
    how = {"quant_type": quant_type} | ({"nested": True} if nested else {})
    for (module, target), (count, *sides) in stacks.items():
        if module.is_transposed:  # published MXFP4 lies as (E, out, in), and the model sees it so
            how["transposed"] = True
            sides.reverse()
        shape = (count, *sides)
        stack = quantized.from_experts(experts(*shape), shape, device=device, **how)
        module.add_module(target, stack)
    return model


def without_mask() -> str:
    """The name of causal attention for which transformers makes no mask.

    In search of packed sequences it reads the positions of every batch on the host, which waits for
    the device there. In a capture it cannot, and makes a mask that the layers never had before.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
    return "causal_sdpa"


def dense_and_grouped(
    experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor, lora: Any = None
) -> Tensor:
    """The usual way: both stacks decoded by bitsandbytes, split LoRA through grouped_mm."""
    ordered, slots = torch.sort(index.flatten(), stable=True)
    token = slots // index.shape[1]
    names = torch.arange(experts.num_experts, device=index.device)
    ends = torch.searchsorted(ordered, names, right=True, out_int32=True)  # the host does not wait
    lora = lora or experts.expert_lora.factors()  # of PEFT, which hands it over, or of ours

    def product(rows: Tensor, stack: nn.Module, factors: Any) -> Tensor:
        low = F.grouped_mm(rows, factors.a.to(rows.dtype).mT, offs=ends)
        up = F.grouped_mm(low, factors.b.to(rows.dtype).contiguous().mT, offs=ends)
        base = F.grouped_mm(rows, decode(stack, rows.dtype).mT, offs=ends)
        return base + factors.scaling * up

    gate, up = product(hidden[token], experts.gate_up_proj, lora.gate_up).chunk(2, -1)
    out = product(F.silu(gate) * up, experts.down_proj, lora.down)
    out = out * weights.flatten()[slots].unsqueeze(-1)
    return torch.zeros_like(hidden).index_add(0, token, out.to(hidden.dtype))


def decode(stack: nn.Module, dtype: torch.dtype) -> Tensor:
    """A whole stack in 16 bits, by bitsandbytes from the same bytes."""
    from bitsandbytes import functional

    state = functional.QuantState(
        absmax=stack.absmax.data,
        shape=stack.shape,
        code=functional.get_4bit_type(stack.format.quant_type, device=stack.device),
        blocksize=stack.format.blocksize,
        quant_type=stack.format.quant_type,
        dtype=dtype,
    )
    return functional.dequantize_4bit(stack.packed.data.view(-1, 1), state).view(stack.shape)


def say(line: str) -> None:
    """Print at once: whoever cuts a run short sees how far it came."""
    print(line, flush=True)


def measure(name: str, step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds and memory of a training step: in MB its peak, what stands before it, all taken.

    A graph's own memory is no tensor's when the graph runs, and counts in what is taken alone.
    """
    torch.cuda.empty_cache()
    begin = time.perf_counter()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(MEASURED + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    sizes = {
        "peak_mb": torch.cuda.max_memory_allocated(),
        "kept_mb": before,
        "taken_mb": torch.cuda.max_memory_reserved(),
    }
    found = {"ms": statistics.median(times)} | {name: size / 1e6 for name, size in sizes.items()}
    say(f"{name}: {found['ms']:.1f} ms a step, after {first:.1f} s for the first three")
    return found


def not_compared(device: torch.device, *, nested: bool, quant_type: str = "nf4") -> str | None:
    """Why the usual way is not measured beside ours."""
    if quant_type != "nf4":
        return f"bitsandbytes decodes no {quant_type}"
    if device.type != "cuda":
        return "bitsandbytes and grouped_mm are compared on a CUDA device"
    if nested:
        return "bitsandbytes decodes the same absmax, which is nested here"
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed"
    return None


def fixed_step(run: Run) -> Callable[[], None]:
    """A training step on the first batch at a learning rate of 0: the training is still to come."""
    starts = run.corpus.train_starts(
        seed=run.seed, steps=1, batch=run.size.batch, context=run.size.context
    )[0]
    batch = windows(run.corpus.train, starts, run.size.context)
    optimizer = torch.optim.AdamW(run.parameters, lr=0.0, fused=True)

    def step() -> None:
        run.gradients(*batch)
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(run: Run, package: Package, *, ours_alone: bool) -> dict[str, dict[str, float] | None]:
    """Our step and the usual one over the same model; None for one that the memory cannot hold."""
    from transformers.integrations.moe import ExpertsInterface

    step = fixed_step(run)
    name = package.module.integrations.use_in_transformers()
    found = {OURS: measure(OURS, step)}
    if ours_alone:
        return found
    try:
        # Under our name: with LoRA attached, experts refuse to run on any other implementation.
        ExpertsInterface.register(name, dense_and_grouped)
        found[USUAL] = measure(USUAL, step)
    except torch.OutOfMemoryError:
        found[USUAL] = None
        for parameter in run.parameters:
            parameter.grad = None
    finally:
        package.module.integrations.use_in_transformers()  # registers ours again
    return found


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Compile the decoder layers; they differ by their weights alone and share one graph."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(backend=backend, dynamic=False, fullgraph=True)


def captured(run: Run) -> Callable[[Tensor, Tensor], Tensor]:
    """`run.gradients` as a CUDA graph, which the host starts with one call."""
    begin = time.perf_counter()
    shape = (run.size.batch, run.size.context)
    vocabulary = run.size.model["vocab_size"]
    tokens, targets = torch.randint(vocabulary, (2, *shape), device=run.device)
    torch.cuda.empty_cache()  # the graph has memory of its own
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):  # what is compiled or allocated once must not fall into the graph
            run.gradients(tokens, targets)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    # Threads that compile kernels for other shapes meanwhile do not end the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = run.gradients(tokens, targets)
    say(f"captured in {time.perf_counter() - begin:.1f} s, with three steps before it")
    gradients = [parameter.grad for parameter in run.parameters]

    def replay(new_tokens: Tensor, new_targets: Tensor) -> Tensor:
        tokens.copy_(new_tokens)
        targets.copy_(new_targets)
        graph.replay()
        for parameter, gradient in zip(run.parameters, gradients, strict=True):
            parameter.grad = gradient
        return loss

    return replay


def report(measured: dict[str, dict[str, float] | None]) -> str:
    """A table of `compare`."""
    heads = "".join(f"{head:>10}" for head in ("ms", "peak MB", "kept MB", "taken MB"))
    lines = [f"{'a training step':<32}{heads}"]
    for name, found in measured.items():
        cells = "  out of memory"
        if found:
            sizes = (found[key] for key in ("peak_mb", "kept_mb", "taken_mb"))
            cells = f"{found['ms']:>10.2f}" + "".join(f"{size:>10.0f}" for size in sizes)
        lines.append(f"{name:<32}{cells}")
    if usual := measured.get(USUAL):
        ours = measured[OURS]
        lines.append(
            f"{usual['ms'] / ours['ms']:.2f} times as fast, "
            f"{ours['peak_mb'] / usual['peak_mb']:.0%} of the memory"
        )
    return "\n".join(lines)


def timed(
    options: argparse.Namespace, run: Run, package: Package
) -> dict[str, dict[str, float] | None]:
    """Measure the eager step, and ours as the options have it, which the run then goes on with."""
    how = [name for name in ("compile", "cuda_graph") if getattr(options, name)]
    on_gpu = run.device.type == "cuda"
    reason = not_compared(run.device, nested=options.nested, quant_type=options.format)
    measured = compare(run, package, ours_alone=reason is not None) if on_gpu else {}
    if options.compile:
        compile_layers(run.model)
        # Another batch, without gradients: a graph of its own, which takes longer than it saves.
        run.evaluate = torch.compiler.set_stance("force_eager")(run.evaluate)
    if options.cuda_graph:
        run.gradients = captured(run)
    if on_gpu and how:
        name = f"{OURS}, {' + '.join(how)}"
        measured[name] = measure(name, fixed_step(run))
    if reason:
        say(f"no comparison: {reason}")
    return measured


def train(
    options: argparse.Namespace, size: Size, device: torch.device, package: Package
) -> dict[str, Any]:
    """The model, its training, the files and the comparison."""
    corpus = read_corpus(
        options.corpus, context=size.context, max_bytes=size.max_bytes, device=device
    )
    folder, module = options.out_dir, package.module
    folder.mkdir(parents=True, exist_ok=True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    how = {"seed": options.seed, "nested": options.nested, "quant_type": options.format}
    begin = time.perf_counter()
    model = build_model(size, package, device, dtype, **how)
    model = module.integrations.attach_lora(
        model, options.rank, options.alpha, target_modules=options.target_modules
    )
    run = Run(
        "LoRA",
        model=model,
        corpus=corpus,
        size=size,
        steps=options.steps or size.lora_steps,
        lr=options.lr,
        seed=options.seed,
        device=device,
    )
    if options.checkpointing:  # there is no dropout, whose random numbers must be drawn again
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    say(f"{size.model['num_hidden_layers']} layers made in {time.perf_counter() - begin:.1f} s")
    measured = timed(options, run, package)
    offload = module.moe.ExpertOffload(model, device) if options.offload else None
    run.run()
    module.integrations.save_peft_adapter(model, folder / "adapter")
    plot(folder / "loss.png", (run,))

    experts = [m for m in model.modules() if isinstance(m, module.moe.QuantizedExperts)]
    packed = sum(p.nbytes for m in experts for p in m.parameters())
    elements = sum(m.shape.numel() for m in experts)
    print(
        f"{elements:,} weights of experts in {packed / 1e6:,.1f} MB "
        f"({8 * packed / elements:.2f} bits each; {2 * elements / 1e6:,.0f} MB in 16 bits)\n"
        f"held-out loss: {run.held_out[0][1]:.3f} to {run.held_out[-1][1]:.3f} nats per byte"
    )
    if measured:
        print(report(measured))
    if offload is not None:
        print(f"{offload.transfers} layers were copied to the device, {offload.waits} of them late")
    return {
        "package": package.describe(),
        "device": device_name(device),
        "experts": {"elements": elements, "bytes": packed},
        "train": run.train,
        "held_out": run.held_out,
        "comparison": measured,
        "transfers": None if offload is None else offload.transfers,
    }


def run(options: argparse.Namespace) -> int:
    """Load the package, train and write the results; returns the exit status."""
    of_gpt_oss = options.format == "mxfp4" and options.size != "tiny"
    size = SIZES[f"{options.size} mxfp4" if of_gpt_oss else options.size]
    device = prepare_device(options.device, threads=options.threads)
    if options.cuda_graph and device.type != "cuda":
        raise DemoError(f"--cuda-graph wants a GPU, and this run is on {device}")
    torch.use_deterministic_algorithms(False)  # what is timed is what others run
    package = load_package(device)
    say(f"{package.repo_id} version {package.version}, {package.variant}")
    say(f"on {device_name(device)}, torch {torch.__version__}")
    results = train(options, size, device, package)
    (options.out_dir / "results.json").write_text(json.dumps(results, indent=1))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse(arguments)
    return exit_status("qlora_moe", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
