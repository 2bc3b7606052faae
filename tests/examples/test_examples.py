"""The examples as a stranger runs them: processes, what they print and what they leave."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib import image

from .._compare import relative_error

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


TINY = ("--layers", "1", "--channels", "16", "--heads", "2", "--batch", "2", "--context", "16")


def run_others(script: str, *arguments: object) -> str:
    command_others = [sys.executable, f"examples/{script}", *TINY, "--device", "cpu", *arguments]
    environment_others = {k: v for k, v in os.environ.items() if k != "LOCAL_KERNELS"}
    done = subprocess.run(
        [*map(str, command_others)],
        cwd=ROOT,
        env=environment_others | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.usefixtures("opt")
def test_profile_step(tmp_path) -> None:
    output = run_others("profile_step.py", "--start", 2, "--count", 2, "--out", tmp_path)
    names = {"trace-rank000-steps2-3.json", "memory-rank000-steps2-3.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    events = json.loads((tmp_path / "trace-rank000-steps2-3.json").read_text())["traceEvents"]
    stages = [event for event in events if event["name"] == "muon::adamw" and "ts" in event]
    assert len(stages) == 4  # two steps of two groups
    assert "blocks.0.attention.q.weight' (16, 16): muon" in output
    assert all(str(tmp_path / name) in output for name in names)


def loss(output: str) -> float:
    return float(re.search(r"held-out loss after \d+ steps: ([\d.]+) nats/byte", output)[1])


@pytest.mark.usefixtures("opt")
def test_train_nanochat_groups(corpus, tmp_path) -> None:
    """It learns, and a resumed run, also with its state in host memory, ends at the same loss."""
    common = ("--corpus", corpus, "--steps", 60, "--out-dir", tmp_path)
    whole = run_others("train_nanochat_groups.py", *common, "--save-every", 25)
    assert loss(whole) < 4.2  # log(256) = 5.55 nats before the first step
    (tmp_path / "step-000060" / "optimizer.safetensors").unlink()  # killed in mid-save
    resumed = run_others("train_nanochat_groups.py", *common, "--resume", "--offload")
    assert "from step 50" in resumed
    assert loss(resumed) == loss(whole)
    run_others("train_nanochat_groups.py", "--corpus", corpus, "--steps", 2, "--out-dir", tmp_path)
    # --resume would go on from steps of the run before.
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000002"]


def command_others(out: Path) -> list[str]:
    script = ["examples/finetune_moe_lora.py", "--tiny", "--device", "cpu"]
    return [*script, "--threads", "1", "--out-dir", str(out)]


def environment_others(**changes: str) -> dict[str, str]:
    """The caller's without LOCAL_KERNELS, which the example sets itself."""
    return {k: v for k, v in os.environ.items() if k != "LOCAL_KERNELS"} | changes


