"""The listed shapes on a GPU: bits of any batch and run, and a prompt first result."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from .._checkout import ROOT
from .._compare import assert_same_bits

pytestmark = pytest.mark.gpu

SHAPES = (
    *((1, 2048, 2048), (1, 4096, 4096), (1, 8192, 8192), (1, 4096, 14336), (8, 4096, 4096)),
    *((16, 2048, 8192), (24, 1024, 4096), (48, 768, 768), (12, 768, 3072), (128, 768, 2048)),
    (256, 512, 2048),
)
BATCHES = (1, 2, 7)

# Loads the package, then times a first call; what the process and torch need is there before.
FIRST_CALL = """
import sys, time
import torch
from kernels import get_kernel

x = torch.randn(24, 1024, 4096, device=sys.argv[2])
torch.cuda.synchronize()
opt = get_kernel(sys.argv[1], version=1, backend="cuda", trust_remote_code=True)
start = time.perf_counter()
result = opt.orthogonalize(x)
torch.cuda.synchronize()
print(time.perf_counter() - start, bool(result.isfinite().all()))
"""


def inputs(shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """Gaussian matrices, every second one with rows that fall off as 1 / k: both ways are taken."""
    generator = torch.Generator(device).manual_seed(shape[1])
    x = torch.randn(shape, device=device, generator=generator)
    x[::2] /= torch.arange(1.0, shape[1] + 1, device=device)[:, None]
    return x


def test_these_are_the_listed_shapes() -> None:
    from benchmarks.harness.orthogonalize import SHAPES as LISTED

    assert tuple("x".join(map(str, shape)) for shape in SHAPES) == LISTED


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_bits_do_not_depend_on_the_batch_or_the_run(opt, device, shape) -> None:
    x = inputs((max(shape[0], *BATCHES), *shape[1:]), device)
    full = opt.orthogonalize(x)
    assert full.isfinite().all()
    assert_same_bits(opt.orthogonalize(x), full)
    for batch in BATCHES:
        for first in {0, len(x) - batch}:
            taken = slice(first, first + batch)
            assert_same_bits(opt.orthogonalize(x[taken]), full[taken])


@pytest.mark.alone
def test_the_first_result_is_there_within_a_second(repo_id, device) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL, repo_id, str(device)],
        env=os.environ | {"LOCAL_KERNELS": f"{repo_id}={ROOT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, finite = done.stdout.split()
    assert finite == "True"
    assert float(seconds) < 1
