"""A small model divides by the sizes of a layout where the large one does, and does not where it does not."""

import pytest
from transformers import GPT2Config, LlamaConfig, Qwen3Config

from hf_parallel.model.shrink import Layout, list_small_values


@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks", "expected"),
    [
        (32, 8, 4, (8, 4)),
        (28, 4, 2, (14, 2)),
        (32, 8, 3, (4, 2)),
        (16, 16, 8, (8, 8)),
        (9, 3, 3, (9, 3)),
        (32, 4, 8, (8, 4)),
    ],
)
def test_heads(heads, key_heads, ranks, expected):
    config = LlamaConfig(hidden_size=64 * heads, num_attention_heads=heads, num_key_value_heads=key_heads)
    small = LlamaConfig(**list_small_values(config, ("vocab_size",), Layout(ranks=ranks)))
    assert (small.num_attention_heads, small.num_key_value_heads) == expected
    assert small.hidden_size == 16 * small.num_attention_heads
    assert small.vocab_size == config.vocab_size


@pytest.mark.parametrize(("layers", "stages", "expected"), [(32, 2, 4), (31, 2, 5), (32, 3, 7), (6, 8, 6), (3, 2, 3)])
def test_layers(layers, stages, expected):
    config = Qwen3Config(num_hidden_layers=layers, max_window_layers=layers)
    small = list_small_values(config, (), Layout(stages=stages))
    assert small.get("num_hidden_layers", layers) == expected
    assert len(Qwen3Config(**small).layer_types) == expected


def test_widths_follow_heads():
    small = GPT2Config(**list_small_values(GPT2Config(), (), Layout(ranks=4)))
    assert small.n_embd % small.n_head == 0
