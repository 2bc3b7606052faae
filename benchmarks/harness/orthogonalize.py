"""Cases of `orthogonalize.json`: a batch of matrices -> the nearest semi-orthogonal ones.

`real`: momenta of a GPT that is trained on text within the run. `heavy`: A diag(1/k) B^T of
Gaussian A, B with unit columns. A row is timed only after its distance to the polar factor passed
the accuracy rule: at most 1.02 times that of five steps of Polar Express in float64 arithmetic on
the same numbers, 1.1 times for `real`.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from . import compile_ahead, other_projects, paths
from .built_package import Built, load
from .built_package import module as package_module
from .device import NotCountedError, added_mb, counted
from .lazy import torch
from .progress import Progress
from .report import Goal, Line, Row, Rows, failed, floor_ms, geomean, judged, name_of, passed, said
from .timer import BURSTS, FEW_BURSTS, Times, cold_sets, times

SHAPES = (
    *("1x2048x2048", "1x4096x4096", "1x8192x8192", "1x4096x14336", "8x4096x4096", "16x2048x8192"),
    *("24x1024x4096", "48x768x768", "12x768x3072", "128x768x2048", "256x512x2048"),
)
# Of a GPT's momenta: width -> (layers, cases beside their shape)
REAL = {768: (12, ("768x768", "3072x768", "768x3072")), 2048: (8, ("2048x2048", "8192x2048"))}
GATED = 2  # matrices of a real batch that the gate decomposes: a float64 SVD each
# The default schedule as dion, modded-nanogpt and nanochat print it (arXiv 2505.16932).
COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
SCALE, EPS = 1.02, 1e-6
# The exact polar factor by iteration in float64: a schedule for singular values down to 1e-12 of
# the norm, where a heavy tail of 8192 ends near 1e-9. Each step lifts small values four times.
EXACT_STEPS, EXACT_LOWER = 26, 1e-12
CONVERGED = 1e-5  # ||X X^T - I||_F of the factor
PEERS = ("gram-newton-schulz",)
# Few of the cases: a peer tries its configurations for every shape.
BESIDE_PEERS = ("real/8x2048x2048", "real/12x3072x768", "1x4096x4096/heavy", "24x1024x4096/heavy")
PEER_SECONDS = 60  # for a case of a peer, most of which it compiles
# Sides in SHAPES at which capability 8.0 gets products by halves, which stay if they are so much
# faster than torch's.
MMA_SYNC_SIDES, OVER_TORCH = (4096, 8192), 1.15
OF_TRAFFIC = 1.5  # DRAM bytes over the least
BASELINE = "torch.compile of 5-step Polar Express in bfloat16"
HEADING = (
    f"{'case':<40}{'wall ms':>9}{'host':>9}{'device':>9}{'% floor':>9}{'x base':>8}{'distance':>10}"
)


def least_flops(shape: Sequence[int]) -> int:
    """Of matrices (..., r, c): the least of any method here that keeps the accuracy rule."""
    *batch, r, c = shape
    m, n = min(r, c), max(r, c)
    return math.prod(batch) * (6 * m * m * n + 10 * m**3)  # gram_polynomial, halves once


@dataclasses.dataclass(frozen=True)
class Problem:
    """Inputs of one shape and kind."""

    batch: int  # matrices of m x n
    m: int
    n: int
    content: str  # "heavy" or "real"
    dtype: str = "float32"  # of the input
    label: str = ""  # before the shape in names
    width: int = 0  # of the GPT whose momenta they are

    @property
    def shape(self) -> tuple[int, int, int]:
        """(batch, m, n)."""
        return self.batch, self.m, self.n

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.m}x{self.n}"

    @property
    def case(self) -> str:
        """Name in the result file."""
        if self.width:
            return f"real/{self.name}"
        name = f"{self.label}{self.name}/{self.content}"
        return name if self.dtype == "float32" else f"{name}/{self.dtype}"

    @property
    def paths(self) -> tuple[str, ...]:
        """What is timed beside "auto": for listed shapes in float32, what applies to their side."""
        side = min(self.m, self.n)
        if self.name not in SHAPES or self.label or self.width or self.dtype != "float32":
            return ()
        return paths.TORCH, *([paths.MMA_SYNC] if side in MMA_SYNC_SIDES else ())

    @property
    def bytes_moved(self) -> int:
        """The input read once, a 16-bit result written once."""
        return self.batch * self.m * self.n * ({"float32": 4, "bfloat16": 2}[self.dtype] + 2)

    @property
    def floor_ms(self) -> float:
        """Least milliseconds."""
        return floor_ms(bytes_moved=self.bytes_moved, flops=least_flops(self.shape))


COUNTED = Problem(256, 512, 2048, "heavy")  # whose DRAM bytes are counted


def listed() -> list[Problem]:
    """The agreed cases, those of one shape together: the baseline is compiled once for them."""
    problems = []
    for shape in SHAPES:
        sizes = tuple(map(int, shape.split("x")))
        problems += [Problem(*sizes, "heavy", dtype) for dtype in ("float32", "bfloat16")]
    return problems


def random_problems(seed: int, count: int = 20) -> list[Problem]:
    """Shapes that nobody tuned for, tall ones too; every second one of no divisibility."""
    rng = random.Random(seed)
    problems = []
    for number in range(count):
        step = 64 if number % 2 else 1
        m = max(step, round(2 ** rng.uniform(7, 12.5) / step) * step)
        n = max(step, round(m * 2 ** rng.uniform(0, 3) / step) * step)
        batch = max(1, min(256, round(2 ** rng.uniform(22, 27.5) / (m * n))))
        m, n = (n, m) if rng.random() < 0.25 else (m, n)
        problems.append(Problem(batch, m, n, "heavy", label=f"random{number}-"))
    return problems


def random_cases(commit: str) -> set[str]:
    """Names of the rows that were drawn, not listed."""
    return {problem.case for problem in random_problems(int(commit[:8], 16))}


def polar_express_bf16(g):
    """The baseline, to be compiled: (B, m, n) of any dtype -> bfloat16, dense products."""
    x = g.bfloat16()
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * SCALE + EPS)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def made(problem: Problem, generator, device: str):
    """(B, m, n) of the problem's dtype on the device of the generator."""

    def normal(*shape: int):
        return torch.randn(shape, generator=generator, device=device)

    m, n = min(problem.m, problem.n), max(problem.m, problem.n)
    k = torch.arange(1, m + 1, device=device, dtype=torch.float64)
    x = torch.empty(problem.batch, m, n, device=device, dtype=getattr(torch, problem.dtype))
    for matrix in x:
        left, right = normal(m, m).double(), normal(n, m).double()
        matrix.copy_((left / left.norm(dim=0) / k) @ (right / right.norm(dim=0)).mT)
    return x if problem.m <= problem.n else x.mT.contiguous()


