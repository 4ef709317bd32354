"""ZeRO's stages: the numbers of one process, the bytes of the paper's table 1, and what travels in a step."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests import models
from tests.counting import CountCollectives
from tests.distributed import run
from tests.training import Script, spec_id
from tests.training import layouts as on

MICRO_BATCHES = 4
TOKENS = (11, 33)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2,dp_shard=2", "pp=2,dp_shard=2"], ids=spec_id)
def test_numbers_of_one_process(runs, stage, layout):
    """Four micro-batches per step, gradients clipped to 1/50."""
    script = Script(model="qwen3", arguments=(("max_grad_norm", 0.05),)).with_accumulation(MICRO_BATCHES)
    runs.check(script, f"{layout},zero_stage={stage}")


@pytest.mark.parametrize("spec", on("LoRA", *(f"dp_shard=2,zero_stage={stage}" for stage in range(3))))
def test_adapters(runs, spec):
    adapters = (("r", 4), ("target_modules", "all-linear"))
    runs.check(Script(lora=adapters).with_accumulation(MICRO_BATCHES), spec)


def accumulated(spec, precision):
    """What a step of four micro-batches holds at its fullest and sends; the model's size; the weights afterwards."""
    import hf_parallel
    from hf_parallel.hooks.accelerate.accelerator import defer_reduction

    model = models.build("llama", num_hidden_layers=7, vocab_size=515)
    size = sum(parameter.numel() for parameter in model.parameters())
    hf_parallel.parallelize(model, spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    held, tokens = [], torch.randint(0, 515, TOKENS, generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        with CountCollectives() as counted:
            for i in range(MICRO_BATCHES):
                more = i < MICRO_BATCHES - 1
                with defer_reduction(model) if more else contextlib.nullcontext():
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                        loss = model(input_ids=tokens, labels=tokens).loss
                    if i == MICRO_BATCHES - 2:
                        loss = Watched.apply(loss, lambda: held.append(states(model, optimizer)))
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return held[-1], dict(counted.whole), size, [p.full_tensor() for p in model.parameters()]


class Watched(torch.autograd.Function):
    """Looks around before the backward pass begins."""

    @staticmethod
    def forward(ctx, loss, look):
        ctx.look = look
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.look()
        return gradient, None


def states(model, optimizer):
    """Bytes of parameters, gradients and Adam's states of this rank; of gathered ones each storage once."""
    found = {}
    for unit in (module for module in model.modules() if hasattr(module, "unshard")):
        for held in (p for group in fully_shard.state(unit)._fsdp_param_groups for p in group.fsdp_params):
            whole = [*held.all_gather_outputs, held.unsharded_accumulated_grad]
            if hasattr(held, "_unsharded_param"):
                whole.append(held._unsharded_param.grad)
            note(found, *whole, held.sharded_param, held.sharded_param.grad)
    note(found, *(value for slots in optimizer.state.values() for value in slots.values()))
    return sum(found.values())


def note(found, *tensors):
    for tensor in tensors:
        if tensor is not None and tensor.dim():
            part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            found[part.untyped_storage().data_ptr() or id(part)] = part.untyped_storage().nbytes()
