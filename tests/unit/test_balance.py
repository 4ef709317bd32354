"""Layers per stage by cost: what is counted, and that no split is faster than the one chosen."""

import itertools
import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, MixtralConfig, Qwen2MoeConfig

from hf_parallel.ask.config import SpecError
from hf_parallel.axes.pipeline.balance import Cost, Costs, balance, block_costs, explain, with_recomputation
from hf_parallel.model.anatomy import find_backbone_plan, get_backbone_of
from tests.models import DECODER
from tests.refusals import pattern_of_refusal

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
GEMMA_2B = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 1024,
    "max_position_embeddings": 8192,
}


def count(config, **kwargs):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    backbone = get_backbone_of(model)
    return block_costs(model, backbone, find_backbone_plan(backbone), **kwargs)


def stage_costs(costs, counts):
    ends = list(itertools.accumulate(counts))
    return [costs.of_stage(end - own, end) for own, end in zip(counts, ends, strict=True)]


def slowest(costs, counts):
    return max(cost.flops for cost in stage_costs(costs, counts))


def all_splits(layers, stages):
    cuts = itertools.combinations(range(1, layers), stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, layers))) for cut in cuts]


def equal_layers(layers, head=0, embedding=0):
    return Costs(Cost(0, embedding), (Cost(100, 100),) * layers, Cost(head, head))


@pytest.mark.parametrize("seed", range(20))
def test_no_split_is_faster(seed):
    draw = random.Random(seed)
    layers = draw.randint(3, 9)
    blocks = tuple(Cost(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(layers))
    costs = Costs(Cost(0, draw.randint(0, 30)), blocks, Cost(draw.randint(0, 30), draw.randint(0, 30)))
    for stages in range(1, layers + 1):
        counts, splits = balance(costs, stages), all_splits(layers, stages)
        assert counts in splits
        assert slowest(costs, counts) == min(slowest(costs, split) for split in splits)


@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("layers", range(1, 13))
def test_equal_layers_go_to_early_stages_first(layers, head):
    for stages in range(1, layers + 1):
        quotient, remainder = divmod(layers, stages)
        expected = tuple(quotient + (stage < remainder) for stage in range(stages))
        assert balance(equal_layers(layers, head, embedding=10), stages) == expected


def test_of_equally_fast_splits_the_one_with_even_memory_wins():
    assert balance(equal_layers(7, embedding=200), 3) == (1, 3, 3)
    # The head alone is the slowest stage whatever the others get: they share the rest evenly.
    assert balance(equal_layers(12, head=1000), 3) == (6, 5, 1)


def test_too_few_layers_are_an_error():
    with pytest.raises(SpecError, match=pattern_of_refusal("5 stages", 4, works="4 stages works")):
        balance(equal_layers(4), 5)
    assert balance(equal_layers(4), 4) == (1, 1, 1, 1)
    assert issubclass(SpecError, ValueError)


def test_every_matrix_counts_twice_and_attention_what_it_sees():
    hidden, heads, kv, inner, vocabulary = 4096, 32, 8, 14336, 128256
    matrices = 2 * hidden * hidden + 2 * hidden * hidden * kv // heads + 3 * hidden * inner
    costs = count(LlamaConfig(**LLAMA_8B), sequence_length=2048)
    assert {cost.flops for cost in costs.layers} == {2 * matrices + 4 * hidden * 2048 / 2}
    assert {cost.memory for cost in costs.layers} == {2 * (matrices + 2 * hidden)}
    assert costs.before == Cost(0, 2 * vocabulary * hidden)
    assert costs.after == Cost(2 * vocabulary * hidden + 5 * vocabulary, 2 * (vocabulary * hidden + hidden))
    assert count(LlamaConfig(**LLAMA_8B)) == count(LlamaConfig(**LLAMA_8B), sequence_length=4096)


@pytest.mark.parametrize(
    ("config", "width"),  # width: heads times their size
    [
        (LlamaConfig(**DECODER), 64),
        (Gemma2Config(**DECODER, head_dim=32), 128),
        (GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256), 64),
    ],
    ids=["llama", "gemma2", "gpt2"],
)
def test_torch_counts_the_same(config, width):
    """torch's counter knows products of matrices only, and sees all scores where a causal kernel needs half."""
    rows, length = 2, 32
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    backbone = get_backbone_of(model)
    costs = block_costs(model, backbone, find_backbone_plan(backbone), sequence_length=length)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(rows, length, dtype=torch.long))
    hidden_scores = config.num_hidden_layers * 4 * width * length / 2
    ours = costs.of_stage(0, len(costs.layers)).flops - 5 * config.vocab_size + hidden_scores
    # Rotary angles are a small product of their own.
    assert counter.get_total_flops() / (rows * length) == pytest.approx(ours, rel=2e-4)


