"""What tensor parallelism must get right beyond the plain case, and how often it may communicate."""

import pytest
import torch
import transformers

from hf_parallel import parallelize
from tests import models, sweep
from tests.counting import CountCollectives
from tests.distributed import run, run_alone
from tests.training import Script, over

LAYERS = models.DECODER["num_hidden_layers"]


@over("odd sizes", "tp=2", "tp=4", "tp=2,pp=2", "tp=2,dp_shard=2")
def test_vocabulary_and_length_that_tp_does_not_divide(runs, spec):
    """515 tokens of vocabulary, 15 of length, a shared embedding; at tp=4 two ranks share a key/value head too."""
    runs.check(Script(model="odd").with_accumulation(2), spec)


@over("Llama", "tp=4")
def test_fewer_kv_heads_than_ranks(runs, spec):
    runs.check(Script().with_accumulation(2), spec)


@over("Qwen3", "tp=4")
def test_fewer_kv_heads_than_ranks_with_norms(runs, spec):
    """The norms of queries and keys act on other heads on each rank."""
    runs.check(Script(model="qwen3").with_accumulation(2), spec)


def test_shared_heads_whose_values_have_another_width_than_their_keys():
    """As of MiMo V2: at tp=4 two ranks share a key head of 16 numbers and a value head of 8."""
    kind = pytest.importorskip("transformers.models.mimo_v2_flash").MiMoV2FlashConfig
    config = sweep.small_config(kind(), "causal")
    config.layer_types, config.v_head_dim = ["full_attention"] * len(config.layer_types), config.head_dim // 2
    model = transformers.MiMoV2FlashForCausalLM
    batch = sweep.batch_for("causal", model, config, 15)
    found = sweep.case(model, config, batch, "tp=4", run_alone(sweep.step, model, config, batch, None))
    assert (found["class"], found["text"]) == ("ok", "")


@over("Qwen2", "tp=2", "tp=4", "tp=2,pp=2", "tp=2,dp_shard=2")
def test_attention_biases(runs, spec):
    runs.check(Script(model="qwen2"), spec)


@over("Gemma 2", "tp=2", "pp=2", "tp=2,pp=2", "tp=2,dp_shard=2")
def test_scaled_embedding_and_capped_logits(runs, spec):
    """What the model does between embedding and layers happens once; the cap acts on parts of the logits."""
    runs.check(Script(model="gemma2"), spec)


@over("Llama", "tp=2", "tp=2,pp=2")
def test_without_sequence_parallelism(runs, spec):
    runs.check(Script().with_accumulation(2), f"{spec},sequence_parallel=false")


def collectives(spec: str) -> dict[str, int]:
    """How often one training step of Llama calls each kind of collective."""
    model = parallelize(models.build("llama"), spec).train()
    model._hf_parallel.batches.axes = []  # what compares the batches of ranks in the first steps
    ids = torch.arange(32).view(2, 16)
    with CountCollectives() as counted:
        model(input_ids=ids, labels=ids).loss.backward()
    return dict(counted.counts)


def test_one_collective_per_region_and_direction():
    """Two regions a layer: one all-reduce each way. Around them: embedding, maximum and sum of the loss, head."""
    counts = run(collectives, 2, "tp=2,sequence_parallel=false")[0]
    assert counts == {"reduce": 2 * 2 * LAYERS + 4}


def test_sequence_parallelism_replaces_each_all_reduce():
    """Gather and scatter instead, as many bytes; the rest are the norms' weights and the four around the layers."""
    counts = run(collectives, 2, "tp=2")[0]
    norms = 2 * LAYERS + 1
    split_and_join = 2
    assert counts == {"gather": (4 + 2) * LAYERS + split_and_join, "scatter": 4 * LAYERS, "reduce": norms + 4}


def generate(spec: str | None) -> list[list[int]]:
    """Greedy tokens after a prompt of odd length."""
    model = models.build("qwen3")
    if spec:
        parallelize(model, spec)
    model.eval().config.use_cache = True
    prompt = torch.arange(3, 8).view(1, 5)
    return model.generate(prompt, max_new_tokens=9, do_sample=False, pad_token_id=0).tolist()


@pytest.mark.parametrize("spec", ["tp=2", "tp=4"])
def test_generation_with_a_cache(spec):
    """One token at a time, so with whole sequences."""
    expected = run_alone(generate, None)
    for tokens in run(generate, int(spec[-1]), spec):
        assert tokens == expected


def strays(spec: str | None) -> list[str]:
    """How ids, targets and token types without a row are answered; the last of each model's are in order."""
    answers = []
    for kind, keys in (("odd", ("input_ids", "labels")), ("bert", ("input_ids", "token_type_ids"))):
        model = models.build(kind) if spec is None else parallelize(models.build(kind), spec)
        rows = {key: torch.arange(15).view(1, 15) % 2 for key in keys}
        for key in ("input_ids", *keys[1:2]):
            for stray in (models.VOCABULARY, models.VOCABULARY + 99, -1):
                answers.append(answer(model, {**rows, key: rows[key].index_fill(1, torch.tensor([7]), stray)}))
        answers.append(answer(model, rows))
    return answers


def answer(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> str:
    """The kind of error, if any."""
    try:
        model(**batch)
    except Exception as error:
        return type(error).__name__
    return "none"


def test_tokens_outside_the_vocabulary():
    """An IndexError, as in one process; a layout that looks up no row for them would train on."""
    expected = run_alone(strays, None)
    assert expected == [*["IndexError"] * 6, "none"] * 2
    assert run(strays, 2, "tp=2") == [expected] * 2
