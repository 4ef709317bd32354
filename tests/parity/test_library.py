"""`hf_parallel.parallelize` in a hand-written torch loop: nothing of Trainer, Accelerate or the runner."""

import copy
import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from hf_parallel.apply import weights
from tests import models
from tests.distributed import RankFailure, run, run_alone
from tests.rows import Rows
from tests.training import activate, axes, close, none, over, weight_differences

STEPS, BATCH = 3, 8


def loop(model, shares: int, share: int, out: str, even: bool, length: int = 16) -> list[float]:
    """Three SGD steps on this share of each batch; returns the losses and saves the model."""
    rows = Rows(STEPS * BATCH, seed=11, even=even, length=length)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        chosen = [rows[index] for index in range(step * BATCH, (step + 1) * BATCH)][share::shares]
        batch = {key: torch.stack([row[key] for row in chosen]) for key in chosen[0]}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(out)
    return losses


def alone(name: str, out: str, even: bool) -> list[float]:
    return loop(models.build(name), 1, 0, out, even)


def parallel(name: str, spec: str, out: str, even: bool) -> list[float]:
    import hf_parallel

    model = models.build(name)
    config = hf_parallel.ParallelConfig.parse(spec)
    assert hf_parallel.parallelize(model, config) is model
    data_ranks = axes(spec)["data_ranks"]
    return loop(model, data_ranks, dist.get_rank() if data_ranks > 1 else 0, out, even)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@over("library", "tp=2", "pp=2", "tp=2,pp=2", "dp_shard=2")
def test_same_numbers_as_one_process(name, spec, tmp_path):
    data_ranks = axes(spec)["data_ranks"]
    even = data_ranks > 1  # a loop written by hand averages means: equal only where every rank has as many labels
    expected = run_alone(alone, name, str(tmp_path / "alone"), even)
    ranks = run(parallel, axes(spec)["world"], name, spec, str(tmp_path / "parallel"), even)
    found = []
    for step, theirs in enumerate(expected):
        losses = [rank[step] for rank in ranks]
        if data_ranks > 1:
            losses = [sum(losses) / len(losses)]
        for ours in losses:
            found += close(f"loss in step {step + 1}", ours, theirs, 1e-5)  # relative; sums in another order
    # absolute; the steps move every tensor by 1e-3 or more
    none(found + weight_differences(str(tmp_path / "parallel"), str(tmp_path / "alone"), 1e-6))


#: Column, row and head; neither 515 rows nor three layers divide among ranks.
TARGETS = ["q_proj", "o_proj", "down_proj", "lm_head"]
ODD = {"num_hidden_layers": 3, "vocab_size": 515}


def adapters(spec: str, order: str, out: str) -> list[float]:
    """Adapters that start apart on all ranks, put in before or after the model becomes parallel; then read again."""
    from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training

    import hf_parallel

    rank = dist.get_rank() if spec else 0
    model, data_ranks = models.build("llama", **ODD), axes(spec)["data_ranks"]
    make = partial(hf_parallel.parallelize, config=spec) if spec else (lambda model: model)
    model = make(model.bfloat16()) if order == "kbit" else make(model) if order == "after" else model
    model = prepare_model_for_kbit_training(model) if order == "kbit" else model
    torch.manual_seed(models.SEED + rank)
    model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, target_modules=TARGETS))
    model = make(model) if order == "before" else model
    losses = loop(model, data_ranks, rank if data_ranks > 1 else 0, out, True, 33)

    base = models.build("llama", **ODD)
    again = PeftModel.from_pretrained(make(base.bfloat16().float() if order == "kbit" else base), out)
    batch = Rows(4, seed=12, even=True, length=33)[:4]
    with torch.no_grad():
        return [*losses, again(**batch).loss.item(), model(**batch).loss.item()]


def alone_with_adapters(order: str, out: str) -> list[float]:
    return adapters("", order, out)


