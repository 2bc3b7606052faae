"""Cases of `optimizer_step.json`: a whole step on one GPU, beside torch's fused AdamW.

Gradients have heavy tails, A diag(1/k) B^T. In the clock a step gets gradients at other addresses,
steps, and sets them to None, as a training loop does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection
from contextlib import contextmanager

from .. import compile_ahead, other_projects, paths
from ..built_package import Built
from ..device import added_mb
from ..lazy import torch
from ..orthogonalize import EXACT_LOWER, EXACT_STEPS, least_flops
from ..progress import Progress
from ..report import FLOOR_TBPS, FLOOR_TFLOPS, Line, Row, Rows, failed, line, passed
from ..timer import FEW_BURSTS, LEAST_SETS, Times, times

STEPS = 5  # of the orthogonalization
LR, DECAY = 1e-3, 0.1
WARMUP, TIMED = 4, 15
HOST_CALLS = 2  # whose 400 launches each a queue of 1024 takes

# Matrices for Muon, parameters for AdamW.
SHAPES: dict[str, tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]] = {
    "gpt2-124M": (((768, 768),) * 48 + ((3072, 768),) * 12 + ((768, 3072),) * 12, ((50304, 768),)),
    "nanochat-d20": (
        ((1280, 1280),) * 80 + ((5120, 1280),) * 20 + ((1280, 5120),) * 20,
        ((65536, 1280),) * 2,
    ),
    "llama-1B": (
        ((2048, 2048),) * 32 + ((512, 2048),) * 32 + ((8192, 2048),) * 32 + ((2048, 8192),) * 16,
        ((128256, 2048),),
    ),
    "experts-128": (((128, 1536, 2048), (128, 2048, 768)), ()),  # one MoE layer
    "tiny": (((32, 32),) * 5 + ((64, 32),) * 2 + ((32, 64),) * 2, ((128, 32),)),  # for CPUs
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A set of parameters with gradients of the same dtype, state in float32."""

    name: str
    dtype: str = "float32"

    @property
    def case(self) -> str:
        """Name in the result file."""
        kind = "" if self.dtype == "float32" else f"/{self.dtype}"
        return f"{self.name}{kind}/1gpu/heavy"

    @property
    def flops(self) -> float:
        """Of the orthogonalization: the least of its symmetric forms (docs/dev/measuring.md)."""
        return sum(map(least_flops, SHAPES[self.name][0]))

    @property
    def bytes_moved(self) -> float:
        """Each parameter, gradient and moment read once, parameters and moments written once."""
        size = 4 if self.dtype == "float32" else 2
        matrices, others = (sum(map(math.prod, shapes)) for shapes in SHAPES[self.name])
        # 4 more bytes per matrix element: the float16 update, written and read
        return matrices * (3 * size + 8 + 4) + others * (3 * size + 16)

    @property
    def floor_ms(self) -> float:
        """One after the other: no step can orthogonalize before its momentum is there."""
        return (self.flops / FLOOR_TFLOPS + self.bytes_moved / FLOOR_TBPS) / 1e9


LISTED = (
    Model("llama-1B", "bfloat16"),
    Model("gpt2-124M"),
    Model("nanochat-d20"),
    Model("llama-1B"),
    Model("experts-128"),
)

PEERS = ("dion", "nanochat")
BESIDE_PEERS = LISTED[:2]  # those of README
PEER_SECONDS = 180  # for a step of a peer, most of which it compiles
# Beside what a user gets: the step on torch's products, as on capability 8.0, which takes no others
# for sides below 4096; and over DTensors of a mesh of one GPU.
COMPARED = ("gpt2-124M", "llama-1B")


