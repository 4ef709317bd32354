"""Linears in 8 bits on every layout, against torchao's own conversion of the plain model in one process.

The reference multiplies the rows that one rank multiplies at once: a data rank's, or a micro-batch's, one after the
other, as scales are made of them.
"""

import contextlib
import dataclasses
import re

import pytest
import torch
from torch import nn

from tests import models
from tests.counting import CountCollectives
from tests.distributed import run, run_alone
from tests.training import axes, spec_id

pytest.importorskip("torchao")

ROWS, LENGTH, STEPS = 6, 33, 3
SHAPE = {"vocab_size": 515, "num_hidden_layers": 3, "intermediate_size": 96}
RECIPES = [
    ("fp8", "tensorwise"),
    ("fp8", "rowwise"),
    ("fp8", "rowwise_with_gw_hp"),
    ("int8", "rowwise"),
    ("int8", "rowwise_with_gw_hp"),
]


def keys_of(recipe):
    return "precision={},precision_scaling={}".format(*recipe)


def in_blocks(module, name):
    return isinstance(module, nn.Linear) and "layers." in name and "lora_" not in name


def convert(model, precision, scaling):
    """What a torchao script does."""
    if precision == "int8":
        from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
        from torchao.quantization import quantize_

        full = scaling == "rowwise_with_gw_hp"
        quantize_(model, Int8MixedPrecisionTrainingConfig(grad_weight=not full, module_swap=True), in_blocks)
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(scaling), emulate=True)
    convert_to_float8_training(model, module_filter_fn=in_blocks, config=config)


def asked(spec):
    """Precision and scaling of a spec."""
    precision = re.search(r"precision=(\w+)", spec)[1]
    scaling = re.search(r"precision_scaling=(\w+)", spec)
    return precision, scaling[1] if scaling else "tensorwise" if precision == "fp8" else "rowwise"


# ---- regions: every operand is rounded as in one process -----------------------------------------------------------


def region_inputs(model):
    """What enters, the gradient of what leaves, and the rotations, of an odd number of tokens."""
    generator = torch.Generator().manual_seed(3)
    x, gradient = (torch.randn(3, 36, 64, generator=generator) for _ in range(2))
    x[:, 33:], gradient[:, 33:] = 0.0, 0.0  # tokens that only fill a row
    places = torch.arange(36).unsqueeze(0)
    return x, gradient, model.model.rotary_emb(x, places)


def through(model, part, cut=lambda tensor: tensor):
    """Output of the attention or MLP of a layer, gradients of its input and weights."""
    x, gradient, rotations = region_inputs(model)
    x = cut(x).detach().clone().requires_grad_()
    region = model.model.layers[0].get_submodule(part)
    more = {"position_embeddings": rotations, "attention_mask": None} if part == "self_attn" else {}
    model.zero_grad()
    output = region(x, **more)
    output = output[0] if isinstance(output, tuple) else output
    output.backward(cut(gradient))
    gradients = {name: parameter.grad for name, parameter in region.named_parameters()}
    return {"output": output.detach(), "input": x.grad, **gradients}


def regions_alone():
    found = {}
    for recipe in RECIPES:
        model = models.build("llama", **SHAPE)
        convert(model, *recipe)
        found[recipe] = {part: through(model, part) for part in ("self_attn", "mlp")}
    return found


def regions(settings):
    """The same on one rank of tp, with what it has put together to the whole."""
    import hf_parallel
    from hf_parallel.checkpoint.slices import local_part  # noqa: F401
    from hf_parallel.collectives import parts_of_sequence

    found = {}
    for recipe in RECIPES:
        model = hf_parallel.parallelize(models.build("llama", **SHAPE), f"tp=-1,{keys_of(recipe)}{settings}")
        mesh = model._hf_parallel.mesh
        group = mesh["tp"].get_group()
        cut = (lambda tensor: parts_of_sequence(tensor, group)[group.rank()]) if not settings else lambda x: x  # noqa: B023

        def whole(name, tensor):
            if hasattr(tensor, "full_tensor"):
                return tensor.full_tensor()
            if settings or name not in ("output", "input"):
                return tensor
            parts = [torch.empty_like(tensor) for _ in range(group.size())]  # noqa: B023
            torch.distributed.all_gather(parts, tensor.contiguous(), group=group)  # noqa: B023
            return torch.cat([part.flatten(0, -2) for part in parts]).view(3, 36, 64)

        found[recipe] = {
            part: {name: whole(name, tensor) for name, tensor in through(model, part, cut).items()}
            for part in ("self_attn", "mlp")
        }
    return found


@pytest.mark.parametrize("settings", ["", ",sequence_parallel=false"], ids=["sp", "whole"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_regions_round_as_torchao_does(ranks, settings):
    """The same codes, whoever holds a part of what a scale is made of; sums of fp32 in another order.

    Four ranks share two key heads.
    """
    expected = run_alone(regions_alone)
    for found in run(regions, ranks, settings):
        for recipe, part, name in ((r, p, n) for r in RECIPES for p in found[r] for n in found[r][p]):
            ours, theirs = found[recipe][part][name], expected[recipe][part][name]
            gap = (ours - theirs).abs().max() / theirs.abs().max()
            assert gap < 2e-6, (recipe, part, name, gap)
