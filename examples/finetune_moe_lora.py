"""Fine-tune a small mixture of experts with LoRA on experts and attention, and hand it to PEFT.

    python examples/finetune_moe_lora.py             # minutes on two CPU cores, seconds on a GPU
    python examples/finetune_moe_lora.py --tiny      # half a minute anywhere

A Qwen3-MoE of transformers is built with random weights and trained on the source of Python's
standard library, byte by byte. Then its weights are frozen, LoRA is attached to the experts and to
attention and trained on Python's help texts, which are English and new to the base, and the adapter
is saved in PEFT's format. At the end PEFT alone loads it over the saved base model and must give
the same logits. The experts run on the package in this checkout's build/ folder, loaded with
`kernels.get_kernel`.

It writes base/ (the model before LoRA), adapter/, loss.png and results.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from demo.command_line import exit_status, positive_integer
from demo.config import DemoError
from demo.corpus import Corpus, read_corpus, windows
from demo.device import device_name, has_bfloat16, prepare_device
from demo.package import Package, load_first
from demo.report import curves
from torch import Tensor, nn
from tqdm import tqdm

AGREEMENT = 1e-4  # relative, of float32 logits: two ways to sum W x + s B A x


@dataclass(frozen=True)
class Size:
    """The model and its two trainings.

    Args:
        model: options of Qwen3MoeConfig.
        context: bytes per sequence.
        batch: sequences per step.
        base_steps: steps of all weights.
        lora_steps: steps of LoRA alone.
        max_bytes: text to read at most.
    """

    model: dict[str, int]
    context: int
    batch: int
    base_steps: int
    lora_steps: int
    max_bytes: int


def sized(
    layers: int,
    hidden: int,
    heads: tuple[int, int, int],
    experts: tuple[int, int, int],
    *,
    vocabulary: int = 256,
    base_steps: int = 0,
    **rest: int,
) -> Size:
    """Heads are (query, key and value, their width), experts (number, top k, intermediate)."""
    query, key, head = heads
    count, top_k, intermediate = experts
    model = {
        "vocab_size": vocabulary,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": query,
        "num_key_value_heads": key,
        "head_dim": head,
        "num_experts": count,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": intermediate,
        "intermediate_size": intermediate,  # of gpt-oss's experts
    }
    return Size(model, base_steps=base_steps, **rest)


TINY = {"context": 32, "batch": 8, "base_steps": 60, "lora_steps": 80, "max_bytes": 1 << 20}
SMALL = {"context": 128, "batch": 16, "base_steps": 200, "lora_steps": 200, "max_bytes": 8 << 20}
SIZES = {
    "tiny": sized(2, 64, (2, 2, 32), (8, 2, 48), **TINY),
    "small": sized(4, 128, (4, 4, 32), (16, 2, 96), **SMALL),
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tiny", action="store_true", help="the size of the tests")
    add("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    add("--base-steps", type=positive_integer, help="steps of all weights (default: the size's)")
    add("--steps", type=positive_integer, help="steps of LoRA (default: the size's)")
    add("--rank", type=positive_integer, default=8, help="of LoRA (default: 8)")
    add("--alpha", type=float, default=16.0, help="the update is scaled by alpha / rank")
    add("--rslora", action="store_true", help="scale by alpha / sqrt(rank) instead")
    add(
        "--target-modules",
        nargs="*",
        default=["q_proj", "v_proj"],
        metavar="NAME",
        help="LoRA on these beside the experts (default: q_proj v_proj; no name: experts alone)",
    )
    add("--base-lr", type=float, default=3e-3, help="peak learning rate of all weights (3e-3)")
    add("--lr", type=float, default=1e-2, help="peak learning rate of LoRA (default: 1e-2)")
    add("--corpus", type=Path, metavar="DIR", help="train the base on the *.py files below DIR")
    add("--lora-corpus", type=Path, metavar="DIR", help="and LoRA on those (default: help texts)")
    add("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    add("--threads", type=positive_integer, help="CPU threads (default: torch's choice)")
    add("--out-dir", type=Path, default=Path("finetune_out"), help="default: finetune_out")
    return parser.parse_args(arguments)


def build_model(size: Size, *, implementation: str, seed: int) -> nn.Module:
    """A random Qwen3-MoE over bytes."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        max_position_embeddings=size.context,
        tie_word_embeddings=False,
        output_router_logits=True,  # the auxiliary loss keeps the experts in use
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **size.model,
    )
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM._from_config(config, experts_implementation=implementation)


