"""The demo as a stranger runs it: a process, its exit status, what it prints and what it leaves."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from matplotlib import image

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
OPTIMIZERS = ("AdamW", "MuonAdamW")
STEPS = 240  # about a second per run: long enough to be interrupted in the middle


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half a megabyte of Python in 64 files whose names, and so whose split, are fixed."""
    folder = tmp_path_factory.mktemp("corpus")
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:64]
    for number, source in enumerate(sources):
        (folder / f"part_{number:02d}.py").write_bytes(source.read_bytes()[:8192])
    return folder


def command(out: Path, *options: object) -> list[str]:
    """The command line of a tiny demo that writes to `out`."""
    script = [sys.executable, "examples/train_demo.py", "--model", "tiny", "--device", "cpu"]
    return [*script, "--threads", "1", "--out-dir", str(out), *map(str, options)]


def environment(**changes: str) -> dict[str, str]:
    """The caller's environment without LOCAL_KERNELS, which the demo sets itself."""
    return {k: v for k, v in os.environ.items() if k != "LOCAL_KERNELS"} | changes


def run(*arguments: object, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture
def forked(forks):
    """`run` but for the seconds of imports."""

    def run_forked(*arguments: object, **changes: str) -> subprocess.CompletedProcess[str]:
        _, *words = command(*arguments)
        return forks.run(*words, folder=ROOT, environment=environment(**changes))

    return run_forked


def interrupt(out: Path, optimizer: str, *options: object) -> str:
    """Start the demo, press Ctrl-C after the first checkpoint of `optimizer`, return the output."""
    process = subprocess.Popen(
        command(out, *options),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 200
        checkpoints = out / "checkpoints" / optimizer.lower()
        while not any(checkpoints.glob("step_*")):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "no checkpoint was written"
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130, output
    return output


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a run that was left alone."""
    out = tmp_path_factory.mktemp("finished")
    done = run(out, "--corpus", corpus, "--steps", STEPS)
    assert done.returncode == 0, done.stderr
    (out / "printed.txt").write_text(done.stdout)
    return out


def histories(out: Path) -> dict[str, dict]:
    """What the runs recorded, without the times."""
    saved = json.loads((out / "results.json").read_text())["histories"]
    return {name: {k: v for k, v in h.items() if k != "seconds"} for name, h in saved.items()}


def test_both_optimizers_learn(finished: Path) -> None:
    for name in OPTIMIZERS:
        history = histories(finished)[name]
        assert len(history["train"]) == STEPS
        steps, losses = zip(*history["held_out"], strict=True)
        assert steps == tuple(range(STEPS // 40, STEPS + 1, STEPS // 40))
        assert losses[-1] < losses[0] - 1  # nats per byte; it starts above ln 256 = 5.5
    assert histories(finished)["AdamW"]["train"][0] == histories(finished)["MuonAdamW"]["train"][0]


def test_table_names_losses_steps_times_and_kernels(finished: Path, repo_id: str) -> None:
    table = (finished / "table.md").read_text()
    assert table in (finished / "printed.txt").read_text()
    for name in OPTIMIZERS:
        assert f"{histories(finished)[name]['held_out'][-1][1]:.4f}" in table
    for words in ("steps to AdamW's held-out loss", "seconds in training steps", "tokens/s"):
        assert words in table
    assert f"{repo_id} version 1, torch-stable-abi" in table  # the variant that get_kernel chose
    for words in ("8 matrices of 32 x 32: ", "2 matrices of 128 x 32: ", "2 matrices of 32 x 128"):
        assert words in table


def test_plot_is_an_image_with_both_colours(finished: Path) -> None:
    pixels = image.imread(finished / "loss.png")  # (height, width, RGBA) in [0, 1]
    assert pixels.shape[0] > 400 and pixels.shape[1] > 600
    for colour in ((255, 127, 14), (31, 119, 180)):  # tab:orange, tab:blue
        assert ((pixels[..., :3] * 255).round() == colour).all(axis=-1).sum() > 500


def test_interrupted_run_resumes_bit_for_bit(
    finished: Path, corpus: Path, forked, tmp_path: Path
) -> None:
    options = ("--corpus", corpus, "--steps", STEPS, "--checkpoint-every", 7)
    output = interrupt(tmp_path, "AdamW", *options)
    assert "--resume" in output
    interrupt(tmp_path, "MuonAdamW", *options, "--resume")
    assert not (tmp_path / "results.json").exists()
    done = forked(tmp_path, *options, "--resume")
    assert done.returncode == 0, done.stderr

    assert histories(tmp_path) == histories(finished)
    for name in ("adamw", "muonadamw"):
        folder = f"checkpoints/{name}/step_{STEPS:06d}"
        files = sorted((finished / folder).rglob("*.safetensors"))
        assert len(files) == 2  # model and optimizer
        for file in files:
            assert (tmp_path / file.relative_to(finished)).read_bytes() == file.read_bytes()


def test_resume_refuses_what_does_not_fit(
    finished: Path, corpus: Path, forked, tmp_path: Path
) -> None:
    options = ("--corpus", corpus, "--steps", STEPS, "--resume")
    before = sorted(path for path in finished.rglob("*"))
    for refused, words in (
        (forked(finished, *options), ["two finished runs", "without --resume"]),
        (
            forked(finished, *options, "--lr-muon", "0.5", "--seed", "1"),
            ["different run", "run.seed: 0 in the checkpoint, 1 now"],
        ),
        (forked(tmp_path, *options), ["no checkpoint", "without --resume"]),
    ):
        assert refused.returncode == 2
        assert "Traceback" not in refused.stderr
        for word in words:
            assert word in refused.stderr
    assert sorted(path for path in finished.rglob("*")) == before


def test_sweep_widens_its_grid_and_writes_its_tables(corpus: Path, tmp_path: Path) -> None:
    table = tmp_path / "tables" / "sweep-v1.0"
    done = run(
        *(tmp_path, "--corpus", corpus, "--steps", 20, "--sweep", "--seeds", 1, "--jobs", 2),
        *("--lrs-adamw", "0.004,0.016", "--lrs-muon", "0.008,0.032", "--out", table),
    )
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert content == json.loads(Path(f"{table}.json").read_text())
    assert content["torch"] and content["device"] and content["package"]["variant"]
    text = Path(f"{table}.md").read_text()
    assert text in done.stdout
    for name in OPTIMIZERS:
        rows = [row for row in content["rows"] if row["optimizer"] == name]
        rates = [row["lr"] for row in rows]
        assert len(rates) == len(set(rates)) >= 3  # of two values, one is always at the edge
        best = min(rows, key=lambda row: row["held_out"][-1])["lr"]
        assert content["summary"]["best_lr"][name] == best
        assert min(rates) < best < max(rates)
        assert f"## {name}" in text


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        ([], {"LOCAL_KERNELS": "{repo_id}={empty}"}, ["no cpu variant", "make build"]),
        (["--corpus", "{empty}"], {}, ["too small", "--corpus"]),
        (["--corpus", "{empty}/none"], {}, ["does not exist", "--corpus"]),
        (["--device", "bogus"], {}, ["--device bogus", "cpu or cuda"]),
        (["--device", "meta"], {}, ["--device meta", "cpu or cuda"]),
    ],
    ids=["not built", "no text", "no folder", "no device", "no training device"],
)
def test_setup_errors_say_what_to_do(
    options: list[str],
    changes: dict[str, str],
    words: list[str],
    repo_id: str,
    forked,
    tmp_path: Path,
) -> None:
    def fill(text: str) -> str:
        return text.format(repo_id=repo_id, empty=tmp_path)

    refused = forked(tmp_path, *map(fill, options), **{k: fill(v) for k, v in changes.items()})
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    for word in words:
        assert word in refused.stderr


# A process for which torch sees one GPU of CUDA 13.0.
WITH_GPU = """
import sys, torch

def for_the_demo(value, otherwise):  # a CUDA build of torch would start a driver that is not there
    def call(*_):
        caller = sys._getframe(1).f_globals["__name__"]
        return value if caller.startswith(("demo", "train_demo")) else otherwise
    return call

torch.version.cuda = "13.0"
torch.cuda.is_available = for_the_demo(True, False)
torch.cuda.device_count = for_the_demo(1, 0)
torch.cuda.get_device_name = for_the_demo("a GPU", None)
sys.path.insert(0, "examples")
import train_demo
sys.exit(train_demo.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("device", [None, "cuda", "cuda:1"])
def test_gpu_without_a_variant_of_its_own(
    device: str | None, corpus: Path, repo_id: str, forks, tmp_path: Path
) -> None:
    (variant,) = (ROOT / "build").glob("torch-stable-abi211-cpu-*")
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / variant.name).symlink_to(variant)
    options = ["--model", "tiny", "--corpus", str(corpus), "--steps", "20", "--threads", "1"]
    options += ["--out-dir", str(tmp_path / "out")] + (["--device", device] if device else [])
    found = environment(LOCAL_KERNELS=f"{repo_id}={tmp_path}")
    done = forks.run("-c", WITH_GPU, *options, folder=ROOT, environment=found)
    assert "Traceback" not in done.stderr
    if device is None:  # the demo takes what was built, and says so at once
        assert done.returncode == 0, done.stderr
        first = done.stdout.splitlines()[0]
        for words in (variant.name, "CPU", "no cuda variant", "a GPU", "make build BACKEND=cuda"):
            assert words in first
    else:
        assert done.returncode == 2
        words = "no cuda variant" if device == "cuda" else "cuda:1: there is only cuda:0"
        assert words in done.stderr


def test_unswept_rates_are_called_so(finished: Path, corpus: Path, forked, tmp_path: Path) -> None:
    assert "rates not swept for this model" in (finished / "table.md").read_text()
    given = ("--lr-adamw", "0.01", "--lr-muon", "0.02")
    done = forked(tmp_path, "--corpus", corpus, "--steps", 10, *given)
    assert done.returncode == 0 and "not swept" not in done.stdout


@pytest.fixture(scope="module")
def demo():
    """`demo("report")` -> that module beside the script."""
    sys.path.insert(0, str(EXAMPLES))
    yield lambda name: importlib.import_module(f"demo.{name}")
    sys.path.remove(str(EXAMPLES))


def test_swept_rates_are_those_of_the_committed_sweep(demo) -> None:
    config = demo("config")
    committed = json.loads((ROOT / "docs/benchmarks/demo-sweep.json").read_text())
    (swept,) = (preset for preset in config.PRESETS.values() if preset.swept)
    assert swept.lr == committed["summary"]["best_lr"]
    assert swept.model == demo("model").ModelConfig(**committed["run"]["model"])
    assert (swept.batch, swept.steps) == (committed["run"]["batch"], committed["run"]["steps"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("file", ["run.json", "model.safetensors", "optimizer/*.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{}", None], ids=["empty", "other", "cut"])
def test_damaged_checkpoint_is_refused_in_words(
    demo, opt, tmp_path: Path, optimizer: str, file: str, content: bytes | None
) -> None:
    import torch

    model = torch.nn.Linear(4, 4, bias=False)
    if optimizer == "AdamW":
        steps = torch.optim.AdamW(model.parameters())
    else:
        steps = opt.MuonAdamW([{"kind": "muon", "params": list(model.parameters()), "lr": 0.1}])
    model(torch.ones(4)).sum().backward()
    steps.step()
    store = demo("checkpoint").Checkpoints(tmp_path, every=1, identity={}, package=opt)
    store.save(model, steps, {"train": [1.0], "held_out": [], "seconds": 1.0})
    assert store.load(model, steps)["train"] == [1.0]

    (damaged,) = store.newest().glob(file)
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(demo("config").DemoError, match="cannot resume") as refused:
        store.load(model, steps)
    assert str(store.newest()) in str(refused.value) and "--resume" in str(refused.value)


def test_kernels_are_those_of_the_groups_own_options(demo, opt) -> None:
    import torch

    def matrices(count: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(torch.zeros(6, 12, dtype=dtype)) for _ in range(count)]

    muon, double = {"kind": "muon", "lr": 0.1}, torch.float64
    optimizer = opt.MuonAdamW(
        [
            muon | {"params": matrices(2, torch.float32), "method": "newton_schulz", "ns_steps": 7},
            muon | {"params": matrices(1, torch.float32), "dtype": torch.bfloat16},
            muon | {"params": matrices(3, double)},
            muon | {"params": matrices(1, double), "momentum_dtype": torch.bfloat16},
            {"kind": "adamw", "params": [torch.nn.Parameter(torch.zeros(3))], "lr": 0.1},
        ]
    )
    package = demo("package").Package(opt, "org/name", 1, "variant", "", True, "")
    lines = demo("report").kernels_that_ran(package, optimizer)["MuonAdamW"]
    for line, start in zip(
        lines,
        [
            "org/name version 1, variant",
            "2 matrices of 6 x 12: newton_schulz, 7 steps, float32 iterates",
            "1 matrix of 6 x 12: polar_express, 5 steps, bfloat16 iterates",
            "3 matrices of 6 x 12: polar_express, 5 steps, float64 iterates",
            "1 matrix of 6 x 12: gram_newton_schulz, 5 steps, float32 iterates",
        ],
        strict=True,
    ):
        assert line.startswith(start)


def test_split_depends_on_relative_paths_alone(demo, corpus: Path, tmp_path: Path) -> None:
    import torch

    def read(folder: Path):
        cpu = torch.device("cpu")
        return demo("corpus").read_corpus(folder, context=32, max_bytes=1 << 30, device=cpu)

    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for path in sorted(corpus.iterdir(), reverse=True):  # another order in the directory
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "tests").mkdir()
    (copy / "tests" / "ignored.py").write_text("x = 1\n" * 1000)
    first, second = read(corpus), read(copy)
    assert first.digest == second.digest
    assert sum(first.files) == 64 and first.files[1] >= 1
    held_out, train = bytes(first.held_out.tolist()), bytes(first.train.tolist())
    for path in corpus.iterdir():  # every file is whole, and on one side only
        text = path.read_bytes()
        assert (text in held_out) != (text in train)


def test_grid_grows_evenly_at_its_edge(demo) -> None:
    grow = demo("sweep").beyond_the_edge
    assert grow({1e-3: 2.0, 2e-3: 1.0, 4e-3: 1.5}) == []
    assert grow({1e-3: 2.0, 2e-3: 1.5, 4e-3: 1.0}) == [8e-3]
    assert grow({1e-3: 1.0, 2e-3: 1.5, 4e-3: float("inf")}) == [5e-4]


def test_steps_to_counts_from_the_first_evaluation_at_the_loss(demo) -> None:
    steps_to = demo("report").steps_to
    curve = [(10, 3.0), (20, 2.0), (30, 2.1), (40, 1.5)]
    assert steps_to(curve, 2.05) == 20
    assert steps_to(curve, 2.0) == 20
    assert steps_to(curve, 1.0) is None


def test_schedule_warms_up_and_ends_at_zero(demo) -> None:
    config = demo("config")
    preset = config.PRESETS["tiny"]
    run = config.RunConfig(
        optimizer=config.ADAMW,
        lr=1.0,
        model=preset.model,
        batch=1,
        steps=100,
        eval_sequences=1,
        autocast=False,
        seed=0,
    )
    factors = [demo("training").learning_rate_factor(step, run) for step in range(100)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[10] == 1.0 and factors[55] == pytest.approx(0.5)
    assert 0 < factors[-1] < 1e-3
    assert factors[10:] == sorted(factors[10:], reverse=True)
