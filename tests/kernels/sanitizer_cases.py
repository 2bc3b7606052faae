"""What compute-sanitizer watches: every compiled kernel at odd shapes, and one planted bug.

    compute-sanitizer --tool memcheck python -m tests.kernels.sanitizer_cases kernels
    compute-sanitizer --tool memcheck python -m tests.kernels.sanitizer_cases chain
    compute-sanitizer --tool memcheck python -m tests.kernels.sanitizer_cases experts
    compute-sanitizer --tool memcheck python -m tests.kernels.sanitizer_cases planted

`tools/sanitize.py` runs them: all but the last must be clean, the last must be caught. The caching
allocator would hide most wrong addresses, so PYTORCH_NO_CUDA_MEMORY_CACHING=1 is required.
"""

import functools
import importlib
import itertools
import os
import sys
from collections.abc import Iterator

import torch

from .._compare import assert_same_bits
from . import test_communication_gpu, test_packed_product_gpu, test_progress_matmul_gpu
from ._products import DTYPES as SYMMETRIC_DTYPES
from ._products import TILES, Problem, exact, laid_out, relaid, run_chain, run_dense
from ._tensors import DTYPES as LIST_DTYPES
from ._tensors import draw
from .test_nf4_dequant import DTYPES, STACKS, oracle
from .test_step_ops import OPS


@functools.cache
def loaded():
    """The package, from this checkout's build/."""
    import tomllib
    from kernels import get_kernel

    from ..conftest import ROOT

    repo_id = tomllib.loads((ROOT / "build.toml").read_text())["general"]["hub"]["repo-id"]
    os.environ["LOCAL_KERNELS"] = f"{repo_id}={ROOT}"
    return get_kernel(repo_id, version=1, trust_remote_code=True)


def submodule(opt, name: str):
    return importlib.import_module(f"{opt.__name__}.{name}")


def decoded_stacks(opt) -> Iterator[None]:
    """nf4_dequant: the packed bytes may have room for one expert more than the stack has."""
    device = torch.device("cuda")
    for stack in STACKS:
        arguments = stack.arguments(device)
        ids = [stack.experts - 1, 0]
        for dtype in DTYPES:
            active = torch.tensor([*ids, stack.experts + 1, -1], device=device)
            out = opt.nf4_dequant(active_experts=active, dtype=dtype, **arguments)
            assert_same_bits(out[:2], oracle(arguments, ids, dtype))
            assert out[2:].isnan().all()
            yield


def quantized_weights(opt) -> Iterator[None]:
    """nf4_quantize: odd sizes, tails and unaligned starts."""
    device = torch.device("cuda")
    for dtype in DTYPES:
        for numel in (1, 33, 4095, 4097, 20503):
            buffer = torch.randn(numel + 1, device=device, dtype=dtype)
            for weight in (buffer[1:], buffer[1:].clone()):
                packed, absmax = opt.nf4_quantize(weight, 64, backend="compiled")
                assert packed.numel() == (numel + 1) // 2 and absmax.isfinite().all()
                yield


def normalized_slices(opt) -> Iterator[None]:
    """normalize: layouts and dtypes at odd shapes, in odd frames."""
    device = torch.device("cuda")
    ops, numbers = submodule(opt, "_ops").ops, itertools.count()
    for rows, cols in ((1, 1), (3, 1030), (259, 5), (67, 257), (130, 132)):
        for source in SYMMETRIC_DTYPES:
            x = torch.randn(3, rows, cols).to(source)  # compared on the CPU, see list_ops
            expected = x.double() / x.double().norm(dim=(1, 2), keepdim=True)
            for pattern in ("padded", "transposed-padded", "shifted", "batch-inside"):
                number = next(numbers)
                target, more = SYMMETRIC_DTYPES[number % 3], number % 4
                pieces = [laid_out(part.to(device), pattern) for part in (x[:1], x[1:])]
                frame = torch.full((3 + more, rows + more, cols + more), torch.nan).to(target)
                out = frame.to(device)
                ops.normalize(pieces, out, 1.0)
                out = out.cpu()
                inner = out[:3, :rows, :cols]
                assert torch.allclose(inner.double(), expected, rtol=2.0**-7, atol=2.0**-24)
                inner.zero_()
                assert (out == 0).all()
                yield
    # One matrix beyond shared memory, whose tiles are read again.
    x = torch.ones(1, 8192, 8199, device=device)
    out = torch.empty_like(x)
    ops.normalize([x], out, 1.0)
    assert (out - x.numel() ** -0.5).abs().max().item() < 1e-9
    yield