@pytest.fixture(scope="module")
def finished_others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finetune")
    done = subprocess.run(
        [sys.executable, *command_others(out)],
        cwd=ROOT,
        env=environment_others(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    (out / "printed.txt").write_text(done.stdout + done.stderr)
    return out


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("finetune_moe_lora")
    sys.path.remove(str(EXAMPLES))


def test_base_and_lora_learn(finished_others: Path) -> None:
    runs = json.loads((finished_others / "results.json").read_text())["runs"]
    for name, steps, gain in (("base", 60, 2.0), ("LoRA", 80, 0.15)):
        assert len(runs[name]["train"]) == steps
        losses = [loss for _, loss in runs[name]["held_out"]]
        assert losses[-1] < losses[0] - gain  # nats per byte


def test_bar_plot_and_table(finished_others: Path, repo_id: str) -> None:
    from matplotlib import image

    printed = (finished_others / "printed.txt").read_text()
    for words in (f"{repo_id} version 1, torch-stable-abi", "LoRA: 100%", "held-out loss: base"):
        assert words in printed
    pixels = image.imread(finished_others / "loss.png")
    assert ((pixels[..., :3] * 255).round() == (31, 119, 180)).all(axis=-1).sum() > 200  # LoRA's


def test_peft_gets_the_losses_that_training_saw(finished_others: Path, script) -> None:
    """Base and adapter are read by transformers and PEFT alone, and evaluated on the same text."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    runs = json.loads((finished_others / "results.json").read_text())["runs"]
    size = script.SIZES["tiny"]
    tokens, targets = script.held_out_batch(script.help_texts(torch.device("cpu")), size)
    base = AutoModelForCausalLM.from_pretrained(
        finished_others / "base", experts_implementation="grouped_mm"
    )
    model = peft.PeftModel.from_pretrained(base, finished_others / "adapter")

    @torch.no_grad()
    def loss() -> float:
        logits = model(input_ids=tokens).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()

    (_, before), *_, (_, after) = runs["LoRA"]["held_out"]
    assert loss() == pytest.approx(after, rel=1e-5)
    with model.disable_adapter():
        assert loss() == pytest.approx(before, rel=1e-5)
    config = json.loads((finished_others / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 16.0)


def test_set_up_errors_say_what_to_do(repo_id: str, forks, tmp_path: Path) -> None:
    empty = environment_others(LOCAL_KERNELS=f"{repo_id}={tmp_path}")
    done = forks.run(*command_others(tmp_path), folder=ROOT, environment=empty)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "no cpu variant" in done.stderr and "make build" in done.stderr


@pytest.fixture(scope="module")
def script_qlora():
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("qlora_moe")
    sys.path.remove(str(EXAMPLES))


@pytest.mark.parametrize("quant_type", ["mxfp4", "fp8"])
def test_other_formats_train(script_qlora, opt, quant_type) -> None:
    """MXFP4 on gpt-oss, which sees its stacks transposed; FP8 on Qwen3-MoE."""
    package = script_qlora.Package(opt, "", 1, "", "", False, "")
    size, device = script_qlora.SIZES["tiny"], torch.device("cpu")
    options = {"seed": 0, "nested": False, "quant_type": quant_type}
    model = script_qlora.build_model(size, package, device, torch.float32, **options)
    opt.integrations.attach_lora(model, 8, 16.0)
    stacks = [m for m in model.modules() if type(m).__name__ == "QuantizedExperts"]
    assert {stack.format.quant_type for stack in stacks} == {quant_type} and len(stacks) == 4
    corpus = script_qlora.read_corpus(None, context=size.context, max_bytes=1 << 16, device=device)
    run = script_qlora.Run(
        "LoRA", model=model, corpus=corpus, size=size, steps=12, lr=1e-2, seed=0, device=device
    )
    run.run()
    assert run.held_out[-1][1] < run.held_out[0][1]
    with pytest.raises(SystemExit):
        script_qlora.parse(["--format", quant_type, "--nested"])


@pytest.mark.usefixtures("opt")
def test_training_over_4_bits_in_host_memory(tmp_path: Path) -> None:
    command_others = [
        sys.executable,
        "examples/qlora_moe.py",
        "--tiny",
        "--device",
        "cpu",
        "--offload",
        "--target-modules",
        "q_proj",
        "--checkpointing",
    ]
    environment_others = {k: v for k, v in os.environ.items() if k != "LOCAL_KERNELS"}
    done = subprocess.run(
        [*command_others, "--threads", "1", "--steps", "30", "--out-dir", str(tmp_path)],
        cwd=ROOT,
        env=environment_others,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    for words in ("LoRA: 100%", "(4.50 bits each;", "no comparison: bitsandbytes", "to the device"):
        assert words in printed
    results = json.loads((tmp_path / "results.json").read_text())
    (_, before), *_, (_, after) = results["held_out"]
    assert after < before - 1.0  # nats per byte
    assert results["experts"] == {"elements": 2 * 8 * 3 * 64 * 64, "bytes": 110_592}
    names = {"adapter", "loss.png", "results.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size > 10_000


def test_the_other_way_computes_the_same(script_qlora, opt) -> None:
    """What is timed beside ours is the same layer, or the comparison would say nothing."""
    pytest.importorskip("bitsandbytes")
    package = script_qlora.Package(opt, "", 1, "", "", False, "")
    size, device = script_qlora.SIZES["tiny"], torch.device("cpu")
    model = script_qlora.build_model(size, package, device, torch.bfloat16, seed=0, nested=False)
    stacks = [p for n, p in model.named_parameters() if ".experts." in n]
    assert stacks and not any(p.dtype == torch.bfloat16 for p in stacks)
    opt.integrations.attach_lora(model, 16, 32.0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    experts = model.model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 64, generator=generator).bfloat16()
    weights, index = torch.rand(20, 8, generator=generator).topk(2)
    ours = experts(hidden, index, weights.bfloat16())
    other = script_qlora.dense_and_grouped(experts, hidden, index, weights.bfloat16())
    assert relative_error(ours, other.float()) < 0.02


def test_a_comparison_runs_both_ways_and_training_goes_on_with_ours(
    script_qlora, opt, monkeypatch
) -> None:
    """With LoRA attached, as on a GPU that has bitsandbytes; only the clock is another one."""
    pytest.importorskip("bitsandbytes")
    package = script_qlora.Package(opt, "", 1, "", "", False, "")
    size, device = script_qlora.SIZES["tiny"], torch.device("cpu")
    model = script_qlora.build_model(size, package, device, torch.bfloat16, seed=0, nested=False)
    opt.integrations.attach_lora(model, 8, 16.0)
    run_others = script_qlora.Run(
        "LoRA",
        model=model,
        corpus=script_qlora.read_corpus(
            None, context=size.context, max_bytes=1 << 16, device=device
        ),
        size=size,
        steps=1,
        lr=1e-2,
        seed=0,
        device=SimpleNamespace(type="cuda"),
    )
    losses, used = [], []
    usual = script_qlora.dense_and_grouped

    def measure(step) -> dict[str, float]:
        before = len(used)
        step()
        return {"usual": float(len(used) - before)}

    def counted(*arguments):
        used.append(arguments)
        return usual(*arguments)

    monkeypatch.setattr(script_qlora, "dense_and_grouped", counted)
    monkeypatch.setattr(script_qlora, "measure", measure)
    monkeypatch.setattr(
        run_others, "loss", lambda *batch: losses.append(model(*batch[:1])) or total()
    )

    def total():
        return losses[-1].logits.float().square().mean()

    before = {name: p.clone() for name, p in model.named_parameters()}
    found = script_qlora.compare(run_others, package, ours_alone=False)
    layers = size.model["num_hidden_layers"]
    assert found == {"ours": {"usual": 0}, "bitsandbytes + grouped_mm": {"usual": layers}}
    first, second = (output.logits for output in losses)
    assert relative_error(second, first.float()) < 0.05
    model(losses[-1].logits.argmax(-1))
    assert len(used) == layers  # ours again
    for name, parameter in model.named_parameters():
        assert parameter.grad is None and torch.equal(parameter, before[name]), name

    def too_large(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(script_qlora, "dense_and_grouped", too_large)
    found = script_qlora.compare(run_others, package, ours_alone=False)
    assert found == {"ours": {"usual": 0}, "bitsandbytes + grouped_mm": None}
    assert script_qlora.compare(run_others, package, ours_alone=True) == {"ours": {"usual": 0}}


def test_the_table_of_a_comparison(script_qlora) -> None:
    ours = {"ms": 10.0, "peak_mb": 250.0, "kept_mb": 1.0}
    usual = {"ms": 25.0, "peak_mb": 1000.0, "kept_mb": 1.0}
    table = script_qlora.report({"ours": ours, "bitsandbytes + grouped_mm": usual})
    assert "2.50 times as fast, 25% of the memory" in table
    table = script_qlora.report({"ours": ours, "bitsandbytes + grouped_mm": None})
    assert "out of memory" in table and "times as fast" not in table


def test_the_full_size_is_the_whole_model(script_qlora) -> None:
    """The shapes of Qwen/Qwen3-30B-A3B, 30.5e9 parameters, counted without memory for them."""
    import transformers

    assert script_qlora.parse(["--full"]).size == "full"
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM._from_config(
            transformers.Qwen3MoeConfig(
                tie_word_embeddings=False, **script_qlora.SIZES["full"].model
            )
        )
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 2) == 30.53
