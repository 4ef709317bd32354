"""One process with the keys of a layout: settings that need no other rank hold, to try a script alone."""

import contextlib
import io
import os
from functools import partial

import pytest
import torch
from transformers import Trainer, TrainerCallback

from tests.distributed import run, run_alone
from tests.rows import Rows
from tests.training import Script, Tolerance, activate, differences, fit, load_model, none, train, trainer_of

#: Three steps of eight rows.
SCRIPT = Script("llama")


def alone(spec, initial, out):
    """The script in one process, as `python -m hf_parallel --parallel SPEC` has it, or without a layout."""
    return train(SCRIPT, initial, out, activate(spec))


#: Settings that change no number but by rounding.
EXACT = (
    "dp_shard=1,offload=optimizer",
    "tp=1,activation_checkpointing=full,activation_offload=true",
    "activation_checkpointing=selective,lean_loss=true",
    "pp=1,attention=torch_flash,monitor=full,async_save=true",
    "activation_checkpointing=every:3,nan_action=skip,zero_stage=2",
)


@pytest.mark.parametrize("spec", EXACT)
def test_numbers_are_those_of_a_plain_script(spec, runs):
    """Losses, norms, evaluation, predictions and saved weights."""
    found = run_alone(alone, spec, runs.initial("llama"), runs._folder())
    none(differences([found], runs.reference(SCRIPT), Tolerance()))


def test_a_launcher_of_one_process_is_no_other(runs):
    """With the variables that torchrun sets."""
    call = partial(alone, EXACT[0], runs.initial("llama"), runs._folder())
    none(differences(run(call, 1, init=False), runs.reference(SCRIPT), Tolerance()))


class Seen(TrainerCallback):
    """What each setting changes that can be seen."""

    def __init__(self):
        self.calls, self.files, self.logs = 0, [], []

    def on_train_begin(self, args, state, control, model, **kwargs):
        model.model.layers[1].mlp.register_forward_pre_hook(self.count)  # recomputing ends before the layer does

    def count(self, *_):
        self.calls += torch.is_grad_enabled()

    def on_step_end(self, args, state, control, **kwargs):
        self.files += [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]

    def on_log(self, args, state, control, logs, **kwargs):
        self.logs.append(logs)


def _is_open(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")


def looked_at(spec, initial, out):
    """What can be seen of a spec in two steps."""
    seen = Seen()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        activate(spec.replace("PATH", out))
        made = trainer_of(
            load_model(SCRIPT, initial, 0),
            out,
            settings={"max_steps": 2, "save_strategy": "steps", "save_steps": 2},
            kind=Trainer,
            callbacks=[seen],
            train_dataset=Rows(16, 3),
        )
        fit(*made)
    model = made[0].model
    return {
        "calls": seen.calls,
        "files": [name for name in seen.files if out in name],
        "perf": [key for logs in seen.logs for key in logs if key.startswith("perf/")],
        "attention": model.config._attn_implementation,
        "loss": seen.logs[0]["loss"],
        "said": said.getvalue(),
        "saved": sorted(os.listdir(f"{out}/checkpoint-2")),
    }


#: Spec -> what shows that it holds.
EFFECTS = {
    "activation_checkpointing=full": lambda seen, plain: seen["calls"] == 2 * plain["calls"],
    "activation_checkpointing=selective": lambda seen, plain: seen["calls"] == 2 * plain["calls"],
    "offload=nvme:PATH": lambda seen, plain: bool(seen["files"]) and not plain["files"],
    "attention=torch_flash": lambda seen, plain: seen["attention"] == "hf_parallel_documents",
    "lean_loss=true": lambda seen, plain: "head and loss in chunks of tokens" in seen["said"],
    "precision=int8": lambda seen, plain: 1e-6 < abs(seen["loss"] - plain["loss"]) < 0.1,
    "monitor=full": lambda seen, plain: bool(seen["perf"]) and not plain["perf"],
    "zero_stage=1,offload=optimizer": lambda seen, plain: seen["said"].count(
        "one process trains without zero_stage=1"
    ),
    "async_save=true": lambda seen, plain: "manifest.json" in " ".join(seen["saved"]),
}


@pytest.mark.parametrize("spec", EFFECTS)
def test_a_setting_holds(spec, runs):
    """Each does what it does on several ranks."""
    initial = runs.initial("llama")
    plain = run_alone(looked_at, "tp=1", initial, runs._folder())
    seen = run_alone(looked_at, spec, initial, runs._folder())
    assert EFFECTS[spec](seen, plain), seen


@pytest.mark.parametrize(
    ("spec", "works"), [("dp_shard=1,offload=cpu", "offload=optimizer"), ("dp_shard=1,tp=1,compile=maybe", "compile")]
)
def test_what_cannot_hold_is_refused(spec, works, runs):
    """By key, with a value that works."""
    with pytest.raises(Exception, match=works):
        run_alone(alone, spec, runs.initial("llama"), runs._folder())
