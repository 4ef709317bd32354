"""The script that is proved here: a small Llama on padded rows, evaluated and saved by Trainer."""

import sys

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tests.rows import Rows, pad

if __name__ == "__main__":
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=515,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.1,
        )
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=Rows(101, 11, uneven_lengths=True),
        eval_dataset=Rows(13, 12, uneven_lengths=True),
        data_collator=pad,
    )
    trainer.train()
    trainer.save_model()
    sys.exit(0)
