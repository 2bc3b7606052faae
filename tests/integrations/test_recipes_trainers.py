"""Muon in Trainer, TRL and Lightning as in the recipes: what it trains, and how it resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kernels
import pytest
import torch
import transformers
from torch import nn

from ..conftest import ROOT
from ..optimizers._steps import TinyTransformer, language_loss
from ..test_readme import blocks
from ._trainers import samples, settings, tokenizer
from .test_recipes import ours_for

STEPS, STOP = 4, 2
PAGES = ("trainer.md", "trainer-trl-peft.md", "qlora-moe.md", "qwen3-30b-a3b.md")


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
    import datasets
    import trl

    model = model_of(device)
    options = settings(folder, device) | {"max_steps": STEPS, "save_steps": STOP}
    factory = {"optimizer_cls_and_kwargs": (opt.MuonFactory, {"lr": 2e-3, "adamw_lr": 1e-3})}
    rows = [{"input_ids": ids, "labels": ids} for ids in samples()]
    if kind == "SFTTrainer":
        return trl.SFTTrainer(
            model,
            trl.SFTConfig(**options, gradient_checkpointing=False),
            train_dataset=datasets.Dataset.from_list([{"input_ids": ids} for ids in samples()]),
            processing_class=tokenizer(),
            **factory,
        )
    if kind == "optimizers":
        groups = opt.get_default_muon_param_groups(model, adamw_lr=1e-3)
        factory = {"optimizers": (opt.Muon(groups, lr=2e-3), None)}
    arguments = transformers.TrainingArguments(**options)
    data = datasets.Dataset.from_list(rows)
    return transformers.Trainer(model, arguments, train_dataset=data, **factory)


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
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
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
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
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
