"""QLoRA: adapters on a base in 4 bits, whose packed weights are split and sharded, not repeated on every rank."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import models
from tests.distributed import RankFailure, run, run_alone
from tests.refusals import pattern_of_refusal
from tests.rows import data
from tests.training import Tolerance, activate, axes, fit, trainer_of

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
WEIGHTS = 4 * 128 * (128 + 64 + 64 + 128 + 3 * 256)  # of the linears of four layers


def quantised(folder, **settings):
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **settings)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)


def train(spec, out, folder, kind, targets="all-linear"):
    """Three steps and an evaluation; also the bytes of this rank's packed weights."""
    data_ranks = activate(spec)
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training  # a script imports it later, too

    base = quantised(folder, **SETTINGS[kind])
    stored = sum(local(p).nbytes for p in base.parameters() if not p.is_floating_point())
    base = prepare_model_for_kbit_training(base)  # norms, embedding and head in fp32
    torch.manual_seed(models.SEED)
    model = get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, target_modules=targets)
    )
    sets = {"train_dataset": data("llama", 22, 11), "eval_dataset": data("llama", 13, 12)}
    outcome = fit(*trainer_of(model, out, data_ranks, {"gradient_checkpointing": True}, **sets), f"{out}/saved")
    outcome.more = stored
    return outcome


def local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


@pytest.fixture
def folder(runs):
    return runs.initial("llama", **SIZES)


SETTINGS = {
    "single": {},
    "double": {"bnb_4bit_use_double_quant": True},  # the largest values are rounded too
}
#: The codes are those of one process, and so are the products but for their order of sums. In an evaluation
#: bitsandbytes takes a kernel of its own on CPUs, which rounds to bf16.
SAME_CODES = Tolerance(eval_loss=1e-3, weights=2e-6)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        pytest.param(spec, kind, marks=pytest.mark.support("QLoRA"))
        for spec, kind in (("dp_shard=2", "single"), ("tp=2", "double"), ("tp=2,pp=2", "single"))
    ]
    + [
        ("cp=2", "single"),
        pytest.param("dp_shard=2,activation_checkpointing=selective", "single", id="dp2-selective"),
    ],
)
def test_same_numbers_as_one_process(runs, folder, spec, kind):
    ranks = runs.compare(train, spec, folder, kind, tolerance=SAME_CODES)
    # Half a byte per weight and four for each block of 64: stored once, in equal parts.
    assert {rank.more for rank in ranks} == {(WEIGHTS // 2 + WEIGHTS // 16) // axes(spec)["world"]}


def logits(spec, folder, **settings):
    """Of a base whose activations are fp32; its products are in `bnb_4bit_compute_dtype`."""
    activate(spec)
    from peft import prepare_model_for_kbit_training

    base = prepare_model_for_kbit_training(quantised(folder, **settings), use_gradient_checkpointing=False)
    return base.train()(input_ids=torch.arange(128).reshape(8, 16)).logits.detach()


def test_products_in_the_dtype_asked_for(folder):
    """Nothing is cut along a row of activations, so not a bit is another."""
    half = {"bnb_4bit_compute_dtype": torch.bfloat16}
    one, whole = run_alone(logits, None, folder, **half), run_alone(logits, None, folder)
    assert not torch.equal(one, whole)
    for found in run(partial(logits, "dp_shard=2", folder, **half), 2, init=False):
        assert torch.equal(found, one)


def test_rows_of_half_blocks_are_refused(runs, tmp_path):
    """`down_proj` has rows of 128 weights: over four ranks 32 each, half a block."""
    with pytest.raises(RankFailure, match=pattern_of_refusal("load_in_4bit", 64, works=" works")):
        run(partial(train, "tp=2", str(tmp_path), runs.initial("llama"), "single"), 2, init=False)
    narrow = runs.initial("llama", hidden_size=32)
    with pytest.raises(RankFailure, match=pattern_of_refusal("load_in_4bit", 32, works=" works")) as caught:
        run(partial(train, "dp_shard=2", str(tmp_path), narrow, "single"), 2, init=False)
    assert "tp_size" not in caught.value.message  # whole rows are no blocks already


def test_linears_looked_for_by_their_class_are_refused(folder, tmp_path):
    """As qlora.py does: `isinstance(module, bnb.nn.Linear4bit)`. "all-linear" works: the first test here."""
    refusal = pattern_of_refusal("LoraConfig(target_modules=[])", "Linear4bit", works='"all-linear"')
    with pytest.raises(RankFailure, match=refusal):
        run(partial(train, "dp_shard=2", str(tmp_path), folder, "single", targets=[]), 2, init=False)
