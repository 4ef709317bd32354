"""Cross-entropy of a split vocabulary: one process's numbers, and no more memory than its gradient."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from hf_parallel.axes.tensor import vocab_parallel as module
from hf_parallel.axes.tensor.vocab_parallel import compute_first_row
from hf_parallel.planner.dryrun.recorder import REST, Recorder
from tests import models
from tests.distributed import run

TOKENS, VOCABULARY = 33, 515


def whole(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, TOKENS // 3, VOCABULARY, generator=generator).mul(4).to(dtype)
    target = torch.randint(0, VOCABULARY, (3, TOKENS // 3), generator=generator)
    return logits, target.masked_fill(torch.rand(target.shape, generator=generator) < 0.2, -100)


def own_columns(logits: torch.Tensor) -> tuple[torch.Tensor, int]:
    first, last = compute_first_row(VOCABULARY, dist.group.WORLD), -(-VOCABULARY // dist.get_world_size())
    return logits[..., first : first + last].contiguous().requires_grad_(), first


def split(dtype: torch.dtype) -> tuple[Any, ...]:
    """Loss, gradient and the largest number of bytes per logit beside the logits."""
    module.CHUNK = 8  # the last one is ragged
    logits, target = whole(dtype)
    part, first = own_columns(logits)
    with Recorder({}) as recorder:
        known = {recorder.note(part): "logits"}
        recorder.remember()
        loss = module.SplitCrossEntropy.apply(part, target, first, dist.group.WORLD, -100)
        (loss / 7).backward()
        recorder.remember()
    return loss.detach(), part.grad, max(peak[REST] for peak in recorder.peaks(known)) / part.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_give_the_loss_of_one_process(dtype):
    logits, target = whole(dtype)
    logits = logits.requires_grad_()
    expected = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="sum")
    (expected / 7).backward()
    parts = run(split, 2, dtype)
    # Rounded once to 16 bits; sums of exponentials in another order.
    near = {"rtol": 1e-2, "atol": 1e-5} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(torch.cat([gradient for _, gradient, _ in parts], dim=-1), logits.grad, **near)
    for loss, _, _ in parts:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)


def test_memory_beside_the_logits():
    """The gradient, in their dtype; fp32 of a chunk of 8 of 33 tokens three times, and what there is per token."""
    for _, _, per_logit in run(split, 2, torch.bfloat16):
        assert per_logit < 2 + 3 * 4 * 8 / TOKENS + 0.5


def outputs_of_accelerate() -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """The dtypes of split logits before and when they are read, and of the loss, under mixed precision."""
    from accelerate import Accelerator

    from hf_parallel.hooks import activation

    activation.activate("tp=2,lean_loss=false", source="test")
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(models.build("llama"))
    ids = torch.arange(22).view(2, 11)
    outputs = model(input_ids=ids, labels=ids)
    held = dict.__getitem__(outputs, "logits")
    return held.dtype, outputs.logits.dtype, outputs.loss.dtype


def test_split_logits_are_cast_when_they_are_read():
    """Accelerate makes fp32 of all outputs: of logits that nobody reads it would be 4 bytes each, for nothing."""
    for found in run(outputs_of_accelerate, 2, init=False):
        assert found == (torch.bfloat16, torch.float32, torch.float32)
