"""Modules that a model keeps in fp32 when it is loaded in 16 bits: T5's `wo`, whose outputs fp16 does not hold."""

import pytest
import torch

from tests.distributed import run, run_alone_once
from tests.training import activate, axes, check_numbers


def steps(spec, folder):
    """Losses of three steps of the loaded model, and its parameters by dtype."""
    activate(spec)
    from accelerate import Accelerator
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float16).train()
    accelerator, optimizer = Accelerator(cpu=True), torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    rows = torch.randint(3, 60, (6, 17), generator=torch.Generator().manual_seed(4))
    if spec and "dp_shard" in spec:
        rows = rows.chunk(2)[model._hf_parallel.mesh.data_rank]
    losses = []
    for _ in range(3):
        loss = model(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
    return losses, {name: parameter.dtype for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "tp=2,dp_shard=2", "dp_replicate=2"])
def test_they_stay_so_on_every_layout(runs, spec):
    folder = runs.initial("t5")
    expected, dtypes = run_alone_once(steps, None, folder)
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {
        f"{stack}.block.{block}.layer.{layer}.DenseReluDense.wo.weight"
        for stack, layer in (("encoder", 1), ("decoder", 2))
        for block in range(2)
    }
    losses, ours = zip(*run(steps, axes(spec)["world"], spec, folder, init=False), strict=True)
    assert all(each == dtypes for each in ours)
    check_numbers(losses, expected, 1e-2)  # fp16 keeps 11 bits, logits here are 10 to 100
