"""Recipes of docs/recipes: Muon and LoRA on experts in trainers, installed ones or their contracts.

Each page names the version. What stands here of a trainer that the tests cannot install is how it
finds, calls, steps, saves and loads an optimizer, restated in a few lines."""

import functools
import importlib
import re
import runpy
import sys
import types
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import kernels
import peft
import pytest
import torch
import transformers
from torch import nn
from torch.distributed import checkpoint

from .._compare import assert_all_same_bits, assert_error_at_most
from ..conftest import ROOT
from ..optimizers._steps import TinyTransformer, language_loss, parameters, values
from ..optimizers.test_other_groups import KELLER_JORDAN, assert_three_steps
from ..optimizers.test_update_rules import groups_of
from ..test_readme import blocks
from ._models import tokens
from ._trainers import plain_trainer, settings, sft_trainer


def ours_for(opt: Any, repo_id: str) -> Any:
    """`get_kernel` that gives the package under test, and others what they ask for."""
    get_kernel = kernels.get_kernel

    def found(name: str, *arguments: Any, **options: Any) -> Any:
        return opt if name == repo_id else get_kernel(name, *arguments, **options)

    return found


class Contract:
    """A trainer's modules while a test runs, and the files of its recipe."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch, self.folder = monkeypatch, folder
        monkeypatch.syspath_prepend(str(folder))

    def module(self, name: str, **attributes: Any) -> types.ModuleType:
        """A module, with the packages that it lies in."""
        for end in [match.start() for match in re.finditer(r"\.", name)]:
            if name[:end] not in sys.modules:
                self.module(name[:end])
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(attributes)
        self.monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
        return module

    def files(self, page: str) -> list[str]:
        """Write the blocks that begin with a file's name; the names of the modules."""
        names = []
        for code in blocks(ROOT / "docs/recipes" / page):
            if found := re.match(r"# (\w+)\.py", code):
                (self.folder / f"{found[1]}.py").write_text(code)
                self.monkeypatch.delitem(sys.modules, found[1], raising=False)
                names.append(found[1])
        return names

    def load(self, page: str) -> types.ModuleType:
        """The module that is the first file of a page."""
        return importlib.import_module(self.files(page)[0])


@pytest.fixture
def contract(opt, repo_id, monkeypatch, tmp_path):
    importlib.invalidate_caches()
    monkeypatch.setattr(kernels, "get_kernel", ours_for(opt, repo_id))
    yield Contract(monkeypatch, tmp_path)
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def train(model: nn.Module, optimizer: Any, steps: int = 2) -> None:
    for step in range(steps):
        language_loss(model, seed=step).backward()
        optimizer.step()
        optimizer.zero_grad()


def muon_names(model: nn.Module, optimizer: Any) -> set[str]:
    named = {param: name for name, param in model.named_parameters()}
    groups = [group for group in optimizer.param_groups if group.get("use_muon", False)]
    return {named[param] for group in groups for param in group["params"]}


HIDDEN = {f"layers.{i}.{name}.weight" for i in range(2) for name in ("qkv", "output")}


class Container(torch.optim.Optimizer):
    """torchtitan b5bcd76: OptimizersContainer."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        param_groups: list = field(default_factory=list)
        implementation: str = "fused"
        optimizer_factory_kwargs_by_name: dict = field(default_factory=dict)

        def build(self, **runtime: Any) -> "Container":
            return self._owner(self, **runtime)

    def __init_subclass__(cls) -> None:
        if "Config" in cls.__dict__:
            cls.Config._owner = cls

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        return {"AdamW": torch.optim.AdamW}[name]

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        how = config.implementation
        switches = {"fused": how == "fused", "foreach": how == "foreach"}
        self.optimizers = []
        for part in model_parts:
            left, groups = dict(part.named_parameters()), defaultdict(list)
            for entry in config.param_groups:
                names = [name for name in left if re.search(entry.pattern, name)]
                assert names, entry.pattern
                group = {"params": [left.pop(name) for name in names], "param_names": names}
                groups[entry.optimizer_name].append(group | switches | entry.optimizer_kwargs)
            assert not left
            for name, of_name in groups.items():
                factory = self._resolve_optimizer_factory(name)
                kwargs = config.optimizer_factory_kwargs_by_name.get(name, {})
                self.optimizers.append(factory(of_name, **kwargs))
        super().__init__([p for part in model_parts for p in part.parameters()], {})

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def _materialize(self, optimizer: torch.optim.Optimizer) -> None:
        """A step with gradients and rates of zero, where there is no state yet."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if optimizer.state or any(p.grad is not None for p in params):
            return
        for param in params:
            param.grad = torch.zeros_like(param)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step(closure=None)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        flat = {}
        for optimizer in self.optimizers:
            self._materialize(optimizer)
            saved = optimizer.state_dict()
            for group in saved["param_groups"]:
                names = group.pop("param_names")
                for number, name in zip(group.pop("params"), names, strict=True):
                    state = saved["state"][number]
                    flat |= {f"state.{name}.{key}": value for key, value in state.items()}
                    flat |= {f"param_groups.{name}.{key}": value for key, value in group.items()}
        return flat

    def load_state_dict(self, flat: dict[str, Any]) -> None:
        for optimizer in self.optimizers:
            self._materialize(optimizer)
            state, groups, number = {}, [], 0
            for group in optimizer.param_groups:
                numbers = []
                for name, param in zip(group["param_names"], group["params"], strict=True):
                    keys = optimizer.state[param]
                    state[number] = {key: flat[f"state.{name}.{key}"] for key in keys}
                    numbers.append(number)
                    number += 1
                first = group["param_names"][0]
                keys = [key for key in group if key not in ("params", "param_names")]
                found = {key: flat[f"param_groups.{first}.{key}"] for key in keys}
                groups.append({"params": numbers} | found)
            optimizer.load_state_dict({"state": state, "param_groups": groups})


