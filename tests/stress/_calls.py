"""What a call is, its tensors, and calls of the optimizers' functions, with what each must give."""

from __future__ import annotations

import functools
import importlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..orthogonalize._matrices import exact
from ._problem import DifferenceError, Run, Source, assert_unchanged, bits


@dataclass
class Call:
    """One call of a public function.

    Args:
        name: of the function.
        function: the function.
        arguments: by keyword.
        check: gets the result and raises DifferenceError if it is wrong; None for none.
        written: names of the arguments that the function may write.
        also: documented errors besides ValueError and TypeError.
        words: what a message may name in place of an argument.
        exact: arguments that are left as they are, since only together they mean something.
    """

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    check: Callable[[Any], None] | None = None
    written: tuple[str, ...] = ()
    also: tuple[type[BaseException], ...] = ()
    words: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    spoiled: list[str] = field(default_factory=list)


Check = Callable[[Any], None]
Made = dict[str, Any] | tuple[Any, ...] | Call
CALLS: dict[str, Callable[[Package, random.Random], Call]] = {}
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
STEPPED = (torch.float32, torch.bfloat16, torch.float16)


def draw(
    generator: random.Random,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    scale: float = 1.0,
    strided: bool = True,
) -> Tensor:
    numbers = torch.Generator().manual_seed(generator.randrange(2**31))
    x = (torch.randn(tuple(shape), generator=numbers, dtype=torch.float64) * scale).to(dtype)
    return restrided(generator, x) if strided else x


def integers(generator: random.Random, low: int, high: int, shape: Sequence[int]) -> Tensor:
    numbers = torch.Generator().manual_seed(generator.randrange(2**31))
    return torch.randint(low, high, tuple(shape), generator=numbers)


def restrided(generator: random.Random, x: Tensor) -> Tensor:
    """The same numbers: contiguous, transposed in memory, with gaps, or at an odd place."""
    kind = generator.choice(["as it is", "as it is", "transposed", "gaps", "offset"])
    if kind == "transposed" and x.ndim >= 2:
        return x.mT.contiguous().mT
    if kind == "gaps" and x.ndim:
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), 7, dtype=x.dtype)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if kind == "offset":
        flat = torch.zeros(x.numel() + 1, dtype=x.dtype)
        flat[1:] = x.reshape(-1)
        return flat[1:].view(x.shape)
    return x


class Package:
    """The loaded package, its inner modules and a folder to write to."""

    def __init__(self, opt: Any, folder: Any) -> None:
        self.opt, self.folder = opt, folder

    def __call__(self, name: str) -> Any:
        return importlib.import_module(f"{self.opt.__name__}.{name}")

    def function(self, path: str) -> Any:
        """Such as "moe.glu"; what only the inner modules hand out begins with "kernels."."""
        if path.startswith("kernels."):
            return getattr(self("kernels"), path.removeprefix("kernels."))
        return functools.reduce(getattr, path.split("."), self.opt)

    def new_path(self) -> Any:
        return self.folder / f"{len([*self.folder.iterdir()])}"


