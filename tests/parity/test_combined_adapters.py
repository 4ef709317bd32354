"""Adapters that are computed from others (`add_weighted_adapter`), swapped or trained in PEFT's ways, and deleted."""

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_riemannian_optimizer
from peft.utils import hotswap
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_parallel.ask.config import SpecError
from tests import models
from tests.distributed import RankFailure, run, run_alone
from tests.rows import data
from tests.training import Outcome, activate, axes, check_numbers, fit, trainer_of

#: Weights of all cuts: columns, rows, and the embedding.
TARGETS = ["q_proj", "o_proj", "down_proj", "embed_tokens"]
#: Kinds of combinations, and what they are given; odd ranks.
KINDS = {
    "linear": {},
    "cat": {},
    "svd": {"svd_rank": 3},
    "ties": {"density": 0.5},
    "dare_linear": {"density": 0.5},
    "magnitude_prune_svd": {"density": 0.5, "svd_rank": 3, "svd_clamp": 0.9},
}
SPECS = ["dp_shard=2", "tp=2", "pp=2", "dp_shard=2,tp=2", "dp_shard=2,pp=2"]
PAIRS = [(kind, spec) for kind in KINDS for spec in SPECS[:4] if "dare" not in kind or "pp" not in spec]


def start(spec, folder, targets=TARGETS):
    """A base with two adapters, of which the first one is active."""
    data_ranks = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(models.SEED)
    config = {"r": 3, "lora_alpha": 8, "target_modules": targets, "init_lora_weights": False}
    model = get_peft_model(model, LoraConfig(**config))
    model.add_adapter("second", LoraConfig(**config))
    return model, data_ranks


def train(model, out, data_ranks, folder=None) -> Outcome:
    return fit(*trainer_of(model, out, data_ranks, train_dataset=data("odd", 14, 11)), folder)


def combine(spec, out, folder, kind) -> Outcome:
    model, data_ranks = start(spec, folder)
    losses = []
    # What training rounds turns the factors of singular values that lie close together.
    for adapter in () if "svd" in kind else ("default", "second"):
        model.set_adapter(adapter)
        losses += [log["loss"] for log in train(model, out, data_ranks).logs]
    model.add_weighted_adapter(["default", "second"], [0.7, -0.4], "mixed", combination_type=kind, **KINDS[kind])
    model.set_adapter("mixed")
    outcome = train(model, out, data_ranks)
    model.save_pretrained(f"{out}/saved", selected_adapters=["mixed"])
    outcome.folder, outcome.more = f"{out}/saved/mixed", losses
    return outcome


@pytest.mark.parametrize(("kind", "spec"), PAIRS)
def test_combined_as_in_one_process(runs, kind, spec):
    folder = runs.initial("odd")
    ranks, reference = runs.compare(combine, spec, folder, kind), runs.alone(combine, folder, kind)
    check_numbers([rank.more for rank in ranks], reference.more)


def delete(spec, out, folder) -> Outcome:
    """Delete the adapter that was trained last, and train the other one."""
    model, data_ranks = start(spec, folder)
    model.set_adapter("second")
    train(model, out, data_ranks)
    model.delete_adapter("second")
    model.set_adapter("default")
    return train(model, out, data_ranks, f"{out}/saved")


@pytest.mark.parametrize("spec", SPECS)
def test_deleted_as_in_one_process(runs, spec):
    for rank in runs.compare(delete, spec, runs.initial("odd")):
        assert not any("second" in key for key in rank.gradient_keys[-1])


def choose_by_row(spec, folder):
    """The logits of five rows, each with an adapter of its own or none, and what they go on with."""
    model = start(spec, folder)[0].eval()
    names = ["second", "default", "__base__", "second", "default"]
    tokens = torch.arange(55).view(5, 11)
    with torch.no_grad():
        logits = model(input_ids=tokens, adapter_names=names).logits.double()
    drawn = model.generate(input_ids=tokens, adapter_names=names, max_new_tokens=3, do_sample=False)
    return logits.square().mean((1, 2)).tolist(), drawn.tolist()


@pytest.mark.parametrize("spec", ["pp=2", "tp=2", "dp_shard=2"])
def test_each_row_has_its_adapter(runs, spec):
    folder = runs.initial("odd")
    (squares, drawn), ranks = run_alone(choose_by_row, None, folder), run(choose_by_row, 2, spec, folder, init=False)
    check_numbers([rank[0] for rank in ranks], squares)
    assert all(rank[1] == drawn for rank in ranks)


def tell_status(spec, folder):
    model = start(spec, folder)[0]
    model.set_adapter("second")
    found = [model.get_model_status(), model.get_layer_status()]
    model.merge_adapter()
    return [*found, peft.get_layer_status(model), peft.get_model_status(model)]


