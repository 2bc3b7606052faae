"""What compute-sanitizer watches: every compiled kernel at odd shapes, and one planted bug.

    compute-sanitizer --tool memcheck python -m tests.kernels.sanitizer_cases kernels
    compute-sanitizer --tool memcheck python -m tests.kernels.sanitizer_cases planted

`tools/sanitize.py` runs both: the first must be clean, the second must be caught. The caching
allocator would hide most wrong addresses, so PYTORCH_NO_CUDA_MEMORY_CACHING=1 is required.
"""

from __future__ import annotations

import os
import sys

import torch

from .._compare import assert_same_bits
from .test_nf4_dequant import DTYPES, STACKS, oracle


def kernels() -> None:
    """nf4_dequant over all its stacks, dtypes and unknown ids, compared with the oracle."""
    import tomllib
    from kernels import get_kernel

    from ..conftest import ROOT

    repo_id = tomllib.loads((ROOT / "build.toml").read_text())["general"]["hub"]["repo-id"]
    os.environ["LOCAL_KERNELS"] = f"{repo_id}={ROOT}"
    opt = get_kernel(repo_id, version=1, trust_remote_code=True)
    device, count = torch.device("cuda"), 0
    for stack in STACKS:
        arguments = stack.arguments(device)
        ids = [stack.experts - 1, 0]
        for dtype in DTYPES:
            # The packed bytes may have room for one expert more than the stack has.
            active = torch.tensor([*ids, stack.experts + 1, -1], device=device)
            out = opt.nf4_dequant(active_experts=active, dtype=dtype, **arguments)
            assert_same_bits(out[:2], oracle(arguments, ids, dtype))
            assert out[2:].isnan().all()
            count += 1
    print(f"{count} cases, all right")


def planted() -> None:
    """A kernel that writes behind its buffer, to show that the tool sees such a thing here."""
    import triton
    import triton.language as tl

    @triton.jit
    def overrun(out, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out + at, at, mask=at < n + 1)  # one element too many

    out = torch.empty(1000, dtype=torch.int32, device="cuda")
    overrun[(1,)](out, out.numel(), BLOCK=1024)
    torch.cuda.synchronize()


if __name__ == "__main__":
    assert os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1", "see the module's docstring"
    {"kernels": kernels, "planted": planted}[sys.argv[1]]()
