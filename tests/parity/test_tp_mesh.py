"""Tensor parallelism on a grid of ranks (`tp_mesh=ROWSxCOLS`): weights cut along both dims, one process's numbers."""

import torch

from hf_parallel import parallelize
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
