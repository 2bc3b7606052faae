"""The examples as a stranger runs them: processes, what they print and what they leave."""

import contextlib
import dataclasses
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
from unittest import mock

import pytest
import torch

from .._compare import assert_same_bits, relative_error

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


ONE_THREAD = ("--device", "cpu", "--threads", "1", "--out-dir")
DEMO = ("examples/train_demo.py", "--model", "tiny", *ONE_THREAD)  # and the folder
NANOCHAT = ("examples/train_nanochat_groups.py", "--out-dir")
FINETUNE = ("examples/finetune_moe_lora.py", "--tiny", *ONE_THREAD)


def environment(**changes: str) -> dict[str, str]:
    """The caller's environment without LOCAL_KERNELS, which the examples set themselves."""
    return {k: v for k, v in os.environ.items() if k != "LOCAL_KERNELS"} | changes


def process(*words: object, **options) -> subprocess.Popen[str]:
    command = [sys.executable, *map(str, words)]
    options |= {"stdout": subprocess.PIPE, "cwd": ROOT, "env": environment(), "text": True}
    return subprocess.Popen(command, **options)


def run(*words: object) -> tuple[str, str]:
    """What the script prints; it must succeed."""
    with process(*words, stderr=subprocess.PIPE) as running:
        out, err = running.communicate(timeout=240)
    assert running.returncode == 0, out + err
    return out, err


@pytest.fixture
def forked(forks):
    return lambda *options: forks.run(
        *map(str, (*DEMO, *options)), folder=ROOT, environment=environment()
    )


