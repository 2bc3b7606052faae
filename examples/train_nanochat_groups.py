"""Train with nanochat's parameter groups and schedules on `MuonAdamW`.

    python examples/train_nanochat_groups.py            # a small model
    python examples/train_nanochat_groups.py --steps 2000 --channels 512 --layers 8 --device cuda

The groups are those of nanochat's setup: one AdamW group each for the head, the embedding and the
norms, with rates of their own that go by 1 / sqrt(channels), and one Muon group per matrix shape.
MuonAdamW does not need the shapes apart; old scripts keep them. Momentum warms up from 0.85, the
rates warm down at the end. --resume goes on from the checkpoint in --out-dir.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from demo.command_line import add_corpus, add_decoder, exit_status
from demo.corpus import read_corpus, windows
from demo.device import prepare_device
from demo.model import Decoder, ModelConfig
from demo.package import load_first
from tqdm import tqdm

REFERENCE_CHANNELS = 768  # the width that nanochat's AdamW rates were tuned at
MOMENTUM = (0.85, 0.95)
MOMENTUM_STEPS = 300
WARMDOWN = 0.4  # share of the steps


def nanochat_groups(model: Decoder) -> list[dict[str, Any]]:
    """AdamW for head, embedding and norms, Muon for the matrices of the blocks, by shape."""
    scale = (model.config.channels / REFERENCE_CHANNELS) ** -0.5
    adamw = {"kind": "adamw", "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {**adamw, "params": [model.head.weight], "lr": 0.004 * scale},
        {**adamw, "params": [model.embedding.weight], "lr": 0.2 * scale},
        {**adamw, "params": vectors, "lr": 0.01 * scale},
    ]
    muon = {"kind": "muon", "lr": 0.02, "momentum": 0.95, "ns_steps": 5, "beta2": 0.95}
    for shape in sorted({tuple(p.shape) for p in matrices}):
        alike = [p for p in matrices if tuple(p.shape) == shape]
        groups.append({**muon, "params": alike, "weight_decay": 0.1})
    for group in groups:
        group["initial_lr"] = group["lr"]
    return groups


def schedule(optimizer: torch.optim.Optimizer, step: int, steps: int) -> None:
    """Rates warm down linearly over the last steps, momentum warms up over the first."""
    rate = min(1.0, (steps - step) / max(WARMDOWN * steps, 1))
    part = min(step / MOMENTUM_STEPS, 1)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * rate
        if group["kind"] == "muon":
            group["momentum"] = (1 - part) * MOMENTUM[0] + part * MOMENTUM[1]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    add_decoder(parser)
    add_corpus(parser, "demo_out/nanochat")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from --out-dir")
    parser.add_argument("--offload", action="store_true", help="keep the state in host memory")
    parser.add_argument("--device", help="torch device; default: CUDA where it is, else the CPU")
    return parser.parse_args(arguments)


def save(opt: Any, model: Decoder, optimizer: Any, step: int, folder: Path) -> None:
    """The model and the step first: the optimizer's file, whose name has the step, comes last."""
    target = folder / f"step-{step:06d}"
    target.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "step": step}, target / "model.pt")
    opt.save_optimizer(optimizer, target)


def clear(folder: Path) -> None:
    """Forget the checkpoints of an earlier run, which --resume would take for this one's."""
    for path in folder.glob("step-*"):
        shutil.rmtree(path)


def load(opt: Any, model: Decoder, optimizer: Any, folder: Path) -> int:
    """Load the last whole checkpoint; returns its step, 0 if there is none."""
    whole = sorted(path.parent for path in folder.glob("step-*/optimizer.safetensors"))
    if not whole:
        return 0
    saved = torch.load(whole[-1] / "model.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    opt.load_optimizer(optimizer, whole[-1])
    return saved["step"]


def train(options: argparse.Namespace) -> int:
    """Train to the end; returns the exit status."""
    found = prepare_device(options.device, threads=None)
    package, device = load_first([found] if options.device else [found, torch.device("cpu")])
    opt = package.module
    corpus = read_corpus(options.corpus, context=options.context, max_bytes=2**22, device=device)
    config = ModelConfig(options.layers, options.channels, options.heads, options.context)
    model = Decoder(config, seed=0).to(device)
    optimizer = opt.MuonAdamW(nanochat_groups(model))
    if options.offload:
        optimizer.turn_on_cpu_offload()
    if not options.resume:
        clear(options.out_dir)
    first = load(opt, model, optimizer, options.out_dir) if options.resume else 0
    print(f"{package.variant}, {len(optimizer.param_groups)} groups, from step {first}")
    starts = corpus.train_starts(
        seed=0, steps=options.steps, batch=options.batch, context=options.context
    )
    held_out = corpus.held_out_batch(sequences=16, context=options.context)
    for step in tqdm(range(first, options.steps), initial=first, total=options.steps):
        model(*windows(corpus.train, starts[step], options.context)).backward()
        schedule(optimizer, step, options.steps)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            save(opt, model, optimizer, step + 1, options.out_dir)
    with torch.no_grad():
        print(f"held-out loss after {options.steps} steps: {model(*held_out).item():.6f} nats/byte")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse(arguments)
    return exit_status("train_nanochat_groups", lambda: train(options))


if __name__ == "__main__":
    sys.exit(main())
