"""nf4_dequant on every path: bit for bit what bitsandbytes' format says, whatever the shape.

Every message names the argument. On a GPU also: capture, sizes, a traced Triton op.
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .._compare import assert_same_bits, capture
from .launch.test_triton_compile import run_compiling

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PATHS = ("compiled", "reference", "triton")


@dataclasses.dataclass(frozen=True)
class Stack:
    """A quantised stack of experts, random in every bit."""

    experts: int
    shape: tuple[int, ...]
    blocksize: int = 64
    nested: bool = False
    custom_codebook: bool = False

    def __str__(self) -> str:
        size = "x".join(map(str, (self.experts, *self.shape)))
        flags = "-nested" * self.nested + "-codebook" * self.custom_codebook
        return f"{size}-b{self.blocksize}{flags}"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def build(self, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor | None]:
        """packed, absmax and the optional arguments, drawn on the CPU so that devices agree."""
        generator = torch.Generator().manual_seed(seed)
        elements = self.experts * self.numel
        blocks = -(-elements // self.blocksize)

        def codes(count: int) -> torch.Tensor:
            return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)

        def values(count: int) -> torch.Tensor:
            return torch.randn(count, generator=generator)

        tensors = {
            "packed": codes((elements + 1) // 2),
            "absmax": codes(blocks) if self.nested else values(blocks).abs(),
            "codebook": values(16) if self.custom_codebook else None,
            "absmax_code": values(256) if self.nested else None,
            "absmax_scale": values(-(-blocks // 256)) if self.nested else None,
            "absmax_offset": values(1) if self.nested else None,
        }
        return {name: None if t is None else t.to(device) for name, t in tensors.items()}

    def arguments(self, device: torch.device, seed: int = 0) -> dict:
        return stack_of(self.shape, self.blocksize, **self.build(device, seed))


def stack_of(expert_shape: tuple[int, ...], blocksize: int, **tensors) -> dict:
    """Arguments of `run_nf4`; what is not given is None."""
    optional = ("codebook", "absmax_code", "absmax_scale", "absmax_offset")
    return {
        **dict.fromkeys(optional),
        "expert_shape": expert_shape,
        "blocksize": blocksize,
    } | tensors


def stack_of_bitsandbytes(packed: torch.Tensor, state, expert_shape: tuple[int, ...]) -> dict:
    """The same of what its quantize_4bit gives."""
    found = {"packed": packed, "absmax": state.absmax, "codebook": state.code}
    if state.nested:
        found |= {"absmax_code": state.state2.code, "absmax_scale": state.state2.absmax}
        found["absmax_offset"] = state.offset.reshape(1)
    return stack_of(expert_shape, state.blocksize, **found)


# Names of what makes each one hard stand beside it.
FIVE = Stack(5, (3, 7), 32, nested=True, custom_codebook=True)  # with every argument
STACKS = (
    Stack(8, (64, 64)),  # aligned, blocks end with experts
    Stack(4, (6, 96), 256),  # blocks straddle rows and experts
    Stack(5, (3, 7), 32),  # odd element count: experts start inside a byte
    Stack(5, (3, 7), 4096),  # the whole stack is less than one block
    Stack(3, (5,), 64),  # one dimension, the last byte half empty
    Stack(7, (33, 65), 128),  # odd, several blocks each
    Stack(3, (1,), 32),  # one element per expert
    Stack(3, (2,), 32),  # one whole byte per expert, which Triton compiles in
    Stack(3, (3,), 32),  # the same and a half
    Stack(3, (2, 3, 5, 7), 512),  # four dimensions
    Stack(3, (203, 101), 1024),  # odd and longer than one chunk of any kernel
    Stack(2, (96, 256), 2048),  # aligned and longer than one chunk
    Stack(4, (40, 8), 64, nested=True),
    Stack(3, (203, 101), 32, nested=True),  # more than 256 blocks: several nested scales
    Stack(2, (128, 256), 32, nested=True),  # the same, aligned
    Stack(4, (6, 96), 64, custom_codebook=True),
    FIVE,
    Stack(4, (3, 20), 32),  # experts start inside a word: aligned for float32 alone
    Stack(6, (203, 100), 64, nested=True),  # the same, longer than one chunk
    Stack(3, (3, 20), 32),  # and with a last word that is half outside
)


def oracle(arguments: dict, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Decode the whole stack on the CPU, then pick: another way than any of ours."""
    given = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    shape, blocksize = given["expert_shape"], given["blocksize"]
    byte = given["packed"].reshape(-1).view(torch.uint8)
    experts = 2 * byte.numel() // math.prod(shape)
    nibble = torch.stack((byte >> 4, byte & 15), -1).reshape(-1)[: experts * math.prod(shape)]
    absmax = given["absmax"].reshape(-1)
    if given["absmax_code"] is not None:
        absmax = given["absmax_code"][absmax.long()]
        absmax = absmax * given["absmax_scale"].repeat_interleave(256)[: absmax.numel()]
        absmax = absmax + given["absmax_offset"]
    codebook = given["codebook"]
    codebook = torch.tensor(NF4) if codebook is None else codebook
    scale = absmax.repeat_interleave(blocksize)[: nibble.numel()]
    values = (codebook[nibble.long()] * scale).to(dtype)
    return values.reshape(experts, *shape)[torch.tensor(ids, dtype=torch.long)]