def test_torchtitan(opt, contract, tmp_path) -> None:
    """One pattern for all; training goes on after its checkpoint as without."""
    entry = functools.partial(SimpleNamespace, optimizer_kwargs={})
    name = "torchtitan.components.optimizer"
    contract.module(name, OptimizersContainer=Container, ParamGroupConfig=entry)
    page = contract.load("torchtitan.md")
    exec(blocks(ROOT / "docs/recipes/torchtitan.md")[1], vars(page))
    models = [TinyTransformer() for _ in range(2)]
    containers = [page.optimizer.build(model_parts=[model]) for model in models]
    ((one,), (other,)) = (container.optimizers for container in containers)
    assert isinstance(one, opt.Muon) and isinstance(containers[0], page.MuonContainer)
    assert muon_names(models[0], one) == HIDDEN
    before = values(models[1].parameters())
    train(models[0], containers[0])

    checkpoint.save({"optimizer": containers[0]}, checkpoint_id=tmp_path / "saved", no_dist=True)
    loaded = {"optimizer": containers[1]}
    checkpoint.load(loaded, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert_all_same_bits(before, models[1].parameters())
    models[1].load_state_dict(models[0].state_dict())
    for model, container in zip(models, containers, strict=True):
        train(model, container, 1)
    assert_all_same_bits(models[0].parameters(), models[1].parameters())
    assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in one.param_groups]


def test_axolotl(opt, contract, tmp_path) -> None:
    """Its trainer calls factories with the model and its own arguments."""

    class AxolotlTrainer(transformers.Trainer):
        """axolotl 067b021: OptimizerMixin.create_optimizer."""

        def create_optimizer(self, model: nn.Module | None = None) -> Any:
            cls, kwargs = self.optimizer_cls_and_kwargs
            assert not issubclass(cls, torch.optim.Optimizer)
            self.optimizer = cls()(model or self.model, self.args, **kwargs)
            return self.optimizer

    contract.module("axolotl.integrations.base", BasePlugin=object)
    page = contract.load("axolotl.md")
    model = TinyTransformer()
    arguments = transformers.TrainingArguments(tmp_path, report_to="none", use_cpu=True)
    trainer = AxolotlTrainer(model, arguments)
    cfg = SimpleNamespace(learning_rate=2e-4, weight_decay=None)
    page.MuonPlugin().post_trainer_create(cfg, trainer)
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, opt.Muon) and muon_names(model, optimizer) == HIDDEN
    assert {g["lr"] for g in optimizer.param_groups} == {2e-4}
    assert {g["weight_decay"] for g in optimizer.param_groups} == {0.0}
    train(model, optimizer)


def test_axolotl_runs_lora_on_experts(opt, contract, device, fresh) -> None:
    contract.module("axolotl.integrations.base", BasePlugin=object)
    page = contract.load("axolotl.md")
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    model = peft.get_peft_model(fresh(), peft.LoraConfig(r=3, target_parameters=targets))
    ids = tokens().to(device)
    before = model(ids).logits
    page.ExpertsPlugin().post_model_load(SimpleNamespace(), model)
    assert model.config._experts_implementation == opt.integrations.use_in_transformers()
    assert_error_at_most(model(ids).logits, before, 1e-5)


