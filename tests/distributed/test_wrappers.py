"""Models as torch's wrappers and accelerate shard them, and LoRA on experts within them.

And examples/train_fsdp2.py: interrupted and resumed runs, on the same and on other ranks.
"""

# ruff: noqa: F811 - tests take the imported fixture as an argument

import contextlib
import copy
import importlib
import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from .._compare import assert_error_at_most, assert_same_tensors
from ..conftest import ROOT
from ..examples.test_examples import corpus  # noqa: F401 - a fixture
from ..optimizers._steps import TinyTransformer, language_loss
from ._cases import bits, whole
from ._ranks import on_ranks, same_everywhere
from .test_partition import message_of

pytestmark = pytest.mark.dist

STEPS = 2


class Model(nn.Module):
    """By default rows that no number of ranks divides, and fewer rows than ranks."""

    def __init__(self, tokens: int = 13, width: int = 6, hidden: int = 10, out: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.router = nn.Linear(width, out, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(self.up(x).relu())
        return self.router(x)


def build(wrapper: str, world: int) -> tuple[nn.Module, nn.Module]:
    """(the model to call, the model with the parameters)."""
    torch.manual_seed(0)
    # FSDP2 over tensor parallelism wants rows that divide.
    model = Model(16, 8, 12, 4) if wrapper == "TP" else Model()
    if wrapper == "DDP":
        return DistributedDataParallel(model), model
    if wrapper == "FSDP2":
        mesh = init_device_mesh("cpu", (world,))
    elif wrapper == "HSDP":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, both["tensor"], plan)
        mesh = both["data"]
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, model


@pytest.mark.parametrize(
    ("wrapper", "world"), [("FSDP2", 3), ("FSDP2", 4), ("HSDP", 4), ("TP", 4), ("DDP", 3)]
)
@on_ranks()
def test_wrapped_models_step_as_on_one_rank(opt: Any, wrapper, world) -> list[bytes]:
    called, model = build(wrapper, world)
    arguments = {"process_group": distributed.group.WORLD} if wrapper == "DDP" else {}
    groups = opt.get_default_muon_param_groups(model, no_decay=False)
    optimizer = opt.Muon(groups, lr=0.1, **arguments)
    single, beside = {}, []
    for number, group in enumerate(optimizer.param_groups):
        names = optimizer.parameter_names(number)
        copies = [nn.Parameter(whole(p.detach()).clone()) for p in group["params"]]
        single |= dict(zip(names, copies, strict=True))
        beside.append({"params": copies, "names": names, "use_muon": group["use_muon"]})
    assert sum(len(group["params"]) for group in beside if group["use_muon"]) == 3
    beside = opt.Muon(beside, lr=0.1)
    for step in range(STEPS):
        torch.manual_seed(100 * step + distributed.get_rank() // (2 if wrapper == "TP" else 1))
        logits = called(torch.randint(0, 13, (4, 5)))
        logits.square().mean().backward()
        for name, param in model.named_parameters():
            single[name].grad = None if param.grad is None else whole(param.grad).clone()
        optimizer.step()
        beside.step()
        optimizer.zero_grad()
    for name, param in model.named_parameters():
        assert bits(whole(param.detach())) == bits(single[name]), name
    return [bits(param) for param in single.values()]


def model_of(
    opt: Any, *, lora: bool = True, quantize: str | None = None, modules: Any = None, **sizes: int
) -> Any:
    """The same model on every rank, with a random adapter that trains."""
    from ..integrations._models import build, set_random_lora

    model = build("qwen3_moe", **sizes)
    if lora:
        opt.integrations.attach_lora(model, 3, 7, quantize=quantize, target_modules=modules)
        set_random_lora(model)
    return model


def shard(model: Any, how: str = "fsdp") -> Any:
    """A copy under fully_shard: over all ranks, over two halves of replicas, or by rows."""
    world = distributed.get_world_size()
    sizes = {"replicas": 2, "shards": world // 2} if how == "hsdp" else {"shards": world}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    options: dict[str, Any] = {"mesh": mesh}
    if how == "rows":
        options["shard_placement_fn"] = lambda param: Shard(1) if param.ndim == 3 else None
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def logits(model: Any) -> Any:
    from ..integrations._models import tokens

    with torch.no_grad():
        return model(input_ids=tokens()).logits


def stacks(model: Any) -> dict[str, Any]:
    named = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if name.endswith(("gate_up_proj", "down_proj"))
    }
    assert named
    return {name: whole(value).clone() for name, value in named.items()}


@pytest.mark.parametrize(
    ("world", "how"), [(2, "fsdp"), (4, "fsdp"), (4, "hsdp"), (2, "rows")], ids=str
)
@on_ranks()
def test_merging_writes_into_the_shards(opt: Any, world: int, how: str) -> None:
    """Of four ranks the last one holds none of the five experts."""
    from ..integrations.test_transformers import FP32

    alone = model_of(opt)
    model = shard(alone, how)
    before = stacks(alone)
    adapted = logits(alone)
    # This leaves whole copies of some parameters behind, which are not what must be written.
    assert_error_at_most(logits(model), adapted, FP32)
    opt.integrations.merge_lora(alone)
    opt.integrations.merge_lora(model, keep_on="cpu")
    merged = stacks(alone)
    assert any((merged[name] != before[name]).any() for name in merged)
    assert_same_tensors(stacks(model), merged)
    assert_error_at_most(logits(model), adapted, FP32)
    opt.integrations.unmerge_lora(model)
    assert_same_tensors(stacks(model), before)
    assert_error_at_most(logits(model), adapted, FP32)


@on_ranks(2)
def test_what_one_rank_cannot_merge_no_rank_merges(opt: Any) -> Any:
    model = shard(model_of(opt))
    last = model.model.layers[1].mlp.experts.expert_lora["down"].lora_B["default"].weight
    with torch.no_grad():
        if last.to_local().numel() and torch.distributed.get_rank() == 0:
            last.to_local()[0, 0] = float("nan")
    before = stacks(model)
    message = message_of(lambda: opt.integrations.merge_lora(model))
    assert_same_tensors(stacks(model), before)
    assert message.startswith("ValueError: ") and "NaN or inf" in message
    return message


@pytest.mark.parametrize("modules", [None, ["q_proj"]], ids=["experts", "attention"])
@pytest.mark.parametrize("how", ["fsdp", "hsdp"])
@on_ranks(4)
def test_an_adapter_in_shards_is_saved_as_a_whole_one(opt: Any, how, modules, tmp_path) -> None:
    alone = model_of(opt, modules=modules)
    model = shard(alone, how)
    logits(model)
    opt.integrations.save_peft_adapter(model, tmp_path / "sharded")
    found = sorted(path.name for path in (tmp_path / "sharded").iterdir())  # when any rank returns
    own = tmp_path / str(distributed.get_rank())
    opt.integrations.save_peft_adapter(alone, own)
    for name in found:
        assert (tmp_path / "sharded" / name).read_bytes() == (own / name).read_bytes()
    if modules is not None:
        before = stacks(model)
        with pytest.raises(ValueError, match="sharded over ranks, where PEFT does not merge"):
            opt.integrations.merge_lora(model)
        assert_same_tensors(stacks(model), before)
    assert found == ["adapter_config.json", "adapter_model.safetensors"]


@on_ranks(2)
def test_all_ranks_raise_if_the_one_that_writes_fails(opt: Any, tmp_path) -> str:
    (tmp_path / "file").touch()
    model = shard(model_of(opt))
    message = message_of(lambda: opt.integrations.save_peft_adapter(model, tmp_path / "file"))
    if distributed.get_rank():
        assert message.startswith("OSError: the rank that writes failed: ")
        message = message.removeprefix("OSError: the rank that writes failed: ")
    assert message.startswith("FileExistsError") and str(tmp_path / "file") in message
    return message


@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="its fully_shard takes packed parameters as ignored_params alone: docs/concepts/nf4.md",
)
@on_ranks(2)
def test_4_bit_experts_are_saved_before_they_are_sharded(opt: Any, tmp_path) -> Any:
    sizes = {"moe_intermediate_size": 64, "hidden_size": 64}
    alone = model_of(opt, quantize="nf4", **sizes)
    model = shard(alone)
    message = message_of(lambda: model.save_pretrained(tmp_path))
    assert not list(tmp_path.iterdir())
    assert "before fully_shard, and what trains with save_peft_adapter" in message
    return message


@on_ranks(2)
def test_lora_comes_before_the_shards(opt: Any, tmp_path) -> Any:
    if distributed.get_rank() == 0:
        opt.integrations.save_peft_adapter(model_of(opt), tmp_path)
    distributed.barrier()
    plain = model_of(opt, lora=False)
    split = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    experts = split.model.layers[1].mlp.experts
    for name, dim in (("gate_up_proj", 1), ("down_proj", 2)):
        whole = experts._parameters[name]
        experts._parameters[name] = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)]))
    said = []
    for model in (shard(plain), split):
        before = set(dict(model.named_parameters()))
        for call in (
            lambda model=model: opt.integrations.attach_lora(model, 3, 7),
            lambda model=model: opt.integrations.load_peft_adapter(model, tmp_path),
        ):
            said.append(message_of(call))
        assert set(dict(model.named_parameters())) == before
        assert all(parameter.requires_grad for parameter in model.parameters())
    fsdp, loaded, tp, loaded_tp = said
    assert {text.split(": ")[0] for text in (fsdp, tp)} == {"ValueError"}
    assert fsdp == loaded and "attach LoRA first, then call fully_shard" in fsdp
    assert tp == loaded_tp and "tensor parallelism splits model.layers.1.mlp.experts" in tp
    return loaded, loaded_tp