def norms(opt) -> Iterator[None]:
    """norm_factors: full and symmetric matrices at odd sides."""
    device = torch.device("cuda")
    norm_factors = submodule(opt, "kernels.products.normalize").norm_factors
    for side in (1, 67, 129, 260, 515):
        x = torch.randn(2, side, side)
        x = x.triu() + x.triu(1).mT
        for dtype in SYMMETRIC_DTYPES:
            expected = 1 / torch.linalg.matrix_norm(x.to(dtype).double())
            for pattern in ("padded", "transposed-padded", "shifted"):
                view = laid_out(x.to(dtype).to(device), pattern)
                for symmetric in (False, True):
                    factors, _ = norm_factors(view, symmetric=symmetric)
                    assert torch.allclose(factors.cpu().double(), expected, rtol=2e-7, atol=0)
                    yield


def symmetric_products(opt) -> Iterator[None]:
    """symmetric_matmul: every tile, layout and dtype at odd shapes."""
    device = torch.device("cuda")
    module = submodule(opt, "kernels.products.symmetric_matmul")
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    for m, k in ((1, 1), (67, 33), (130, 129), (257, 70)):
        problem = Problem((2,), m, k, alpha=0.5, beta=2.0, diag=1.0, other=True)
        for dtype in SYMMETRIC_DTYPES:
            arguments = problem.operands(dtype, device)
            expected = exact(arguments, dtype)
            for pattern in ("padded", "transposed-padded", "shifted", "every-third"):
                A, B, C = (laid_out(arguments[name], pattern) for name in "ABC")
                by_tma = hopper and "padded" in pattern and dtype != torch.float32
                for tile in range(len(module.TILES) if by_tma else 3):
                    out = laid_out(torch.full_like(expected, torch.nan), pattern)
                    module.ops.symmetric_matmul(A, B, C, out, 0.5, 2.0, 1.0, tile)
                    assert torch.equal(out, expected)
                    yield


def dense_products(opt) -> Iterator[None]:
    """matmul_add by the tiles of capability 9.0."""
    device = torch.device("cuda")
    ops = submodule(opt, "_ops").ops
    for m, k, n in ((1, 1, 1), (67, 33, 300), (257, 200, 70)):
        arguments = Problem((2,), m, k, n, beta=2.0, scaled=True).operands(torch.float16, device)
        expected = exact(arguments, torch.float16)
        for a in ("padded", "transposed-padded"):
            for b in ("padded", "transposed-padded"):
                operands = relaid(arguments, A=a, B=b, C="padded")
                for tile in TILES[1:]:
                    out = laid_out(torch.full_like(expected, torch.nan), "padded")
                    run_dense(ops, **operands, out=out, tile=tile)
                    assert torch.equal(out, expected)
                    yield