def test_ms_swift(opt, contract) -> None:
    """ms-swift 3602360: SwiftMixin asks the callback named by --optimizer."""

    class OptimizerCallback:
        def __init__(self, args: Any, trainer: Any) -> None:
            self.args, self.trainer = args, trainer

    names: dict[str, Any] = {"default": OptimizerCallback}
    contract.module("swift.optimizers", OptimizerCallback=OptimizerCallback, optimizers_map=names)
    contract.load("ms-swift.md")  # --external_plugins
    args = SimpleNamespace(
        optimizer="hub_muon",
        learning_rate=2e-4,
        weight_decay=0.05,
        adam_beta1=0.8,
        adam_beta2=0.9,
        adam_epsilon=1e-6,
    )
    trainer = SimpleNamespace(model=TinyTransformer())
    optimizer = names[args.optimizer](args, trainer).create_optimizer(model=None)
    optimizer.param_groups = [g for g in optimizer.param_groups if len(g["params"]) > 0]
    assert isinstance(optimizer, opt.Muon) and muon_names(trainer.model, optimizer) == HIDDEN
    rest = optimizer.param_groups[1]
    assert (rest["lr"], rest["adamw_betas"], rest["adamw_eps"]) == (2e-4, (0.8, 0.9), 1e-6)
    train(trainer.model, optimizer)


def test_verl(opt, contract) -> None:
    """verl 1dda039: build_optimizer(module.parameters(), config), and its offloading."""
    contract.files("verl.md")
    config = SimpleNamespace(
        optimizer="Muon",
        optimizer_impl="hub_muon",
        lr=2e-5,
        weight_decay=0.1,
        betas=(0.9, 0.999),
        override_optimizer_config={"vocab_size": 32},
    )

    def build_optimizer(params: Any) -> Any:
        options = {"lr": config.lr, "weight_decay": config.weight_decay}
        if "adam" in config.optimizer.lower():
            options["betas"] = config.betas
        options |= config.override_optimizer_config
        module = importlib.import_module(config.optimizer_impl)
        return getattr(module, config.optimizer)(params, **options)

    model = TinyTransformer()
    model.layers[0].experts = nn.ParameterList([torch.randn(3, 4, 5)])
    model.score = nn.Linear(8, 1, bias=False)
    model.norm.requires_grad_(False)
    optimizer = build_optimizer(model.parameters())
    assert isinstance(optimizer, opt.Muon)
    assert muon_names(model, optimizer) == HIDDEN | {"layers.0.experts.0"}
    held = {p for group in optimizer.param_groups for p in group["params"]}
    assert held == {p for p in model.parameters() if p.requires_grad}
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert decays == [0.1, 0.1, 0.0]
    train(model, optimizer, 1)
    for group in optimizer.param_groups:  # to the host, and back before the next step
        for param in group["params"]:
            state = optimizer.state[param]
            state |= {key: value.to("cpu", non_blocking=True) for key, value in state.items()}
    train(model, optimizer, 1)
    with pytest.raises(ValueError, match="strategy=fsdp2"):
        build_optimizer([nn.Parameter(torch.zeros(100))])


def test_llama_factory(opt, contract) -> None:
    """LLaMA-Factory ff6d4d1: _create_muon_optimizer, where the update is that of its Muon; and
    OptimizerPlugin(name).register() and OptimizerPlugin(name)(...) of its version 1.
    """

    class OptimizerPlugin:
        registry: ClassVar[dict[str, Any]] = {}

        def __init__(self, name: str) -> None:
            self.name = name

        def register(self) -> Any:
            return lambda made: self.registry.setdefault(self.name, made)

        def __call__(self, *arguments: Any) -> Any:
            return self.registry[self.name](*arguments)

    theirs = contract.module("llamafactory.third_party.muon", Muon=None)
    started = []
    contract.module("llamafactory.train.tuner", run_exp=lambda: started.append(True))
    plugins = "llamafactory.v1.plugins.trainer_plugins.optimizers.optimizer"
    contract.module(plugins, OptimizerPlugin=OptimizerPlugin)
    contract.module("llamafactory.v1.launcher", main=lambda: started.append(True))
    for name in contract.files("llama-factory.md"):
        importlib.import_module(name)
    assert not started  # only as __main__
    params = parameters([(12, 4), (5,)], dtype=torch.float64)
    optimizer = theirs.Muon(
        lr=1e-3,
        wd=0.1,
        muon_params=params[:1],
        adamw_params=params[1:],
        adamw_betas=(0.8, 0.9),
        adamw_eps=1e-6,
    )
    shared = {"lr": 1e-3, "weight_decay": 0.1}
    rule = {**shared, "rows": [KELLER_JORDAN] * 5}
    assert_three_steps(opt, optimizer, params, rule, **shared, betas=(0.8, 0.9), eps=1e-6)
    model = TinyTransformer()
    optimizer = OptimizerPlugin("hub_muon")(model, {"lr": 2e-4})
    assert isinstance(optimizer, opt.Muon) and muon_names(model, optimizer) == HIDDEN
    assert optimizer.param_groups[0]["lr"] == 2e-4
    train(model, optimizer)


