"""Trainer.hyperparameter_search: rank 0's study, all ranks' trials, and each rank's best run."""

import logging
from functools import partial
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, hyperparameter_search

from tests import models
from tests.distributed import RankFailure, run
from tests.rows import Rows
from tests.training import TRAIN_SEED, Outcome, activate, check_numbers, over, trainer_of

TRIALS = 4


def search(spec: str | None, out: str, evaluates: bool, *options: tuple[str, object]) -> Outcome:
    """Search rate, seed and number of layers; train once more with what was best, as the documentation of HF does."""
    import optuna

    optuna.logging.set_verbosity(logging.ERROR)
    data_ranks = activate(spec)

    def make_model(trial=None):
        layers = 3 if trial is None else trial.suggest_categorical("layers", [3, 2])
        return AutoModelForCausalLM.from_config(models.llama(num_hidden_layers=layers, vocab_size=515))

    def space(trial):
        rate = trial.suggest_float("learning_rate", 1e-3, 3e-1, log=True)
        return {"learning_rate": rate, "seed": trial.suggest_int("seed", 1, 4)}

    steps = {"eval_strategy": "steps", "eval_steps": 1} if evaluates else {}
    sets = {"train_dataset": Rows(22, TRAIN_SEED, length=33), "eval_dataset": Rows(11, 12, length=33)}
    trainer, recorder = trainer_of(None, out, data_ranks, {"max_steps": 3, **steps}, model_init=make_model, **sets)
    study = {
        "sampler": optuna.samplers.RandomSampler(seed=5),
        "pruner": optuna.pruners.MedianPruner(n_startup_trials=1),
        **dict(options),
    }
    best = trainer.hyperparameter_search(space, n_trials=TRIALS, direction="minimize", backend="optuna", **study)
    trained = len([log for log in recorder.logs if "loss" in log])
    for name, value in best.hyperparameters.items():
        setattr(trainer.args, name, value)
    trainer.train()
    values = {name: float(value) for name, value in best.hyperparameters.items()}
    more = [best.objective, float(best.run_id), float(trained), *values.values(), trainer.evaluate()["eval_loss"]]
    trainer.save_model(f"{out}/saved")
    return Outcome(recorder.logs, recorder.gradient_keys, f"{out}/saved", more=more)


@over("hyperparameter_search", "dp_shard=2", "tp=2", "pp=2,dp_shard=2")
@pytest.mark.parametrize("evaluates", [False, True])
def test_trials_and_the_best_run_of_one_process(runs, spec, evaluates):
    """With an evaluation per step, some trials end early, on all ranks."""
    reference = runs.alone(search, evaluates)
    steps = reference.more[2]
    assert (steps < 3 * TRIALS) == evaluates, steps
    ranks = runs.compare(search, spec, evaluates)
    check_numbers([rank.more for rank in ranks], reference.more)


@pytest.mark.parametrize(
    ("option", "value", "works"), [("n_jobs", 2, "1 works"), ("catch", (ValueError,), "() works")]
)
def test_trials_that_ranks_cannot_follow(tmp_path, option, value, works):
    with pytest.raises(RankFailure) as failure:
        run(partial(search, "tp=2", str(tmp_path), False, (option, value)), 2, init=False)
    assert f"hyperparameter_search({option}=" in failure.value.message
    assert works in failure.value.message


def search_elsewhere(backend: str) -> None:
    """Ask for the trials of another backend, as `hyperparameter_search` does once it has found it installed."""
    activate("dp_shard=2")
    trainer = SimpleNamespace(hp_search_backend=hyperparameter_search.HPSearchBackend(backend))
    getattr(hyperparameter_search, f"run_hp_search_{backend}")(trainer, TRIALS, "minimize")


@pytest.mark.parametrize("backend", ["ray", "wandb"])
def test_trials_that_do_not_reach_all_ranks(backend):
    with pytest.raises(RankFailure) as failure:
        run(partial(search_elsewhere, backend), 2, init=False)
    assert f'hyperparameter_search(backend="{backend}")' in failure.value.message
    assert 'backend="optuna" works' in failure.value.message
