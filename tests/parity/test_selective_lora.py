"""Selective checkpointing of a layer with adapters keeps what it keeps without them: a thin product runs again."""

from typing import Any

import pytest
import torch

from hf_parallel.axes.recompute import is_kept
from hf_parallel.planner.activations import count_kept_bytes
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.shape import shape_of
from tests import loops, models
from tests.activations import BATCH, LENGTH, SIZES, kept_by_layers
from tests.distributed import run

pytest.importorskip("peft")
RANK = 8


def kept_by_adapted_layers(spec: str) -> float:
    """Bytes of a layer with adapters."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, target_modules="all-linear")
    return kept_by_layers(spec, "selective", lambda model: get_peft_model(model, config))


@pytest.mark.clock
@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_keep_no_second_output(tp):
    """Nor, of a layer whose outputs ranks sum, the base's beside the sum: that would be 30 % more."""
    shape = shape_of(models.build("llama", **SIZES).to(torch.bfloat16))
    job = Job(LENGTH, BATCH, 1, recompute="selective", lora=RANK, engine="hf_parallel")
    layout = Layout(tp=tp, sequence_parallel=tp > 1)
    planned = BATCH * LENGTH * count_kept_bytes(shape.blocks[0], shape.hidden, layout, job)
    for found in run(kept_by_adapted_layers, tp, f"tp={tp}"):
        # and 8 fp32 numbers of the first half of each of 7 adapters, which tp does not divide
        assert found == pytest.approx(planned, rel=0.06 * tp)


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


def losses(
    way: str, rank: int, spec: str = "dp_shard=1", kind: str = "llama", adds: bool = False, **settings: Any
) -> list[float]:
    """Of a LoRA script's loop; adapters begin away from zero. With `adds` layers add to sums in place."""
    from peft import LoraConfig, get_peft_model

    from hf_parallel import parallelize

    model = models.build(kind).train()
    parallelize(model, f"{spec},activation_checkpointing={way}")
    torch.manual_seed(3)
    settings = {"r": rank, "target_modules": "all-linear", "init_lora_weights": False, **settings}
    model = get_peft_model(model, LoraConfig(**settings))
    for name, module in model.named_modules():
        if adds and name.endswith("o_proj"):
            module.register_forward_hook(lambda module, args, output: output.add_(0.25))
    return loops.losses(model, loops.rows(3, 3, 33))


def test_numbers_stay():
    none, selective = (run(losses, 1, way, 3)[0] for way in ("none", "selective"))
    assert selective == none
    assert none[0] != none[1]


@pytest.mark.parametrize(
    ("spec", "kind", "settings"),
    [
        ("tp=2", "llama", {}),
        ("tp=2,sequence_parallel=false", "llama", {"lora_dropout": 0.0, "use_dora": True}),
        ("tp=2", "llama", {"use_dora": True}),
        ("tp=2", "llama", {"adds": True}),
        ("tp=2", "gpt2", {"bias": "lora_only"}),
    ],
)
def test_numbers_stay_where_ranks_sum(spec, kind, settings):
    """Magnitudes read the base's product, which then stays."""
    none, selective = (run(losses, 2, way, 3, spec, kind, **settings)[0] for way in ("none", "selective"))
    assert selective == pytest.approx(none, rel=1e-6)  # products of halves are summed in another order
    assert none[0] != none[1]