@dataclasses.dataclass(frozen=True)
class Distances:
    """From the polar factor, relative, over a batch; `worst` is ours in exact steps' distances."""

    ours: float
    baseline: float
    worst: float


class Exact:
    """Float64 polar factors of a batch x (B, m, n) of full rank, for all results that it has.

    Raises:
        RuntimeError: one did not converge, so nothing can be said.
    """

    def __init__(self, package, x) -> None:
        reference = package_module(package, "reference.orthogonalize")
        long = package.polar_express_coefficients(EXACT_STEPS, lower=EXACT_LOWER)
        self._polar, self._five = [], []
        for i, matrix in enumerate(x):
            wide = matrix.double() if matrix.shape[0] <= matrix.shape[1] else matrix.double().mT
            polar = reference.newton_schulz(wide, long, 1.02)
            gram = polar @ polar.mT
            gram.diagonal().sub_(1)
            if not gram.norm().item() < CONVERGED:
                raise RuntimeError(f"the polar factor of matrix {i} did not converge")
            five = reference.newton_schulz(wide, COEFFICIENTS, SCALE)
            self._polar.append(polar)
            self._five.append((five - polar).norm().item())

    def distances(self, ours, baseline) -> Distances:
        """Of two results for x."""
        squares, worst = [0.0, 0.0], 0.0
        for polar, five, *results in zip(self._polar, self._five, ours, baseline, strict=True):
            turned = (r if r.shape == polar.shape else r.mT for r in results)
            mine, theirs = ((r.double() - polar).norm().item() for r in turned)
            # max() would drop a NaN that comes second.
            worst = mine / five if not mine / five <= worst else worst
            squares = [squares[0] + mine**2, squares[1] + theirs**2]
        count = len(self._polar) * len(self._polar[0])
        return Distances(*(math.sqrt(square / count) for square in squares), worst)