@dataclass
class EmergingOptimizerEntry:
    """Megatron-LM d98e8a6."""

    optimizer_cls: Any
    init_state_fn: Any = None
    config_to_kwargs: Any = None


def megatron_optimizer(registry: Any, groups: list[dict[str, Any]], config: Any, tp: int) -> Any:
    """_create_emerging_optimizer, after _get_param_groups has made the groups' other keys."""
    entry = registry._EMERGING_OPTIMIZERS[config.optimizer]
    process_groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: tp))
    kwargs = entry.config_to_kwargs(config, [], process_groups)
    keys = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "default_config": True}
    keys |= {"max_lr": config.lr, "min_lr": 0.0, "is_expert_parallel": False}
    return entry.optimizer_cls([group | keys for group in groups], **kwargs), entry.init_state_fn


def test_megatron(opt, contract) -> None:
    """Parameters in bfloat16 are swapped for copies in float32, which step as they would alone."""
    registry = contract.module(
        "megatron.core.optimizer.emerging_optimizers",
        EmergingOptimizerEntry=EmergingOptimizerEntry,
        _EMERGING_OPTIMIZERS={},
    )
    contract.load("megatron.md")
    config = SimpleNamespace(optimizer="hub_muon", lr=1e-3, weight_decay=0.1)
    params = parameters([(12, 4), (4, 12)], dtype=torch.bfloat16)
    optimizer, make_state = megatron_optimizer(registry, [{"params": params}], config, tp=1)
    (group,) = optimizer.param_groups
    copies = [param.detach().clone().float() for param in params]
    group["params"][:] = copies
    alone = [nn.Parameter(copy.clone()) for copy in copies]
    other = opt.Muon([{"params": alone, "use_muon": True}], lr=1e-3, weight_decay=0.1)
    make_state(optimizer, config)  # before a checkpoint is saved or loaded
    for number, copy in enumerate(copies):
        state = optimizer.state_dict()["state"][number]
        assert state["momentum_buffer"].shape == copy.shape
    for step in range(2):
        group["lr"] = other.param_groups[0]["lr"] = 1e-3 * (step + 1)  # its scheduler writes it
        for param, copy, one in zip(params, copies, alone, strict=True):
            copy.grad = param.grad.float()
            one.grad = param.grad.float()
        optimizer.step()
        other.step()
    assert_all_same_bits(copies, alone)
    with pytest.raises(ValueError, match="tensor-model-parallel-size 1"):
        megatron_optimizer(registry, [{"params": params}], config, tp=2)


BASE_TRAIN = """
import sys
import nanochat.gpt
nanochat.gpt.base_train(sys.argv)
"""


def test_nanochat(opt, contract, tmp_path) -> None:
    """nanochat 92d63d4: GPT.setup_optimizer, the loop of base_train, and chat_sft's warm start."""
    runs = []

    def setup_optimizer(model: TinyTransformer) -> Any:
        optimizer = sys.modules["nanochat.gpt"].MuonAdamW(groups_of(model))
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        return optimizer

    def loop(model: TinyTransformer, optimizer: Any, steps: range) -> None:
        for step in steps:
            language_loss(model, seed=step).backward()
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * (1 - step / 8)
                if group["kind"] == "muon":
                    group["momentum"] = 0.85 + 0.01 * step
                    group["weight_decay"] = 0.2 * (1 - step / 8)
            optimizer.step()
            model.zero_grad(set_to_none=True)

    def base_train(arguments: list[str]) -> None:
        torch.manual_seed(0)
        model = TinyTransformer()
        optimizer = setup_optimizer(model)
        loop(model, optimizer, range(2))
        torch.save(optimizer.state_dict(), tmp_path / "optim_000002_rank0.pt")
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        loop(model, optimizer, range(2, 4))
        runs.append((arguments, model, optimizer, weights))

    contract.module("nanochat.gpt", MuonAdamW=None, base_train=base_train)
    contract.files("nanochat.md")
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "base_train.py").write_text(BASE_TRAIN)
    launcher = tmp_path / "train_hub.py"
    contract.monkeypatch.setattr(sys, "argv", [str(launcher), "scripts.base_train", "--depth", "2"])
    runpy.run_path(str(launcher), run_name="__main__")
    ((arguments, model, optimizer, weights),) = runs
    assert arguments[1:] == ["--depth", "2"]
    assert isinstance(optimizer, opt.DistMuonAdamW)
    for group in optimizer.param_groups:
        both = group.get("row_equilibration"), group.get("renormalize")
        assert both == ((True, True) if group["kind"] == "muon" else (None, None))

    resumed = TinyTransformer()
    resumed.load_state_dict(weights)
    other = setup_optimizer(resumed)
    other.load_state_dict(torch.load(tmp_path / "optim_000002_rank0.pt", map_location="cpu"))
    loop(resumed, other, range(2, 4))
    assert_all_same_bits(model.parameters(), resumed.parameters())


