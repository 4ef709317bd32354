"""The unchanged script that the parts train: a tiny Llama of odd sizes under plain Trainer, or under a layout."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.share import layout_of

ROWS, LENGTH, VOCABULARY = 22, 33, 515
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 120,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def config(**sizes: Any) -> Any:
    """Of a Llama."""
    from transformers import LlamaConfig

    fixed = {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "initializer_range": 0.1, "use_cache": False}
    return LlamaConfig(**{**fixed, "tie_word_embeddings": False, **SIZES, **sizes})


class Rows:
    """Random tokens under a seed."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, vocabulary, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def trainer(spec: str, folder: str, callbacks: list[Any] | None = None, rows: int = ROWS, **arguments: Any) -> Any:
    """What a script makes: its model, its data, its Trainer."""
    from transformers import Trainer, TrainingArguments, set_seed

    if spec:
        from hf_parallel.hooks import activation

        activation.activate(spec, source="benchmark")
    from transformers import LlamaForCausalLM

    set_seed(7)
    fixed = {
        "per_device_train_batch_size": 4 // layout_of(spec).data_parallel_size,
        "learning_rate": 1e-2,
        "logging_steps": 1,
    }
    fixed |= {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "lr_scheduler_type": "constant"}
    settings = TrainingArguments(output_dir=folder, **{**fixed, **arguments})
    return Trainer(
        LlamaForCausalLM(config()), settings, train_dataset=Rows(rows, LENGTH, VOCABULARY), callbacks=callbacks
    )