@on_ranks(2)
def test_gradients_under_fsdp2_are_those_of_one_process(opt: Any) -> None:
    from ..integrations._models import tokens
    from ..integrations.test_transformers import FP32

    alone = model_of(opt)
    models = alone, shard(alone)
    grads = []
    for model in models:
        ids = tokens()
        model(input_ids=ids, labels=ids).loss.backward()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        grads.append({name: whole(param.grad) for name, param in trained.items()})
    assert grads[0].keys() == grads[1].keys()
    for name, gradient in grads[0].items():
        assert isinstance(gradient, torch.Tensor)
        assert_error_at_most(grads[1][name], gradient, FP32)


def prepared(opt: Any, device: torch.device) -> tuple[Any, Any, Any]:
    """Accelerator, model and optimizer after `prepare`, on the ranks of this process's group.

    accelerate takes FSDP for something of GPUs: on a CPU its state is told by hand.
    """
    import accelerate
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from torch import distributed

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
    cpu = device.type == "cpu"
    accelerator = accelerate.Accelerator(cpu=cpu, fsdp_plugin=None if cpu else plugin)
    if cpu:
        for state in (PartialState(), accelerator.state):
            state.distributed_type = accelerate.DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    assert accelerator.is_fsdp2 and accelerator.num_processes == distributed.get_world_size()
    torch.manual_seed(0)
    model = TinyTransformer()
    optimizer = opt.Muon(opt.get_default_muon_param_groups(model), lr=1e-3)
    return accelerator, *accelerator.prepare(model, optimizer)