def interrupt(out: Path, optimizer: str, *options: object) -> str:
    """Start the demo, press Ctrl-C after the first checkpoint of `optimizer`, return the output."""
    running = process(*DEMO, out, *options, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 200
        checkpoints = out / "checkpoints" / optimizer.lower()
        while not any(checkpoints.glob("step_*")):
            assert running.poll() is None, running.communicate()[0]
            assert time.monotonic() < deadline, "no checkpoint was written"
            time.sleep(0.005)
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=100)
    finally:
        running.kill()
    assert running.returncode == 130, output
    return output


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a run that was left alone."""
    out = tmp_path_factory.mktemp("finished")
    printed, _ = run(*DEMO, out, "--corpus", corpus, "--steps", STEPS)
    (out / "printed.txt").write_text(printed)
    return out


def histories(out: Path) -> dict[str, dict]:
    saved = json.loads((out / "results.json").read_text())["histories"]
    return {name: {k: v for k, v in h.items() if k != "seconds"} for name, h in saved.items()}


def test_both_optimizers_learn_and_a_table_says_how(finished: Path, repo_id: str) -> None:
    """It names losses, steps, times and kernels."""
    table = (finished / "table.md").read_text()
    assert table in (finished / "printed.txt").read_text()
    for name in OPTIMIZERS:
        history = histories(finished)[name]
        assert len(history["train"]) == STEPS
        steps, losses = zip(*history["held_out"], strict=True)
        assert steps == tuple(range(STEPS // 40, STEPS + 1, STEPS // 40))
        assert losses[-1] < losses[0] - 1  # nats per byte; it starts above ln 256 = 5.5
        assert f"{losses[-1]:.4f}" in table
    assert histories(finished)["AdamW"]["train"][0] == histories(finished)["MuonAdamW"]["train"][0]
    for words in ("steps to AdamW's held-out loss", "seconds in training steps", "tokens/s"):
        assert words in table
    assert f"{repo_id} version 1, torch-stable-abi" in table  # the variant that get_kernel chose
    for words in ("8 matrices of 32 x 32: ", "2 matrices of 128 x 32: ", "2 matrices of 32 x 128"):
        assert words in table


def test_interrupted_run_resumes_bit_for_bit(finished, corpus, forked, tmp_path) -> None:
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


def test_resume_refuses_what_does_not_fit(finished, corpus, forked, tmp_path) -> None:
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


def test_sweep_finds_rates_inside_its_grids(corpus: Path, forked, tmp_path: Path) -> None:
    given = ("--steps", 20, "--sweep", "--seeds", 1, "--jobs", 2)
    done = forked(tmp_path, "--corpus", corpus, *given)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert content["torch"] and content["device"] and content["package"]["variant"]
    text = (tmp_path / "sweep.md").read_text()
    assert text in done.stdout
    for name in OPTIMIZERS:
        rows = [row for row in content["rows"] if row["optimizer"] == name]
        rates = [row["lr"] for row in rows]
        assert len(rates) == len(set(rates)) >= 7
        best = min(rows, key=lambda row: row["held_out"][-1])["lr"]
        assert content["summary"]["best_lr"][name] == best
        assert min(rates) < best < max(rates)
        assert f"## {name}" in text


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        (DEMO, [], ["no cpu variant", "make build"]),
        (FINETUNE, [], ["no cpu variant", "make build"]),
        (DEMO, ["--corpus", "{empty}"], ["too small", "--corpus"]),
        (DEMO, ["--corpus", "{empty}/none"], ["does not exist", "--corpus"]),
        (DEMO, ["--device", "bogus"], ["--device bogus", "cpu or cuda"]),
        (DEMO, ["--device", "meta"], ["--device meta", "cpu or cuda"]),
        (NANOCHAT, ["--device", "bogus"], ["--device bogus", "cpu or cuda"]),
    ],
)
def test_setup_errors_say_what_to_do(script, options, words, repo_id, forks, tmp_path) -> None:
    given = environment() if options else environment(LOCAL_KERNELS=f"{repo_id}={tmp_path}")
    options = [option.format(empty=tmp_path) for option in options]
    refused = forks.run(*script, str(tmp_path), *options, folder=ROOT, environment=given)
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
def test_gpu_without_a_variant_of_its_own(device, corpus, repo_id, forks, tmp_path) -> None:
    (variant,) = (ROOT / "build").glob("torch-stable-abi211-cpu-*")
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / variant.name).symlink_to(variant)
    for name in ("metadata.json", "no_variant"):  # as a checkout has them, for what is not built
        (tmp_path / name).symlink_to(ROOT / name)
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


@pytest.fixture(scope="module")
def example():
    """`example("qlora_moe")` -> that module."""
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def demo(example):
    """`demo("report")` -> that module beside the script."""
    return lambda name: example(f"demo.{name}")


@pytest.fixture(scope="module")
def qlora(example):
    return example("qlora_moe")


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


def test_split_depends_on_relative_paths_alone(demo, corpus: Path, tmp_path: Path) -> None:
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


def test_steps_to_counts_from_the_first_evaluation_at_the_loss(demo) -> None:
    steps_to = demo("report").steps_to
    curve = [(10, 3.0), (20, 2.0), (30, 2.1), (40, 1.5)]
    assert steps_to(curve, 2.05) == 20
    assert steps_to(curve, 2.0) == 20
    assert steps_to(curve, 1.0) is None


TINY = ("--layers", "1", "--channels", "16", "--heads", "2", "--batch", "2", "--context", "16")


def loss(output: str) -> float:
    return float(re.search(r"held-out loss after \d+ steps: ([\d.]+) nats/byte", output)[1])


@pytest.mark.usefixtures("opt")
def test_train_nanochat_groups(corpus, forks, tmp_path) -> None:
    """It learns, and a resumed run, also with its state in host memory, ends at the same loss."""
    common = ("--corpus", corpus, "--steps", 60, "--out-dir", tmp_path)

    def started(*options: object) -> str:
        words = ("examples/train_nanochat_groups.py", *TINY, "--device", "cpu", *options)
        done = forks.run(*words, folder=ROOT, environment=environment(OMP_NUM_THREADS="1"))
        assert done.returncode == 0, done.stderr
        return done.stdout

    whole = started(*common, "--save-every", 25)
    assert loss(whole) < 4.2  # log(256) = 5.55 nats before the first step
    (tmp_path / "step-000060" / "optimizer.safetensors").unlink()  # killed in mid-save
    resumed = started(*common, "--resume", "--offload")
    assert "from step 50" in resumed
    assert loss(resumed) == loss(whole)
    started("--corpus", corpus, "--steps", 2, "--out-dir", tmp_path)
    # --resume would go on from steps of the run before.
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000002"]


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finetune")
    (out / "printed.txt").write_text("".join(run(*FINETUNE, out)))
    return out


def test_peft_gets_the_losses_that_training_saw(finetuned: Path, example) -> None:
    """Base and adapter are read by transformers and PEFT alone, and evaluated on the same text;
    both trainings learned.
    """
    import peft
    from transformers import AutoModelForCausalLM

    runs = json.loads((finetuned / "results.json").read_text())["runs"]
    for name, steps, gain in (("base", 60, 2.0), ("LoRA", 80, 0.15)):
        assert len(runs[name]["train"]) == steps
        losses = [loss for _, loss in runs[name]["held_out"]]
        assert losses[-1] < losses[0] - gain  # nats per byte
    script = example("finetune_moe_lora")
    size = script.SIZES["tiny"]
    tokens, targets = script.held_out_batch(script.help_texts(torch.device("cpu")), size)
    base = AutoModelForCausalLM.from_pretrained(
        finetuned / "base", experts_implementation="grouped_mm"
    )
    model = peft.PeftModel.from_pretrained(base, finetuned / "adapter")

    @torch.no_grad()
    def loss() -> float:
        logits = model(input_ids=tokens).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()

    (_, before), *_, (_, after) = runs["LoRA"]["held_out"]
    assert loss() == pytest.approx(after, rel=1e-5)
    with model.disable_adapter():
        assert loss() == pytest.approx(before, rel=1e-5)
    config = json.loads((finetuned / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 16.0)


CPU = torch.device("cpu")


def tiny_model(qlora, opt, dtype=torch.bfloat16, **options):
    """The package as the example knows it, a size, and the model of that size."""
    package, size = qlora.Package(opt, "", 1, "", "", False, ""), qlora.SIZES["tiny"]
    options = {"seed": 0, "nested": False} | options
    return package, size, qlora.build_model(size, package, CPU, dtype, **options)


def tiny_run(qlora, model, size, steps: int, device):
    corpus = qlora.read_corpus(None, context=size.context, max_bytes=1 << 16, device=CPU)
    options = {"corpus": corpus, "size": size, "steps": steps, "lr": 1e-2, "seed": 0}
    return qlora.Run("LoRA", model=model, device=device, **options)


@pytest.mark.parametrize("quant_type", ["mxfp4", "fp8"])
def test_other_formats_train(qlora, opt, quant_type) -> None:
    """MXFP4 on gpt-oss, which sees its stacks transposed; FP8 on Qwen3-MoE."""
    _, size, model = tiny_model(qlora, opt, torch.float32, quant_type=quant_type)
    opt.integrations.attach_lora(model, 8, 16.0)
    stacks = [m for m in model.modules() if type(m).__name__ == "QuantizedExperts"]
    assert {stack.format.quant_type for stack in stacks} == {quant_type} and len(stacks) == 4
    training = tiny_run(qlora, model, size, 12, CPU)
    training.run()
    assert training.held_out[-1][1] < training.held_out[0][1]
    with pytest.raises(SystemExit):
        qlora.parse(["--format", quant_type, "--nested"])


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_compiled_layers_share_one_graph_and_compute_the_same(
    qlora, opt, checkpointing, monkeypatch
) -> None:
    """Ten layers, more than torch compiles anew before it gives up, with LoRA on attention too.

    In a capture, where transformers would make a mask, they are the same graphs.
    """
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    package, size, _ = tiny_model(qlora, opt)
    size = dataclasses.replace(size, model=size.model | {"num_hidden_layers": 10})
    model = qlora.build_model(size, package, CPU, torch.float32, seed=0, nested=False)
    model = opt.integrations.attach_lora(model, 4, 8.0, target_modules=["q_proj"])
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    training = tiny_run(qlora, model, size, 1, CPU)
    batch = torch.randint(256, (2, 2, 16), generator=torch.Generator().manual_seed(0))
    eager = training.gradients(*batch), [p.grad for p in training.parameters]
    qlora.compile_layers(model, "aot_eager")
    compiled = training.gradients(*batch), [p.grad for p in training.parameters]
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        in_a_capture = training.gradients(*batch), [p.grad for p in training.parameters]
    # The first layer's input wants no gradient, unless checkpointing asks for one.
    assert counters["stats"]["unique_graphs"] == (1 if checkpointing else 2)
    assert not counters["graph_break"]
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(in_a_capture, compiled, rtol=0, atol=0)


def test_a_replay_takes_its_batch_and_hands_over_the_gradients(qlora, opt, monkeypatch) -> None:
    """Here a graph that computes again in its tensors plays that of CUDA."""
    _, size, model = tiny_model(qlora, opt, torch.float32)
    opt.integrations.attach_lora(model, 4, 8.0)
    training = tiny_run(qlora, model, size, 1, CPU)
    gradients, taken = training.gradients, []

    def recorded(*batch):
        taken[:] = [batch, gradients(*batch), [p.grad for p in training.parameters]]
        return taken[1]

    class Graph(contextlib.nullcontext):
        def replay(self) -> None:
            batch, *places = taken[0], taken[1], *taken[2]
            found = gradients(*batch), *(p.grad for p in training.parameters)
            for place, value in zip(places, found, strict=True):
                place.copy_(value)
            for parameter in training.parameters:
                parameter.grad = None  # a graph hands over nothing

    for name in ("Stream", "current_stream", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, mock.Mock())
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, capture_error_mode: graph)
    training.gradients = recorded
    replay = qlora.captured(training)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        batch = torch.randint(256, (2, size.batch, size.context), generator=generator)
        expected = gradients(*batch), [p.grad for p in training.parameters]
        assert_same_bits(replay(*batch), expected[0])
        for parameter, gradient in zip(training.parameters, expected[1], strict=True):
            assert_same_bits(parameter.grad, gradient)


def test_options_that_exclude_each_other_are_refused(qlora, tmp_path, capsys) -> None:
    for option in ("--compile", "--cuda-graph"):
        with pytest.raises(SystemExit):
            qlora.parse(["--offload", option])
    given = ["--tiny", "--device", "cpu", "--cuda-graph", "--out-dir", str(tmp_path)]
    assert qlora.main(given) == 2 and "--cuda-graph wants a GPU" in capsys.readouterr().err


@pytest.mark.usefixtures("opt")
def test_training_over_4_bits_in_host_memory(tmp_path: Path) -> None:
    options = ("--offload", "--target-modules", "q_proj", "--checkpointing", "--steps", 30)
    words = ("examples/qlora_moe.py", "--tiny", *options, *ONE_THREAD, tmp_path)
    printed = "".join(run(*words))
    for words in ("LoRA: 100%", "(4.50 bits each;", "no comparison: bitsandbytes", "to the device"):
        assert words in printed
    results = json.loads((tmp_path / "results.json").read_text())
    (_, before), *_, (_, after) = results["held_out"]
    assert after < before - 1.0  # nats per byte
    assert results["experts"] == {"elements": 2 * 8 * 3 * 64 * 64, "bytes": 110_592}
    names = {"adapter", "loss.png", "results.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size > 10_000


def test_the_other_way_computes_the_same(qlora, opt) -> None:
    """What is timed beside ours is the same layer, or the comparison would say nothing."""
    pytest.importorskip("bitsandbytes")
    _, _, model = tiny_model(qlora, opt)
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
    other = qlora.dense_and_grouped(experts, hidden, index, weights.bfloat16())
    assert relative_error(ours, other.float()) < 0.02


def test_a_comparison_runs_both_ways_and_training_goes_on_with_ours(
    qlora, opt, watch, monkeypatch
) -> None:
    """With LoRA attached, as on a GPU that has bitsandbytes; only the clock is another one."""
    pytest.importorskip("bitsandbytes")
    package, size, model = tiny_model(qlora, opt)
    opt.integrations.attach_lora(model, 8, 16.0)
    training = tiny_run(qlora, model, size, 1, SimpleNamespace(type="cuda"))
    outputs = []
    used = watch(qlora, "dense_and_grouped", lambda *_, **__: True)

    def measure(_, step) -> dict[str, float]:
        before = len(used)
        step()
        return {"usual": float(len(used) - before)}

    def loss(ids, *_) -> torch.Tensor:
        outputs.append(model(ids).logits)
        return outputs[-1].float().square().mean()

    monkeypatch.setattr(qlora, "measure", measure)
    monkeypatch.setattr(training, "loss", loss)
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = qlora.compare(training, package, ours_alone=False)
    layers = size.model["num_hidden_layers"]
    assert found == {"ours": {"usual": 0}, "bitsandbytes + grouped_mm": {"usual": layers}}
    first, second = outputs
    assert relative_error(second, first.float()) < 0.05
    model(second.argmax(-1))
    assert len(used) == layers  # ours again
    for name, parameter in model.named_parameters():
        assert parameter.grad is None and torch.equal(parameter, before[name]), name


def test_the_full_size_is_the_whole_model(qlora) -> None:
    """The shapes of Qwen/Qwen3-30B-A3B, 30.5e9 parameters, counted without memory for them."""
    import transformers

    options = qlora.parse(["--full"])
    assert (options.size, options.lr, qlora.parse(["--tiny"]).lr) == ("full", 1e-3, 1e-2)
    sizes = {"tie_word_embeddings": False} | qlora.SIZES["full"].model
    with torch.device("meta"):
        config = transformers.Qwen3MoeConfig(**sizes)
        model = transformers.Qwen3MoeForCausalLM._from_config(config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 2) == 30.53