class Case:
    """Input sets on the device, ours and the baseline over them, launched and as graphs."""

    def __init__(self, inputs: Sequence, built: Built, compiled: Callable) -> None:
        self.package, self.compiled = built.package, compiled
        self.inputs = inputs
        self.outs = [torch.empty_like(self.ours(0)) for _ in inputs]
        self.captured = {"ours": self.ours_into, "baseline": self.baseline}
        self.graphs: dict[str, list[Any]] = {}

    def ours(self, number: int):
        """What a user calls."""
        return self.package.orthogonalize(self.inputs[number])

    def ours_into(self, number: int):
        """The same into memory that stays, as a graph needs it."""
        out = self.outs[number]
        return self.package.orthogonalize(self.inputs[number], out=out)

    def baseline(self, number: int):
        """The compiled baseline."""
        return self.compiled(self.inputs[number])

    def capture(self) -> None:
        """One graph per input set and side; they take turns in one pool of memory."""
        # A graph of an earlier case that the collector destroyed in a capture would end it.
        gc.collect()
        gc.disable()
        try:
            self._capture(torch.cuda.graph_pool_handle())
        finally:
            gc.enable()

    def _capture(self, pool: tuple[int, int]) -> None:
        for name, call in self.captured.items():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                call(0)
            torch.cuda.current_stream().wait_stream(stream)
            self.graphs[name] = []
            for number in range(len(self.inputs)):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    call(number)
                self.graphs[name].append(graph)

    def times(self, bursts: int = BURSTS, known: Times | None = None) -> dict[str, Times]:
        """Eager calls by the clock; the device's time is that of a replay, where there is one.

        The baseline does not run where its times are `known`.
        """
        replays = {
            name: lambda number, name=name: self.graphs[name][number].replay()
            for name in self.graphs
        }
        eager = {"ours": self.ours} | ({} if known else {"baseline": self.baseline})
        found = times(eager, sets=len(self.inputs), device=eager | replays, bursts=bursts)
        return found | ({"baseline": known} if known else {})

    def replay_repeats(self) -> bool:
        """Whether a replay writes the bits of a launch."""
        if "ours" not in self.graphs:
            return True

        wanted = self.ours(0)
        self.outs[0].zero_()
        self.graphs["ours"][0].replay()
        return torch.equal(self.outs[0], wanted)


class PeerCase(Case):
    """A peer instead of ours. It may write to its input, and captures graphs by itself."""

    def __init__(self, inputs: Sequence, built: Built, compiled: Callable, call: Callable) -> None:
        self.call = call
        super().__init__([x.clone() for x in inputs], built, compiled)
        del self.captured["ours"]

    def ours(self, number: int):
        """What the peer's user calls."""
        return self.call(self.inputs[number])


def line(row: Row, found: Distances) -> str:
    """One printed line; the distance is in those of five exact steps."""
    name = name_of(row)
    if not row.ok:
        return f"{name:<40} {found.worst:.3f} EXACT STEPS' DISTANCE OR OTHER BITS, not timed"
    return (
        f"{name:<40}{row.wall_ms:>9.4g}{row.host_ms:>9.4g}{row.ms:>9.4g}"
        f"{row.fraction_of_floor:>9.1%}{row.speedup:>7.2f}x{found.worst:>10.3f}"
    )


@dataclasses.dataclass(frozen=True)
class Task:
    """What is orthogonalized, and what counts as right."""

    name: str  # of the case
    inputs: Sequence  # batches (B, m, n) of one shape
    # (result, baseline's) of the first batch -> distances from the polar factor.
    found: Callable[[Any, Any], Distances]
    least: float  # milliseconds of the floor
    allowed: float  # `Distances.worst` at most


def measure(
    task: Task, case: Case, variant: str = "auto", bursts: int = BURSTS, known: Times | None = None
) -> Line:
    """Gate, then time; the last arguments are those of `Case.times`."""
    distance = task.found(case.ours(0), case.baseline(0))
    row = failed(task.name, variant)
    if distance.worst <= task.allowed:
        peak_mb = added_mb(lambda: case.ours(0))
        case.capture()
        if case.replay_repeats():
            taken = case.times(bursts, known)
            errors = distance.ours, distance.baseline
            kept = {"variant": variant, "errors": errors, "peak_mb": peak_mb}
            row = passed(task.name, taken, BASELINE, task.least, **kept)
    return row, line(row, distance)


def peer_row(task: Task, built: Built, compiled: Callable, peer: other_projects.Peer) -> Rows:
    """The row of a peer; it must come nearer to the polar factor than zero is."""
    judged = dataclasses.replace(task, allowed=math.inf)
    case = PeerCase(task.inputs, built, compiled, peer.call)
    row, text = measure(judged, case, peer.name, FEW_BURSTS)
    yield (row if row.ok and row.error < 1 else failed(task.name, peer.name)), text


