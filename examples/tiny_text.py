"""Text, tokenizer, blocks and model for the examples: nothing is downloaded, everything is made on the spot.

The text is the language reference that every Python carries for its `help()`: about half a million characters of
English. Same Python, same text, same tokenizer, on every process: none of them needs to wait for another.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"


class TextBlocks(Dataset):
    """Rows of tokens, shape (rows, block_size); `labels` are the same tokens (the model shifts them itself)."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def read_documents() -> list[str]:
    """The prose of Python's own reference, one string per topic: grammar rules, tables and code are left out."""
    return [_prose(topics[name]) for name in sorted(topics)]


def _prose(text: str) -> str:
    text = text.replace('"', "").replace("*", "")
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return " ".join(p for p in paragraphs if p[:1].isalpha() and p.endswith(".") and p.count(" ") > 5)


def train_tokenizer(documents: list[str], vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer learned from `documents`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=PAD)


def train_and_eval_blocks(
    tokenizer: PreTrainedTokenizerFast, documents: list[str], block_size: int = 128, eval_share: float = 0.05
) -> tuple[TextBlocks, TextBlocks]:
    """Every document, closed by the end-of-text token, in one stream; every n-th block of it is held out."""
    stream = [token for ids in tokenizer(documents)["input_ids"] for token in [*ids, tokenizer.eos_token_id]]
    rows = len(stream) // block_size
    blocks = torch.tensor(stream[: rows * block_size]).view(rows, block_size)
    held_out = torch.arange(rows) % round(1 / eval_share) == 0
    return TextBlocks(blocks[~held_out]), TextBlocks(blocks[held_out])


def build_model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A Llama of six million parameters with grouped-query attention: 8 query heads share 4 key/value heads."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config)
