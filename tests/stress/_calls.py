"""Calls of the optimizers' functions and of the step's kernels, with what each must give."""

from __future__ import annotations

import functools
import importlib
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..orthogonalize._matrices import exact
from ._arguments import FLOATS, Call, draw, restrided
from ._problem import DifferenceError, Run, Source, bits

Maker = Callable[["Package", random.Random], Call]
Made = dict[str, Any] | tuple[Any, ...] | Call
CALLS: dict[str, Maker] = {}
WORDS = (
    "lists of tensors",
    "could not convert string to float",
)  # of ops whose arguments are nothing else
STEPPED = (torch.float32, torch.bfloat16, torch.float16)


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


def call(name: str, **options: Any) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Enter a function that makes the arguments of a public function, by its name in the package.

    It returns them alone, with the check of a result, with that and another function; or a call.
    """

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


def close(
    what: str, found: Tensor, expected: Tensor, slack: float, terms: tuple[Tensor, ...] = ()
) -> None:
    """The norm of the difference is at most slack of that of what is expected, or of its terms.

    Of a difference that cancels, the rounding is that of its terms.
    """
    if found.shape != expected.shape:
        raise DifferenceError(f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    found, expected = found.detach().double(), expected.detach().double()
    if not expected.numel():
        return
    if not torch.equal(found.isfinite(), expected.isfinite()):
        raise DifferenceError(f"{what}: other elements are finite than expected")
    found, expected = found[found.isfinite()], expected[expected.isfinite()]
    away = (found - expected).norm().item()
    sizes = [term.detach().double().norm().item() for term in (expected, *terms)]
    if away > slack * max(size for size in sizes if size < math.inf) + 1e-30:
        raise DifferenceError(f"{what}: off by {away:.3g} of {expected.norm().item():.3g}")


def rounding(dtype: torch.dtype) -> float:
    return 8 * torch.finfo(dtype).eps


def matrices(generator: random.Random, dtypes: tuple[torch.dtype, ...] = FLOATS) -> Tensor:
    lead = generator.choice([(), (), (1,), (3,), (2, 2), (0,)])
    m, n = (generator.choice([1, 2, 3, 5, 8, 17, 33]) for _ in range(2))
    if generator.random() < 0.05:
        m = 0
    return draw(generator, (*lead, m, n), generator.choice(dtypes))


def accuracy(generator: random.Random, x: Tensor) -> tuple[torch.dtype | None, float]:
    """A dtype of the iteration, and how far it may be from float64."""
    dtype = generator.choice([None, None, *FLOATS])
    used = dtype or (torch.float64 if x.dtype == torch.float64 else torch.float32)
    return dtype, {torch.float16: 0.2, torch.bfloat16: 1.5}.get(used, 2e-2)


def with_out(generator: random.Random, x: Tensor, arguments: dict[str, Any]) -> dict[str, Any]:
    if generator.random() < 0.3:
        dtype = arguments.get("dtype") or x.dtype
        arguments["out"] = restrided(generator, torch.zeros(x.shape, dtype=dtype))
    return arguments


def iterated(package: Package, x: Tensor, *schedule: Any) -> Tensor:
    """x after a schedule of Newton-Schulz steps in float64."""
    turned = x.shape[-2] > x.shape[-1]
    wide = (x.mT if turned else x).double()
    found = package("reference.orthogonalize").newton_schulz(wide, *schedule)
    return found.mT if turned else found


def same_bits(what: str, reference: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """A check: the bits are those of a reference of the same arguments, as they are now."""
    given = dict(arguments)

    def check(result: Any) -> None:
        expected = reference(**given)
        pairs = (
            zip(result, expected, strict=True)
            if isinstance(result, tuple)
            else [(result, expected)]
        )
        if any(bits(found) != bits(right) for found, right in pairs):
            raise DifferenceError(f"{what}: other bits than the reference")

    return check


@call("orthogonalize", written=("out",))
def orthogonalize(package: Package, generator: random.Random) -> Made:
    x = matrices(generator)
    steps = generator.choice([1, 2, 5, 5, 8])
    methods = ["auto", "polar_express", "gram_newton_schulz", "newton_schulz"]
    methods += ["gram_polynomial"] * (steps == 5)
    method = generator.choice(methods)
    dtype, slack = accuracy(generator, x)
    if method == "gram_polynomial" and dtype == torch.bfloat16:
        dtype = None
    arguments = {"x": x, "method": method, "steps": steps, "dtype": dtype}

    def check(result: Tensor) -> None:
        if x.numel():
            expected = exact(package.opt, package, x, method, steps, iterate_dtype=dtype)
            close("orthogonalize", result, expected, slack)

    return with_out(generator, x, arguments), check


@call("newton_schulz", written=("out",), words=("a coefficient",))
def newton_schulz(package: Package, generator: random.Random) -> Made:
    x = matrices(generator)
    dtype, slack = accuracy(generator, x)
    steps = generator.choice([1, 3, 5])
    rows = [
        [generator.uniform(1, 1.5), generator.uniform(-0.5, 0), generator.uniform(0, 0.01)]
    ] * steps
    arguments = {"x": x, "steps": steps, "coefficients": rows, "dtype": dtype}

    def check(result: Tensor) -> None:
        close("newton_schulz", result, iterated(package, x, rows), slack)

    return with_out(generator, x, arguments), check


@call("gram_newton_schulz", written=("out",))
def gram_newton_schulz(package: Package, generator: random.Random) -> Made:
    x = matrices(generator)
    dtype = generator.choice([None, torch.float32, torch.float64])
    steps = generator.choice([1, 3, 5])
    arguments = {"x": x, "steps": steps, "dtype": dtype}
    if generator.random() < 0.3:
        arguments["restarts"] = generator.choice([[], [1], (1, 2)])
        if steps < 3:
            arguments["restarts"] = []
    if generator.random() < 0.3:
        name = generator.choice([*package.opt.COEFFICIENT_SETS])
        arguments |= {"coefficients": name, "restarts": None}
        arguments["steps"] = len(package.opt.COEFFICIENT_SETS[name].rows)
    return with_out(generator, x, arguments)


@call("polar_express", written=("out",))
def polar_express(package: Package, generator: random.Random) -> Made:
    x = matrices(generator)
    dtype, slack = accuracy(generator, x)
    options = schedule_options(generator)
    steps = generator.choice([1, 4, 7])

    def check(result: Tensor) -> None:
        rows = package.opt.polar_express_coefficients(steps, **options)
        close("polar_express", result, iterated(package, x, rows, 1 + options["safety"]), 2 * slack)

    arguments = {"x": x, "steps": steps, "dtype": dtype, **options}
    return with_out(generator, x, arguments), check


def schedule_options(generator: random.Random) -> dict[str, float]:
    return {
        "lower": generator.choice([1e-3, 1e-2, 0.1, 1e-4]),
        "safety": generator.choice([0.02, 0.05]),  # the room that rounding needs
        "cushion": generator.choice([0.02, 0.1]),
    }


@call("polar_express_coefficients")
def polar_express_coefficients(package: Package, generator: random.Random) -> Made:
    options = schedule_options(generator)
    steps = generator.choice([1, 2, 5, 9])

    def check(rows: Any) -> None:
        sigma = torch.linspace(options["lower"], 1, 1000, dtype=torch.float64)
        values = package("reference.orthogonalize").schedule_on_values(sigma, rows)
        if len(rows) != steps or not values.isfinite().all() or not (values > 0).all():
            raise DifferenceError(f"polar_express_coefficients{options}, {steps} steps: {rows}")

    return {"steps": steps, **options}, check


def lists(generator: random.Random, dtypes: tuple[torch.dtype, ...]) -> list[Tensor]:
    count = generator.choice([0, 1, 1, 3, 5])
    shapes = [(5, 3), (8,), (1, 1), (2, 3, 4), (0, 3), (33, 17), ()]
    return [
        draw(generator, generator.choice(shapes), generator.choice(dtypes)) for _ in range(count)
    ]


def wide(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.promote_types(x.dtype, torch.float32) for x in tensors]


@call("kernels.momentum", written=("buffers", "out"), words=WORDS)
def momentum(package: Package, generator: random.Random) -> Made:
    grads = lists(generator, STEPPED)
    buffers = [draw(generator, g.shape, torch.float32) for g in grads]
    out = [restrided(generator, torch.zeros(g.shape)) for g in grads]
    mu, nesterov = generator.choice([0.0, 0.5, 0.95]), generator.random() < 0.5
    form = generator.choice(["heavy_ball", "ema"])
    old = [b.clone() for b in buffers]

    def check(_: Any) -> None:
        slow = package("reference.update")
        for grad, kept, buffer, found in zip(grads, old, buffers, out, strict=True):
            expected = slow.momentum(
                grad.double(), kept := kept.double(), mu, nesterov=nesterov, ema=form == "ema"
            )
            close("momentum", found, expected, 1e-5, (grad, buffer))
            close("momentum: buffer", buffer, kept, 1e-5)

    arguments = {"grads": grads, "buffers": buffers, "out": out, "mu": mu, "nesterov": nesterov}
    return arguments | {"form": form}, check


@call("kernels.apply_update", written=("params",), words=WORDS)
def apply_update(package: Package, generator: random.Random) -> Made:
    params = lists(generator, STEPPED)
    updates = [draw(generator, p.shape, torch.float32, strided=False) for p in params]
    factors = [generator.uniform(0.1, 2) for _ in params]
    options: dict[str, Any] = {
        "lr": generator.uniform(1e-3, 0.1),
        "weight_decay": generator.choice([0.0, 0.1]),
        "shaped_decay": generator.random() < 0.5,
        "cautious": generator.random() < 0.5,
    }
    old = [p.clone() for p in params]

    def check(_: Any) -> None:
        for param, kept, update, factor in zip(params, old, updates, factors, strict=True):
            rate = options["lr"] * factor
            decay = (rate if options["shaped_decay"] else options["lr"]) * options["weight_decay"]
            expected = kept.double()
            package("reference.update").apply_update(
                expected, update, lr=rate, decay=decay, cautious=options["cautious"]
            )
            terms = kept, rate * update.norm()
            close("apply_update", param, expected, rounding(param.dtype), terms)

    return {"params": params, "updates": updates, "factors": factors, **options}, check


@call("kernels.adamw", written=("params", "exp_avgs", "exp_avg_sqs", "steps"), words=WORDS)
def adamw(package: Package, generator: random.Random) -> Made:
    params = lists(generator, STEPPED)
    grads = [draw(generator, p.shape, p.dtype) for p in params]
    averages = [draw(generator, p.shape, torch.float32) for p in params]
    squares = [draw(generator, p.shape, torch.float32).abs() for p in params]
    steps = [torch.tensor(float(generator.randrange(20))) for _ in params]
    options = {
        "lr": generator.uniform(1e-3, 0.1),
        "betas": generator.choice([(0.9, 0.95), (0.5, 0.999)]),
        "eps": 1e-8,
        "weight_decay": generator.choice([0.0, 0.1]),
    }
    old = [
        [x.double() for x in of_one]
        for of_one in zip(params, averages, squares, steps, strict=True)
    ]

    def check(_: Any) -> None:
        for param, grad, kept in zip(params, grads, old, strict=True):
            value, average, square, step = kept
            package("reference.update").adamw(
                value, grad.double(), average, square, step, **options
            )
            close("adamw", param, value, rounding(param.dtype) + 1e-5)

    return {
        "params": params,
        "grads": grads,
        "exp_avgs": averages,
        "exp_avg_sqs": squares,
        "steps": steps,
        **options,
    }, check


@call("kernels.symmetric_matmul", written=("out",))
def symmetric_matmul(package: Package, generator: random.Random) -> Made:
    dtype = generator.choice(STEPPED)
    lead = generator.choice([(), (2,), (2, 2)])
    m, k = (generator.choice([1, 3, 8, 17]) for _ in range(2))
    a = draw(generator, (*lead, m, k), dtype)
    options: dict[str, Any] = {"alpha": 0.5, "diag": generator.choice([0.0, 1.5])}
    if generator.random() < 0.5:
        c = draw(generator, (*lead, m, m), dtype)
        options |= {"C": c + c.mT, "beta": -1.0}
    if generator.random() < 0.3:
        options["scale"] = draw(generator, lead)

    def check(result: Tensor) -> None:
        expected = package("reference.products").symmetric_matmul(a, **options)
        close("symmetric_matmul", result, expected, 20 * rounding(dtype))
        if bits(result) != bits(result.mT.contiguous()):
            raise DifferenceError("symmetric_matmul: the result is not symmetric")

    return {"A": a, **options}, check


@call("nf4_quantize")
def nf4_quantize(package: Package, generator: random.Random) -> Made:
    dtype = generator.choice(STEPPED)
    shape = generator.choice([(64,), (3, 65), (0,), (2, 32, 4), (1,), (7, 9)])
    weight = draw(generator, shape, dtype, strided=False)
    blocksize, quant_type = generator.choice([32, 64, 128]), generator.choice(["nf4", "fp4"])

    arguments = {"weight": weight, "blocksize": blocksize, "quant_type": quant_type}
    return arguments, same_bits("nf4_quantize", package("reference.nf4").nf4_quantize, arguments)


@call("nf4_dequant", also=(RuntimeError,))
def nf4_dequant(package: Package, generator: random.Random) -> Made:
    experts, shape = generator.randint(1, 4), generator.choice([(8, 16), (64,), (3, 32)])
    weight = draw(generator, (experts, *shape), strided=False)
    packed, absmax = package.opt.nf4_quantize(weight, 32)
    ids = integers_below(generator, experts)
    arguments: dict[str, Any] = {
        "packed": packed,
        "absmax": absmax,
        "active_experts": ids,
        "expert_shape": shape,
        "blocksize": 32,
        "dtype": generator.choice(STEPPED),
    }
    if generator.random() < 0.3:
        nested = package("reference.nf4").nest_absmax(absmax)
        names = ("absmax", "absmax_code", "absmax_scale", "absmax_offset")
        arguments |= dict(zip(names, nested, strict=True))

    return arguments, same_bits("nf4_dequant", package("reference.nf4").nf4_dequant, arguments)


def _block_scales(package: Package, generator: random.Random, name: str) -> dict[str, Any]:
    """A stack in MXFP4 or FP8, and which of its experts are decoded."""
    experts, shape = generator.randint(1, 4), generator.choice([(8, 32), (3, 64), (33, 96)])
    weight = draw(generator, (experts, *shape), generator.choice(STEPPED))
    packed, scales = getattr(package.opt, f"{name}_quantize")(weight)
    ids = integers_below(generator, experts)
    arguments = {"packed": packed, "scales": scales, "active_experts": ids, "expert_shape": shape}
    return arguments | {"dtype": generator.choice(STEPPED)}


@call("mxfp4_quantize")
def mxfp4_quantize(package: Package, generator: random.Random) -> Made:
    weight = draw(generator, generator.choice([(2, 32), (3, 5, 64), (96,)]))
    return {"weight": weight}


@call("fp8_quantize")
def fp8_quantize(package: Package, generator: random.Random) -> Made:
    weight = draw(generator, generator.choice([(2, 32), (3, 5, 70), (2, 130, 150)]))
    return {"weight": weight, "block": generator.choice([(128, 128), (1, 0), (0, 0)])}


@call("mxfp4_dequant", also=(IndexError,))  # of an id that names no expert
def mxfp4_dequant(package: Package, generator: random.Random) -> Made:
    arguments = _block_scales(package, generator, "mxfp4")
    slow = package("reference.mxfp4").mxfp4_dequant
    return arguments, same_bits("mxfp4_dequant", slow, arguments)


@call("fp8_dequant", also=(IndexError,))  # of an id that names no expert
def fp8_dequant(package: Package, generator: random.Random) -> Made:
    arguments = _block_scales(package, generator, "fp8") | {"block": (128, 128)}
    return arguments, same_bits("fp8_dequant", package("reference.fp8").fp8_dequant, arguments)


def integers_below(generator: random.Random, high: int) -> Tensor:
    count = generator.randint(0, 4)
    return torch.tensor([generator.randrange(high) for _ in range(count)], dtype=torch.int64)


@call("explain")
def explain(package: Package, generator: random.Random) -> Made:
    op = generator.choice([*package("explain").EXPLAINERS])
    arguments: dict[str, Any] = {"op": op, "device": generator.choice(["cpu", torch.device("cpu")])}
    if op == "orthogonalize":
        arguments |= {"shape": (8, 5), "dtype": generator.choice(FLOATS), "steps": 5}
    elif op in ("expert_sort", "grouped_lora_linear", "combine", "glu"):
        arguments |= {"dtype": generator.choice(FLOATS), "backend": "auto"}

    def check(text: Any) -> None:
        if not isinstance(text, str) or not text:
            raise DifferenceError(f"explain({op}) says {text!r}")

    return arguments, check


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

    def check(groups: Any) -> None:
        held = [p for group in groups for p in group["params"]]
        if len(held) != len({*map(id, held)}) or len(held) != len([*model.parameters()]):
            raise DifferenceError("get_default_muon_param_groups loses or repeats parameters")

    return {"model": model, "is_muon_func": package.opt.default_is_muon}, check


@call("default_is_muon")
def default_is_muon(package: Package, generator: random.Random) -> Made:
    name = generator.choice(
        ["layers.0.q_proj.weight", "lm_head.weight", "norm.bias", "", "a" * 999]
    )
    param = draw(generator, generator.choice([(3, 4), (3,), (), (2, 3, 4), (0, 2)]))

    def check(result: Any) -> None:
        if not isinstance(result, bool):
            raise DifferenceError(f"default_is_muon returned {result!r}")

    return {"name": name, "param": param}, check


def constructor(front: str) -> Maker:
    def make(package: Package, generator: random.Random) -> Call:
        source = Source(generator)
        given = [source.group(muon=True), source.group(muon=False)]
        mark = "Muon" if front == "Muon" else "MuonAdamW"
        groups = []
        for group in given:
            params = [nn.Parameter(one.value()) for one in group.params]
            groups.append(group.make(mark, params))

        def check(optimizer: Any) -> None:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
            if not all(param.isfinite().all() for param in params):
                raise DifferenceError(f"{front} made a parameter infinite")

        arguments: dict[str, Any] = {"params" if front == "Muon" else "param_groups": groups}
        if front == "Muon":
            arguments |= {"lr": 0.01, "momentum": 0.9, "ns_steps": 5, "adamw_eps": 1e-8}
            arguments |= {"method": "auto", "split_sizes": None, "adamw_betas": (0.9, 0.95)}
            arguments |= {"warmup_step": 1, "chunk_size": -1}
        arguments |= {"distributed": None, "debug": False, "clip_config": None}
        return Call(
            front, getattr(package.opt, front), arguments, check, words=("group", "parameter")
        )

    return make


for _front in ("Muon", "MuonAdamW"):
    CALLS[_front] = constructor(_front)


@call("DistributedConfig")
def distributed_config(package: Package, generator: random.Random) -> Made:
    arguments = {
        "wire_dtype": generator.choice([None, torch.float16, torch.float32]),
        "prefetch": generator.randint(1, 4),
        "chunk_size": generator.choice([-1, 1, 8]),
        "in_flight_bytes": generator.choice([1, 2**20]),
        "cuda_graphs": generator.random() < 0.5,
        "timeout": generator.choice([1, 0.5]),
    }

    def check(config: Any) -> None:
        if any(getattr(config, name) != value for name, value in arguments.items()):
            raise DifferenceError(f"DistributedConfig took {config} for {arguments}")

    return arguments, check


def stepped(package: Package, generator: random.Random) -> Run:
    """An optimizer after one step."""
    source = Source(generator)
    front = generator.choice(["Muon", "MuonAdamW"])
    given = [source.group(muon=True), source.group(muon=False)]
    for group in given:
        group.options["adjust_lr_fn"] = "original"
        if not group.muon:
            del group.options["adjust_lr_fn"]
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
    grad = torch.ones_like(param)

    def call_step(grad: Any, qk_logits: Any = None) -> None:
        try:
            param.grad = grad
        except (RuntimeError, TypeError) as error:  # torch's own check of the attribute
            raise ValueError(f"grad: {error}") from error
        run.optimizer.step(qk_logits=qk_logits)

    return Call(
        "step", call_step, {"grad": grad, "qk_logits": None}, None, words=("gradient", name)
    )


@call(
    "load_state_dict",
    words=("group", "state", "loaded", "params", "saved", "zip()", "dictionary update"),
)
def load_state_dict(package: Package, generator: random.Random) -> Made:
    run = stepped(package, generator)
    saved = run.optimizer.state_dict()
    before = run.snapshot()

    def load(groups: Any, state: Any) -> None:
        from ._problem import assert_unchanged

        try:
            run.optimizer.load_state_dict({"param_groups": groups, "state": state})
        except (ValueError, TypeError):
            assert_unchanged(run, before, "after a refused load")
            raise

    numbers = [*saved["state"]]
    number = generator.choice(numbers)
    groups = [{**group} for group in saved["param_groups"]]

    def load_one(groups: Any, state: Any) -> None:
        load(groups, {**saved["state"], number: state})

    return {"groups": groups, "state": dict(saved["state"][number])}, None, load_one


@call("save_optimizer", also=(OSError,), words=("path",))
def save_optimizer(package: Package, generator: random.Random) -> Made:
    run = stepped(package, generator)
    name = generator.choice(["save_optimizer", "save_optimizer_async"])

    def saved(optimizer: Any, folder: Any) -> None:
        pending = getattr(package.opt, name)(optimizer, folder)
        if pending is not None:
            pending.wait()

    return (
        {"optimizer": run.optimizer, "folder": package.folder / f"a{generator.random()}"},
        None,
        saved,
    )


@call("load_optimizer")
def load_optimizer(package: Package, generator: random.Random) -> Call:
    run = stepped(package, generator)
    folder = package.folder / f"b{generator.random()}"
    package.opt.save_optimizer(run.optimizer, folder)
    path = folder / "optimizer.safetensors"
    data = path.read_bytes()

    def load(optimizer: Any, content: Any, folder: Any) -> None:
        if isinstance(content, bytes):
            path.write_bytes(content)
        package.opt.load_optimizer(optimizer, folder)

    if generator.random() < 0.6:
        place = generator.randrange(len(data))
        data = generator.choice([data[:place], data[place:], data + b"x", b"", data[:8] + data[9:]])
    arguments = {"optimizer": run.optimizer, "content": data, "folder": folder}
    words = (str(folder), "safetensors", "checkpoint", "path")
    return Call(
        "load_optimizer", load, arguments, None, ("content",), (OSError,), words, ("content",)
    )


@call("convert_state_dict", words=("state", "group", "param"))
def convert_state_dict(package: Package, generator: random.Random) -> Made:
    matrix, vector = (nn.Parameter(draw(generator, shape)) for shape in ((5, 3), (4,)))
    muon = torch.optim.Muon([matrix], lr=0.1)
    other = torch.optim.AdamW([vector], lr=0.1)
    for param in (matrix, vector):
        param.grad = torch.ones_like(param)
    muon.step(), other.step()
    ours = package.opt.MuonAdamW(
        [
            {"kind": "muon", "params": [matrix], "lr": 0.1},
            {"kind": "adamw", "params": [vector], "lr": 0.1},
        ]
    )
    saved = [muon.state_dict(), other.state_dict()]

    def check(converted: Any) -> None:
        ours.load_state_dict(converted)
        close("converted", ours.state[vector]["exp_avg"], other.state[vector]["exp_avg"], 1e-6)

    return {"optimizer": ours, "saved": saved, "source": "torch"}, check


@call("profile_steps", also=(ImportError,))
def profile_steps(package: Package, generator: random.Random) -> Made:
    """The callback is only made: profiling takes seconds."""
    return (
        {"start": 1, "count": 2, "out": package.folder / "trace.json"},
        None,
        package.opt.ProfileCallback,
    )


def finite(result: Any) -> None:
    """Of functions without another reference."""
    tensors = list(result if isinstance(result, tuple) else (result,))
    for tensor in tensors:
        floating = isinstance(tensor, Tensor) and tensor.is_floating_point()
        if floating and not tensor.isfinite().all():
            raise DifferenceError("finite arguments gave something infinite")