STEPS, STOP = 4, 2
PAGES = (
    "gpt-oss-20b.md",
    "qlora-moe.md",
    "qwen3-30b-a3b.md",
    "trainer-trl-peft.md",
    "trainer.md",
)


def model_of(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.LlamaForCausalLM(config).to(device)


def trainer_of(opt: Any, kind: str, folder: Path, device: torch.device) -> Any:
    model = model_of(device)
    options = settings(folder, device) | {"max_steps": STEPS, "save_steps": STOP}
    factory = {"optimizer_cls_and_kwargs": (opt.MuonFactory, {"lr": 2e-3, "adamw_lr": 1e-3})}
    if kind == "SFTTrainer":
        return sft_trainer(model, options, **factory)
    if kind == "optimizers":
        groups = opt.get_default_muon_param_groups(model, adamw_lr=1e-3)
        factory = {"optimizers": (opt.Muon(groups, lr=2e-3), None)}
    return plain_trainer(model, options, **factory)


@pytest.mark.parametrize("kind", ["MuonFactory", "optimizers", "SFTTrainer"])
def test_trainer(opt, device, tmp_path: Path, kind: str) -> None:
    """Embedding and head reach AdamW; a run resumed at a checkpoint ends with the same bits."""
    pytest.importorskip("trl")
    whole = trainer_of(opt, kind, tmp_path, device)
    whole.train()
    groups = whole.optimizer.param_groups  # of accelerate's wrapper
    named = {param: name for name, param in whole.model.named_parameters()}
    by_muon = {named[p] for group in groups if group["use_muon"] for p in group["params"]}
    names = set(named.values())
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= names
    assert by_muon == {name for name in names if ".layers." in name and "norm" not in name}
    assert [group["initial_lr"] for group in groups] == [2e-3, 1e-3, 1e-3]

    again = trainer_of(opt, kind, tmp_path, device)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STOP}"))
    assert again.state.global_step == STEPS
    assert_all_same_bits(whole.model.parameters(), again.model.parameters())
    fresh = model_of(device)
    assert not any(map(torch.equal, whole.model.parameters(), fresh.parameters()))


def test_lightning(opt, device, tmp_path: Path) -> None:
    """A run resumed at a checkpoint ends with the same bits; the scheduler's rate is used."""
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = TinyTransformer()

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            return language_loss(self.model, seed=number)

        def configure_optimizers(self) -> Any:
            optimizer = opt.Muon(opt.get_default_muon_param_groups(self), lr=2e-3)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=STEPS)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def trained(steps: int, resume: Path | None = None) -> Any:
        trainer = lightning.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            max_steps=steps,
            gradient_clip_val=1.0,
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        batches = torch.utils.data.DataLoader(torch.zeros(STEPS, 1), num_workers=0)
        trainer.fit(Module(), batches, ckpt_path=resume)
        return trainer

    whole, stopped = trained(STEPS), trained(STOP)
    saved = tmp_path / "stop.ckpt"
    stopped.save_checkpoint(saved)
    again = trained(STEPS, saved)
    (optimizer,) = again.optimizers
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False, False]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-3] * 3)
    assert_all_same_bits(whole.model.parameters(), again.model.parameters())
    assert not any(map(torch.equal, whole.model.parameters(), stopped.model.parameters()))


@pytest.mark.parametrize("page", PAGES)
def test_page(opt, repo_id, device, monkeypatch, page: str) -> None:
    """Its blocks, here and not in a process of their own, which would import all of this again."""
    pytest.importorskip("trl")
    monkeypatch.setattr(kernels, "get_kernel", ours_for(opt, repo_id))
    if device.type == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("\n".join(blocks(ROOT / "docs/recipes" / page)), page, "exec"), found)
    factors = [p for name, p in found["model"].named_parameters() if "lora_B" in name]
    assert bool(factors) == (page != "trainer.md")
    assert all(factor.any() for factor in factors)  # they were zero