@pytest.mark.parametrize("order", ["after", "before", "kbit"])
@pytest.mark.parametrize("spec", ["tp=2", "pp=2", "dp_shard=2"])
def test_adapters_as_in_one_process(spec, order, tmp_path):
    pytest.importorskip("peft")
    expected = run_alone(alone_with_adapters, order, str(tmp_path / "alone"))
    ranks = run(adapters, 2, spec, order, str(tmp_path / "parallel"))
    found = []
    for step, theirs in enumerate(expected):
        losses = [rank[step] for rank in ranks]
        if axes(spec)["data_ranks"] > 1 and step < STEPS:
            losses = [sum(losses) / len(losses)]
        for ours in losses:
            found += close(f"loss {step + 1}", ours, theirs, 1e-5)  # relative; sums in another order
    none(found + weight_differences(str(tmp_path / "parallel"), str(tmp_path / "alone"), 1e-6))


def test_a_spec_string_will_do_and_twice_is_refused():
    def twice():
        import hf_parallel

        model = hf_parallel.parallelize(models.build("llama"), "dp_shard=2")
        with pytest.raises(hf_parallel.SpecError, match="once"):
            hf_parallel.parallelize(model, "dp_shard=2")
        packed = models.build("llama")
        packed.is_quantized = True  # as bitsandbytes' loading leaves it
        with pytest.raises(hf_parallel.SpecError, match="quantised already"):
            hf_parallel.parallelize(packed, "dp_shard=2")

    run(twice, 2)


def test_pack_tokens_is_refused_before_the_model_changes():
    from hf_parallel import SpecError, parallelize

    model = models.build("llama")
    before = set(map(id, model.parameters()))
    with pytest.raises(SpecError, match="pack_tokens=64"):
        parallelize(model, "dp_shard=2,pack_tokens=64")
    assert set(map(id, model.parameters())) == before


def train_made_by_class(spec: str, kind: str) -> list[float]:
    """Train a model that no layout has seen, or one that is parallel, beside helpers that nothing must refuse."""
    import hf_parallel

    weights._models.clear()  # what other tests have left in the process that was forked
    for left in (item for item in gc.get_objects() if issubclass(type(item), PreTrainedModel)):
        left.zero_grad()
    activate(spec)
    model, reference = models.build("llama", **ODD), models.build("llama", **ODD).requires_grad_(False)
    reference = hf_parallel.parallelize(reference, spec) if kind == "beside" else reference
    helper = torch.nn.Linear(3, 3)
    batch = {"input_ids": torch.arange(66).view(2, 33), "labels": torch.arange(66).view(2, 33)}
    model = hf_parallel.parallelize(model, spec) if kind == "parallel" else copy.deepcopy(model)
    beside = [] if "dp" in (spec or "") else helper.parameters()  # on data ranks it would train apart, and is refused
    optimizer, losses = torch.optim.SGD([*model.parameters(), *beside], lr=0.1), []
    for _ in range(2):
        with torch.no_grad():
            reference(**batch)
        loss = model(**batch).loss
        total = loss + helper(torch.ones(3)).mean()
        if kind == "gradients":
            torch.autograd.grad(total, list(model.parameters()))
        total.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("spec", ["tp=2", "pp=2", "dp_shard=2"])
def test_a_model_made_by_its_class_is_not_trained_apart(spec):
    """The refusal's own line trains it, with the numbers of one process where all ranks have one batch."""
    refused = f'trains a LlamaForCausalLM that is not parallel.*2 processes.*parallelize.model, ".*{spec}'
    for kind, who in {"plain": "a loop", "gradients": "a loop", "beside": "SGD"}.items():
        with pytest.raises(RankFailure, match=f"{who} {refused}"):
            run(train_made_by_class, 2, spec, kind, init=False)
    expected = run_alone(train_made_by_class, None, "plain")
    for losses in run(train_made_by_class, 2, spec, "parallel", init=False):
        pairs = zip(losses, expected, strict=True)
        none([text for ours, theirs in pairs for text in close("loss", ours, theirs, 1e-5)])
