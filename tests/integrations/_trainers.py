"""A run of TRL's SFTTrainer over 4-bit experts, which can be killed, and what trainers are given.

`python -m tests.integrations._trainers FOLDER STEP` dies by SIGKILL after STEP.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from ._models import build

STEPS, SAVE_EVERY = 12, 3


def samples() -> list[list[int]]:
    """Few, so that they are learned, and of one length, so that no collator has to pad them."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(61, (4, 11), generator=generator).tolist()


def lora() -> Any:
    return peft.LoraConfig(
        r=3,
        lora_alpha=7,
        task_type="CAUSAL_LM",
        target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )


def settings(folder: Path, device: torch.device) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "save_steps": SAVE_EVERY,
        "logging_steps": 1,
        "learning_rate": 3e-2,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": device.type == "cpu",
        "bf16": False,
        "seed": 5,
    }


def plain_trainer(model: torch.nn.Module, arguments: dict[str, Any], **options: Any) -> Any:
    rows = [{"input_ids": ids, "labels": ids} for ids in samples()]
    given = transformers.TrainingArguments(**arguments)
    return transformers.Trainer(model, given, train_dataset=rows, **options)


def sft_trainer(model: torch.nn.Module, arguments: dict[str, Any], **options: Any) -> Any:
    import datasets
    import trl

    rows = datasets.Dataset.from_list([{"input_ids": ids} for ids in samples()])
    options |= {"train_dataset": rows, "processing_class": tokenizer()}
    given = trl.SFTConfig(**arguments, gradient_checkpointing=False)
    return trl.SFTTrainer(model, given, **options)


def trainer_of(opt: Any, folder: Path, device: torch.device) -> Any:
    """TRL's trainer of a fresh PEFT model over 4-bit experts, on our kernels."""
    model = build("qwen3_moe").to(device)
    opt.integrations.quantize_experts(model)
    torch.manual_seed(7)  # of PEFT's factors
    trainer = sft_trainer(model, settings(folder, device), peft_config=lora())
    opt.integrations.use_in_transformers(trainer.model)
    return trainer


def tokenizer() -> Any:
    """Made here: the tests load nothing from the Hub."""
    import tokenizers

    words = {str(number): number for number in range(61)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="1", pad_token="2", unk_token="0"
    )


def losses(trainer: Any) -> dict[int, float]:
    """Loss of every step, those before a resumption included."""
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def main(folder: str, step: str) -> None:
    from kernels import get_kernel

    class Kill(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_) -> None:
            if state.global_step == int(step):
                os.kill(os.getpid(), signal.SIGKILL)

    name, _, _ = os.environ["LOCAL_KERNELS"].partition("=")
    device = torch.device(os.environ["TRAINER_DEVICE"])
    opt = get_kernel(name, version=1, backend=device.type, trust_remote_code=True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    trainer = trainer_of(opt, Path(folder), device)
    trainer.add_callback(Kill())
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
