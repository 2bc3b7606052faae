"""Train a byte-level transformer on several ranks with FSDP2 and Muon, with checkpoints.

    torchrun --standalone --nproc-per-node 2 examples/train_fsdp2.py              # GPUs, else CPU
    torchrun --standalone --nproc-per-node 8 examples/train_fsdp2.py --channels 1024 --layers 16
    torchrun ... examples/train_fsdp2.py --resume      # go on, on any number of ranks

Parameters, gradients and state are shards; `Muon` sees that from the parameters alone. Checkpoints
are written by torch.distributed.checkpoint, with --async-save while training goes on. SIGINT or
SIGTERM, as at the end of a cluster's time slot, saves and stops. The text is the source of Python's
standard library, found on this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from demo.checkpoint import differences
from demo.command_line import INTERRUPTED, StopSignals, add_corpus, add_decoder, exit_status
from demo.config import DemoError, RunConfig
from demo.corpus import Corpus, read_corpus, windows
from demo.device import device_name, has_bfloat16, joined
from demo.model import Decoder, ModelConfig
from demo.package import load_first
from demo.report import curves, smooth
from demo.sharded_checkpoint import ShardedCheckpoints
from demo.training import learning_rate_factor
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--optimizer", choices=("Muon", "MuonAdamW"), default="Muon")
    add("--lr", type=float, default=8e-3, help="peak learning rate of all parameters")
    add("--steps", type=int, default=300)
    add_decoder(parser, batch=24)  # of all ranks together
    add("--seed", type=int, default=0, help="of the weights and the batches")
    add("--replicas", type=int, default=1, help="copies of the model (HSDP), each in shards")
    add_corpus(parser, "demo_out/fsdp2")
    add("--save-every", type=int, default=100, help="steps between checkpoints")
    add("--async-save", action="store_true", help="write checkpoints while training goes on")
    add("--report-every", type=int, default=10, help="steps between reports of the loss")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --out-dir")
    add("--device", choices=("cpu", "cuda"), help="default: CUDA where it is, else the CPU")
    return parser.parse_args(arguments)


def run_config(options: argparse.Namespace, device: torch.device) -> RunConfig:
    """What decides the numbers of the run, except for how many ranks add up the gradients."""
    return RunConfig(
        optimizer=options.optimizer,
        lr=options.lr,
        model=ModelConfig(options.layers, options.channels, options.heads, options.context),
        batch=options.batch,
        steps=options.steps,
        eval_sequences=16,
        autocast=has_bfloat16(device),
        seed=options.seed,
    )


def sharded_model(run: RunConfig, device: torch.device, replicas: int) -> nn.Module:
    """The same model on all ranks, then a shard of it on each."""
    world = distributed.get_world_size()
    if world % replicas or run.batch % world:
        raise DemoError(
            f"{world} ranks: --replicas {replicas} must divide them, and they --batch {run.batch}"
        )
    mesh = init_device_mesh(
        device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard")
    )
    kept = torch.bfloat16 if run.autocast else None  # parameters and their shards stay float32
    options: dict[str, Any] = {
        "mesh": mesh if replicas > 1 else mesh["shard"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=kept, reduce_dtype=torch.float32),
    }
    model = Decoder(run.model, seed=run.seed).to(device)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def build_optimizer(opt: Any, run: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Muon for the matrices of the blocks, AdamW for the rest, at one learning rate."""
    muon, adamw = opt.get_default_muon_param_groups(model, no_decay=False)
    if run.optimizer == "Muon":
        return opt.Muon([muon, adamw], lr=run.lr, weight_decay=run.weight_decay)
    muon["adjust_lr_fn"] = "match_rms_adamw"  # so that one learning rate serves both groups
    shared = {"lr": run.lr, "weight_decay": run.weight_decay}
    return opt.MuonAdamW([muon | shared, adamw | shared])


