"""Check and time every tile of the matrix products on this GPU, to fill the table that picks them.

    python3 tools/tune.py symmetric_matmul --out tune.json
    python3 tools/tune.py matmul_add --out tune.json

Each tile runs in a process of its own with a time limit, since a kernel that hangs would take the
GPU with it; what is known is printed and written after every one. A tile is checked against integer
products before it is timed. Times are medians of CUDA-graph replays beside cuBLAS on the same
operands; TFLOP/s count dense products (2 m n k) for all.

The last table fits `block_time` and `tile_time` of kernels-src/products/tiles_sm90.h:
the time of a call is rounds of tiles times (stages of 64 in k x block_time + tile_time). Copy them
there to let `auto` take the tiles.

If a tile hangs, build once with `cuda-flags = ["-DOPTIMIZER_BOUNDED_WAITS"]` in build.toml's
[kernel.products_sm90]: a wait that does not end then says which one it is and stops the
kernel. The message's function call serializes the products, so that build is not for timing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from harness import built_package, orthogonalize  # noqa: E402  found there

# batch, m, n of the matrices that the benchmark of orthogonalize times.
SHAPES = [tuple(map(int, shape.split("x"))) for shape in orthogonalize.SHAPES]
OPS = ("symmetric_matmul", "matmul_add")
REPLAYS, ROUNDS = 5, 7
LIMIT = 90  # seconds per tile


def main() -> int:
    options = _parser().parse_args()
    if options.tile is not None:
        return _child(options)
    tiles, rows = _tiles(options.op), []
    failed = []
    for tile in tiles:
        command = [sys.executable, __file__, options.op, "--tile", tile, "--dtype", options.dtype]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LIMIT, check=False
            )
            output, errors, code = done.stdout, done.stderr, done.returncode
        except subprocess.TimeoutExpired as expired:
            output, errors, code = _text(expired.stdout), _text(expired.stderr), "time limit"
        found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        rows += found
        if code != 0:
            failed.append(tile)
            print(f"{tile}: FAILED ({code})\n{errors[-3000:]}", flush=True)
        for row in found:
            print(_line(row), flush=True)
        if options.out:
            options.out.write_text(json.dumps({"rows": rows, "failed": failed}, indent=1))
    _summary(rows)
    return len(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=OPS)
    parser.add_argument("--out", type=Path, help="file for all rows, as JSON")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--tile", help="run this tile here instead of every tile in a process")
    return parser


def _text(output: bytes | str | None) -> str:
    return output.decode() if isinstance(output, bytes) else output or ""


def _tiles(op: str) -> list[str]:
    import ast

    source = ROOT / "torch-ext" / "optimizer" / "kernels" / "products" / f"{op}.py"
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TILES":
            return list(eval(compile(ast.Expression(node.value), str(source), "eval")))
    raise RuntimeError(f"{source} assigns no TILES")


def problems(op: str):
    """(batch, m, k, n, with C): X X^T and b A + c A^2, or Q X and a X + B X."""
    for batch, m, n in SHAPES:
        if op == "symmetric_matmul":
            yield batch, m, n, m, False
            yield batch, m, m, m, True
        else:
            yield batch, m, m, n, False
            yield batch, m, m, n, True


def _runner(built: ModuleType, op: str):
    """The op as a function of its operands and a tile's name."""
    module = built_package.module(built, f"kernels.products.{op}")
    if op == "symmetric_matmul":
        return module.symmetric_matmul
    ops = built_package.module(built, "_ops").ops

    def run(A, B, *, out, tile, C=None, alpha=1.0, beta=0.0):
        ops.matmul_add(A, B, C, out, alpha, beta, module.TILES.index(tile))

    return run


def _child(options: argparse.Namespace) -> int:
    import torch

    run = _runner(built_package.load().package, options.op)
    dtype, half = getattr(torch, options.dtype), options.op == "symmetric_matmul"
    for batch, m, k, n, added in problems(options.op):
        _check(run, options.tile, batch, m, k, n, added, dtype, half)
        A = torch.randn(batch, m, k, device="cuda").to(dtype)
        B = A.mT if half else torch.randn(batch, k, n, device="cuda").to(dtype)
        C = torch.randn(batch, m, n, device="cuda").to(dtype) if added else None
        out, beta = A.new_empty(batch, m, n), 0.5 if added else 0.0
        ours = {"A": A, "C": C, "beta": beta, "out": out, "tile": options.tile}
        if not half:
            ours["B"] = B
        calls = {
            "ours": lambda ours=ours: run(**ours),
            "cublas": lambda C=C, A=A, B=B, beta=beta: (
                torch.bmm(A, B) if C is None else torch.baddbmm(C, A, B, beta=beta)
            ),
        }
        times = _times(calls)
        row = {"op": options.op, "tile": options.tile, "dtype": options.dtype}
        row |= {"batch": batch, "m": m, "k": k, "n": n, "added": added}
        row |= {f"{name}_ms": times[name] for name in times}
        if half and options.tile.startswith("sm90"):
            row["bits_of_mma_sync"] = torch.equal(
                out, run(**{**ours, "out": None, "tile": "64x64"})
            )
        print(json.dumps(row), flush=True)
    return 0


