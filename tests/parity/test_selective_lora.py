"""Selective checkpointing of a layer with adapters keeps what it keeps without them: a thin product runs again."""

import pytest
import torch
from transformers import LlamaConfig

from hf_parallel.axes.selective import is_kept
from hf_parallel.dryrun import dry_run
from hf_parallel.planner.activations import kept_bytes
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.shape import shape_of
from tests import models
from tests.activations import SIZES
from tests.distributed import run_alone

pytest.importorskip("peft")
ROWS, LENGTH, RANK = 32, 256, 8


def kept_per_token(tp: int, way: str, adapters: bool) -> float:
    """Bytes per token that one more layer of a bf16 model keeps on a rank, from two dry runs."""
    from hf_parallel.hooks.peft.planned_adapters import lora

    config = LlamaConfig(**{**SIZES, "vocab_size": models.VOCABULARY, "num_hidden_layers": 3})
    spec = f"tp={tp},dp_shard=1,activation_checkpointing={way}"
    given = {"rows": ROWS, "seq": LENGTH, "adapt": lora(RANK) if adapters else None}
    two, three = (dry_run(config, spec, layers=layers, **given).peak["activations"] for layers in (2, 3))
    return (three - two) / (ROWS * LENGTH)


@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_keep_no_second_output(tp):
    config = LlamaConfig(**{**SIZES, "vocab_size": models.VOCABULARY, "num_hidden_layers": 3})
    shape = shape_of(config)
    job = Job(LENGTH, ROWS, 1, recompute="selective", lora=RANK, engine="hf_parallel")
    planned = kept_bytes(shape.blocks[0], shape, Layout(tp=tp, sequence_parallel=tp > 1), job)
    found = run_alone(kept_per_token, tp, "selective", True)
    assert found == pytest.approx(planned, rel=0.06)  # and `RANK` fp32 numbers of each adapter's first half


@pytest.mark.parametrize(
    ("inner", "outer", "kept"), [(8, 64, False), (8, 63, True), (256, 4096, False), (257, 4096, True), (48, 136, True)]
)
def test_what_is_thin(inner, outer, kept):
    """An adapter's second half; not a model's own products, however small."""
    rows, weight = torch.zeros(5, inner), torch.zeros(inner, outer)
    assert is_kept(torch.ops.aten.mm.default, (rows, weight), {}) is kept
    assert is_kept(torch.ops.aten.addmm.default, (torch.zeros(outer), rows, weight), {}) is kept


def losses(way: str, rank: int) -> list[float]:
    """Of a LoRA script's loop on one process; adapters begin away from zero."""
    from peft import LoraConfig, get_peft_model

    from hf_parallel import parallelize

    model = models.build("llama").train()
    parallelize(model, f"dp_shard=1,activation_checkpointing={way}")
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for seed in range(3):
        tokens = torch.randint(0, models.VOCABULARY, (3, 33), generator=torch.Generator().manual_seed(seed))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_numbers_stay():
    none, selective = (run_alone(losses, way, 3) for way in ("none", "selective"))
    assert selective == none
    assert none[0] != none[1]
