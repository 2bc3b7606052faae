"""Other projects' code as rows beside ours, from the user's own checkouts.

PEERS=<folder> names a folder with any of these checkouts, each under its repository's name; none of
their code is part of this one. What a checkout lacks, such as a package that it imports, is said,
and its rows are left out. Peers' rows carry the commit of their checkout, and no goal is judged on
them.

checkout                                  rows
dion (microsoft/dion)                     optimizer_step, gpt-124M/dion of end_to_end
nanochat (karpathy/nanochat)              optimizer_step, gpt-124M/nanochat of end_to_end
gram-newton-schulz and quack (Dao-AILab)  orthogonalize
axolotl (axolotl-ai-cloud/axolotl)        moe_lora
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from .report import Line, Rows

VARIABLE = "PEERS"
AXOLOTL_KERNELS = "axolotl.integrations.kernels.libs.scattermoe_lora"
TUNED = ("dion", "axolotl")  # packages whose kernels Triton tunes
TUNING_MS = 5, 25  # warm-up and repetitions of each configuration that is tried
SLICES = 8  # of the configurations, for processes that compile ahead
# Peer -> the checkouts that it needs, its own first, and the folder of each that is imported from.
CHECKOUTS = {
    "dion": {"dion": "."},
    "nanochat": {"nanochat": "."},
    "gram-newton-schulz": {"gram-newton-schulz": ".", "quack": "."},
    "axolotl": {"axolotl": "src/axolotl/integrations/kernels/libs"},
}


def title(name: str) -> str:
    """What tables call a peer: its own checkout and those that it computes with."""
    return " with ".join(CHECKOUTS[name])


class MissingError(Exception):
    """Why a peer has no rows."""


@dataclass(frozen=True)
class Peer:
    """A peer that can be imported."""

    name: str  # of CHECKOUTS
    commit: str  # of its checkouts
    call: Callable[..., Any]  # what the peer's rows time; see the adapters below


def offered(*names: str) -> Iterator[Peer]:
    """Those of the peers that PEERS has; a line for each that it lacks, nothing without PEERS."""
    if not os.environ.get(VARIABLE):
        return
    for name in names:
        try:
            yield found(name)
        except MissingError as reason:
            _say_once(f"no rows of {name}: {reason}")


def rows(peer: Peer, make: Callable[[], Iterable[Line]], seconds: float = math.inf) -> Rows:
    """What `make` measures of a peer; if it fails, or takes longer, that is said instead."""
    try:
        with _within(seconds):
            measured = list(make())
        if not all(row.ok for row, _ in measured):
            raise ValueError("its results are wrong")
    except Exception as error:  # of any kind: a peer's failure must not end our measurement
        print(f"no rows of {peer.name}: {type(error).__name__}: {error}", flush=True)
        return
    yield from ((replace(row, peer_commit=peer.commit), text) for row, text in measured)


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in here after so long: whatever a peer compiles, ours go on."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0 if seconds == math.inf else seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def unit(case: str, peer: Peer) -> str:
    """What a peer's row is called in a file's progress: they have their turn behind all of ours."""
    return f"{case} [{peer.name}]"


@functools.cache
def found(name: str) -> Peer:
    """The peer of this name.

    Raises:
        MissingError: PEERS, the checkout, its commit, or a package that it imports is missing.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        raise MissingError(f"{VARIABLE} names no folder of checkouts")
    commits, places = [], []
    for checkout, inside in CHECKOUTS[name].items():
        path = Path(folder).expanduser().resolve() / checkout
        if not (path / inside).is_dir():
            raise MissingError(f"there is no checkout {path}")
        commits.append(f"{checkout} {commit_of(path)}")
        places.append(str(path / inside))
    before = list(sys.path)
    sys.path[:0] = places  # until it is imported: checkouts have folders such as tests, too
    try:
        call = ADAPTERS[name]()
    except Exception as error:  # of any kind, as its imports are not ours
        raise MissingError(f"{type(error).__name__}: {error}") from error
    finally:
        sys.path[:] = before
    return Peer(name, ", ".join(commits), call)


def commit_of(checkout: Path) -> str:
    """The 40 digits of a checkout's commit, from its file COMMIT or, without one, from git.

    Raises:
        MissingError: neither names a commit.
    """
    named = checkout / "COMMIT"
    if named.is_file():
        return named.read_text().strip()
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    if (checkout / ".git").exists():  # else it would be that of a repository around it
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            return subprocess.run(
                command, capture_output=True, text=True, check=True
            ).stdout.strip()
    raise MissingError(f"{checkout} has neither .git nor a file COMMIT with its commit")


@functools.cache
def _say_once(text: str) -> None:
    print(text, flush=True)


def dion() -> Callable[[Sequence[dict]], Any]:
    """Groups with "kind", "params", "lr", "weight_decay" -> dion's Muon, its Triton products."""
    with _tuning_kept():
        make = importlib.import_module("dion").Muon

    def optimizer(groups: Sequence[dict]) -> Any:
        kinds = [
            {**{k: v for k, v in group.items() if k != "kind"}, "algorithm": group["kind"]}
            for group in groups
        ]
        # The rate by shape is that of match_rms_adamw.
        options = {"mu": 0.95, "nesterov": True, "adjust_lr": "rms_norm", "use_triton": True}
        return make(kinds, betas=(0.9, 0.95), **options)

    return optimizer