def arriving_products(opt) -> Iterator[None]:
    """progress_matmul by tiles of both widths, with signals that are set."""
    device = torch.device("cuda")
    ops = submodule(opt, "_ops").ops
    for m, k, n in ((2, 8, 8), (66, 40, 300), (258, 200, 705)):
        for by_columns in (False, True):
            a, b, exact = test_progress_matmul_gpu.operands(
                m, k, n, torch.bfloat16, device, by_columns=by_columns
            )
            words = torch.full((2,), 1, dtype=torch.int32, device=device).view(torch.uint32)
            status = torch.zeros(1, dtype=torch.int32, device=device)
            for narrow in range(-(-n // 192) + 1):
                out = laid_out(torch.full_like(exact, torch.nan), "padded")
                ops.progress_matmul(a, b, out, words, 2, 1, 1, None, 1000, status, 0, narrow)
                assert torch.equal(out, exact) and status.item() == 0
                yield


def copied_rows(opt) -> Iterator[None]:
    """push of rows within the device, which end where their memory ends."""
    push, device = submodule(opt, "kernels.communication").push, torch.device("cuda")
    for rows, width, before, _ in test_communication_gpu.ROWS:
        dst, _ = test_communication_gpu.columns(rows, width, before, 0, device)
        src, held = test_communication_gpu.columns(rows, width, 16, 0, device)
        held.copy_(test_communication_gpu.random_bytes(held.shape, device))
        push([dst], [src], blocks=3)
        assert torch.equal(dst, src)
        yield


def expert_products(opt) -> Iterator[None]:
    """nf4_product over NF4, MXFP4 and FP8: every epilogue at odd sizes."""
    device = torch.device("cuda")
    module = submodule(opt, "kernels.quant.packed_product")
    reference = functools.partial(submodule, opt)
    kinds = [test_packed_product_gpu.KINDS[k] for k in ("nf4", "mxfp4", "fp8-blocks", "fp8-rows")]
    counts = (0, 1, 65, 257, 0, 130)
    # The rank, the rows' gather, whether the result stays grouped, what the epilogue does beside it
    for rank, fan, grouped_out, extras in (
        (0, 0, True, {}),
        (8, 1, False, {"gated": True}),
        (72, 3, False, {"bias": True, "sentinels": 7}),
    ):
        for along in (False, True):
            for make in kinds:
                problem = make(counts, 136, 192, along, rank, fan, grouped_out, **extras)
                test_packed_product_gpu.check(module, device, reference, problem)
                yield
    for along in (False, True):
        for make in kinds[:2]:  # few, some, many and most rows
            for rows in ((0, 1, 65, 49, 0, 0), (0, 1, 65, 129, 81, 0), (0, 161, 97), (321, 400)):
                problem = make(rows, 136, 192, along, 72, 3, False, bias=True)
                test_packed_product_gpu.check(module, device, reference, problem)
                yield
    activation = (
        test_packed_product_gpu.test_an_activation_in_the_product_has_the_bits_of_its_own_launch
    )
    for keeps in (True, False):
        activation(module, reference, device, 72, 264, keeps)
        yield


def chains(opt) -> Iterator[None]:
    """square_chain: one and several tiles a side, groups, fewer and more tiles than blocks."""
    device = torch.device("cuda")
    module = submodule(opt, "kernels.products.square_chain")
    ops = submodule(opt, "_ops").ops
    for batch, m, groups in ((1, 8, 1), (3, 136, 2), (70, 264, 3), (1, 512, 1)):
        x = torch.zeros(batch, m, m, dtype=torch.float16, device=device)
        x.diagonal(dim1=-2, dim2=-1).fill_(2.0)
        # 2 I: 4 I, then (32 - 1 + 1) I, then (64 + 4) I
        squares = [(0, 1.0, 0.0, 0.0), (0, 2.0, -0.5, 1.0), (1, 0.0625, 1.0, 0.0)]
        result = run_chain(module, ops, x, squares, groups=groups)
        block = torch.arange(m, device=device) // module.SIDE
        expected = 68.0 * torch.eye(m, device=device)
        upper = block[:, None] <= block
        assert torch.equal(result.float()[:, upper], expected[upper].expand(batch, -1))
        yield


def rescaling(opt) -> Iterator[None]:
    """scale_rows by norms of rows and of matrices, aligned or not, zeros."""
    device = torch.device("cuda")
    module = submodule(opt, "kernels.step.scale_rows")
    for shape in ((2, 3, 8), (1, 5, 2056), (3, 7, 65), (2, 1, 1), (1, 300, 24)):
        for dtype in LIST_DTYPES:
            x = torch.randn(shape).to(dtype)
            x[-1, 0] = 0.0
            for scale, dims in ((module.equilibrate_rows, -1), (module.renormalize, (-2, -1))):
                norms = torch.linalg.vector_norm(x.double(), dim=dims, keepdim=True)
                target = 1.0 if dims == -1 else min(shape[1:]) ** 0.5
                expected = torch.where(norms == 0, 0.0, x.double() * target / norms)
                for start in (0, 1):
                    buffer = torch.empty(x.numel() + start, dtype=dtype, device=device)
                    scaled = buffer[start:].view(shape).copy_(x)
                    scale(scaled)
                    assert torch.allclose(scaled.cpu().double(), expected, rtol=2.0**-7, atol=2e-7)
                    yield


def list_ops(opt) -> Iterator[None]:
    """momentum, apply_update and adamw; references run on the CPU, which the tool leaves alone."""
    device = torch.device("cuda")
    shapes = ((5, 7), (0,), (3, 20, 17), (), (131, 129))
    matrices = [shape for shape in shapes if len(shape) >= 2]
    for layout in ("plain", "unaligned", "permuted"):
        for kind in OPS.values():
            op = kind(functools.partial(submodule, opt))
            for mode in op.modes:
                lists = op.lists(shapes, device, LIST_DTYPES, LIST_DTYPES[::-1], layout)
                op.check(lists, mode, layout)
                yield
        params = draw(matrices, LIST_DTYPES, seed=0, layout=layout, device=device)
        updates = draw(matrices, torch.float16, seed=5, device=device)
        options = {"lr": 0.1, "factors": [1.0] * len(matrices), "weight_decay": 0.1}
        for reduced in (-1, -2):
            second = [p.float().mean(reduced, keepdim=True).abs() for p in params]
            opt.kernels.apply_update(params, updates, second_moments=second, beta2=0.9, **options)
            assert all(p.isfinite().all() for p in params)
            yield


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


# Of Hopper alone
HOPPER = (dense_products, arriving_products, expert_products, chains)
LISTS = (decoded_stacks, quantized_weights, normalized_slices, norms, list_ops, rescaling)
CASES = {
    "kernels": (*LISTS, symmetric_products, dense_products, arriving_products, copied_rows),
    "chain": (chains,),
    "experts": (expert_products,),
}


def main(name: str) -> None:
    assert os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1", "see the module's docstring"
    if name == "planted":
        return planted()
    hopper = torch.cuda.get_device_capability() == (9, 0)
    cases = [case for case in CASES[name] if hopper or case not in HOPPER]
    print(f"{sum(1 for case in cases for _ in case(loaded()))} cases, all right")


if __name__ == "__main__":
    main(sys.argv[1])
