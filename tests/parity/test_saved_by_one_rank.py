"""Rank 0 saves by itself what all ranks took out of the model, as scripts of the Alpaca kind do at their end."""

import os

import pytest
import torch
from safetensors.torch import save_file

from hf_parallel.ask.session import of_process
from hf_parallel.ranks import desync
from tests import models
from tests.distributed import RankFailure, run
from tests.reliability.test_desync import quick
from tests.rows import data
from tests.training import Tolerance, activate, fit, over, trainer_of

get_peft_model_state_dict = pytest.importorskip("peft").get_peft_model_state_dict

LORA = {"target_modules": ["q_proj", "down_proj"], "r": 3, "task_type": "CAUSAL_LM"}


def state_to_cpu(trainer, folder):
    state = trainer.model.state_dict()
    if trainer.args.should_save:
        trainer._save(folder, state_dict={name: tensor.cpu() for name, tensor in state.items()})


def state_in_half(trainer, folder):
    state = {name: tensor.to(torch.bfloat16) for name, tensor in trainer.model.state_dict().items()}
    if trainer.args.should_save:
        trainer.model.save_pretrained(folder, state_dict=state)
    trainer.evaluate()  # the other ranks wait here meanwhile


def adapters_by_name(trainer, folder):
    named = trainer.model.named_parameters()
    adapters = {name: p.detach().cpu().clone() for name, p in named if "lora_" in name}
    if trainer.args.local_process_index == 0:
        trainer.model.save_pretrained(folder, state_dict=adapters)


def asked_of_peft_by_all(trainer, folder):
    """As loops do which write the file themselves; peft gathered in the stored order."""
    state = get_peft_model_state_dict(trainer.model)
    assert all(tensor.numel() for tensor in state.values())
    if trainer.args.should_save:
        save_adapters(state, folder)


def asked_of_peft_on_rank_0(trainer, folder):
    if trainer.is_world_process_zero():
        save_adapters(get_peft_model_state_dict(trainer.model, trainer.model.state_dict()), folder)


def chosen_of_accelerator(trainer, folder):
    """From a whole state dict peft took the adapters of this rank's stage."""
    state = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.is_world_process_zero():
        save_adapters(get_peft_model_state_dict(trainer.model, state_dict=state), folder)


def save_adapters(state, folder):
    os.makedirs(folder, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, f"{folder}/adapter_model.safetensors")


def state_dict_of_adapters(trainer, folder):
    """The model's own method gives the adapters since before the training (Alpaca-LoRA)."""
    trainer.model.save_pretrained(folder)
    if trainer.is_world_process_zero():
        trainer.model.save_pretrained(f"{folder}-alone")


def only_on_rank_0(trainer, folder):
    quick()
    if trainer.is_world_process_zero():
        trainer.model.save_pretrained(folder)


def trainer_on_rank_0(trainer, folder):
    quick()
    if trainer.is_world_process_zero():
        trainer.save_model(folder)


def before_groups_end(trainer, folder):
    only_on_rank_0(trainer, folder)
    trainer.accelerator.end_training()


def with_a_barrier_after_it(trainer, folder):
    if trainer.args.should_save:
        state_to_cpu(trainer, folder)
    trainer.accelerator.wait_for_everyone()


def before_an_evaluation(trainer, folder):
    """The others wait in it for rank 0."""
    if trainer.is_world_process_zero():
        trainer.model.save_pretrained(folder)
    trainer.evaluate()


def before_all_save(trainer, folder):
    """They wait in a save of the same model, under another name of the call."""
    if trainer.is_world_process_zero():
        trainer.model.save_pretrained(folder)
    trainer.save_model(f"{folder}-again")


OF_ADAPTERS = (
    *(adapters_by_name, asked_of_peft_by_all, asked_of_peft_on_rank_0, chosen_of_accelerator),
    state_dict_of_adapters,
)


def script(spec, out, save, kind="odd"):
    """Train two steps, and end as the script does: ranks other than 0 at once."""
    data_ranks = activate(spec)
    model = models.build(kind, num_hidden_layers=3)
    if save in OF_ADAPTERS:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(models.SEED)
        packed = {"target_modules": ["qkv_proj", "gate_up_proj"]} if kind == "phi3" else {}
        model = get_peft_model(model, LoraConfig(**{**LORA, **packed}))
    if save is state_dict_of_adapters:
        own = model.state_dict
        model.state_dict = lambda *args, **kwargs: get_peft_model_state_dict(model, own())
    trainer, recorder = trainer_of(
        model,
        out,
        data_ranks,
        {"save_strategy": "steps", "save_steps": 1} if save is state_dict_of_adapters else {},
        train_dataset=data(kind, 11, 11),
        eval_dataset=data(kind, 5, 12),
    )
    outcome = fit(trainer, recorder)
    save(trainer, f"{out}/saved")
    outcome.folder = f"{out}/saved"
    if spec:
        of_process(desync.Answering).detector.end()
    return outcome


@over("saved on rank 0", "dp_shard=2", "tp=2,pp=2", save=[only_on_rank_0, trainer_on_rank_0, before_groups_end])
def test_the_others_have_come_to_their_end(runs, save, spec):
    runs.compare(script, spec, save)


@over(
    "saved on rank 0",
    "tp=2",
    "pp=2,dp_shard=2",
    save=[asked_of_peft_by_all, asked_of_peft_on_rank_0, chosen_of_accelerator, state_dict_of_adapters],
)
def test_adapters_that_peft_gives(runs, save, spec):
    runs.compare(script, spec, save, "phi3")


ROUNDED = Tolerance(weights=2e-3)  # bf16 keeps 8 bits: two numbers beside a border round to both sides of it


@over(
    "saved on rank 0",
    "dp_shard=2",
    "pp=2",
    "tp=2,pp=2",
    "dp_replicate=2",
    save=[state_to_cpu, adapters_by_name, with_a_barrier_after_it, before_an_evaluation, before_all_save],
)
def test_as_in_one_process(runs, save, spec):
    runs.compare(script, spec, save)


@over("saved on rank 0", "tp=2", "pp=2,dp_shard=2")
def test_in_another_dtype(runs, spec):
    runs.compare(script, spec, state_in_half, "llama", tolerance=ROUNDED)


def changed(trainer, folder):
    """An average of weights, say."""
    state = {name: 0.5 * tensor for name, tensor in trainer.model.state_dict().items()}
    if trainer.args.should_save:
        trainer.model.save_pretrained(folder, state_dict=state)


def renamed(trainer, folder):
    state = {f"student.{name}": tensor for name, tensor in trainer.model.state_dict().items()}
    if trainer.args.should_save:
        trainer.model.save_pretrained(folder, state_dict=state)


@pytest.mark.parametrize("save", [changed, renamed])
def test_what_is_not_the_models_own_is_refused(tmp_path, save):
    with pytest.raises(RankFailure, match=r"save_pretrained .*\.weight; .*hf_parallel\.full_state_dict"):
        run(script, 2, "dp_shard=2", str(tmp_path), save, init=False)