def nanochat() -> Callable[[Sequence[dict]], Any]:
    """Groups as of `dion` -> nanochat's MuonAdamW with nanochat's other options.

    It stacks the parameters of a Muon group, so each shape is a group.
    """
    make = importlib.import_module("nanochat.optim").MuonAdamW

    def optimizer(groups: Sequence[dict]) -> Any:
        found = []
        for group in groups:
            if group["kind"] == "adamw":
                found.append({"betas": (0.8, 0.95), "eps": 1e-10, **group})
                continue
            options = {"momentum": 0.95, "ns_steps": 5, "beta2": 0.9, **group}
            for shape in dict.fromkeys(param.shape for param in group["params"]):
                params = [param for param in group["params"] if param.shape == shape]
                found.append({**options, "params": params})
        return make(found)

    return optimizer


def gram_newton_schulz() -> Callable[[Any], Any]:
    """(B, m, n) -> its polar factor, with its own coefficients and quack's products."""
    importlib.import_module("quack")
    # Called by name: newer releases compile the instance's own, which a plain call does not take.
    return importlib.import_module("gram_newton_schulz").GramNewtonSchulz().__call__


def axolotl() -> Callable[..., Any]:
    """A SwiGLU layer of experts with LoRA as PEFT's matrices, by ScatterMoE's kernels.

    As axolotl's replacement of a transformers layer: PEFT's B is laid out anew in each forward, and
    both fused forms of backward are asked for.
    """
    kernels = _axolotl_kernels()

    def layer(x, ids, gates, weights, matrices, *, rank: int, scaling: float):
        """x (T, H), ids and gates (T, k), weights (E, out, in) of both, PEFT's A, B, A, B."""
        import torch.nn.functional as F

        experts, top_k = weights[0].shape[0], ids.shape[1]
        order = kernels.flatten_sort_count(ids, num_experts=experts)

        def linear(rows, number, fan, **options):
            a, b = matrices[2 * number : 2 * number + 2]
            b = b.unflatten(1, (rank, experts)).mT.flatten(1)  # (out, E r), expert by expert
            options |= {"scaling": scaling, "use_fused_dX": True, "use_fused_gather": True}
            weight = weights[number].mT
            return kernels.parallel_linear_lora(
                rows, weight, fan, *order, lora_A=a, lora_B=b, **options
            )

        gate, up = linear(x, 0, top_k, grouped_out=True).chunk(2, -1)
        return linear(F.silu(gate) * up, 1, 1, grouped_in=True, gates=gates)

    return layer


def _axolotl_kernels() -> ModuleType:
    """The package of its kernels under its full name, by which they import one another.

    The packages around it would import a whole trainer: empty ones stand for them.
    """
    parts = AXOLOTL_KERNELS.split(".")[:-1]
    for count in range(1, len(parts) + 1):
        outer = ModuleType(".".join(parts[:count]))
        outer.__path__ = sys.path[:1] if count == len(parts) else []  # where `found` looks first
        sys.modules[outer.__name__] = outer
    with _tuning_kept():
        return importlib.import_module(AXOLOTL_KERNELS)


@contextlib.contextmanager
def _tuning_kept() -> Iterator[None]:
    """For the import of a peer: Triton keeps what its autotuners find, each in a short time."""
    cached, before = "TRITON_CACHE_AUTOTUNING", os.environ.get("TRITON_CACHE_AUTOTUNING")
    os.environ[cached] = "1"  # read where a kernel is defined
    try:
        yield
    finally:
        os.environ.pop(cached) if before is None else os.environ.update({cached: before})
    for tuner in _tuners():
        tuner._do_bench = _bench


def _bench(call: Callable[[], object], quantiles: Sequence[float]) -> Any:
    from triton.testing import do_bench

    warmup, rep = TUNING_MS
    return do_bench(call, warmup=warmup, rep=rep, quantiles=quantiles)


def _tuners() -> Iterator[Any]:
    """Triton's autotuners of peers' kernels."""
    from triton.runtime.autotuner import Autotuner

    modules = [m for name, m in sys.modules.items() if name.split(".")[0] in TUNED]
    found = (one for module in modules for one in vars(module).values())
    yield from {id(one): one for one in found if isinstance(one, Autotuner)}.values()


@contextlib.contextmanager
def slice_of_tuning(number: int) -> Iterator[None]:
    """In here peers' kernels try one of SLICES parts of their configurations, once: to compile."""
    before = [(tuner, tuner.configs) for tuner in _tuners()]
    for tuner, configs in before:
        tuner.configs, tuner.cache = configs[number::SLICES] or configs[:1], {}
        tuner._do_bench = lambda call, quantiles: [call(), [0.0] * len(quantiles)][1]
    try:
        yield
    finally:
        for tuner, configs in before:
            tuner.configs, tuner.cache, tuner._do_bench = configs, {}, _bench


ADAPTERS = {
    "dion": dion,
    "nanochat": nanochat,
    "gram-newton-schulz": gram_newton_schulz,
    "axolotl": axolotl,
}