def call(name: str, **options: Any) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Enter a maker of arguments of a public function, with a check of the result, or of a call."""

    def entered(made: Callable[..., Made]) -> Callable[..., Made]:
        def make(package: Package, generator: random.Random) -> Call:
            found = made(package, generator)
            if isinstance(found, Call):
                return found
            arguments, check, *other = found if isinstance(found, tuple) else (found, None)
            function = other[0] if other else package.function(name.split(",")[0])
            return Call(name, function, arguments, check, **options)

        CALLS[name] = make
        return made

    return entered


def drawn(generator: random.Random, **choices: list[Any]) -> dict[str, Any]:
    return {name: generator.choice(values) for name, values in choices.items()}


def close(found: Tensor, expected: Tensor, slack: float, *terms: Tensor) -> None:
    """The norm of the difference is at most slack of that of what is expected, or of its terms."""
    if found.shape != expected.shape:
        raise DifferenceError(f"shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    found, expected = found.detach().double(), expected.detach().double()
    if not expected.numel():
        return
    if not torch.equal(found.isfinite(), expected.isfinite()):
        raise DifferenceError("other elements are finite than expected")
    found, expected = found[found.isfinite()], expected[expected.isfinite()]
    away = (found - expected).norm().item()
    sizes = [term.detach().double().norm().item() for term in (expected, *terms)]
    if away > slack * max(size for size in sizes if size < math.inf) + 1e-30:
        raise DifferenceError(f"off by {away:.3g} of {expected.norm().item():.3g}")


def near(expected: Callable[[], Tensor], slack: float) -> Check:
    """A check: the result is close to what the reference gives."""
    return lambda found: close(found, expected(), slack)


def holds(right: Callable[[Any], bool]) -> Check:
    """A check: that is true of the result."""

    def check(result: Any) -> None:
        if not right(result):
            raise DifferenceError(f"gave {result!r:.300}")

    return check


def finite(result: Any) -> None:
    """A check, of functions without a reference."""
    for tensor in result if isinstance(result, tuple) else (result,):
        floating = isinstance(tensor, Tensor) and tensor.is_floating_point()
        if floating and not tensor.isfinite().all():
            raise DifferenceError("finite arguments gave something infinite")


def same_bits(reference: Callable[..., Any], arguments: dict[str, Any]) -> Check:
    """A check: the bits are those of a reference of the same arguments, as they are now."""
    given = dict(arguments)

    def check(result: Any) -> None:
        both = result, reference(**given)
        pairs = zip(*both, strict=True) if isinstance(result, tuple) else [both]
        if any(bits(found) != bits(right) for found, right in pairs):
            raise DifferenceError("other bits than the reference")

    return check


def rounding(dtype: torch.dtype) -> float:
    return 8 * torch.finfo(dtype).eps


def iteration(generator: random.Random, **choices: list[Any]) -> tuple[dict[str, Any], float]:
    """Arguments of a function of matrices, and how far its result may be from float64."""
    lead = generator.choice([(), (), (1,), (3,), (2, 2), (0,)])
    m, n = (generator.choice([1, 2, 3, 5, 8, 17, 33]) for _ in range(2))
    if generator.random() < 0.05:
        m = 0
    x = draw(generator, (*lead, m, n), generator.choice(FLOATS))
    given = {"x": x} | drawn(generator, dtype=[None, None, *FLOATS], **choices)
    if generator.random() < 0.3:
        given["out"] = restrided(generator, torch.zeros(x.shape, dtype=given["dtype"] or x.dtype))
    used = given["dtype"] or (torch.float64 if x.dtype == torch.float64 else torch.float32)
    return given, {torch.float16: 0.2, torch.bfloat16: 1.5}.get(used, 2e-2)


def iterated(package: Package, x: Tensor, *schedule: Any) -> Tensor:
    """x after a schedule of Newton-Schulz steps in float64."""
    turned = x.shape[-2] > x.shape[-1]
    wide = (x.mT if turned else x).double()
    found = package("reference.orthogonalize").newton_schulz(wide, *schedule)
    return found.mT if turned else found


@call("orthogonalize", written=("out",))
def orthogonalize(package: Package, generator: random.Random) -> Made:
    methods = ["auto", "polar_express", "gram_newton_schulz", "newton_schulz", "gram_polynomial"]
    given, slack = iteration(generator, steps=[1, 2, 5, 5, 8], method=methods)
    if given["method"] == "gram_polynomial":
        given["steps"] = 5
        if given["dtype"] == torch.bfloat16:
            given |= {"dtype": torch.float32, "out": None}
    x, kept = given["x"], dict(given)

    def check(result: Tensor) -> None:
        if x.numel():
            method, steps, dtype = (kept[name] for name in ("method", "steps", "dtype"))
            right = exact(package.opt, package, x, method, steps, iterate_dtype=dtype)
            close(result, right, slack)

    return given, check


@call("newton_schulz", written=("out",), words=("a coefficient",))
def newton_schulz(package: Package, generator: random.Random) -> Made:
    given, slack = iteration(generator, steps=[1, 3, 5])
    row = [generator.uniform(*ends) for ends in ((1, 1.5), (-0.5, 0), (0, 0.01))]
    given["coefficients"] = rows = [row] * given["steps"]
    x = given["x"]
    return given, near(lambda: iterated(package, x, rows), slack)


@call("gram_newton_schulz", written=("out",))
def gram_newton_schulz(package: Package, generator: random.Random) -> Made:
    given, _ = iteration(generator, steps=[1, 3, 5])
    if given["dtype"] in (torch.float16, torch.bfloat16):
        given |= {"dtype": None, "out": None}
    if generator.random() < 0.3:
        some = [[], [1], (1, 2)] if given["steps"] >= 3 else [[]]
        given["restarts"] = generator.choice(some)
    elif generator.random() < 0.4:
        name, table = generator.choice([*package.opt.COEFFICIENT_SETS.items()])
        given |= {"coefficients": name, "restarts": None, "steps": len(table.rows)}
    return given


# Of polar_express_coefficients; the room that rounding needs is 0.02 or more.
SCHEDULE = {"lower": [1e-3, 1e-2, 0.1, 1e-4], "safety": [0.02, 0.05], "cushion": [0.02, 0.1]}


@call("polar_express", written=("out",))
def polar_express(package: Package, generator: random.Random) -> Made:
    given, slack = iteration(generator, steps=[1, 4, 7], **SCHEDULE)
    x, options = given["x"], {name: given[name] for name in ("steps", *SCHEDULE)}

    def expected() -> Tensor:
        rows = package.opt.polar_express_coefficients(**options)
        return iterated(package, x, rows, 1 + options["safety"])

    return given, near(expected, 2 * slack)


@call("polar_express_coefficients")
def polar_express_coefficients(package: Package, generator: random.Random) -> Made:
    given = drawn(generator, steps=[1, 2, 5, 9], **SCHEDULE)
    steps, lower = given["steps"], given["lower"]

    def right(rows: Any) -> bool:
        sigma = torch.linspace(lower, 1, 1000, dtype=torch.float64)
        values = package("reference.orthogonalize").schedule_on_values(sigma, rows)
        return len(rows) == steps and bool((values.isfinite() & (values > 0)).all())

    return given, holds(right)


@call("kernels.symmetric_matmul", written=("out",))
def symmetric_matmul(package: Package, generator: random.Random) -> Made:
    dtype, lead = generator.choice(STEPPED), generator.choice([(), (2,), (2, 2)])
    m, k = (generator.choice([1, 3, 8, 17]) for _ in range(2))
    a = draw(generator, (*lead, m, k), dtype)
    options: dict[str, Any] = {"alpha": 0.5, "diag": generator.choice([0.0, 1.5])}
    if generator.random() < 0.5:
        c = draw(generator, (*lead, m, m), dtype)
        options |= {"C": c + c.mT, "beta": -1.0}
    if generator.random() < 0.3:
        options["scale"] = draw(generator, lead)
    return {"A": a, **options}


def some_ids(generator: random.Random, high: int) -> Tensor:
    count = generator.randint(0, 4)
    return torch.tensor([generator.randrange(high) for _ in range(count)], dtype=torch.int64)


@call("nf4_quantize")
def nf4_quantize(package: Package, generator: random.Random) -> Made:
    shape = generator.choice([(64,), (3, 65), (0,), (2, 32, 4), (1,), (7, 9)])
    given = drawn(generator, blocksize=[32, 64, 128], quant_type=["nf4", "fp4"])
    given["weight"] = draw(generator, shape, generator.choice(STEPPED), strided=False)
    return given, same_bits(package("reference.nf4").nf4_quantize, given)


@call("nf4_dequant", also=(RuntimeError,))
def nf4_dequant(package: Package, generator: random.Random) -> Made:
    experts, shape = generator.randint(1, 4), generator.choice([(8, 16), (64,), (3, 32)])
    weight = draw(generator, (experts, *shape), strided=False)
    packed, absmax = package.opt.nf4_quantize(weight, 32)
    given: dict[str, Any] = {"packed": packed, "absmax": absmax, "expert_shape": shape}
    given |= {"active_experts": some_ids(generator, experts), "blocksize": 32}
    given["dtype"] = generator.choice(STEPPED)
    if generator.random() < 0.3:
        nested = package("reference.nf4").nest_absmax(absmax)
        names = ("absmax", "absmax_code", "absmax_scale", "absmax_offset")
        given |= dict(zip(names, nested, strict=True))
    return given, same_bits(package("reference.nf4").nf4_dequant, given)


def _dequant(name: str, **more: Any) -> None:
    @call(f"{name}_dequant", also=(IndexError,))  # of an id that names no expert
    def dequant(package: Package, generator: random.Random) -> Made:
        experts, shape = generator.randint(1, 4), generator.choice([(8, 32), (3, 64), (33, 96)])
        weight = draw(generator, (experts, *shape), generator.choice(STEPPED))
        packed, scales = getattr(package.opt, f"{name}_quantize")(weight)
        given = {"packed": packed, "scales": scales, "expert_shape": shape, **more}
        given |= {"active_experts": some_ids(generator, experts)}
        given["dtype"] = generator.choice(STEPPED)
        reference = getattr(package(f"reference.{name}"), f"{name}_dequant")
        return given, same_bits(reference, given)


_dequant("mxfp4")
_dequant("fp8", block=(128, 128))


@call("mxfp4_quantize")
def mxfp4_quantize(package: Package, generator: random.Random) -> Made:
    return {"weight": draw(generator, generator.choice([(2, 32), (3, 5, 64), (96,)]))}


@call("fp8_quantize")
def fp8_quantize(package: Package, generator: random.Random) -> Made:
    weight = draw(generator, generator.choice([(2, 32), (3, 5, 70), (2, 130, 150)]))
    return {"weight": weight, "block": generator.choice([(128, 128), (1, 0), (0, 0)])}


@call("explain")
def explain(package: Package, generator: random.Random) -> Made:
    given = drawn(
        generator, op=[*package("explain").EXPLAINERS], device=["cpu", torch.device("cpu")]
    )
    if given["op"] == "orthogonalize":
        given |= {"shape": (8, 5), "dtype": generator.choice(FLOATS), "steps": 5}
    elif given["op"] in ("expert_sort", "grouped_lora_linear", "combine", "glu"):
        given |= {"dtype": generator.choice(FLOATS), "backend": "auto"}
    return given, holds(lambda text: isinstance(text, str) and bool(text))


class Small(nn.Module):
    """Parameters of every kind that groups tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 4)
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 7, bias=False)