class StepCase:
    """A model's parameters on the device, ours over them and torch's AdamW over copies."""

    def __init__(self, model: Model, built: Built, device: str = "cuda", mesh=None) -> None:
        self.package, self.device, self.mesh = built.package, device, mesh
        self.generator = torch.Generator(device).manual_seed(0)
        dtype = getattr(torch, model.dtype)
        matrices, others = SHAPES[model.name]
        self.matrices = [self._parameter(shape, dtype) for shape in matrices]
        self.others = [self._parameter(shape, dtype) for shape in others]
        self.params = [*self.matrices, *self.others]
        first = [self._gradient(param) for param in self.params]
        # The same values at other addresses: what a step computes does not depend on them.
        self.gradients = [first, *([g.clone() for g in first] for _ in range(LEAST_SETS - 1))]
        self.ours = self.muon()
        self.baseline = torch.optim.AdamW(self.params, lr=LR, weight_decay=DECAY, fused=True)
        self.baseline_name = f"torch {torch.__version__} AdamW(fused=True) on all parameters"

    def muon(self):
        """Ours over the parameters."""
        experts = any(param.ndim == 3 for param in self.matrices)
        groups = [
            {
                "params": [(f"experts.{k}", param) for k, param in enumerate(self.matrices)],
                "use_muon": True,
                "expert_keys": ["experts"] if experts else None,
            },
            {
                "params": [(f"others.{k}", param) for k, param in enumerate(self.others)],
                "use_muon": False,
            },
        ]
        return self.package.Muon(groups, lr=LR, weight_decay=DECAY, none_grad=False)

    def _normal(self, shape: tuple[int, ...]):
        return torch.randn(shape, device=self.device, generator=self.generator)

    def _parameter(self, shape: tuple[int, ...], dtype):
        return torch.nn.Parameter(self._placed((self._normal(shape) * 0.02).to(dtype)))

    def _placed(self, tensor):
        """The tensor, or rows of a DTensor as FSDP2 leaves them."""
        if self.mesh is None:
            return tensor
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(tensor, self.mesh, [Shard(0)], run_check=False)

    def _gradient(self, param):
        """A diag(1/k) B^T of unit columns for a matrix, scaled; Gaussian for an embedding."""
        shape = param.shape
        if all(param is not matrix for matrix in self.matrices):
            return self._placed((self._normal(shape) * 1e-3).to(param.dtype))
        grad = torch.empty(shape, device=self.device, dtype=param.dtype)
        for matrix in grad.view(-1, *shape[-2:]):
            side = min(matrix.shape)
            left, right = (self._normal((rows, side)) for rows in matrix.shape)
            k = torch.arange(1, side + 1, device=self.device)
            matrix.copy_((left / left.norm(dim=0) / k) @ (right / right.norm(dim=0)).mT * 1e-2)
        return self._placed(grad)

    def give(self, number: int) -> None:
        """Gradients as backward leaves them: other memory at every step."""
        for param, grad in zip(self.params, self.gradients[number], strict=True):
            param.grad = grad

    def call(self, optimizer):
        """A step with the gradients of a number, which are None before and after it."""

        def step(number: int) -> None:
            self.give(number)
            optimizer.step()
            for param in self.params:
                param.grad = None

        return step

    def compare(self, optimizer=None) -> tuple[bool, float, float]:
        """(gate, error of the first step, that of plain bfloat16 products), relative to the update.

        One matrix of each shape, against a step with the polar factor itself. The gate: no farther
        from it than five steps of Polar Express in bfloat16, which peers use. Parameters of 16 bits
        are rounded on both sides. None: ours.
        """
        optimizer = self.ours if optimizer is None else optimizer

        self.give(0)
        firsts = {param.shape: param for param in reversed(self.matrices)}
        before = {shape: param.detach().clone() for shape, param in firsts.items()}
        optimizer.step()
        squares = torch.zeros(3, dtype=torch.float64, device=self.device)
        for shape, param in firsts.items():
            old, new, grad = (
                x.reshape(-1, *shape[-2:])[0] for x in (before[shape], param.detach(), param.grad)
            )
            kept = old.double() * (1 - LR * DECAY)
            rate = LR * 0.2 * math.sqrt(max(shape[-2:]))  # match_rms_adamw
            polar = self.package.polar_express(grad.double(), EXACT_STEPS, lower=EXACT_LOWER)
            five = self.package.polar_express(grad, STEPS, dtype=torch.bfloat16)
            exact, plain = (kept - rate * move.double() for move in (polar, five))
            squares += torch.stack(
                [(x.double() - exact).square().sum() for x in (new, plain.to(new.dtype), kept)]
            )
        error, error_baseline, norm = squares.sqrt().tolist()
        return error <= 1.01 * error_baseline, error / norm, error_baseline / norm

    def peer(self, peer: other_projects.Peer):
        """A peer's optimizer over the same parameters."""
        rule = {"lr": LR, "weight_decay": DECAY}
        kinds = (("muon", self.matrices), ("adamw", self.others))
        return peer.call([{"kind": kind, "params": params, **rule} for kind, params in kinds])

    def moves(self, optimizer) -> bool:
        """Whether a step changes every parameter, and leaves finite numbers."""
        before = [param.detach().clone() for param in self.params]
        self.call(optimizer)(0)
        return all(
            not torch.equal(param, old) and bool(param.isfinite().all())
            for param, old in zip(self.params, before, strict=True)
        )

    def times(self, ours, baseline=None, **options) -> dict[str, Times]:
        """Two calls by turns; None: a step of the baseline. Options are those of `timer.times`."""
        calls = {"ours": ours, "baseline": baseline or self.call(self.baseline)}
        options = {"rounds": TIMED, "warmup": WARMUP, "host_calls": HOST_CALLS, **options}
        return times(calls, sets=len(self.gradients), **options)


