"""Adapt a small model with LoRA, keep the best checkpoint, and load it again as PEFT does.

    python examples/finetune_lora.py --base outputs/base --output_dir outputs/lora --max_steps 60 \\
        --eval_strategy steps --eval_steps 20 --save_strategy steps --save_steps 20 --load_best_model_at_end

Every argument of `TrainingArguments` may follow. Nothing is downloaded: see `tiny_text.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments, set_seed

from tiny_text import build_model, read_documents, train_and_eval_blocks, train_tokenizer


@dataclass
class AdapterArguments:
    """What is adapted, and how."""

    base: str = field(metadata={"help": "Folder of the base model; it is made if it does not exist."})
    rank: int = field(default=8, metadata={"help": "Rank of the adapters."})
    vocab_size: int = field(default=4096, metadata={"help": "Tokens in the vocabulary trained from the text."})
    block_size: int = field(default=128, metadata={"help": "Tokens per training example."})


def main() -> None:
    adapter_args, training_args = HfArgumentParser((AdapterArguments, TrainingArguments)).parse_args_into_dataclasses()
    documents = read_documents()
    tokenizer = train_tokenizer(documents, adapter_args.vocab_size)
    train_dataset, eval_dataset = train_and_eval_blocks(tokenizer, documents, adapter_args.block_size)
    with training_args.main_process_first():
        if not os.path.isdir(adapter_args.base):
            set_seed(0)
            build_model(tokenizer).save_pretrained(adapter_args.base)

    set_seed(training_args.seed)
    base = AutoModelForCausalLM.from_pretrained(adapter_args.base)
    config = LoraConfig(r=adapter_args.rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    model.print_trainable_parameters()
    trainer = Trainer(model, training_args, train_dataset=train_dataset, eval_dataset=eval_dataset)
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    best = trainer.evaluate()["eval_loss"]
    trainer.save_model()

    again = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(adapter_args.base), training_args.output_dir
    )
    found = Trainer(again, training_args, eval_dataset=eval_dataset).evaluate()["eval_loss"]
    torch.testing.assert_close(found, best)
    trainer.accelerator.print(f"loss of the best adapters: {best:.4f}, after loading them again: {found:.4f}")


if __name__ == "__main__":
    main()