@call("get_default_muon_param_groups")
def get_default_muon_param_groups(package: Package, generator: random.Random) -> Made:
    model = Small()

    def right(groups: Any) -> bool:
        """No parameter is lost or repeated."""
        held = [id(p) for group in groups for p in group["params"]]
        return sorted(held) == sorted(map(id, model.parameters()))

    return {"model": model, "is_muon_func": package.opt.default_is_muon}, holds(right)


@call("default_is_muon")
def default_is_muon(package: Package, generator: random.Random) -> Made:
    names = ["layers.0.q_proj.weight", "lm_head.weight", "norm.bias", "", "a" * 999]
    param = draw(generator, generator.choice([(3, 4), (3,), (), (2, 3, 4), (0, 2)]))
    given = {"name": generator.choice(names), "param": param}
    return given, holds(lambda result: isinstance(result, bool))


def _constructor(front: str) -> None:
    @call(front, words=("group", "parameter"))
    def constructor(package: Package, generator: random.Random) -> Made:
        source = Source(generator)
        groups = [
            given.make(front, [nn.Parameter(one.value()) for one in given.params])
            for given in (source.group(muon=True), source.group(muon=False))
        ]

        def check(optimizer: Any) -> None:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
            finite(tuple(params))

        given: dict[str, Any] = {"distributed": None, "debug": False, "clip_config": None}
        if front == "MuonAdamW":
            return {"param_groups": groups, **given}, check
        given |= {"lr": 0.01, "momentum": 0.9, "ns_steps": 5, "adamw_eps": 1e-8, "params": groups}
        given |= {"method": "auto", "split_sizes": None, "adamw_betas": (0.9, 0.95)}
        return given | {"warmup_step": 1, "chunk_size": -1}, check


