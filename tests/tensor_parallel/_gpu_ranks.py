"""One rank of the GPU tests, a program of its own: torch reads its variables at import.

``python -m tests.tensor_parallel._gpu_ranks FOLDER RANK WORLD PLACEMENT REPO_ID JOBS`` does these
jobs and leaves FOLDER/RANK.json. "shared" puts all ranks on one GPU, over gloo; "own" gives each
one of its own, over NCCL.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

PATIENCE = 150  # seconds for the jobs of a set of ranks
VARIABLES = {
    "CUDA_MODULE_LOADING": "EAGER",  # a kernel that is loaded late waits for one that waits for it
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def results_of(
    world: int, placement: str, repo_id: str, root: Path, jobs: str
) -> list[dict[str, Any]]:
    """What every rank left of the `JOBS` of a name, in their order.

    Raises:
        AssertionError: A rank left nothing in time; the message has the end of what each wrote.
    """
    folder = Path(tempfile.mkdtemp(prefix="tp-"))  # short: sockets lie in it
    variables = os.environ | VARIABLES | {"TMPDIR": str(folder)}
    variables["LOCAL_KERNELS"] = f"{repo_id}={root}"
    module, ranks = f"{__package__}._gpu_ranks", []
    logs = [folder / f"{rank}.log" for rank in range(world)]
    for rank, log in enumerate(logs):
        words = (str(folder), str(rank), str(world), placement, repo_id, jobs)
        with log.open("w") as out:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, *words],
                    cwd=root,
                    env=variables,
                    stdout=out,
                    stderr=out,
                )
            )
    end = time.monotonic() + PATIENCE
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, end - time.monotonic()))
    for rank in ranks:
        rank.kill()
        rank.wait()
    found = [folder / f"{rank}.json" for rank in range(world)]
    kept = os.environ.get("OUT")
    if kept:
        place = Path(kept) / f"tensor_parallel-{world}-{placement}-{jobs}"
        shutil.copytree(folder, place, dirs_exist_ok=True)
    tails = "\n".join(f"rank {r}: {log.read_text()[-3000:]}" for r, log in enumerate(logs))
    assert all(path.is_file() for path in found), f"a rank left no results:\n{tails}"
    results = [json.loads(path.read_text()) for path in found]
    shutil.rmtree(folder, ignore_errors=True)
    return results


def _main(folder: str, rank: str, world: str, placement: str, repo_id: str, jobs: str) -> None:
    import torch
    from kernels import get_kernel
    from torch import distributed

    index = int(rank) if placement == "own" else 0
    torch.cuda.set_device(index)
    distributed.init_process_group(
        "nccl" if placement == "own" else "gloo",
        store=distributed.FileStore(f"{folder}/store", int(world)),
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=100),
    )
    opt = get_kernel(repo_id, version=1, backend="cuda", trust_remote_code=True)
    device = torch.device("cuda", index)
    results: dict[str, Any] = {}
    for job in JOBS[jobs]:
        begun = time.monotonic()
        results[job.__name__] = _outcome(job, opt, device)
        print(job.__name__, f"{time.monotonic() - begun:.1f} s", flush=True)
    unfinished = Path(folder, f"{rank}.tmp")
    unfinished.write_text(json.dumps(results))
    unfinished.rename(Path(folder, f"{rank}.json"))
    distributed.barrier()
    os._exit(0)  # what symmetric memory keeps is not needed, and its order of release not ours


def _outcome(job: Callable, opt: Any, device: Any) -> Any:
    try:
        return job(opt, device)
    except Exception:
        return {"failed": traceback.format_exc()}


def _products(opt: Any, device: Any) -> dict:
    import torch

    from . import _cases

    return _cases.run_all(opt, _cases.GPU, str(device), torch.bfloat16, "always")


def _block(tp: Any, x: Any, w: Any, v: Any, scaling: str | None) -> Any:
    (h,) = tp.all_gather_matmul(x, [w], 0, scaling=scaling, fuse="always", strict=True)
    h = h.relu()
    return tp.matmul_reduce_scatter(h, v, "sum", 0, scaling=scaling, fuse="always", strict=True)


def _inputs(device: Any, seed: int = 0) -> list:
    import torch
    from torch import distributed

    made = torch.Generator(device).manual_seed(100 * seed + distributed.get_rank())
    sizes = (64, 128), (128, 96), (96, 128)
    options = {"generator": made, "device": device, "dtype": torch.bfloat16}
    return [torch.randn(size, **options).mul_(0.1).requires_grad_() for size in sizes]


def _calls(opt: Any) -> dict[str, int]:
    records = opt.tensor_parallel.comm_report()
    return {f"{record.op}/{record.path}": record.calls for record in records}


def _compiled(opt: Any, device: Any) -> dict:
    """A compiled block against the eager one, forward and backward, in one graph."""
    import torch

    tp, found = opt.tensor_parallel, {}
    for scaling in (None, "rowwise_sharded"):
        inputs = _inputs(device)

        def block(*tensors: Any, scaling: str | None = scaling) -> Any:
            return _block(tp, *tensors, scaling)

        eager = block(*inputs)
        wanted = [eager, *torch.autograd.grad(eager.float().square().sum(), inputs)]
        tp.reset_comm_report()
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")(*inputs)
        got = [compiled, *torch.autograd.grad(compiled.float().square().sum(), inputs)]
        errors = [
            ((a.float() - b.float()).norm() / b.float().norm()).item()
            for a, b in zip(got, wanted, strict=True)
        ]
        found[str(scaling)] = {"errors": errors, "calls": _calls(opt)}
    return found


def _captured(opt: Any, device: Any) -> dict:
    """A block that is replayed from a CUDA graph on other numbers, against an eager call."""
    import torch

    tp, found = opt.tensor_parallel, {}
    for number, scaling in enumerate((None, "rowwise_sharded")):
        with torch.no_grad():
            inputs = [x.detach() for x in _inputs(device)]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                _block(tp, *inputs, scaling)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            tp.reset_comm_report()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = _block(tp, *inputs, scaling)
            calls, equal = _calls(opt), []
            for seed in (1, 2, 3):
                if seed == 3:  # 8 MiB of workspace, then 16
                    larger = torch.cat([inputs[0]] * 2 ** (8 + number))
                    _block(tp, larger, *inputs[1:], scaling)
                for x, other in zip(inputs, _inputs(device, seed), strict=True):
                    x.copy_(other)
                graph.replay()
                torch.cuda.synchronize()
                again = out.clone()
                equal.append(torch.equal(again, _block(tp, *inputs, scaling)))
            found[str(scaling)] = {"equal": equal, "calls": calls}
    return found


def _small(opt: Any, device: Any) -> str:
    """The reason why a small product is not fused by itself."""
    x, w, _ = _inputs(device)
    try:
        opt.tensor_parallel.all_gather_matmul(x, [w], 0, strict=True)
    except opt.CommUnavailable as error:
        return error.reason
    return "fused"


def _newton_schulz(opt: Any, device: Any) -> dict[str, list[float]]:
    """By matrix, method and schedule: relative distances of this rank's rows from those of
    `orthogonalize` and from those in float64, and of the former from the latter.
    """
    import torch
    from torch import distributed

    rank, world = distributed.get_rank(), distributed.get_world_size()
    found = {}
    for m, n in ((512, 512), (1000, 328), (256, 640), (2048, 2048)):
        made = torch.Generator(device).manual_seed(m)
        gaussian = torch.randn(m, n, generator=made, device=device)
        decaying = gaussian / torch.arange(1, n + 1, device=device)
        sizes = [len(part) for part in torch.arange(m).tensor_split(world)]
        for name, x in {"gaussian": gaussian, "decaying": decaying}.items():
            for method in ("auto", "polar_express"):
                picked = opt.orthogonalize(x, method).split(sizes)[rank].double()
                exact_method = "gram_polynomial" if method == "auto" else method
                exact = opt.orthogonalize(x.double(), exact_method).split(sizes)[rank]
                for schedule in ("rs_ag", "gram_ar"):
                    got = opt.tensor_parallel.sharded_newton_schulz(
                        x.split(sizes)[rank], None, schedule, method=method, rows=sizes
                    ).double()
                    pairs = (got, picked), (got, exact), (picked, exact)
                    found[f"{name}-{m}x{n}/{method}/{schedule}"] = [
                        ((a - b).norm() / b.norm()).item() for a, b in pairs
                    ]
    return found


def _pipelined(opt: Any, device: Any) -> dict[str, Any]:
    """Calls whose product is not exact, and what the last rank's absence gives."""
    import torch
    from torch import distributed

    rank, world = distributed.get_rank(), distributed.get_world_size()
    rows, inner, columns, half = 200, 512, 328, torch.bfloat16
    product = opt.tensor_parallel.PipelinedAllGatherMatmul(
        None, rows, inner, half, device, timeout_ms=3000, blocks=24
    )

    def part(call: int, of: int) -> torch.Tensor:
        made = torch.Generator(device).manual_seed(1000 * call + of)
        return torch.randint(-3, 4, (rows, inner), generator=made, device=device).to(half)

    b = torch.randint(-3, 4, (columns, inner), device=device).to(half).T
    outs, exact = [], []
    for call in range(12):
        whole = torch.cat([part(call, of) for of in range(world)]).double()
        exact.append((whole @ b.double()).to(half))
    torch.cuda.synchronize()
    distributed.barrier()
    for call in range(12):
        outs.append(product(part(call, rank), b))
        if (call + rank) % 5 == 0:
            time.sleep(0.02)
    product.check(wait=True)
    wrong = [call for call in range(12) if not torch.equal(outs[call], exact[call])]
    distributed.barrier()
    late = "none"
    if rank < world - 1:
        product(part(12, rank), b)
        try:
            product.check(wait=True)
        except RuntimeError as error:
            late = str(error)
    distributed.barrier()
    product.close()
    return {"wrong": wrong, "calls": product.calls, "late": late}


# Processes that share a GPU wait for each other's turns: not all in the time of one set.
JOBS = {
    "products": (_products,),
    "others": (_compiled, _captured, _small, _newton_schulz, _pipelined),
}


if __name__ == "__main__":
    _main(*sys.argv[1:])