def row_of(
    case: StepCase, model: Model, optimizer, errors: tuple[float, float], variant: str, **options
) -> Row:
    """The row of an optimizer that passed its gate; options are those of `times`."""
    case.give(0)
    peak_mb = added_mb(optimizer.step)
    found = case.times(case.call(optimizer), **options)
    kept = {"variant": variant, "errors": errors, "peak_mb": peak_mb}
    return passed(model.case, found, case.baseline_name, model.floor_ms, **kept)


def measure(model: Model, built: Built, device: str = "cuda") -> Rows:
    """The row of one model and its printed line, then on torch's products."""
    case = StepCase(model, built, device)
    good, *errors = case.compare()
    row = row_of(case, model, case.ours, errors, "auto") if good else failed(model.case)
    yield row, line(row, gigabytes=model.bytes_moved / 1e9)
    if model in map(Model, COMPARED):
        with paths.forced(built.package, paths.TORCH):
            optimizer = case.muon()
            good, *errors = case.compare(optimizer)
            row = failed(model.case, paths.TORCH)
            if good:
                row = row_of(case, model, optimizer, errors, row.variant, bursts=FEW_BURSTS)
        yield row, line(row, gigabytes=model.bytes_moved / 1e9)


def peer_row(model: Model, built: Built, peer: other_projects.Peer, device: str = "cuda") -> Rows:
    """The row of a peer's step, whose own rule no gate of ours can judge: it must move everything.

    Its error is the distance from our rule's step, which nanochat's does not follow.
    """
    torch._dynamo.reset()  # it keeps eight compilations of a function, and fails at the next
    case = StepCase(model, built, device)
    optimizer = case.peer(peer)
    _, *errors = case.compare(optimizer)
    row = failed(model.case, peer.name)
    if case.moves(optimizer):
        row = row_of(case, model, optimizer, errors, peer.name, bursts=FEW_BURSTS)
    yield row, line(row, gigabytes=model.bytes_moved / 1e9)


@contextmanager
def mesh_of_one(device: str = "cuda"):
    """A process group of this process alone, and its mesh."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    backend = "nccl" if device == "cuda" else "gloo"
    store = distributed.HashStore()
    distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh(device, (1,))
    finally:
        distributed.destroy_process_group()


def sharded_case(model: Model) -> str:
    """Name of the row of a model over DTensors."""
    return f"{model.case}/fsdp2"


def measure_shards(model: Model, built: Built, device: str = "cuda") -> Line:
    """A step over DTensors of a mesh of one GPU beside the same over plain parameters."""
    name = sharded_case(model)
    with mesh_of_one(device) as mesh:
        plain = StepCase(model, built, device)
        sharded = StepCase(model, built, device, mesh)
        for case in (plain, sharded):
            case.call(case.ours)(0)
        pairs = zip(sharded.params, plain.params, strict=True)
        if not all(torch.equal(a.detach().to_local(), b.detach()) for a, b in pairs):
            row = failed(name)
            return row, line(row, gigabytes=0)
        step, baseline = sharded.call(sharded.ours), "the same step over plain parameters"
        peak_mb = added_mb(lambda: step(0))
        found = plain.times(step, plain.call(plain.ours))
        row = passed(name, found, baseline, model.floor_ms, peak_mb=peak_mb)
        return row, line(row, gigabytes=model.bytes_moved / 1e9)


def compile_jobs(built: Built, measured: Collection[str] = ()) -> compile_ahead.Jobs:
    """Steps of peers, each with a part of the configurations that the peer's kernels try.

    Of the smallest model: kernels do not depend on sizes, and every process holds all of a model.
    """

    def job(model: Model, peer: other_projects.Peer, number: int) -> None:
        case = StepCase(model, built)
        with other_projects.slice_of_tuning(number):
            case.call(case.peer(peer))(0)

    model = min(BESIDE_PEERS, key=lambda model: model.bytes_moved)
    return {
        f"{model.case} {peer.name} {number}": functools.partial(job, model, peer, number)
        for peer in other_projects.offered("dion")
        if other_projects.unit(model.case, peer) not in measured
        for number in range(other_projects.SLICES)
    }


def rows(built: Built, progress: Progress) -> Rows:
    """Every row of the file, peers' last."""
    for model in LISTED:
        if progress.begin(model.case):
            yield from measure(model, built)
            torch.cuda.empty_cache()
    for model in map(Model, COMPARED):
        if progress.begin(sharded_case(model)):
            yield measure_shards(model, built)
            torch.cuda.empty_cache()
    progress.begin()
    if not progress.is_over:
        compile_ahead.run(__name__, built, progress.measured)
    for peer in other_projects.offered(*PEERS):
        for model in BESIDE_PEERS:
            if progress.begin(other_projects.unit(model.case, peer)):
                make = functools.partial(peer_row, model, built, peer)
                yield from other_projects.rows(peer, make, PEER_SECONDS)
                torch.cuda.empty_cache()
