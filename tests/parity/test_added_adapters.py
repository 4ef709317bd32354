"""Adapters that Transformers' own `add_adapter` puts in, on a model by itself and inside a module around it."""

import pytest
import torch
import transformers.integrations.peft as integration
from peft import (
    IA3Config,
    LoHaConfig,
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
)
from transformers import AutoModelForCausalLM

from tests.adapters import ATTENTION, MLP, SPECS
from tests.distributed import run, run_alone
from tests.rows import data
from tests.training import Outcome, activate, check_numbers, fit, trainer_of

#: Transformers 5.24 asks for a PEFT that is not out yet; its code works with this one.
integration.MIN_PEFT_VERSION = "0.20.0"
CONFIG = {"r": 3, "lora_alpha": 8, "init_lora_weights": False}


def train(spec: str | None, out: str, folder: str, kind: str | None = None) -> Outcome:
    """A Trainer script after `model.add_adapter`; what is saved are the adapters."""
    data_ranks = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(7)
    model.add_adapter(WHOLE.get(kind) or LoraConfig(target_modules=[*ATTENTION, *MLP], **CONFIG))
    sets = {"train_dataset": data("odd", 19, 11), "eval_dataset": data("odd", 5, 12)}
    outcome = fit(*trainer_of(model, out, data_ranks, **sets), f"{out}/saved")
    model.disable_adapters()
    outcome.more = logits(model)
    return outcome


def logits(model: torch.nn.Module) -> list[float]:
    with torch.no_grad():
        return (
            model(input_ids=torch.arange(18).view(2, 9).to(model.device))
            .logits.double()
            .norm(dim=-1)
            .flatten()
            .tolist()
        )


@pytest.mark.support("LoRA")
@pytest.mark.parametrize("spec", [*SPECS, "cp=2"])
def test_as_in_one_process(runs, spec):
    ranks, reference = runs.compare(train, spec, runs.initial("odd")), runs.alone(train, runs.initial("odd"))
    check_numbers([rank.more for rank in ranks], reference.more)


def injected(spec: str | None, out: str, folder: str) -> Outcome:
    """The same by PEFT's own function, and without a file: the norms of the adapters it gives."""
    data_ranks = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(7)
    model = inject_adapter_in_model(LoraConfig(target_modules=[*ATTENTION, *MLP], **CONFIG), model)
    sets = {"train_dataset": data("odd", 19, 11), "eval_dataset": data("odd", 5, 12)}
    outcome = fit(*trainer_of(model, out, data_ranks, **sets))
    saved = get_peft_model_state_dict(model)
    outcome.more = logits(model) + [saved[key].double().norm().item() for key in sorted(saved)]
    return outcome


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "pp=2", "cp=2"])
def test_injected_as_in_one_process(runs, spec):
    initial = runs.initial("odd")
    ranks = runs.compare(injected, spec, initial)
    check_numbers([rank.more for rank in ranks], runs.alone(injected, initial).more)


#: Of these, data ranks keep the adapters whole.
WHOLE = {
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": LoHaConfig(target_modules=ATTENTION, r=3, init_weights=False),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_adapters_that_are_kept_whole(runs, kind):
    initial = runs.initial("odd")
    ranks = runs.compare(train, "dp_shard=2", initial, kind)
    check_numbers([rank.more for rank in ranks], runs.alone(train, initial, kind).more)
    adapters = runs.alone(train, initial, kind).folder
    check_numbers(run(load, 2, "dp_shard=2", initial, adapters, init=False), run_alone(load, None, initial, adapters))


def load(spec: str | None, folder: str, adapters: str) -> list[float]:
    """From the folder of adapters alone, and into a model that is there."""
    activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.load_adapter(adapters)
    found = logits(model)
    model.set_adapter("default")
    return found + logits(AutoModelForCausalLM.from_pretrained(adapters))


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2"])
def test_loaded_as_in_one_process(runs, spec):
    initial = runs.initial("odd")
    adapters = runs.alone(train, initial).folder
    check_numbers(run(load, 2, spec, initial, adapters, init=False), run_alone(load, None, initial, adapters))


def train_base(spec: str | None, out: str, folder: str) -> Outcome:
    """A Trainer with the base model into which `get_peft_model` has put adapters: whole folders, and the best."""
    data_ranks = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    get_peft_model(model, LoraConfig(target_modules=[*ATTENTION, *MLP], **CONFIG))
    best = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    best |= {"load_best_model_at_end": True, "greater_is_better": True}  # the worst, which is not the last
    sets = {"train_dataset": data("odd", 19, 11), "eval_dataset": data("odd", 5, 12)}
    return fit(*trainer_of(model, out, data_ranks, best, **sets), f"{out}/saved")


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "pp=2", "tp=2,dp_shard=2"])
def test_a_base_model_with_adapters_reads_its_best_folder(runs, spec):
    """Its folders hold the whole model, not adapters alone: reading one ended the run."""
    runs.compare(train_base, spec, runs.initial("odd"))