@dataclass
class Run:
    """One training: which parameters, on which text, and what came of it.

    Args:
        name: of the progress bar and in the plot.
        model: what is trained.
        corpus: its text.
        size: batch and context.
        steps: how many.
        lr: peak learning rate.
        seed: of the batches.
        device: of the model.
    """

    name: str
    model: nn.Module
    corpus: Corpus
    size: Size
    steps: int
    lr: float
    seed: int
    device: torch.device

    def __post_init__(self) -> None:
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.train: list[float] = []
        self.held_out: list[tuple[int, float]] = []

    def run(self) -> None:
        """Train what requires a gradient: AdamW, warm-up, cosine to zero."""
        optimizer = torch.optim.AdamW(
            self.parameters, lr=self.lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        size, every = self.size, max(1, self.steps // 10)
        starts = self.corpus.train_starts(
            seed=self.seed, steps=self.steps, batch=size.batch, context=size.context
        )
        self.held_out.append((0, self.evaluate()))
        with tqdm(total=self.steps, desc=self.name, mininterval=0.5) as bar:
            for index in range(self.steps):
                for group in optimizer.param_groups:
                    group["lr"] = self.lr * self._factor(index)
                batch = windows(self.corpus.train, starts[index], size.context)
                loss = self.gradients(*batch)
                nn.utils.clip_grad_norm_(self.parameters, 1.0)
                optimizer.step()
                self.train.append(loss.item())
                if (index + 1) % every == 0 or index + 1 == self.steps:
                    self.held_out.append((index + 1, self.evaluate()))
                bar.set_postfix_str(
                    f"loss {self.train[-1]:.3f}, held-out {self.held_out[-1][1]:.3f}", refresh=False
                )
                bar.update()

    def gradients(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of a batch; its gradients take the place of those that were there."""
        for parameter in self.parameters:
            parameter.grad = None
        loss = self.loss(tokens, targets)
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Held-out loss, nats per byte."""
        return self.loss(*held_out_batch(self.corpus, self.size)).item()

    def _factor(self, index: int) -> float:
        warmup = max(1, self.steps // 10)
        if index < warmup:
            return (index + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (index - warmup) / (self.steps - warmup)))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy per byte; in training the router's auxiliary loss, if any, on top."""
        autocast = torch.autocast(
            self.device.type, torch.bfloat16, enabled=has_bfloat16(self.device)
        )
        with autocast:
            output = self.model(input_ids=tokens)
        loss = nn.functional.cross_entropy(output.logits.float().flatten(0, 1), targets.flatten())
        if torch.is_grad_enabled() and output.aux_loss is not None:
            loss = loss + self.model.config.router_aux_loss_coef * output.aux_loss
        return loss


def help_texts(device: torch.device) -> Corpus:
    """The texts behind Python's `help()`, split by topic; they are no part of `read_corpus`."""
    from pydoc_data.topics import topics

    def digest(topic: str) -> bytes:
        return hashlib.sha256(topic.encode()).digest()

    ordered = sorted(topics, key=digest)
    held_out = {topic for topic in ordered if digest(topic)[0] % 8 == 0}
    parts = [
        "".join(topics[topic] for topic in ordered if (topic in held_out) == wanted).encode()
        for wanted in (False, True)
    ]
    train, other = (torch.frombuffer(bytearray(p), dtype=torch.uint8).to(device) for p in parts)
    files = (len(ordered) - len(held_out), len(held_out))
    return Corpus(train, other, files, hashlib.sha256(b"\0".join(parts)).hexdigest())


def held_out_batch(corpus: Corpus, size: Size) -> tuple[Tensor, Tensor]:
    """Tokens and targets (B, T) spread over the held-out text."""
    return corpus.held_out_batch(sequences=4 * size.batch, context=size.context)


def peft_difference(model: nn.Module, folder: Path, tokens: Tensor) -> float:
    """Load base and adapter with PEFT alone; relative difference of its logits from the model's."""
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "base", experts_implementation="eager")
    loaded = peft.PeftModel.from_pretrained(base.to(tokens.device), folder / "adapter").eval()
    with torch.no_grad():
        theirs, ours = loaded(input_ids=tokens).logits, model.eval()(input_ids=tokens).logits
    return ((ours - theirs).norm() / theirs.norm()).item()


def plot(path: Path, runs: Iterable[Run]) -> None:
    """Train and held-out loss of the runs, one after the other."""
    start = 0
    with curves(path, "loss, nats per byte (line: held out, pale: train with router loss)") as axes:
        for run, color in zip(runs, ("tab:gray", "tab:blue"), strict=False):
            end = start + len(run.train)
            axes.plot(range(start + 1, end + 1), run.train, color=color, alpha=0.35)
            steps, losses = zip(*run.held_out, strict=True)
            label = f"{run.name}: {losses[0]:.3f} to {losses[-1]:.3f}"
            axes.plot([start + step for step in steps], losses, color=color, label=label)
            start = end
            axes.axvline(start, color="black", linestyle=":", linewidth=1)


def finetune(
    options: argparse.Namespace, size: Size, device: torch.device, package: Package
) -> None:
    """Both trainings, the files and the comparison with PEFT."""
    limits = {"context": size.context, "max_bytes": size.max_bytes, "device": device}
    corpus = read_corpus(options.corpus, **limits)
    lora_corpus = (
        read_corpus(options.lora_corpus, **limits) if options.lora_corpus else help_texts(device)
    )
    folder, integrations = options.out_dir, package.module.integrations
    folder.mkdir(parents=True, exist_ok=True)

    implementation = integrations.use_in_transformers()
    model = build_model(size, implementation=implementation, seed=options.seed).to(device)
    shared = {"size": size, "device": device}
    base = Run(
        "base",
        model=model,
        corpus=corpus,
        steps=options.base_steps or size.base_steps,
        lr=options.base_lr,
        seed=options.seed,
        **shared,
    )
    base.run()
    model.save_pretrained(folder / "base")

    model = integrations.attach_lora(
        model,
        options.rank,
        options.alpha,
        target_modules=options.target_modules,
        use_rslora=options.rslora,
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters()) - trained
    lora = Run(
        "LoRA",
        model=model,
        corpus=lora_corpus,
        steps=options.steps or size.lora_steps,
        lr=options.lr,
        seed=options.seed + 1,
        **shared,
    )
    lora.run()
    integrations.save_peft_adapter(model, folder / "adapter")

    plot(folder / "loss.png", (base, lora))
    difference = peft_difference(model, folder, held_out_batch(lora_corpus, size)[0])
    results = {
        "package": package.describe(),
        "device": device_name(device),
        "parameters": {"base": total, "lora": trained},
        "runs": {r.name: {"train": r.train, "held_out": r.held_out} for r in (base, lora)},
        "peft_difference": difference,
    }
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    print(
        f"LoRA trained {trained:,} parameters over {total:,} frozen ones\n"
        f"held-out loss: base {base.held_out[0][1]:.3f} to {base.held_out[-1][1]:.3f}, "
        f"then LoRA {lora.held_out[0][1]:.3f} to {lora.held_out[-1][1]:.3f} nats per byte\n"
        f"PEFT over {folder / 'base'} and {folder / 'adapter'}: logits differ by {difference:.1e}"
    )
    if not difference <= AGREEMENT:
        raise DemoError(
            f"PEFT's logits differ by {difference:.1e}, at most {AGREEMENT:.0e} was expected; this "
            "is a defect of the package, please report it"
        )


def run(options: argparse.Namespace) -> int:
    """Load the package and train; returns the exit status."""
    size = SIZES["tiny" if options.tiny else "small"]
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    found = prepare_device(options.device, threads=options.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)  # transformers has others too
    package, device = load_first([found] if options.device else [found, torch.device("cpu")])
    print(
        f"{package.repo_id} version {package.version}, {package.variant}, on {device_name(device)}"
    )
    finetune(options, size, device, package)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse(arguments)
    return exit_status("finetune_moe_lora", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
