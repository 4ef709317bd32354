"""Tensor parallelism on a grid of ranks (`tp_mesh=ROWSxCOLS`): weights cut along both dims, one process's numbers."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_parallel import parallelize
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.plans import examine
from tests import models
from tests.adapters import ATTENTION, MLP, lora
from tests.distributed import run, run_alone
from tests.training import Script, over

#: Shared keys, q and k norms, biases, soft caps, norms over all columns, packed and transposed weights, sinks,
#: experts, cross-attention.
FAMILIES = (
    "odd",
    "qwen3",
    "qwen2",
    "gemma2",
    "olmo2_eight",
    "phi3_eight",
    "gpt2",
    "gpt_oss",
    "mixtral",
    "falcon_rw",
    "bloom",
    "gptj",
    "t5",
    "bert",
    "bart",
    "deberta",
)
LAYOUTS = (
    "tp=4,tp_mesh=2x2",
    "tp=4,tp_mesh=2x2,sequence_parallel=false",
    "tp=4,tp_mesh=2x2,pp=2",
    "tp=4,tp_mesh=2x2,cp=2",
    "tp=4,tp_mesh=2x2,dp_shard=2",
    "tp=4,tp_mesh=2x2,dp_replicate=2",
)


@over("{model} on a grid", "tp=4,tp_mesh=2x2", model=FAMILIES)
def test_families(runs, model, spec):
    """Micro-batches with unequal numbers of targets."""
    runs.check(Script(model=model).with_accumulation(2), spec)


@over("tp_mesh", *LAYOUTS)
def test_layouts(runs, spec):
    """A shared vocabulary of 515, rows of 15 tokens; each rank of a pair shares a key/value head."""
    runs.check(Script(model="odd").with_accumulation(2), spec)


@over("experts on a grid", "tp=4,tp_mesh=2x2,ep=4", "tp=4,tp_mesh=2x2,dp_shard=2,ep=4")
def test_experts(runs, spec):
    """Experts stay on all ranks of tp, whole or cut; their routers read whole tokens."""
    runs.check(Script(model="mixtral").with_accumulation(2), spec)


@over("more rows than columns", "tp=8,tp_mesh=4x2")
def test_oblong(runs, spec):
    runs.check(Script(model="gpt2_eight").with_accumulation(2), spec)


@over("checkpointing on a grid", "tp=4,tp_mesh=2x2", "tp=4,tp_mesh=2x2,pp=2")
def test_recomputed(runs, spec):
    for way in ("full", "selective"):
        runs.check(Script(model="odd").with_accumulation(2), f"{spec},activation_checkpointing={way}")


@over("LoRA on a grid", "tp=4,tp_mesh=2x2", "tp=4,tp_mesh=2x2,dp_shard=2", "tp=4,tp_mesh=2x2,pp=2")
def test_lora(runs, spec):
    """On all linears and both ends, of which two ranks share a key/value head."""
    runs.check(Script(model="odd", lora=lora((*ATTENTION, *MLP, "embed_tokens"))).with_accumulation(2), spec)


@over("LoRA on a grid", "tp=4,tp_mesh=2x2", "tp=4,tp_mesh=2x2,sequence_parallel=false")
def test_lora_of_packed_weights(runs, spec):
    for model in ("gpt2", "phi3_eight"):
        runs.check(Script(model=model, lora=lora("all-linear", lora_bias=model == "gpt2")), spec)


def generated(spec):
    """Greedy tokens after a prompt of odd length, and the whole logits of a row."""
    model = models.build("odd")
    if spec:
        parallelize(model, spec)
    model.eval().config.use_cache = True
    prompt = torch.arange(3, 8).view(1, 5)
    with torch.no_grad():
        logits = model(input_ids=prompt).logits
    return model.generate(prompt, max_new_tokens=9, do_sample=False, pad_token_id=0).tolist(), logits


def test_generation_and_logits():
    """One token at a time, so with whole sequences, of which each rank has some features."""
    tokens, logits = run_alone(generated, None)
    for found, whole in run(generated, 4, "tp=4,tp_mesh=2x2"):
        assert found == tokens
        torch.testing.assert_close(whole, logits)


class AddsToItsInput(LlamaMLP):
    """Does more with its input than to multiply it."""

    def forward(self, x):
        return super().forward(x) + 0.1 * x.mean(-1, keepdim=True)


class ReadsTheWidth(LlamaMLP):
    """Its input's last size decides what it gives."""

    def forward(self, x):
        return super().forward(x).view(*x.shape[:2], x.shape[-1])


@pytest.mark.parametrize("kind", [AddsToItsInput, ReadsTheWidth])
def test_code_that_reads_what_is_cut_is_refused(kind):
    """Columns of the grid would each read their own features; `tp=4` runs it."""
    with torch.device("meta"):
        model = models.build("llama")
    for layer in model.model.layers:
        layer.mlp.__class__ = kind
    found = examine(model, ParallelConfig.parse("tp=4,tp_mesh=2x2")).problems
    why = f"that {kind.__name__} does no more with x than to multiply it is not known; tp=4 without tp_mesh works"
    assert found == [f"tp_mesh=2x2: {why}"]
    assert examine(model, ParallelConfig.parse("tp=4")).problems == []


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("deepseek_v3", "tp=4,tp_mesh=2x2", "q_a_proj stays whole and may read what is cut; tp=4 without tp_mesh"),
        ("phi3", "tp=4,tp_mesh=2x2", "ranks share keys that model.layers.0.self_attn.qkv_proj holds beside queries"),
        ("llama", "tp=4,tp_mesh=2x2,precision=int8", "tp_mesh=2x2 cuts products along both dims; precision=auto"),
    ],
)
def test_models_that_are_refused(name, spec, words):
    with torch.device("meta"):
        model = models.build(name)
    assert words in examine(model, ParallelConfig.parse(spec)).problems[0]


def test_columns_that_do_not_divide_the_widths():
    sizes = {"num_attention_heads": 4, "head_dim": 16, "intermediate_size": 132}
    with torch.device("meta"):
        even, odd = (models.build("qwen3", hidden_size=hidden, **sizes) for hidden in (66, 65))
    assert examine(even, ParallelConfig.parse("tp=4,tp_mesh=2x2")).problems == []
    (problem,) = examine(odd, ParallelConfig.parse("tp=4,tp_mesh=2x2")).problems
    assert problem == (
        "tp_mesh=2x2: 2 columns do not divide 65 features of model.layers.0.self_attn.q_proj; "
        "tp=4 without tp_mesh works"
    )
    assert examine(odd, ParallelConfig.parse("tp=4")).problems == []
