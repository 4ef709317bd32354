"""Selective checkpointing of a layer with adapters keeps what it keeps without them: a thin product runs again."""

import pytest
import torch

from hf_parallel.axes.selective import is_kept
from hf_parallel.planner.activations import kept_bytes
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.shape import shape_of
from tests import loops, models
from tests.activations import BATCH, LENGTH, SIZES, Alive
from tests.distributed import run

pytest.importorskip("peft")
RANK = 8


def kept_by_layer(way: str) -> float:
    """Bytes of a bf16 layer with adapters, on average over all layers, at the end of the forward."""
    from peft import LoraConfig, get_peft_model

    from hf_parallel import parallelize

    model = models.build("llama", **SIZES).to(torch.bfloat16).train()
    parallelize(model, f"dp_shard=1,activation_checkpointing={way}")
    model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear"))
    layers, held, recorder = model.model.model.layers, [], Alive()
    layers[0].register_forward_pre_hook(lambda *_: held.append(recorder.bytes))
    layers[-1].register_forward_hook(lambda *_: held.append(recorder.bytes))
    with recorder:
        model(input_ids=torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % models.VOCABULARY)
    return (held[1] - held[0]) / len(layers)


@pytest.mark.clock
def test_adapters_keep_no_second_output():
    shape = shape_of(models.build("llama", **SIZES).to(torch.bfloat16))
    job = Job(LENGTH, BATCH, 1, recompute="selective", lora=RANK, engine="hf_parallel")
    planned = BATCH * LENGTH * kept_bytes(shape.blocks[0], shape, Layout(), job)
    (found,) = run(kept_by_layer, 1, "selective")
    assert found == pytest.approx(planned, rel=0.06)  # and 8 fp32 numbers of the first half of each of 7 adapters


@pytest.mark.parametrize(
    ("inner", "outer", "kept"), [(8, 64, False), (8, 63, True), (256, 4096, False), (257, 4096, True), (48, 136, True)]
)
def test_what_is_thin(inner, outer, kept):
    """An adapter's second half; not a model's own products, however small."""
    rows, weight = torch.zeros(5, inner), torch.zeros(inner, outer)
    assert is_kept(torch.ops.aten.mm.default, (rows, weight), {}) is kept
    assert is_kept(torch.ops.aten.addmm.default, (torch.zeros(outer), rows, weight), {}) is kept


def test_products_of_packed_weights_are_kept():
    """Else selective checkpointing of QLoRA computes nearly all again."""
    pytest.importorskip("bitsandbytes")
    assert is_kept(torch.ops.bitsandbytes.gemm_4bit.default, (), {})


def losses(way: str, rank: int) -> list[float]:
    """Of a LoRA script's loop on one process; adapters begin away from zero."""
    from peft import LoraConfig, get_peft_model

    from hf_parallel import parallelize

    model = models.build("llama").train()
    parallelize(model, f"dp_shard=1,activation_checkpointing={way}")
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False))
    return loops.losses(model, loops.rows(3, 3, 33))


def test_numbers_stay():
    none, selective = (run(losses, 1, way, 3)[0] for way in ("none", "selective"))
    assert selective == none
    assert none[0] != none[1]
