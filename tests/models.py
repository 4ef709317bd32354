"""Tiny models and data sets: fp32, on CPU, every number drawn under a seed.

Weights are drawn with a spread of 0.1, not the usual 0.02: losses then move visibly in three steps, and an error of
one axis is not hidden behind logits that are all nearly zero.
"""

from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 256
LENGTH = 16
CLASSES = 3
SEED = 7

DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "use_cache": False,
}


def llama(**changes: Any) -> LlamaConfig:
    """Llama with grouped-query attention: 4 heads, 2 key/value heads."""
    return LlamaConfig(**{**DECODER, "tie_word_embeddings": False, **changes})


def qwen3(**changes: Any) -> Qwen3Config:
    """Qwen3: q/k norms, tied embeddings, heads wider than hidden / heads."""
    return Qwen3Config(**{**DECODER, "tie_word_embeddings": True, "head_dim": 32, **changes})


def mistral(**changes: Any) -> MistralConfig:
    """Mistral with a sliding window shorter than the rows, so the mask of every stage matters."""
    return MistralConfig(**{**DECODER, "tie_word_embeddings": False, "sliding_window": 8, **changes})


def bert(**changes: Any) -> BertConfig:
    """BERT sequence classification, 2 layers, no dropout: its forward takes no `num_items_in_batch`."""
    sizes = {key: DECODER[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.1}
    return BertConfig(**{**sizes, **still, "num_hidden_layers": 2, "num_labels": CLASSES, **changes})


def odd(**changes: Any) -> LlamaConfig:
    """Llama with a vocabulary that no number of ranks divides, on rows of an odd length (see `data`), tied."""
    return llama(**{"vocab_size": VOCABULARY + 1, "tie_word_embeddings": True, **changes})


def gemma2(**changes: Any) -> Gemma2Config:
    """Gemma 2: scaled embeddings, four norms a layer, soft-capped logits, a sliding window in every other layer."""
    return Gemma2Config(**{**DECODER, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, **changes})


def qwen2(**changes: Any) -> Qwen2Config:
    """Qwen2: biases on the projections of queries, keys and values."""
    return Qwen2Config(**{**DECODER, "tie_word_embeddings": False, **changes})


CONFIGS = {
    "llama": llama,
    "qwen3": qwen3,
    "mistral": mistral,
    "bert": bert,
    "odd": odd,
    "gemma2": gemma2,
    "qwen2": qwen2,
}


def auto_class(config: PretrainedConfig) -> type:
    """The Auto class a script would use for this config."""
    return AutoModelForSequenceClassification if isinstance(config, BertConfig) else AutoModelForCausalLM


def build(name: str, seed: int = SEED, **changes: Any) -> PreTrainedModel:
    """The model with weights drawn under `seed`, in this process's memory."""
    config = CONFIGS[name](**changes)
    torch.manual_seed(seed)
    return auto_class(config).from_config(config)


class Rows(Dataset):
    """`size` rows of LENGTH random tokens; row i has its first i % 7 labels ignored, so label counts are uneven.

    With `even=True` no label is ignored, for loops that average means over ranks. With `uneven_lengths=True` row i
    has LENGTH - i % 5 tokens and needs a collator that pads.
    """

    def __init__(self, size: int, seed: int, even: bool = False, uneven_lengths: bool = False, length: int = LENGTH):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (size, length), generator=generator)
        self.even, self.uneven_lengths = even, uneven_lengths

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index, : LENGTH - index % 5] if self.uneven_lengths else self.tokens[index]
        labels = tokens.clone()
        if not self.even:
            labels[: index % 7] = -100
        return {"input_ids": tokens, "attention_mask": torch.ones_like(labels), "labels": labels}


class Stream(IterableDataset):
    """The same rows without a length and without random access."""

    def __init__(self, size: int, seed: int):
        self.rows = Rows(size, seed)

    def __iter__(self):
        for index in range(len(self.rows)):
            yield self.rows[index]


class Sentences(Rows):
    """Rows for classification: a class per row, and padding at the end of every third one."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        mask = (torch.arange(LENGTH) < LENGTH - 5 * (index % 3 == 0)).long()
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens[0] % CLASSES}


PADDING = {"input_ids": 0, "attention_mask": 0, "labels": -100}


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collator that pads to the longest row of the batch, so that data ranks and steps see unequal lengths."""
    stack = torch.nn.utils.rnn.pad_sequence
    return {key: stack([row[key] for row in rows], True, PADDING[key]) for key in rows[0]}


def data(model: str, size: int, seed: int, stream: bool = False, uneven_lengths: bool = False) -> Dataset:
    """The data set that goes with a model."""
    if model == "bert":
        return Sentences(size, seed)
    if model == "odd":
        return Rows(size, seed, length=LENGTH - 1)
    return Stream(size, seed) if stream else Rows(size, seed, uneven_lengths=uneven_lengths)