_constructor("Muon")
_constructor("MuonAdamW")


@call("DistributedConfig")
def distributed_config(package: Package, generator: random.Random) -> Made:
    given = drawn(
        generator,
        wire_dtype=[None, torch.float16, torch.float32],
        prefetch=[1, 2, 3, 4],
        chunk_size=[-1, 1, 8],
        in_flight_bytes=[1, 2**20],
        cuda_graphs=[True, False],
        timeout=[1, 0.5],
    )
    kept = dict(given)
    return given, holds(lambda made: all(getattr(made, k) == v for k, v in kept.items()))


def stepped(package: Package, generator: random.Random) -> Run:
    source, front = Source(generator), generator.choice(["Muon", "MuonAdamW"])
    given = [source.group(muon=True), source.group(muon=False)]
    given[0].options["adjust_lr_fn"] = "original"
    values = {one.name: one.value() for group in given for one in group.params}
    run = Run(package.opt, front, given, {}).make(values, [{} for _ in given])
    for param in run.params.values():
        param.grad = torch.ones_like(param)
    run.optimizer.step()
    return run


@call("step")
def step(package: Package, generator: random.Random) -> Call:
    run = stepped(package, generator)
    name, param = generator.choice([*run.params.items()])
    for one in run.params.values():
        one.grad = torch.ones_like(one)

    def call_step(grad: Any, qk_logits: Any = None) -> None:
        try:
            param.grad = grad
        except (RuntimeError, TypeError) as error:  # torch's own check of the attribute
            raise ValueError(f"grad: {error}") from error
        run.optimizer.step(qk_logits=qk_logits)

    given = {"grad": torch.ones_like(param), "qk_logits": None}
    return Call("step", call_step, given, words=("gradient", name))