class Training:
    """Model, optimizer and data of this rank, the step that joins them, and the curve."""

    def __init__(
        self, opt: Any, run: RunConfig, corpus: Corpus, device: torch.device, replicas: int
    ) -> None:
        self.run, self.corpus, self.device = run, corpus, device
        self.model = sharded_model(run, device, replicas)
        self.optimizer = build_optimizer(opt, run, self.model)
        context = run.model.context
        starts = corpus.train_starts(
            seed=run.seed, steps=run.steps, batch=run.batch, context=context
        )  # (steps, B)
        world, rank = distributed.get_world_size(), distributed.get_rank()
        self.starts = starts.chunk(world, dim=1)[rank]
        self.held_out = corpus.held_out_batch(sequences=run.eval_sequences, context=context)
        # In the checkpoint: how many steps are done and their losses, means over all ranks.
        self.curve = {
            "step": torch.tensor(0),
            "losses": torch.zeros(run.steps, dtype=torch.float64),
        }
        self._recent: list[Tensor] = []

    @property
    def done(self) -> int:
        """Steps whose loss was reported."""
        return int(self.curve["step"])

    def step(self, index: int) -> None:
        """One training step on this rank's share of the batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.lr * learning_rate_factor(index, self.run)
        tokens, targets = windows(self.corpus.train, self.starts[index], self.run.model.context)
        loss = self.model(tokens, targets)
        loss.backward()  # FSDP2 leaves the mean over all ranks
        nn.utils.clip_grad_norm_(self.model.parameters(), self.run.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._recent.append(loss.detach())

    def report(self, stop: bool) -> bool:
        """Add the steps since the last report to the curve; whether any rank wants to stop."""
        told = torch.stack([*self._recent, torch.tensor(float(stop), device=self.device)]).double()
        distributed.all_reduce(told)
        *losses, stops = (told / distributed.get_world_size()).tolist()
        self.curve["losses"][self.done : self.done + len(losses)] = torch.tensor(
            losses, dtype=torch.float64
        )
        self.curve["step"] += len(losses)
        self._recent = []
        return stops > 0

    @torch.no_grad()
    def evaluate(self) -> float:
        """Held-out loss, the same on all ranks."""
        return self.model(*self.held_out).item()


def train(
    training: Training, checkpoints: ShardedCheckpoints, options: argparse.Namespace
) -> float | None:
    """Train to the end or to a signal; the held-out loss, or None if a signal came."""
    steps, first = training.run.steps, training.done
    stop = False
    rank = distributed.get_rank()
    with StopSignals() as signals, tqdm(total=steps, initial=first, disable=rank > 0) as bar:
        for index in range(first, steps):
            training.step(index)
            bar.update()
            done = index + 1
            save = done % options.save_every == 0 or done == steps
            if save or done % options.report_every == 0:
                stop = training.report(signals.received)
                recent = training.curve["losses"][max(0, done - options.report_every) : done]
                bar.set_postfix_str(f"loss {recent.mean():.3f}", refresh=False)
            if save or stop:
                checkpoints.save(training.model, training.optimizer, training.curve, done)
            if stop and done < steps:
                break
        checkpoints.wait()
    return training.evaluate() if training.done == steps else None


def begin(training: Training, options: argparse.Namespace) -> ShardedCheckpoints:
    """Load the newest checkpoint if asked to; else forget those of an earlier run."""
    identity = {
        "run": vars(training.run) | {"model": vars(training.run.model)},
        "corpus": training.corpus.digest,
    }
    described = options.out_dir / "run.json"
    checkpoints = ShardedCheckpoints(
        options.out_dir / "checkpoints", in_background=options.async_save
    )
    if not options.resume:
        checkpoints.clear()
        if distributed.get_rank() == 0:
            options.out_dir.mkdir(parents=True, exist_ok=True)
            described.write_text(json.dumps(identity))
        return checkpoints
    newest = checkpoints.newest()
    if newest is None:
        raise DemoError(f"cannot resume: {options.out_dir} holds no checkpoint")
    different = list(differences(json.loads(described.read_text()), identity))
    if different:
        raise DemoError(f"cannot resume: {newest} is of another run: {'; '.join(different)}")
    checkpoints.load(training.model, training.optimizer, training.curve, newest)
    return checkpoints


def write_results(folder: Path, run: RunConfig, losses: list[float], held_out: float) -> None:
    """The loss curve as numbers and as a plot."""
    (folder / "results.json").write_text(json.dumps({"train": losses, "held_out": held_out}))
    with curves(folder / "loss.png", "train loss, nats per byte") as axes:
        label = f"{run.optimizer}, lr {run.lr:g}: held-out loss {held_out:.3f}"
        axes.plot(range(1, len(losses) + 1), smooth(losses, span=run.eval_every), label=label)


def run(options: argparse.Namespace, device: torch.device) -> int:
    """One rank's run; returns its exit status."""
    package, _ = load_first([device])
    config = run_config(options, device)
    corpus = read_corpus(options.corpus, context=options.context, max_bytes=2**22, device=device)
    training = Training(package.module, config, corpus, device, options.replicas)
    checkpoints = begin(training, options)
    if distributed.get_rank() == 0:
        print(
            f"{package.variant} on {distributed.get_world_size()} x {device_name(device)}, "
            f"from step {training.done}"
        )
    held_out = train(training, checkpoints, options)
    if distributed.get_rank() == 0:
        if held_out is None:
            print(f"stopped and saved after {training.done} steps; go on with --resume")
        else:
            write_results(options.out_dir, config, training.curve["losses"].tolist(), held_out)
            print(f"held-out loss after {config.steps} steps: {held_out:.6f} nats/byte")
    return INTERRUPTED if held_out is None else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse(arguments)

    def started() -> int:
        # gloo beside NCCL: saving in the background talks on the CPU.
        with joined(options.device, "train_fsdp2", "cpu:gloo,cuda:nccl") as device:
            return run(options, device)

    return exit_status("train_fsdp2", started)


if __name__ == "__main__":
    sys.exit(main())