def test_a_stage_tells_of_the_layers_of_all(runs):
    folder = runs.initial("odd", tie_word_embeddings=False)  # a tied embedding is not merged under pp
    reference = run_alone(tell_status, None, folder)
    assert run(tell_status, 2, "pp=2", folder, init=False) == [reference] * 2


def draw(spec, folder):
    start(spec, folder)[0].add_weighted_adapter(["default"], [1.0], "new", combination_type="dare_ties", density=0.5)


def convert(spec, folder, out=None):
    """Write the first adapter in another rank, and compare what both compute."""
    model, _ = start(spec, folder, TARGETS[:3])
    config, tensors = peft.convert_to_lora(model, rank=2)
    peft.save_as_lora(out, model, rank=2)
    other = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    peft.set_peft_model_state_dict(other, tensors)
    saved = load_file(f"{out}/adapter_model.safetensors")
    assert all(torch.equal(saved[key], value) for key, value in tensors.items())
    products = [
        (tensors[key.replace("lora_A", "lora_B")] @ tensors[key]).double() for key in tensors if "lora_A" in key
    ]
    tokens = torch.arange(33).view(3, 11)
    with torch.no_grad():
        logits = other.eval()(input_ids=tokens).logits.double()
    return [float(value.square().mean()) for value in (logits, *products)]


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2"])
def test_converted_as_in_one_process(runs, tmp_path, spec):
    folder = runs.initial("odd")
    expected = run_alone(convert, None, folder, str(tmp_path / "alone"))
    check_numbers(run(convert, 2, spec, folder, str(tmp_path / "ranks"), init=False), expected)


@pytest.mark.parametrize(
    ("call", "said"), [(draw, "dare_ties.*pp_size=2.*linear works"), (convert, "pp_size=1 works")]
)
def test_what_a_stage_alone_would_do_is_refused(runs, call, said):
    with pytest.raises(RankFailure, match=said):
        run(call, axes("pp=2")["world"], "pp=2", runs.initial("odd"), init=False)


def swap(spec, out, folder, adapter) -> Outcome:
    """Train an adapter that has taken the place of one of a larger rank and more layers; the file has fewer."""
    data_ranks = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(models.SEED)
    config = {"r": 5, "lora_alpha": 8, "target_modules": [*TARGETS[:3], "k_proj"], "init_lora_weights": False}
    model = get_peft_model(model, LoraConfig(**config))
    hotswap.hotswap_adapter(model, adapter, adapter_name="default")
    return train(model, out, data_ranks, f"{out}/saved")


@pytest.mark.parametrize("spec", ["pp=2", "dp_shard=2,tp=2"])
def test_swapped_as_in_one_process(runs, tmp_path, spec):
    folder, adapter = runs.initial("odd"), str(tmp_path)
    run_alone(lambda: start(None, folder, TARGETS[:3])[0].save_pretrained(adapter, selected_adapters=["default"]))
    reference = runs.alone(swap, folder, adapter)
    assert len(reference.gradient_keys[0]) == 32
    runs.compare(swap, spec, folder, adapter)


def widen(spec, folder):
    model = start(spec, folder, TARGETS[:3])[0]
    with pytest.raises(SpecError) as caught:
        hotswap.prepare_model_for_compiled_hotswap(model, target_rank=8)
    return str(caught.value)


def test_wider_adapters_are_refused(runs):
    for said in run(widen, 2, "tp=2", runs.initial("odd"), init=False):
        assert "target_rank=8" in said
        assert "LoraConfig(r=8) for the first adapter works" in said


def merge_tied(spec, folder, targets):
    model = start(spec, folder, targets)[0]
    for call in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(NotImplementedError, match=r"tied.*pp_size=2.*pp_size=1 works"):
            call()
    return model(input_ids=torch.arange(11)[None]).logits.double().square().mean().item()


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_merging_into_one_of_two_tied_copies_is_refused(runs, target):
    """One process adds what an end has learned to the weight that both ends share."""
    assert all(value > 0 for value in run(merge_tied, 2, "pp=2", runs.initial("odd"), [target, "q_proj"], init=False))


def precondition(spec, out, folder) -> Outcome:
    """Train by PEFT's optimizer whose step multiplies the gradients of A and B by products of B and A."""
    model, data_ranks = start(spec, folder, TARGETS[:3])
    optimizer = create_riemannian_optimizer(model, torch.optim.SGD, lr=0.1, reg=1.0)
    options = {"optimizers": (optimizer, None), "train_dataset": data("odd", 30, 11)}
    return fit(*trainer_of(model, out, data_ranks, **options), f"{out}/saved")


@pytest.mark.parametrize("spec", ["dp_shard=2,tp=2", "pp=2"])
def test_preconditioned_as_in_one_process(runs, spec):
    runs.compare(precondition, spec, runs.initial("odd"))