LOADED = ("group", "state", "loaded", "params", "saved", "zip()", "dictionary update")


@call("load_state_dict", words=LOADED)
def load_state_dict(package: Package, generator: random.Random) -> Made:
    run = stepped(package, generator)
    saved, before = run.optimizer.state_dict(), run.snapshot()
    number = generator.choice([*saved["state"]])

    def load(groups: Any, state: Any) -> None:
        states = {**saved["state"], number: state}
        try:
            run.optimizer.load_state_dict({"param_groups": groups, "state": states})
        except (ValueError, TypeError):
            assert_unchanged(run, before, "after a refused load")
            raise

    groups = [{**group} for group in saved["param_groups"]]
    return {"groups": groups, "state": dict(saved["state"][number])}, None, load


@call("save_optimizer", also=(OSError,), words=("path",))
def save_optimizer(package: Package, generator: random.Random) -> Made:
    save = getattr(package.opt, generator.choice(["save_optimizer", "save_optimizer_async"]))

    def saved(optimizer: Any, folder: Any) -> None:
        pending = save(optimizer, folder)
        if pending is not None:
            pending.wait()

    optimizer = stepped(package, generator).optimizer
    return {"optimizer": optimizer, "folder": package.new_path()}, None, saved


@call("load_optimizer")
def load_optimizer(package: Package, generator: random.Random) -> Call:
    optimizer, folder = stepped(package, generator).optimizer, package.new_path()
    package.opt.save_optimizer(optimizer, folder)
    path = folder / "optimizer.safetensors"
    data = path.read_bytes()

    def load(optimizer: Any, content: Any, folder: Any) -> None:
        if isinstance(content, bytes):
            path.write_bytes(content)
        package.opt.load_optimizer(optimizer, folder)

    if generator.random() < 0.6:
        at = generator.randrange(len(data))
        data = generator.choice([data[:at], data[at:], data + b"x", b"", data[:8] + data[9:]])
    given = {"optimizer": optimizer, "content": data, "folder": folder}
    words, kept = (str(folder), "safetensors", "checkpoint", "path"), ("content",)
    return Call("load_optimizer", load, given, None, kept, (OSError,), words, kept)


@call("convert_state_dict", words=("state", "group", "param"))
def convert_state_dict(package: Package, generator: random.Random) -> Made:
    matrix, vector = (nn.Parameter(draw(generator, shape)) for shape in ((5, 3), (4,)))
    theirs = torch.optim.Muon([matrix], lr=0.1), torch.optim.AdamW([vector], lr=0.1)
    for param, optimizer in zip((matrix, vector), theirs, strict=True):
        param.grad = torch.ones_like(param)
        optimizer.step()
    kinds = {"muon": matrix, "adamw": vector}
    ours = package.opt.MuonAdamW([{"kind": k, "params": [p], "lr": 0.1} for k, p in kinds.items()])

    def check(converted: Any) -> None:
        ours.load_state_dict(converted)
        close(ours.state[vector]["exp_avg"], theirs[1].state[vector]["exp_avg"], 1e-6)

    saved = [optimizer.state_dict() for optimizer in theirs]
    return {"optimizer": ours, "saved": saved, "source": "torch"}, check


@call("profile_steps", also=(ImportError,))
def profile_steps(package: Package, generator: random.Random) -> Made:
    """The callback is only made: profiling takes seconds."""
    given = {"start": 1, "count": 2, "out": package.new_path()}
    return given, None, package.opt.ProfileCallback
