"""Trainer(model_init=…): a new model for each training, as in one process."""

from functools import partial

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback, Trainer

import hf_parallel
from hf_parallel import hooks
from tests.distributed import run, run_alone
from tests.rows import Rows
from tests.training import TRAIN_SEED, Recorder, arguments_of, axes, close, layouts, none

ODD = {"num_hidden_layers": 3, "vocab_size": 515, "num_key_value_heads": 1}
RATES = (0.1, 0.03)


def trained_anew(folder, out, spec=None):
    """What each of two trainings logged, how it was evaluated, and the last one's weights; then one more training."""
    if spec:
        hooks.activate(spec, source="test")
    config, recorder = AutoConfig.from_pretrained(folder), Recorder()
    trainer = Trainer(
        model_init=lambda: AutoModelForCausalLM.from_config(config),  # drawn anew under the script's seed
        args=arguments_of(out, axes(spec)["data_ranks"] if spec else 1),
        train_dataset=Rows(22, TRAIN_SEED, length=33),
        eval_dataset=Rows(11, 12, length=33),
        callbacks=[recorder],
    )
    trainer.remove_callback(PrinterCallback)
    losses = []
    for rate in RATES:
        trainer.args.learning_rate = rate
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    trainer.train()
    return recorder.logs, losses, hf_parallel.full_state_dict(trainer.model)


@pytest.fixture(scope="module")
def initial(runs):
    """The folder of an untrained model."""
    return runs.initial("llama", **ODD)


@pytest.fixture(scope="module")
def expected(initial, tmp_path_factory):
    """What one process does."""
    return run_alone(trained_anew, initial, str(tmp_path_factory.mktemp("one")))


@pytest.mark.parametrize("spec", layouts("trainer", "tp=2", "pp=2", "dp_shard=2"))
def test_each_training_begins_anew(spec, initial, expected, tmp_path):
    logs, losses, weights = expected
    assert len(logs) == 3 * (len(RATES) + 1)
    assert logs[0]["loss"] == logs[3]["loss"] != logs[4]["loss"]  # the same model, another rate
    ranks = run(partial(trained_anew, initial, str(tmp_path), spec), axes(spec)["world"], init=False)
    for rank, (seen, found, _) in enumerate(ranks):
        for step, (ours, theirs) in enumerate(zip(seen, logs, strict=True)):
            for key in ("loss", "grad_norm"):
                none(close(f"rank {rank}: {key} {step}", ours[key], theirs[key], 1e-5))
        for ours, theirs in zip(found, losses, strict=True):
            none(close(f"rank {rank}: evaluation", ours, theirs, 1e-5))
    for name, value in ranks[0][2].items():
        assert (value - weights[name]).abs().max() <= 1e-6, name
