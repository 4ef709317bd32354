"""QLoRA in the planner: bytes of bitsandbytes' own weights, time to unpack them, layouts that can take them."""

import dataclasses

import pytest
import torch
from torch import nn

from hf_parallel import cli
from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.axes.pipeline.stages import find_boundary_dtype
from hf_parallel.hooks.auto import Shown, make_acceptance_test
from hf_parallel.hooks.peft.planned_adapters import plan_four_bit
from hf_parallel.planner import find_gpu, make_cluster, predict, shape_of
from hf_parallel.planner.candidates import Goal, iterate_layouts
from hf_parallel.planner.pipeline import list_adapted
from hf_parallel.planner.search import search
from hf_parallel.planner.states import ADAPTER_WIDTH
from tests import models

SIZES = {"hidden_size": 512, "intermediate_size": 1408, "vocab_size": 515, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
GIB, RANK = 2**30, 8


def config():
    return models.llama(**SIZES)


def predicted(four_bit, engine="hf_parallel", **more):
    how = {"seq": 64, "micro_batch": 3, "lora": RANK, "engine": engine, **more}
    return predict(model=config(), gpu="a100-80gb", layout=how.pop("layout", {}), four_bit=four_bit, **how)


@pytest.mark.parametrize(
    ("kind", "engine"), [("nf4", "hf_parallel"), ("nf4", "transformers"), ("nf4_double", "transformers")]
)
def test_weights_are_what_bitsandbytes_keeps(kind, engine):
    """All tensors of a model whose linears are Linear4bit: codes, largest values, the tables that read them."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    model, kept = models.build("llama", **SIZES).bfloat16(), {}
    packed = 0
    for name, module in list(model.model.layers.named_modules()):
        if type(module) is nn.Linear:
            four = Linear4bit(
                module.in_features,
                module.out_features,
                bias=False,
                compress_statistics=kind == "nf4_double",
                quant_type="nf4",
            )
            four.weight = Params4bit(
                module.weight.data, False, compress_statistics=kind == "nf4_double", quant_type="nf4"
            )
            model.model.layers.set_submodule(name, four.to("cpu"))
            state = four.weight.quant_state
            packed += module.weight.numel()
            parts = [four.weight, state.absmax, state.code]
            parts += [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
            kept |= {(name, i): part.nbytes for i, part in enumerate(parts)}
    found = sum(kept.values()) + sum(p.nbytes for p in model.parameters() if p.dtype == torch.bfloat16)
    shape = shape_of(config())
    adapters = sum(RANK * (m.inputs + m.outputs) for block in shape.blocks for m in list_adapted(block))
    planned = predicted(kind, engine).breakdown.memory["weights"] * GIB - ADAPTER_WIDTH * adapters
    assert planned == pytest.approx(found, rel=0.01)
    whole = 2 * (shape.parameters - packed)  # embedding, head, norms stay as they are
    assert planned - whole == pytest.approx(sum(kept.values()), rel=0.01)


def test_each_pass_unpacks():
    """Forward and backward, and the forward again under full checkpointing: codes read, 16 bits written."""
    shape, gpu = shape_of(config()), find_gpu("a100-80gb")
    packed = sum(m.parameters for block in shape.blocks for m in list_adapted(block))
    once = packed * (0.5 + 4 / 64 + 2) / (gpu.bandwidth * gpu.efficiency.memory)
    plain, full = predicted("nf4"), predicted("nf4", recompute="full")
    assert plain.breakdown.time["unpacking 4 bits"] == pytest.approx(2 * once)
    before = predicted("none", recompute="full").breakdown.time["recomputation"]
    assert full.breakdown.time["recomputation"] - before == pytest.approx(once)


def test_a_pass_has_one_linear_unpacked():
    """While it multiplies, in bf16: the largest, 512 x 1408."""
    seen = [predicted(kind, recompute="full").breakdown.memory["temporaries"] for kind in ("nf4", "none")]
    assert (seen[0] - seen[1]) * GIB == pytest.approx(2 * 512 * 1408)


def test_layouts_are_those_that_a_start_takes():
    """Of rows of 1,408 weights eight ranks have parts of 176, which are not whole blocks of 64; two have 704."""
    cluster, sizes = make_cluster("a100-80gb", 8), ParallelConfig(dp_shard_size=1, tp_size=8)
    accept, packs = make_acceptance_test(config()), make_acceptance_test(config(), plan_four_bit())
    assert (accept(sizes), packs(sizes)) == (True, False)
    assert packs(dataclasses.replace(sizes, tp_size=2))
    goal = Goal(shape_of(config()), cluster, 64, 8, lora=RANK)
    for four_bit, expected in ((False, {1, 2, 4, 8}), (True, {1, 2})):
        tried = {layout.tp_size for layout in iterate_layouts(dataclasses.replace(goal, four_bit=four_bit))}
        assert tried == expected
    assert not make_acceptance_test(models.gpt2(), plan_four_bit())(ParallelConfig(dp_shard_size=2))  # Conv1D


def test_less_memory_than_adapters_on_16_bits():
    found = [
        search(
            model=models.LLAMA_8B,
            cluster=make_cluster("h100-80gb", 1),
            seq=2048,
            global_batch=4,
            lora=16,
            four_bit=four,
        )
        for four in (False, True)
    ]
    lora, qlora = (one.choices[0].prediction.breakdown.memory["weights"] for one in found)
    assert lora - qlora == pytest.approx(6.98e9 * (2 - 0.5625) / GIB, rel=0.01)


@pytest.mark.parametrize(
    ("asked", "works"),
    [({"lora": 0}, "lora=16"), ({"precision": "fp32"}, "precision=bf16"), ({"precision": "fp8"}, "precision=bf16")],
)
def test_refusals(asked, works):
    how = {"model": models.LLAMA_8B, "cluster": make_cluster("h100-80gb", 1), "seq": 2048, "global_batch": 4}
    with pytest.raises(SpecError, match=works):
        search(**{**how, "lora": 16, "four_bit": True, **asked})


@pytest.mark.parametrize(
    ("words", "works"), [([], "--lora 16"), (["--lora", "--precision", "mixed"], "--precision bf16")]
)
def test_the_command_refuses(tmp_path, capsys, words, works):
    config().save_pretrained(tmp_path)
    command = ["plan", str(tmp_path), "--gpus", "1", "--gpu", "h100-80gb", "--load-in-4bit", *words]
    assert cli.main(command) == 2
    assert works in capsys.readouterr().err


@pytest.mark.parametrize(
    ("compute", "precision", "planned"),
    [(torch.bfloat16, "bf16", True), (torch.bfloat16, "mixed", False), (torch.float32, "bf16", False)],
)
def test_what_auto_plans_in_four_bits(compute, precision, planned):
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=compute)
    assert Shown(config(), quantization=quantization).is_planned_in_four_bits(precision) is planned


def test_stages_of_packed_layers_send_what_their_norms_have():
    """Adapters in fp32 say nothing of the residual stream; where linears are not packed their weight does."""
    layer = nn.ModuleDict({"linear": nn.Linear(8, 8, bias=False), "norm": nn.LayerNorm(8).bfloat16()})
    layer["linear"].adapter = nn.Linear(8, 2, bias=False)
    assert find_boundary_dtype([layer]) == torch.float32
    layer["linear"].weight = nn.Parameter(torch.zeros(36, dtype=torch.uint8), requires_grad=False)
    layer["norm"].requires_grad_(False)
    assert find_boundary_dtype([layer]) == torch.bfloat16
