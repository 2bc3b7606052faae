"""Profile a few optimizer steps: a Chrome trace, the history of memory, and what each part costs.

    python examples/profile_step.py                              # steps 5 to 7 of a small model
    python examples/profile_step.py --start 10 --count 5 --channels 1024 --layers 12

The package is the one in this checkout's build/ folder, loaded with `kernels.get_kernel` as any
user loads it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from demo.command_line import add_decoder, exit_status
from demo.model import VOCABULARY, Decoder, ModelConfig
from demo.package import load_first


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", type=int, default=5, help="first profiled step")
    parser.add_argument("--count", type=int, default=3, help="profiled steps")
    parser.add_argument("--out", type=Path, default=Path("profile_out"), help="folder of the files")
    add_decoder(parser, channels=256)
    parser.add_argument("--device", help="torch device; default: CUDA where it is, else the CPU")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Train and profile; returns the exit status."""
    preferred = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    package, device = load_first([torch.device(preferred)])
    opt = package.module
    config = ModelConfig(options.layers, options.channels, options.heads, options.context)
    model = Decoder(config, seed=0).to(device)
    groups = opt.get_default_muon_param_groups(model)
    optimizer = opt.Muon(groups, lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    with opt.profile_steps(options.start, options.count, options.out) as profile:
        for _ in range(options.start + options.count):
            size = (options.batch, options.context + 1)
            tokens = torch.randint(VOCABULARY, size, generator=generator).to(device)
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            profile.step()
    print(optimizer.report(verbose=True))
    for path in profile.files:
        print(path)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse(arguments)
    return exit_status("profile_step", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
