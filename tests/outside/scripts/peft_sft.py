"""Adapters with TRL's trainer, new special tokens included; the steps of PEFT's examples/sft/train.py and utils.py."""

import os
from dataclasses import dataclass

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from trl import SFTConfig, SFTTrainer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {{ message['content'] }}<|im_end|>{% endfor %}"
)


@dataclass
class Arguments:
    """Model and data."""

    model_name_or_path: str
    dataset_name: str
    lora_r: int = 4
    lora_alpha: int = 8
    lora_target_modules: str = "all-linear"


def create_and_prepare_model(own):
    """The model, resized to a tokenizer with two more tokens, and the adapters' settings."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        assert torch.distributed.get_world_size() >= 1
    model = AutoModelForCausalLM.from_pretrained(own.model_name_or_path, dtype=torch.float32)
    targets = own.lora_target_modules
    peft_config = LoraConfig(
        lora_alpha=own.lora_alpha,
        lora_dropout=0.0,
        r=own.lora_r,
        bias="none",
        task_type="CAUSAL_LM",
        target_modules=targets if targets == "all-linear" else targets.split(","),
    )
    tokenizer = AutoTokenizer.from_pretrained(own.model_name_or_path)
    tokenizer.chat_template = CHATML
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=8)
    return model, peft_config, tokenizer


def main():
    own, training_args = HfArgumentParser((Arguments, SFTConfig)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    model, peft_config, tokenizer = create_and_prepare_model(own)
    model.config.use_cache = not training_args.gradient_checkpointing
    if training_args.gradient_checkpointing:
        training_args.gradient_checkpointing_kwargs = {"use_reentrant": False}

    def as_text(rows):
        return {"text": [tokenizer.apply_chat_template(turns, tokenize=False) for turns in rows["messages"]]}

    files = {split: os.path.join(own.dataset_name, f"{split}.jsonl") for split in ("train", "test")}
    rows = load_dataset("json", data_files=files).map(as_text, batched=True, remove_columns=["messages"])
    print(f"Size of the train set: {len(rows['train'])}. A sample of train dataset: {rows['train'][0]}")
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        args=training_args,
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        peft_config=peft_config,
    )
    trainer.accelerator.print(f"{trainer.model}")
    if hasattr(trainer.model, "print_trainable_parameters"):
        trainer.model.print_trainable_parameters()
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()


if __name__ == "__main__":
    main()