def train_accelerated(accelerator: Any, model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        accelerator.backward(language_loss(model, seed=step))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_accelerate_shards_saves_and_resumes(opt, tmp_path: Path) -> list[bytes]:
    """Four steps at once, and from a checkpoint after two."""
    pytest.importorskip("accelerate")
    device = torch.device(os.environ["RANKS_DEVICE"])
    rank, world = str(distributed.get_rank()), str(distributed.get_world_size())
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    with patch.dict(os.environ, launched | {"OMP_NUM_THREADS": "1"}):
        accelerator, model, optimizer = prepared(opt, device)
        assert not optimizer.optimizer.state  # none while the parameters are whole
        train_accelerated(accelerator, model, optimizer, range(2))
        accelerator.save_state(str(tmp_path))
        train_accelerated(accelerator, model, optimizer, range(2, 4))
        through = [bits(whole(param.detach())) for param in model.parameters()]
        states = [state for state in optimizer.state.values() if "momentum_buffer" in state]
        sharded = [hasattr(state["momentum_buffer"], "placements") for state in states]
        assert sharded == [True] * 4

        accelerator, model, optimizer = prepared(opt, device)
        accelerator.load_state(str(tmp_path))
        train_accelerated(accelerator, model, optimizer, range(2, 4))
    assert through == [bits(whole(param.detach())) for param in model.parameters()]
    return through


SIZES = ("--layers", 1, "--channels", 16, "--heads", 2, "--batch", 12, "--context", 16)
RUN_STEPS = 24
COMMON = (*SIZES, "--device", "cpu", "--steps", RUN_STEPS, "--save-every", 6, "--report-every", 3)


def example(opt, stop_after: int | None, *arguments: object) -> int:
    """The example in this rank; with `stop_after`, rank 1 gets SIGTERM after so many steps."""
    sys.path.insert(0, str(ROOT / "examples"))
    module = importlib.import_module("train_fsdp2")
    kept = torch.utils.deterministic.fill_uninitialized_memory
    step, steps = module.Training.step, []

    def stopping(training, index: int) -> None:
        step(training, index)
        steps.append(index)
        if len(steps) == stop_after and distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    module.Training.step = stopping
    try:
        return module.main([*map(str, (*COMMON, *arguments))])
    finally:
        module.Training.step = step
        sys.path.remove(str(ROOT / "examples"))
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = kept


def refused(opt, message: str, *arguments: object) -> bool:
    with contextlib.redirect_stderr(io.StringIO()) as told:
        status = example(opt, None, *arguments)
    return status == 2 and message in told.getvalue()


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def runs(ranks, corpus, tmp_path_factory):
    """Two ranks left alone, and two of which one got SIGTERM: their folders, per optimizer."""
    made = {}

    def folders(name: str, *options: str) -> tuple[Path, Path]:
        if name not in made:
            whole, parts = made[name] = [tmp_path_factory.mktemp(f"{name}-{i}") for i in range(2)]
            common = ("--corpus", corpus, "--optimizer", name, *options, "--out-dir")
            assert same_everywhere(ranks(2).run(example, None, *common, whole)) == 0
            assert same_everywhere(ranks(2).run(example, 8, *common, parts)) == 130
        return made[name]

    return folders


def resume(ranks, world: int, corpus: Path, parts: Path, *options: object) -> dict:
    arguments = ("--corpus", corpus, *options, "--out-dir", parts, "--resume")
    assert same_everywhere(ranks(world).run(example, None, *arguments)) == 0
    assert checkpoints(parts) == [f"step-{RUN_STEPS:06d}"]
    return results(parts)


@pytest.mark.parametrize(
    ("name", "options"), [("Muon", ()), ("MuonAdamW", ("--async-save",))], ids=["now", "background"]
)
def test_a_stopped_run_goes_on_to_the_same_bits(
    ranks, corpus, runs, name, options, tmp_path
) -> None:
    """A signal to one rank stops both after the same step; half a checkpoint counts for none."""
    whole, parts = runs(name, *options)
    losses = results(whole)["train"]
    assert len(losses) == RUN_STEPS and losses[-1] < losses[0] - 0.5
    assert checkpoints(parts) == ["step-000009"]  # at the next report
    assert not (parts / "results.json").exists()
    here = shutil.copytree(parts, tmp_path / "parts")
    # What is left where a rank was killed before all had written.
    remains = shutil.copytree(
        here / "checkpoints" / "step-000009", here / "checkpoints" / "step-000012"
    )
    (remains / ".metadata").unlink()
    assert resume(ranks, 2, corpus, here, "--optimizer", name, *options) == results(whole)
    assert (here / "loss.png").stat().st_size > 0


@pytest.mark.parametrize(("world", "options"), [(1, ()), (3, ()), (4, ("--replicas", 2))])
def test_other_ranks_go_on(ranks, corpus, runs, world, options, tmp_path) -> None:
    """The curve of two ranks but for the order in which gradients are added up; HSDP too."""
    whole, parts = runs("Muon")
    here = shutil.copytree(parts, tmp_path / "parts")
    expected = results(whole)["train"]
    found = resume(ranks, world, corpus, here, *options)["train"]
    assert found[:9] == expected[:9]
    assert found[9:] == pytest.approx(expected[9:], rel=1e-4)


def test_what_cannot_be_resumed(ranks, corpus, runs, tmp_path) -> None:
    _, parts = runs("Muon")
    common = ("--corpus", corpus, "--resume", "--out-dir")
    for more, message in (
        ((tmp_path,), f"cannot resume: {tmp_path} holds no checkpoint"),
        ((parts, "--lr", 0.5), "is of another run: run.lr: 0.008 in the checkpoint, 0.5 now"),
        ((parts, "--replicas", 3), "2 ranks: --replicas 3 must divide them"),
    ):
        assert same_everywhere(ranks(2).run(refused, message, *common, *more))