NF4 = [  # as in bitsandbytes; a test below compares with the codebook it hands out
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]


def assert_decoded(
    actual: torch.Tensor, expected: torch.Tensor, path: str, device: torch.device
) -> None:
    """Bits must match; the interpreter's bfloat16 store truncates, so there one ulp is allowed."""
    if path == "triton" and device.type == "cpu" and actual.dtype == torch.bfloat16:
        assert actual.shape == expected.shape
        steps = actual.view(torch.int16).int() - expected.view(torch.int16).int()
        assert steps.abs().max() <= 1
    else:
        assert_same_bits(actual, expected)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stack", STACKS, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_decodes(run_nf4, device, path, stack, dtype):
    arguments = stack.arguments(device)
    ids = [stack.experts - 1, 0, *range(stack.experts), 0]
    actual = run_nf4(path, arguments, torch.tensor(ids, device=device), dtype)
    assert_decoded(actual, oracle(arguments, ids, dtype), path, device)


ONE_BYTE = """
import importlib, torch
from kernels import get_kernel
from triton.backends.compiler import GPUTarget

package = get_kernel({repo_id!r}, version=1, backend={backend!r}, trust_remote_code=True)
compiler, decoding = (
    importlib.import_module(f"{{package.__name__}}.kernels.{{name}}")
    for name in ("launch.triton_compile", "quant.dequant_triton")
)
packed, out = torch.zeros(64, dtype=torch.uint8), torch.zeros(64)
for whole in (False, True):
    operands = (packed, out, packed.long(), *(out,) * 4, out, 1, 64, 2, 6, 0)
    named = dict(MX=False, WHOLE_BYTES=whole, CUSTOM=False, NESTED=False, BLOCK=64)
    named["BY_ROWS"] = whole
    found = compiler.specialization(decoding._nibbles, operands, named)
    assert found.constants[8,] == 1
    compiler.begin(decoding._nibbles, found, {{}}, GPUTarget("cuda", 80, 32))
"""


@pytest.mark.sees_defect("experts of two or three elements do not compile")
@pytest.mark.usefixtures("opt")  # the process finds the package where this one did
def test_experts_of_one_whole_byte_compile(repo_id, device, tmp_path):
    pytest.importorskip("triton")
    program = ONE_BYTE.format(repo_id=repo_id, backend=device.type)
    run_compiling("-c", program, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize("id_dtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("ids", ([], [3], [4, 4, 4], [4, 3, 2, 1, 0]), ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_ids(run_nf4, device, path, ids, id_dtype):
    arguments = Stack(5, (9, 5)).arguments(device)
    active = torch.tensor(ids, dtype=id_dtype, device=device)
    actual = run_nf4(path, arguments, active, torch.float16)
    assert_same_bits(actual, oracle(arguments, ids, torch.float16))


@pytest.mark.sees_defect("nested absmax is decoded for every expert on each call")
def test_nested_absmax_is_rounded_twice(run_nf4, device):
    """A fused multiply-add of code, scale and offset gives other bits on this data."""
    stack = Stack(2, (256, 32), 32, nested=True)
    arguments = stack.arguments(device)
    arguments["codebook"] = torch.ones(16, device=device)  # the values are absmax itself
    blocks = arguments["absmax"].long()
    scale = arguments["absmax_scale"].repeat_interleave(256)[: blocks.numel()].double()
    exact = arguments["absmax_code"][blocks].double() * scale + arguments["absmax_offset"].double()
    fused = exact.float().repeat_interleave(32).reshape(2, 256, 32).cpu()
    expected = oracle(arguments, [0, 1], torch.float32)
    assert (fused != expected).any()
    for path in PATHS:
        actual = run_nf4(path, arguments, torch.tensor([0, 1], device=device), torch.float32)
        assert_same_bits(actual, expected)


@pytest.mark.sees_defect(
    "blocks that straddle experts, and odd experts, are decoded wrongly in silence"
)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape(run_nf4, device, data):
    """Random sizes, ids, dtypes and nesting on the compiled path."""
    stack = Stack(
        experts=data.draw(st.integers(1, 9)),
        shape=tuple(data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=2))),
        blocksize=data.draw(st.sampled_from(BLOCKSIZES)),
        nested=data.draw(st.booleans()),
        custom_codebook=data.draw(st.booleans()),
    )
    dtype = data.draw(st.sampled_from(DTYPES))
    ids = data.draw(st.lists(st.integers(0, stack.experts - 1), max_size=6))
    arguments = stack.arguments(device, seed=data.draw(st.integers(0, 2**31)))
    active = torch.tensor(ids, dtype=torch.int32, device=device)
    actual = run_nf4("compiled", arguments, active, dtype)
    assert_same_bits(actual, oracle(arguments, ids, dtype))


