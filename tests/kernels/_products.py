"""Problems of the products with exact answers or answers in float64, in every layout."""

import dataclasses
from collections.abc import Sequence

import torch

TILES = ("auto", "sm90_128x256", "sm90_256x128", "sm90_128x128")  # from -1 on


def run_dense(
    ops,
    A: torch.Tensor,  # (B, m, k)
    B: torch.Tensor,  # (B, k, n)
    *,
    C: torch.Tensor | None = None,  # (B, m, n)
    alpha: float = 1.0,
    beta: float = 0.0,
    scale: torch.Tensor | None = None,  # (B,)
    out: torch.Tensor | None = None,  # (B, m, n)
    tile: str = "auto",
) -> torch.Tensor:
    if out is None:
        out = A.new_empty((*A.shape[:2], B.shape[2]))
    ops.matmul_add(A, B, C, out, alpha, beta, TILES.index(tile) - 1, scale)
    return out


DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Operands in {-3 .. 2}; every sum is exact in float32, so there is one right answer."""

    batch: tuple[int, ...]
    m: int
    k: int
    n: int | None = None  # None: of a symmetric product
    alpha: float = 1.0
    beta: float = 0.0
    diag: float = 0.0  # of a symmetric product, as `other` is
    other: bool = False  # B given: A with its columns scaled by -2 .. 2, so that A B^T is symmetric
    scaled: bool = False  # powers of two as scale, of a dense product

    def __str__(self) -> str:
        sizes = [*self.batch, self.m, self.k, *([] if self.n is None else [self.n])]
        flags = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[4:]}
        return "x".join(map(str, sizes)) + "".join(f"-{k}{v:g}" for k, v in flags.items() if v)

    def operands(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict:
        generator = torch.Generator(device).manual_seed(seed)

        def integers(*shape: int, low: int = -3, high: int = 3) -> torch.Tensor:
            shape = (*self.batch, *shape)
            return torch.randint(low, high, shape, device=device, generator=generator).to(dtype)

        scalars = {"alpha": self.alpha, "beta": self.beta}
        A = integers(self.m, self.k)
        C = integers(self.m, self.n or self.m)
        if self.n is None:
            B = A * integers(1, self.k, low=-2) if self.other else None
            C = C.triu() + C.triu(1).mT if self.beta else None
            return {"A": A, "B": B, "C": C, **scalars, "diag": self.diag}
        arguments = {
            "A": A,
            "B": integers(self.k, self.n),
            "C": C if self.beta else None,
            **scalars,
        }
        if self.scaled:
            arguments["scale"] = 2.0 ** integers().float()
        return arguments


def exact(arguments: dict, dtype: torch.dtype) -> torch.Tensor:
    """The float64 result of either kind rounded once; `scale` must hold powers of two."""
    A, B, C = (None if arguments[name] is None else arguments[name].double() for name in "ABC")
    if "diag" in arguments:
        B = (A if B is None else B).mT
    value = arguments["alpha"] * (A @ B)
    if C is not None:
        value = value + arguments["beta"] * C
    if arguments.get("scale") is not None:
        value = value * arguments["scale"].double()[..., None, None]
    if "diag" in arguments:
        eye = torch.eye(A.shape[-2], dtype=A.dtype, device=A.device)
        value = value + arguments["diag"] * eye
    assert torch.equal(value.float().double(), value)  # so the next line rounds once
    return value.float().to(dtype)


# Of the last two dimensions (r, c) behind others: an empty view in a layout of memory.
LAYOUTS = {
    "contiguous": lambda new, lead, r, c: new(*lead, r, c),
    "transposed": lambda new, lead, r, c: new(*lead, c, r).mT,
    # Rows start on 16 bytes whatever c is
    "padded": lambda new, lead, r, c: new(*lead, r, -(-c // 8) * 8 + 8)[..., :c],
    "transposed-padded": lambda new, lead, r, c: new(*lead, c, -(-r // 8) * 8 + 8)[..., :r].mT,
    # No row starts on 16 bytes
    "shifted": lambda new, lead, r, c: new(*lead, r, -(-c // 8) * 8 + 8)[..., 1 : c + 1],
    "every-third": lambda new, lead, r, c: new(*lead, r, 3 * c)[..., ::3],
    "batch-inside": lambda new, lead, r, c: new(r, c, *lead).movedim((0, 1), (-2, -1)),
}
PATTERNS = tuple(LAYOUTS)


def laid_out(x: torch.Tensor, pattern: str) -> torch.Tensor:
    """x (..., r, c) with the same values in another layout of memory."""
    return LAYOUTS[pattern](x.new_empty, x.shape[:-2], *x.shape[-2:]).copy_(x)


def relaid(arguments: dict, **patterns: str) -> dict:
    """The same with operands of these names in other layouts."""
    given = {name: pattern for name, pattern in patterns.items() if arguments[name] is not None}
    return arguments | {name: laid_out(arguments[name], given[name]) for name in given}


def below(m: int, device: torch.device) -> torch.Tensor:
    """(m, m): whether an element lies in a block of 128 x 128 below the diagonal."""
    block = torch.arange(m, device=device) // 128
    return block[:, None] > block


PREFACTOR = 1.02


def draw(*shape: int, dtype: torch.dtype, device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=generator).to(dtype)


def exact_norms(x: torch.Tensor) -> torch.Tensor:
    """x (b, r, c) over PREFACTOR times its norm, in float64; zeros stay."""
    norms = torch.stack([m.double().square().sum().sqrt() for m in x])
    norms = torch.where(norms == 0, 1.0, norms)
    return x.double() / (PREFACTOR * norms)[:, None, None]


def assert_rounded_once(actual: torch.Tensor, x: torch.Tensor) -> None:
    """Every element is within the rounding to its dtype and two of float32: factor, product."""
    expected, info = exact_norms(x), torch.finfo(actual.dtype)
    assert actual.shape == x.shape
    allowed = expected.abs() * (info.eps / 2 + 2.0**-23) * (1 + 2.0**-20)
    allowed += info.tiny * info.eps * 0.5 * (1 + 2.0**-10)  # of subnormal numbers
    off = (actual.double() - expected).abs()
    worst = (off / allowed).max().item()
    assert (off <= allowed).all(), f"an element is off by {worst:.3f} times its budget"


def framed(pieces: Sequence[torch.Tensor], dtype: torch.dtype, more=(0, 0, 0)) -> torch.Tensor:
    """A frame of NaN that has room for the pieces and `more` matrices, rows and columns."""
    r, c = pieces[0].shape[1:]
    shape = (sum(map(len, pieces)) + more[0], r + more[1], c + more[2])
    return torch.full(shape, torch.nan, dtype=dtype, device=pieces[0].device)


# Those of gram_polynomial in their pattern of operands, with rounder numbers; a bare square; one
# that adds nothing; as many squares as there may be, with every operand.
CHAINS = {
    "first": [
        *((0, 8.4375, -9.1875, 1.421875), (0, 2.578125, 0.1328125, -2.28125)),
        *((1, 0.828125, -0.265625, -2.359375), (2, 1.140625, -1.1875, -3.625)),
        (2, 0.34765625, 0.107421875, 0.953125),
    ],
    "second": [
        *((0, 0.6484375, -2.609375, 1.953125), (0, 1.0234375, -0.7734375, 0.478515625)),
        *((1, 0.32421875, -0.576171875, -0.8125), (2, 0.38671875, -0.60546875, 1.1953125)),
        (2, 0.24609375, 0.703125, 0.54296875),
    ],
    "one": [(0, 0.5, 2.0, 3.0)],
    "no-sum": [(0, 1.0, 0.0, 0.0), (1, -1.0, 0.0, 1.0)],
    "eight": [(j // 2, 0.75, 0.25, -0.375) for j in range(8)],
}


def operand(
    batch: int, m: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """X (batch, m, m), symmetric to the bit, and factors that bring its values into [0, 1]."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(batch, m, m + 3, device=device, generator=generator)
    gram = (x @ x.mT).to(dtype)
    gram = gram.triu() + gram.triu(1).mT
    norm = torch.linalg.matrix_norm(gram.float())
    return gram, 1 / (1.02 * norm)


def definition(
    x: torch.Tensor, squares: list[tuple], scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """In float64, every M rounded to `dtype`."""
    first = x.double() if scale is None else x.double() * scale.double()[:, None, None]
    terms = [first]
    for i, alpha, beta, delta in squares:
        identity = torch.eye(x.shape[-1], dtype=torch.float64, device=x.device)
        value = alpha * terms[-1] @ terms[-1].mT + beta * terms[i] + delta * identity
        terms.append(value.to(dtype).double())
    return terms[-1]


def run_chain(
    module,  # kernels.products.square_chain
    ops,
    x: torch.Tensor,  # (batch, m, m) float16, contiguous, m in eights
    squares: list[tuple],
    scale: torch.Tensor | None = None,
    groups: int = 0,
    *,
    zeros: torch.Tensor | None = None,  # (1 + squares * batch,) int32 zeros, which are used up
) -> torch.Tensor:
    """The last M in upper storage, maybe in x's memory."""
    places, count = module.places_of([square[0] for square in squares])
    buffers = [x, *(torch.empty_like(x) for _ in range(count - 1))]
    columns = ([square[k] for square in squares] for k in range(4))
    ops.square_chain(buffers, places, *columns, scale, groups, zeros)
    return buffers[places[-1]]
