"""Gradients of small weights that tp ranks hold whole: one all-reduce per layer, and the numbers of one process."""

import pytest
import torch
from torch.distributed.tensor import DTensor

import hf_parallel
from hf_parallel.hooks.accelerate.accelerator import defer_reduction
from tests import models
from tests.counting import CountCollectives
from tests.distributed import run, run_alone
from tests.training import Script, spec_id

ADAPTERS = (("r", 3), ("target_modules", "all-linear"))


def count_sums(spec, name, lora, autocast):
    """All-reduces in the backward pass of a second step."""
    model = models.build(name, vocab_size=515)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**dict(ADAPTERS)))
    hf_parallel.parallelize(model, spec)
    tokens = torch.randint(3, 515, (3, 33), generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(input_ids=tokens, labels=tokens).loss
        with CountCollectives() as counted:
            loss.backward()
    return counted.counts["reduce"]


@pytest.mark.parametrize(
    ("name", "lora", "autocast", "before"),
    [
        ("llama", False, False, 8),  # two norms
        ("qwen3", False, False, 16),  # and those of queries and keys
        ("gemma3", False, False, 24),  # and two norms behind attention and MLP
        ("llama", True, False, 28),  # a half of each adapter of seven linears; norms are frozen
        ("llama", True, True, 28),
    ],
)
def test_one_sum_per_layer(name, lora, autocast, before):
    """Of four layers; beside them those of the last norm and of the head's input."""
    others = 1 if lora else 2
    for found in run(count_sums, 2, "tp=2", name, lora, autocast):
        assert found == 4 + others < before


#: Parts of a layer that other code takes out of it: units of FSDP2, layers that run again, schedules that compute
#: gradients of weights later.
LAYOUTS = [
    *("tp=2", "tp=2,dp_shard=2,zero_stage=1", "tp=2,activation_checkpointing=full", "tp=2,sequence_parallel=false"),
    *("pp=2,tp=2,pipeline_schedule=interleaved_zero_bubble", "pp=2,tp=2,pipeline_schedule=dualpipe_v"),
]


@pytest.mark.parametrize("lora", [(), ADAPTERS], ids=["whole", "adapters"])
@pytest.mark.parametrize("spec", LAYOUTS, ids=spec_id)
def test_numbers_of_one_process(runs, spec, lora):
    """Two micro-batches per step, four norms per layer."""
    script = Script(model="deep" if "pp" in spec else "qwen3", lora=lora, arguments=(("max_grad_norm", 0.05),))
    runs.check(script.with_accumulation(2), spec)


def train_norms_in_16_bits(spec):
    """Gradients of norms whose weights have 16 bits, in a model of fp32: FSDP2 makes units of them."""
    model = models.build("llama", vocab_size=515, num_hidden_layers=3)
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.to(torch.bfloat16)
    if spec:
        hf_parallel.parallelize(model, spec)
    tokens = torch.randint(3, 515, (4, 4, 33), generator=torch.Generator().manual_seed(5))
    for batch in tokens[:2]:  # a step that learns what the layer sums
        model(input_ids=batch, labels=batch).loss.backward()
    model.zero_grad()
    parts = tokens[2:]
    if spec and "dp_shard" in spec:
        rank = model._hf_parallel.mesh.data_rank
        parts = parts[:, 2 * rank : 2 * rank + 2]
    with defer_reduction(model):
        model(input_ids=parts[0], labels=parts[0]).loss.backward()
    model(input_ids=parts[1], labels=parts[1]).loss.backward()
    named = {name: p.grad for name, p in model.named_parameters() if name.endswith("norm.weight")}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in named.items()}


@pytest.mark.parametrize("spec", ["tp=2,dp_shard=2,zero_stage=1", "tp=2,dp_shard=2"])
def test_units_inside_a_layer_add_up_by_themselves(spec):
    """FSDP2 reduces them before the layer's backward pass ends."""
    expected = run_alone(train_norms_in_16_bits, None)
    for found in run(train_norms_in_16_bits, 4, spec):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name].float(), gradient.float(), rtol=2e-2, atol=2e-2, msg=name)
