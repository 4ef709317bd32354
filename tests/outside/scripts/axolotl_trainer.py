"""Axolotl's own Trainer, with its collators and its sampler that packs examples, on tokens of unlike lengths."""

import argparse
import json
from dataclasses import dataclass

import torch
import transformers.trainer_pt_utils  # noqa: F401 - before Axolotl, which imports names of it
from axolotl.core.trainers.base import AxolotlTrainer
from axolotl.core.training_args_base import AxolotlTrainingMixins
from axolotl.monkeypatch.data.batch_dataset_fetcher import patch_fetchers
from axolotl.utils.collators.batching import (
    BatchSamplerDataCollatorForSeq2Seq,
    DataCollatorForSeq2Seq,
    V2BatchSamplerDataCollatorForSeq2Seq,
)
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments, set_seed


@dataclass
class Arguments(AxolotlTrainingMixins, TrainingArguments):
    """As Axolotl joins them."""


def make_rows(size: int, seed: int, words: int) -> Dataset:
    """Rows of 5 to 33 tokens, whose first ones are no targets."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(size):
        tokens = torch.randint(5, words, (5 + (number * 11) % 29,), generator=generator).tolist()
        labels = [-100] * (number % 4) + tokens[number % 4 :]
        places = list(range(len(tokens)))
        row = {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": labels}
        rows.append({**row, "position_ids": places, "length": len(tokens)})
    return Dataset.from_list(rows)


def main() -> None:
    """Train, evaluate, save."""
    options = argparse.ArgumentParser()
    for name in ("model", "output_dir", "settings"):
        options.add_argument(f"--{name}")
    options.add_argument("--lora", action="store_true")
    options.add_argument("--collator", default="v2")
    given = options.parse_args()
    settings = json.loads(given.settings)
    set_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(given.model)
    if given.lora:
        model = get_peft_model(model, LoraConfig(r=8, lora_dropout=0.0, target_modules="all-linear"))
    arguments = Arguments(
        output_dir=given.output_dir,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        logging_steps=1,
        max_seq_length=37,
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        seed=3,
        dataset_num_proc=1,
        include_tkps=False,
        **settings,
    )
    packs = arguments.sample_packing
    if packs:
        patch_fetchers()  # of loaders, whose batches are lists of lists
    kinds = {"v1": BatchSamplerDataCollatorForSeq2Seq, "v2": V2BatchSamplerDataCollatorForSeq2Seq}
    collator = (kinds[given.collator] if packs else DataCollatorForSeq2Seq)(tokenizer)
    words = model.config.vocab_size
    trainer = AxolotlTrainer(
        model=model,
        args=arguments,
        train_dataset=make_rows(61, 1, words),
        eval_dataset=make_rows(23, 2, words),
        data_collator=collator,
        eval_data_collator=collator,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.evaluate()
    trainer.save_model(given.output_dir)


main()
