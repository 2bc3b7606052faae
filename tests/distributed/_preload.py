"""Imported once by the server that ranks are forked from: torch and the package under test."""

import os

import torch.distributed.tensor  # noqa: F401


def load():
    from kernels import get_kernel

    return get_kernel(
        os.environ["RANKS_REPO_ID"],
        version=1,
        backend=os.environ["RANKS_DEVICE"],
        trust_remote_code=True,
    )


# Loading a CUDA variant starts CUDA, after which a process must not be forked.
opt = load() if os.environ["RANKS_DEVICE"] == "cpu" else None