@pytest.mark.parametrize("first", range(5))
def test_packed_may_start_anywhere(run_nf4, device, first):
    """A view into a larger buffer need not lie on a word boundary."""
    arguments = Stack(3, (96, 128)).arguments(device)
    packed = arguments["packed"]
    buffer = torch.zeros(packed.numel() + 8, dtype=torch.uint8, device=device)
    view = buffer[first : first + packed.numel()]
    view.copy_(packed)
    ids, given = torch.tensor([1, 2], device=device), {**arguments, "packed": view}
    for path in PATHS:
        actual = run_nf4(path, given, ids, torch.float16)
        assert_same_bits(actual, oracle(arguments, [1, 2], torch.float16))


@pytest.mark.sees_defect("FP4 and other storage dtypes take another, slower way")
@pytest.mark.parametrize("storage", (torch.int8, torch.bfloat16, torch.float32), ids=str)
def test_storage_dtype_and_shape_of_packed_do_not_matter(opt, device, storage):
    arguments = Stack(4, (16, 64)).arguments(device)
    expected = oracle(arguments, [3, 1], torch.bfloat16)
    arguments["packed"] = arguments["packed"].view(storage).reshape(-1, 1)
    ids = torch.tensor([3, 1], device=device)
    assert_same_bits(opt.nf4_dequant(active_experts=ids, **arguments), expected)


def test_defaults_and_number_as_offset(opt, device):
    """bfloat16, NF4, plain absmax; a number is as good as a tensor for absmax_offset."""
    plain = Stack(3, (8, 24)).arguments(device)
    ids = torch.tensor([2, 0], device=device)
    actual = opt.nf4_dequant(plain["packed"], plain["absmax"], ids, [8, 24], 64)
    assert_same_bits(actual, oracle(plain, [2, 0], torch.bfloat16))

    nested = Stack(3, (8, 24), nested=True).arguments(device)
    expected = oracle(nested, [2, 0], torch.bfloat16)
    for offset in (nested["absmax_offset"].item(), nested["absmax_offset"].reshape(())):
        nested["absmax_offset"] = offset
        assert_same_bits(opt.nf4_dequant(active_experts=ids, **nested), expected)


def test_threads_do_not_change_the_bits(run_nf4, device):
    arguments = Stack(3, (203, 333)).arguments(device)
    ids = torch.tensor([2, 0, 1], device=device)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 4):
            torch.set_num_threads(count)
            results.append(run_nf4("compiled", arguments, ids, torch.float16))
    finally:
        torch.set_num_threads(threads)
    assert_same_bits(*results)