def _check(run, tile, batch, m, k, n, added, dtype, half) -> None:
    """The last matrix of the batch against float64, integers exactly."""
    import torch

    A = torch.randint(-2, 3, (batch, m, k), device="cuda").to(dtype)
    B = A.mT if half else torch.randint(-2, 3, (batch, k, n), device="cuda").to(dtype)
    C = torch.randint(-2, 3, (batch, m, n), device="cuda").to(dtype) if added else None
    if half and added:
        C = C.triu() + C.triu(1).mT
    out = torch.full((batch, m, n), torch.nan, device="cuda", dtype=dtype)
    extra = {} if half else {"B": B}
    run(A, **extra, alpha=0.25, C=C, beta=2.0 if added else 0.0, out=out, tile=tile)
    for i in {0, batch // 2, batch - 1}:
        expected = 0.25 * (A[i].double() @ B[i].double())
        if added:
            expected += 2 * C[i].double()
        if not torch.equal(out[i], expected.float().to(dtype)):
            wrong = (out[i] != expected.float().to(dtype)).nonzero()
            raise AssertionError(
                f"{tile}, {batch}x{m}x{k}x{n}, added={added}: matrix {i} has {len(wrong)} wrong "
                f"elements, the first at {wrong[0].tolist()}, the last at {wrong[-1].tolist()}"
            )


def _times(calls: dict) -> dict[str, float]:
    """Median milliseconds per call of graphs of REPLAYS calls, taking turns."""
    import torch

    graphs = {}
    for name, call in calls.items():
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(REPLAYS):
                call()
    times = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) / REPLAYS)
    return {name: statistics.median(values) for name, values in times.items()}


def _rate(row: dict, name: str) -> float:
    return 2e-9 * row["batch"] * row["m"] * row["n"] * row["k"] / row[f"{name}_ms"]


def _line(row: dict) -> str:
    shape = f"{row['batch']}x{row['m']}x{row['k']}x{row['n']}{'+C' * row['added']}"
    bits = {True: "same bits", False: "other bits"}.get(row.get("bits_of_mma_sync"), "")
    return (
        f"{row['tile']:<20}{shape:<24}{row['ours_ms']:9.4f} ms{_rate(row, 'ours'):8.0f} TFLOP/s"
        f"{_rate(row, 'cublas'):8.0f} cuBLAS {bits}"
    )


def _sides(tile: str) -> tuple[int, int]:
    rows, cols = map(int, tile.removeprefix("sm90_").split("x"))
    return rows, cols


def rounds_of(row: dict, processors: int) -> int:
    """Tiles of the busiest multiprocessor: `tiles_of` and `pick` of tiles_sm90.h."""
    rows, cols = _sides(row["tile"])
    if row["op"] == "symmetric_matmul":
        m = row["m"]
        tiles = sum(-(-min(first + cols, m) // rows) for first in range(0, m, cols))
    else:
        tiles = -(-row["m"] // rows) * -(-row["n"] // cols)
    return -(-tiles * row["batch"] // processors)


def fit(rows: list[dict], processors: int) -> tuple[float, float]:
    """block_time and tile_time in microseconds: least squares of relative errors, none negative."""
    pairs = []
    for row in rows:
        count, time = rounds_of(row, processors), 1000 * row["ours_ms"]
        pairs.append((count * -(-row["k"] // 64) / time, count / time))
    xx, xy, yy = (sum(p[i] * p[j] for p in pairs) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(p[i] for p in pairs) for i in (0, 1))
    determinant = xx * yy - xy * xy
    if determinant > 1e-12 * xx * yy:
        block, tile = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
        if block > 0 and tile >= 0:
            return block, tile
    return x / xx, 0.0


def _summary(rows: list[dict]) -> None:
    import torch

    processors = torch.cuda.get_device_properties(0).multi_processor_count
    print("\nbest per problem")
    keys = ("batch", "m", "k", "n", "added")
    for key in dict.fromkeys(tuple(row[k] for k in keys) for row in rows):
        best = min(
            (r for r in rows if tuple(r[k] for k in keys) == key), key=lambda r: r["ours_ms"]
        )
        print(f"{best['cublas_ms'] / best['ours_ms']:6.2f} x cuBLAS  {_line(best)}")
    print("\nfor tiles_sm90.h: tile, block_time, tile_time (us)")
    for tile in dict.fromkeys(row["tile"] for row in rows):
        if tile.startswith("sm90"):
            block, each = fit([row for row in rows if row["tile"] == tile], processors)
            print(f"{tile:<20}{block:8.4f}{each:8.3f}")


if __name__ == "__main__":
    sys.exit(main())