def forced_rows(problem: Problem, task: Task, row: Row, built: Built, compiled: Callable) -> Rows:
    """Rows of the paths that are compared with what "auto" takes; `row` has the baseline."""
    known = Times(row.baseline_ms, row.baseline_wall_ms, row.baseline_host_ms)
    walls = {}
    for path in problem.paths:
        with paths.forced(built.package, path):
            case = Case(task.inputs, built, compiled)
            del case.captured["baseline"]
            row, text = measure(task, case, path, FEW_BURSTS, known)
        walls[path] = row.wall_ms
        if path == paths.MMA_SYNC and row.ok and walls[paths.TORCH]:
            value = {"over_torch": walls[paths.TORCH] / row.wall_ms}
            row = judged(row, {"over_torch": Goal(OVER_TORCH, True)}, value)
        yield row, text + said(row)


def heavy_task(problem: Problem, built: Built) -> Task:
    """Random matrices of heavy tails."""
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [made(problem, generator, "cuda") for _ in range(cold_sets(problem.bytes_moved))]
    exact = Exact(built.package, inputs[0])
    return Task(problem.case, inputs, exact.distances, problem.floor_ms, 1.02)


def _measured(problem: Problem, built: Built, compiled: Callable) -> Rows:
    task = heavy_task(problem, built)
    is_listed = problem.dtype == "float32" and not problem.label
    bursts = BURSTS if is_listed else FEW_BURSTS
    row, text = measure(task, Case(task.inputs, built, compiled), bursts=bursts)
    if row.ok and problem == COUNTED:
        goal = {"of_least_traffic": Goal(OF_TRAFFIC, False)}
        row = judged(row, goal, {"of_least_traffic": of_least_traffic()})
        text += said(row)
    yield row, text
    if row.ok and problem.paths:
        yield from forced_rows(problem, task, row, built, compiled)


def _compiled_anew() -> Callable:
    """The baseline for the next shape; the compiler keeps at most eight."""
    torch._dynamo.reset()
    return torch.compile(polar_express_bf16, dynamic=False, fullgraph=True)


def compile_jobs(built: Built, measured: Collection[str] = ()) -> compile_ahead.Jobs:
    """The baseline of each shape that is not measured yet."""

    def job(problem: Problem) -> None:
        x = torch.randn(problem.shape, device="cuda").to(getattr(torch, problem.dtype))
        _compiled_anew()(x)

    problems = [*real_problems(), *listed(), *random_problems(int(built.commit[:8], 16))]
    missing = [problem for problem in problems if problem.case not in measured]
    return {one.case: functools.partial(job, one) for one in missing}


def real_problems() -> list[Problem]:
    """Batches of a GPT's momenta, those of one model together."""
    return [
        Problem(layers, *map(int, shape.split("x")), "real", width=width)
        for width, (layers, shapes) in REAL.items()
        for shape in shapes
    ]


@functools.lru_cache(1)
def momenta(built: Built, width: int) -> Mapping[tuple[int, int], list[Any]]:
    """Those of the last model that was trained are kept."""
    from . import matrices

    return matrices.momenta(built.package, width, REAL[width][0])


def real_task(problem: Problem, built: Built) -> Task:
    """Momenta of a GPT's matrices, a batch per shape, of the last steps of its training."""
    from . import matrices

    reference = package_module(built.package, "reference.orthogonalize")
    inputs = momenta(built, problem.width)[problem.m, problem.n]
    known = [matrices.decomposed(matrices.wide(x)) for x in inputs[0][:GATED]]
    exact = [one.distance(reference.newton_schulz(one.x, COEFFICIENTS, SCALE)) for one in known]

    def found(ours, baseline) -> Distances:
        mine, theirs = (
            [one.distance(matrices.wide(y)) for one, y in zip(known, results, strict=False)]
            for results in (ours, baseline)
        )
        worst = max(a / b if a == a else math.inf for a, b in zip(mine, exact, strict=True))
        return Distances(max(mine), max(theirs), worst)

    return Task(problem.case, inputs, found, problem.floor_ms, 1.1)