def decoded_at(element: torch.Tensor, packed, absmax, blocksize: int) -> torch.Tensor:
    """The elements of these numbers, of a stack whose oracle would take too much memory."""
    byte = packed[element // 2]
    nibble = torch.where(element % 2 == 0, byte >> 4, byte & 15)
    return torch.tensor(NF4, device=packed.device)[nibble.long()] * absmax[element // blocksize]


@pytest.mark.sees_defect("32-bit offsets into the decoded experts and into the stack")
@pytest.mark.parametrize("path", ("compiled", pytest.param("triton", marks=pytest.mark.gpu)))
def test_stack_beyond_two_to_the_31_elements(run_nf4, device, path):
    """The last experts' elements have indices above 2**31."""
    numel, experts = 65537, 32800
    elements = experts * numel
    first = (experts - 3) * numel  # of the three experts that hold anything but zeros
    assert first > 2**31
    packed = torch.zeros(elements // 2, dtype=torch.uint8, device=device)  # 1 GB, mostly untouched
    absmax = torch.zeros(-(-elements // 4096), device=device)
    filled = Stack(3, (numel,), 4096).build(torch.device("cpu"))
    packed[first // 2 :] = filled["packed"][-(elements - first) // 2 :].to(device)
    absmax[first // 4096 :] = torch.arange(1.0, absmax.numel() - first // 4096 + 1, device=device)
    arguments = stack_of((numel,), 4096, packed=packed, absmax=absmax)
    ids = torch.tensor([experts - 1, experts - 2], device=device)
    actual = run_nf4(path, arguments, ids, torch.float32)
    element = ids[:, None] * numel + torch.arange(numel, device=device)
    expected = decoded_at(element, packed, absmax, 4096)
    assert expected.count_nonzero() > numel
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("bad", (-1, 4, 2**40))
def test_unknown_ids(run_nf4, device, bad):
    """An error where looking costs nothing, NaN where it would make the host wait."""
    arguments = Stack(4, (5, 7)).arguments(device)
    ids = torch.tensor([1, bad, 2], device=device)
    for path in PATHS:
        if path == "reference" or (path == "compiled" and device.type == "cpu"):
            with pytest.raises((ValueError, RuntimeError), match="active_experts"):
                run_nf4(path, arguments, ids, torch.float32)
            continue
        actual = run_nf4(path, arguments, ids, torch.float32).cpu()
        assert actual[1].isnan().all()
        assert_same_bits(actual[[0, 2]], oracle(arguments, [1, 2], torch.float32))


@pytest.mark.parametrize("stack", (STACKS[0], FIVE), ids=str)
@pytest.mark.parametrize(
    "path", ("compiled", "reference", pytest.param("triton", marks=pytest.mark.gpu))
)
def test_opcheck(nf4_op, device, path, stack):
    arguments = stack.arguments(device)
    arguments |= {"active_experts": torch.tensor([1, 0], device=device), "dtype": torch.float16}
    torch.library.opcheck(nf4_op(path).default, (), arguments)


def test_meta_tensors_give_shapes(opt):
    arguments = Stack(5, (16, 24)).arguments(torch.device("meta"))
    ids = torch.empty(3, dtype=torch.long, device="meta")
    out = opt.nf4_dequant(active_experts=ids, **arguments)
    assert out.shape == (3, 16, 24) and out.dtype == torch.bfloat16


def assert_same_format(actual: torch.Tensor, wanted: torch.Tensor, theirs: torch.Tensor) -> None:
    """`actual` has the bits of the format, bitsandbytes too but for the sign of a zero on a CPU.

    FP4's nibble 8 is -0 in its CUDA and its scalar CPU decoder, +0 in those for AVX512 and NEON and
    in the portable one that it takes for blocks from 2048 on where there is AVX512.
    """
    assert_same_bits(actual, wanted)
    if theirs.device.type == "cpu":
        theirs = torch.where((theirs == 0) & (wanted == 0), wanted, theirs)
    assert_same_bits(theirs, wanted)


def quantized_by_bitsandbytes(dtype, quant_type, blocksize, nested, codebook, device):
    """(arguments of `oracle` for a stack (4, 6, 4096), what bitsandbytes decodes it to).

    On the CPU only rows of whole blocks: bitsandbytes 0.50.2 misreads others with AVX512.
    """
    from bitsandbytes import functional

    weight = torch.randn(4, 6, 4096, dtype=dtype, device=device)
    packed, state = functional.quantize_4bit(
        weight, blocksize=blocksize, quant_type=quant_type, compress_statistics=nested
    )
    assert torch.equal(codebook, state.code)  # the same values; a zero may have the other sign
    arguments = stack_of_bitsandbytes(packed, state, (6, 4096)) | {"codebook": codebook}
    return arguments, functional.dequantize_4bit(packed, state)


@pytest.fixture(scope="session")
def codebooks(submodule, device):
    """Quantisation type -> its 16 values; in FP4's nibble 8 decodes to -0."""
    (fp4,) = submodule("kernels.quant.formats").format_of("fp4").constants(device)
    return {"nf4": torch.tensor(NF4, device=device), "fp4": fp4}


@pytest.mark.sees_defect("values that are close to bitsandbytes' and not the same")
@pytest.mark.parametrize("nested", (False, True))
@pytest.mark.parametrize("quant_type", ("nf4", "fp4"))
@pytest.mark.parametrize(
    ("dtype", "blocksize"),
    [*((torch.bfloat16, size) for size in BLOCKSIZES), *((dtype, 64) for dtype in DTYPES[1:])],
    ids=str,
)
def test_same_bits_as_bitsandbytes(opt, codebooks, device, dtype, quant_type, blocksize, nested):
    """The format decides: value times absmax in float32, rounded once to dtype."""
    code = codebooks[quant_type]
    arguments, theirs = quantized_by_bitsandbytes(
        dtype, quant_type, blocksize, nested, code, device
    )
    ids = [3, 0, 1]
    given = {"active_experts": torch.tensor(ids, device=device), "dtype": dtype}
    actual = opt.nf4_dequant(**given, **arguments)
    wanted = oracle(arguments, ids, dtype)
    assert_same_format(actual, wanted.to(device), theirs[ids])
    if quant_type == "nf4":
        assert_same_bits(opt.nf4_dequant(**given, **{**arguments, "codebook": None}), actual)


NO_IDS = "active_experts must be a vector of int32 or int64 ids"
NESTED = {name: lambda a: a["absmax"] for name in ("absmax_code", "absmax_scale")}
NESTED["absmax_offset"] = lambda a: 0.0
BAD = {  # what is said: a ValueError's changes as functions, a TypeError's as they are
    "packed must be contiguous": {"packed": lambda a: a["packed"].reshape(-1, 2).T},
    "packed holds 95 bytes": {"packed": lambda a: a["packed"][:-1]},
    "blocksize must be one of": {"blocksize": lambda a: 48},
    "expert_shape must hold positive sizes": {"expert_shape": lambda a: (8, 0)},
    "expert_shape must hold positive sizes, got ()": {"expert_shape": lambda a: ()},
    "dtype must be one of": {"dtype": lambda a: torch.float64},
    f"{NO_IDS}, got torch.float32": {"active_experts": lambda a: a["absmax"]},
    f"{NO_IDS}, got torch.int64 of shape (1, 1)": {
        "active_experts": lambda a: a["active_experts"].view(1, 1)
    },
    "active_experts must be contiguous": {
        "active_experts": lambda a: a["active_experts"].repeat(4)[::2]
    },
    "absmax must be contiguous torch.float32": {"absmax": lambda a: a["absmax"].double()},
    "absmax must have 3 elements": {"absmax": lambda a: a["absmax"][:-1]},
    "codebook must have 16 elements": {"codebook": lambda a: a["absmax"]},
    "codebook must be contiguous torch.float32": {
        "codebook": lambda a: torch.zeros(16, dtype=torch.float16, device=a["packed"].device)
    },
    "give all three or none": {"absmax_scale": lambda a: a["absmax"]},
    "absmax must be contiguous torch.uint8": NESTED,
    "absmax_code must have 256 elements": NESTED | {"absmax": lambda a: a["absmax"].byte()},
    "packed must be torch.Tensor, got NoneType": {"packed": None},
    "absmax must be torch.Tensor, got NoneType": {"absmax": None},
    "active_experts must be torch.Tensor, got list": {"active_experts": [1]},
    "codebook must be torch.Tensor or NoneType, got list": {"codebook": [0.0] * 16},
    "absmax_code must be torch.Tensor or NoneType, got tuple": {"absmax_code": ()},
    "absmax_scale must be torch.Tensor or NoneType, got float": {"absmax_scale": 1.0},
    "absmax_offset must be torch.Tensor or Real or NoneType, got str": {"absmax_offset": "0"},
    "blocksize must be an integer, got 64.0": {"blocksize": 64.0},
    "expert_shape must be a sequence of integers, got (8.0, 24)": {"expert_shape": (8.0, 24)},
    "expert_shape must be a sequence of integers, got 192": {"expert_shape": 192},
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_arguments_are_named(opt, device, message):
    arguments = Stack(1, (8, 24)).arguments(device)
    arguments["active_experts"] = torch.zeros(1, dtype=torch.long, device=device)
    changes = BAD[message]
    error = ValueError if any(map(callable, changes.values())) else TypeError
    changed = {name: v(arguments) if callable(v) else v for name, v in changes.items()}
    with pytest.raises(error) as caught:
        opt.nf4_dequant(**{**arguments, **changed})
    assert type(caught.value) is error and message in str(caught.value)


TENSORS = ("absmax", "codebook", "absmax_code", "absmax_scale", "absmax_offset", "packed")


@pytest.mark.parametrize("name", TENSORS)
def test_gradients_are_refused(opt, device, name):
    """They would be zero, hence silently wrong. Without grad mode nobody asks for them."""
    nested = name.startswith("absmax_")
    arguments = Stack(2, (8, 24), nested=nested, custom_codebook=True).arguments(device)
    arguments["active_experts"] = torch.ones(1, dtype=torch.long, device=device)
    arguments["packed"] = arguments["packed"].view(torch.bfloat16)
    expected = opt.nf4_dequant(**arguments)
    arguments[name].requires_grad_()
    with pytest.raises(ValueError, match=f"^{name} requires a gradient"):
        opt.nf4_dequant(**arguments)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            actual = opt.nf4_dequant(**arguments)
        assert not actual.requires_grad
        assert torch.equal(actual.view(torch.int16), expected.view(torch.int16))
    assert not expected.requires_grad


def test_checks_while_a_graph_is_traced(opt, device):
    """The shape may be symbolic, a size may come from a tensor, and the ids may be more."""
    arguments = Stack(5, (16, 24), nested=True).arguments(device)
    arguments["absmax_offset"] = 0.25
    del arguments["expert_shape"]

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def decode(like: torch.Tensor, ids: torch.Tensor, blocksize: int) -> torch.Tensor:
        return opt.nf4_dequant(
            active_experts=ids, expert_shape=like.shape, **{**arguments, "blocksize": blocksize}
        )

    like = torch.empty(16, 24, device=device)
    for ids in ([4, 1], [4, 4, 3], [2, 1, 0, 3]):
        active = torch.tensor(ids, device=device)
        eager = opt.nf4_dequant(active_experts=active, expert_shape=(16, 24), **arguments)
        assert torch.equal(decode(like, active, 64), eager)


@pytest.mark.gpu
def test_graph_capture_replays_with_new_contents(opt, device):
    """The replay reads ids and weights afresh; a number reaches the device as an argument."""
    arguments = Stack(6, (40, 64), nested=True).arguments(device)
    arguments["absmax_offset"] = 0.25
    ids = torch.tensor([0, 1, 2], device=device)
    opt.nf4_dequant(active_experts=ids, **arguments)
    graph, out = capture(lambda: opt.nf4_dequant(active_experts=ids, **arguments))
    ids.copy_(torch.tensor([5, 5, 3]))
    arguments["packed"].copy_(Stack(6, (40, 64)).build(device, seed=1)["packed"])
    graph.replay()
    arguments["absmax_offset"] = torch.tensor([0.25])
    assert_same_bits(out, oracle(arguments, [5, 5, 3], torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1023, 1024))  # odd and even starts
@pytest.mark.parametrize("path", ("compiled", "triton"))
def test_output_beyond_two_to_the_31_elements(run_nf4, device, path, rows):
    """Rows of the output that lie above 2**31 elements equal those below."""
    stack = Stack(2, (rows, 4099), 64)
    arguments = stack.arguments(device)
    count = 2**31 // stack.numel + 2
    ids = torch.zeros(count, dtype=torch.int32, device=device)
    ids[-1] = 1
    out = run_nf4(path, arguments, ids, torch.bfloat16)
    assert out.numel() > 2**31
    assert_same_bits(out[[0, count // 2, -1]], oracle(arguments, [0, 0, 1], torch.bfloat16))
    assert (out[:-1].view(torch.int16) == out[0].view(torch.int16)).all()


@pytest.mark.gpu
def test_triton_op_compiles_with_inductor(nf4_op, device):
    arguments = FIVE.arguments(device)
    op = nf4_op("triton")

    @torch.compile(fullgraph=True)
    def decode(ids: torch.Tensor) -> torch.Tensor:
        return op(active_experts=ids, dtype=torch.float16, **arguments) * 1

    ids = torch.tensor([4, 1], device=device)
    assert_same_bits(decode(ids), oracle(arguments, [4, 1], torch.float16))