def test_recomputing_makes_layers_a_third_dearer():
    once = count(LlamaConfig(**LLAMA_8B))
    twice = with_recomputation(once)
    assert twice.layers[0].flops == pytest.approx(once.layers[0].flops * 4 / 3)
    assert twice.after == once.after


@pytest.mark.parametrize(
    ("config", "stages", "expected"),
    [
        (LlamaConfig(**LLAMA_8B), 4, (8, 9, 9, 6)),
        (LlamaConfig(**LLAMA_8B), 8, (3, 5, 5, 5, 4, 4, 4, 2)),
        (Gemma2Config(**GEMMA_2B), 2, (17, 9)),
        (Gemma2Config(**GEMMA_2B), 4, (8, 9, 8, 1)),
    ],
)
def test_a_large_vocabulary_takes_layers_off_the_last_stage(config, stages, expected):
    costs = count(config)
    counts = balance(costs, stages)
    quotient, remainder = divmod(len(costs.layers), stages)
    even = tuple(quotient + (stage < remainder) for stage in range(stages))
    assert counts == expected
    assert slowest(costs, counts) < slowest(costs, even)


def test_only_the_experts_that_work_count():
    costs = count(MixtralConfig(num_hidden_layers=4), sequence_length=1)
    hidden, inner, experts, chosen = 4096, 14336, 8, 2
    attention = 2 * hidden * hidden + 2 * hidden * hidden // 4
    outside_experts = 2 * (attention + experts * hidden) + 4 * hidden / 2
    assert costs.layers[0].flops == outside_experts + 2 * chosen * 3 * hidden * inner
    assert costs.layers[0].memory == 2 * (attention + experts * hidden + experts * 3 * hidden * inner + 2 * hidden)


def test_layers_of_two_kinds_cost_what_they_hold():
    """Every second layer has experts, or attends to everything."""
    sparse = count(Qwen2MoeConfig(num_hidden_layers=4, decoder_sparse_step=2, intermediate_size=256))
    assert sparse.layers[1].flops > sparse.layers[0].flops == sparse.layers[2].flops
    gemma = count(Gemma2Config(**GEMMA_2B), sequence_length=4096)
    window, full = gemma.layers[0].flops, gemma.layers[1].flops
    assert full - window == 4 * 8 * 256 * (4096 / 2 - 1024 * (1 - 1024 / 8192))


def test_tiny_models_are_split_evenly():
    small = {**DECODER, "vocab_size": 255}
    assert balance(count(LlamaConfig(**small)), 2) == (2, 2)
    assert balance(count(LlamaConfig(**small)), 3) == (2, 1, 1)


def test_the_report_says_what_the_head_costs():
    costs = equal_layers(32, head=380)
    assert explain(costs, balance(costs, 4)) == "layers per stage 9, 9, 9, 5 (the head costs 3.8 layers)"


# ---- devices of unlike speed and memory -----------------------------------------------------------------------------


def test_no_split_over_unlike_devices_is_faster():
    draw = random.Random(9)
    for _ in range(150):
        layers, stages = draw.randint(2, 10), draw.randint(2, 4)
        stages = min(stages, layers)
        costs = equal_layers(layers, head=draw.choice((0, 2, 5)), embedding=draw.choice((0, 3)))
        speeds = [draw.choice((1.0, 0.5, 0.33)) for _ in range(stages)]
        unit = costs.layers[0].memory or 1
        rooms = [draw.randint(1, 8) * unit for _ in range(stages)]

        def ends(counts, costs=costs, speeds=speeds):
            return max(cost.flops / speed for cost, speed in zip(stage_costs(costs, counts), speeds, strict=True))

        def fullest(counts, costs=costs, rooms=rooms):
            return max(cost.memory / room for cost, room in zip(stage_costs(costs, counts), rooms, strict=True))

        every = all_splits(layers, stages)
        assert ends(balance(costs, stages, speeds)) == pytest.approx(min(map(ends, every)))
        fitting = [counts for counts in every if fullest(counts) <= 1]
        chosen = balance(costs, stages, speeds, rooms)
        if fitting:
            assert fullest(chosen) <= 1
            assert ends(chosen) == pytest.approx(min(map(ends, fitting)))
        else:
            assert fullest(chosen) == pytest.approx(min(map(fullest, every)))
        assert balance(costs, stages, [3.0] * stages) == balance(costs, stages)