def _zoo_rows(built: Built, progress: Progress) -> Rows:
    """One matrix of each specimen; distances on the non-zero subspace."""
    from . import matrices

    before, compiled = None, polar_express_bf16
    for name, specimen in sorted(matrices.specimens(512).items(), key=lambda item: item[1].x.shape):
        if not progress.begin(f"zoo/{name}"):
            continue
        reference = package_module(built.package, "reference.orthogonalize")
        there = specimen.to("cuda")
        x = there.x.float().unsqueeze(0)
        problem = Problem(*x.shape, name)
        compiled = compiled if problem.shape == before else _compiled_anew()
        before = problem.shape
        exact = there.distance(reference.newton_schulz(there.x, COEFFICIENTS, SCALE))

        def found(ours, baseline, there=there, exact=exact) -> Distances:
            mine, theirs = there.distance(ours[0]), there.distance(baseline[0])
            return Distances(mine, theirs, mine / exact)

        inputs = [x.clone() for _ in range(min(cold_sets(problem.bytes_moved), 16))]
        task = Task(f"zoo/{name}", inputs, found, problem.floor_ms, matrices.allowed(name))
        yield measure(task, Case(inputs, built, compiled))


def rows(built: Built, progress: Progress) -> Rows:
    """A GPT's momenta, heavy tails, 20 shapes from the commit, known spectra; peers' rows last."""
    if not progress.is_over:
        compile_ahead.run(__name__, built, progress.measured)
    for width in REAL:
        problems = [problem for problem in real_problems() if problem.width == width]
        if not progress.upcoming(*(problem.case for problem in problems)):
            continue
        for problem in problems:
            if progress.begin(problem.case):
                task = real_task(problem, built)
                yield measure(task, Case(task.inputs, built, _compiled_anew()))
    before, compiled = None, polar_express_bf16
    for problem in (*listed(), *random_problems(int(built.commit[:8], 16))):
        if not progress.begin(problem.case):
            continue
        compiled = compiled if problem.shape == before else _compiled_anew()
        before = problem.shape
        yield from _measured(problem, built, compiled)
        torch.cuda.empty_cache()
    yield from _zoo_rows(built, progress)
    progress.begin()
    for peer in other_projects.offered(*PEERS):
        for problem in (*real_problems(), *listed()):
            if problem.case in BESIDE_PEERS and progress.begin(
                other_projects.unit(problem.case, peer)
            ):
                task = (real_task if problem.width else heavy_task)(problem, built)
                make = functools.partial(peer_row, task, built, _compiled_anew(), peer)
                yield from other_projects.rows(peer, make, PEER_SECONDS)
                torch.cuda.empty_cache()


def summary(measured: Sequence[Row]) -> str:
    """The agreed mean: heavy rows of the listed shapes, what a user gets; then the other paths."""
    heavy = {problem.case for problem in listed() if problem.dtype == "float32"}
    shares = [row.fraction_of_floor for row in of_path(measured, "auto") if row.case in heavy]
    missing = len(heavy) - len([share for share in shares if share is not None])
    text = f"heavy rows: {geomean([s for s in shares if s is not None]):.1%} of the floor"
    text += f", {missing} of {len(heavy)} missing" if missing else ""
    said_of = {
        "mma.sync products over torch's, by the clock": (paths.MMA_SYNC, "wall_ms"),
        "what Hopper's products gain over torch's, device": ("auto", "ms"),
    }
    for words, (fast, key) in said_of.items():
        times = {row.case: getattr(row, key) for row in of_path(measured, fast)}
        both = [row for row in of_path(measured, paths.TORCH) if times.get(row.case)]
        ratios = {row.case.split("/")[0]: getattr(row, key) / times[row.case] for row in both}
        if ratios:
            each = ", ".join(f"{case} {ratio:.3f}" for case, ratio in ratios.items())
            text += f"\n{words}: {geomean(list(ratios.values())):.3f} ({each})"
    return text


def of_path(measured: Sequence[Row], path: str) -> list[Row]:
    """The right rows of a path."""
    return [row for row in measured if row.variant == path and row.ok]


def least_bytes(problem: Problem) -> int:
    """The input read, X written and read, and so its successor, the result written: two products
    of X beside each of two Gram matrices. Matrices of side m may stay in L2."""
    elements = problem.batch * problem.m * problem.n
    passes = 1 + 2 + 1 + 2 + 1  # X, X X^T and M X of it, X_1, the same, the result
    return elements * (4 + 2 * passes)


def of_least_traffic() -> float | str:
    """DRAM bytes of COUNTED over the least, or why there is no number."""
    try:
        return sum(counted("harness.orthogonalize")[0]) / least_bytes(COUNTED)
    except NotCountedError as reason:
        return str(reason)


def main() -> None:
    """One call, after one that is not counted: the child that ncu looks at."""
    built = load()
    generator = torch.Generator("cuda").manual_seed(0)
    x = made(COUNTED, generator, "cuda")
    out = torch.empty_like(x, dtype=torch.float16)
    for counts in (False, True):
        if counts:
            torch.cuda.profiler.start()
        built.package.orthogonalize(x, out=out)
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
