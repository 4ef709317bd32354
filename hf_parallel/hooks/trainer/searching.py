"""Hyperparameter search with Optuna: rank 0 has the study, and all ranks take part in its trials.

Trainer's own search over processes gives the best run to process 0 alone, and lets it alone end a trial early.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hf_parallel.ask.spec import refuse
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch
from hf_parallel.ranks import messages

if TYPE_CHECKING:
    from optuna.trial import BaseTrial
    from transformers import Trainer

#: Options of `Study.optimize` with the one value that ranks can follow: trials come one by one, and errors stop all.
_ONE_BY_ONE = {"n_jobs": 1, "catch": ()}


@patch(
    "transformers.hyperparameter_search:run_hp_search_optuna",
    "gives trials and the best run to process 0 alone",
    copies=True,
)
def run_hp_search_optuna(original: Callable, trainer: Trainer, n_trials: int, direction: Any, **kwargs: Any) -> object:
    """Let rank 0 hold the study; return the best run on every rank."""
    if runtime.mesh().config.world_size == 1:
        return original(trainer, n_trials, direction, **kwargs)
    for name, value in _ONE_BY_ONE.items():
        if kwargs.get(name, value) != value:
            refuse(f"hyperparameter_search({name}={kwargs[name]!r})", "all ranks take part in each trial", repr(value))
    multiple = isinstance(direction, list)
    if dist.get_rank() != 0:
        return _follow_trials(trainer, multiple)
    leading = _Leading(trainer, multiple)
    with messages.tell_error(None, 0, lambda: not leading.in_trial):
        best = original(leading, n_trials, direction, **kwargs)
    return messages.send_from_one(lambda: (None, best))[1]


@patch(
    "transformers.hyperparameter_search:run_hp_search_{ray,wandb}",
    "starts trials in processes of its own",
    copies=True,
)
def refuse_other_searches(original: Callable, trainer: Trainer, *args: Any, **kwargs: Any) -> object:
    """Refuse trials that would run without the layout, or on one rank of it."""
    if runtime.mesh().config.world_size > 1:
        which = f'hyperparameter_search(backend="{trainer.hp_search_backend.value}")'
        refuse(which, "its trials do not reach all ranks", 'backend="optuna"')
    return original(trainer, *args, **kwargs)


class _Leading:
    """Rank 0's trainer as Optuna's loop sees it: one process, whose trainings the other ranks are called to."""

    def __init__(self, trainer: Trainer, multiple: bool) -> None:
        args = SimpleNamespace(process_index=0, world_size=1)
        vars(self).update(trainer=trainer, multiple=multiple, args=args, in_trial=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["trainer"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.trainer, name, value)

    def train(self, resume_from_checkpoint: str | None, trial: Any) -> None:
        """Run a trial on all ranks."""
        from optuna import TrialPruned

        messages.send_from_one(lambda: (trial.number, None))
        vars(self)["in_trial"] = True  # also where it fails: then no rank waits for another trial
        try:
            _run_trial(self.trainer, resume_from_checkpoint, _share_trial(trial.number, self.multiple, trial))
        except TrialPruned:
            vars(self)["in_trial"] = False
            raise
        vars(self)["in_trial"] = False


def _follow_trials(trainer: Trainer, multiple: bool) -> object:
    """Take part in the trials of rank 0 until it has the best run; return that."""
    from accelerate.utils.memory import release_memory
    from optuna import TrialPruned

    while True:
        number, best = messages.send_from_one(lambda: (None, None))
        if number is None:
            return best
        trainer.objective = None
        with contextlib.suppress(TrialPruned):
            _run_trial(trainer, None, _share_trial(number, multiple))
            trainer.model_wrapped, trainer.model = release_memory(trainer.model_wrapped, trainer.model)
            trainer.accelerator.clear()


def _run_trial(trainer: Trainer, resume_from_checkpoint: str | None, trial: BaseTrial) -> None:
    """Train, and evaluate where the training has not."""
    trainer.train(resume_from_checkpoint, trial=trial)
    if trainer.objective is None:
        trainer.objective = trainer.compute_objective(trainer.evaluate())


def _share_trial(number: int, multiple: bool, trial: Any = None) -> BaseTrial:
    """Return a trial whose values, and whose early end, are those of rank 0's `trial`, on every rank."""
    from optuna.trial import FixedTrial

    class SharedTrial(FixedTrial):
        """A trial that all ranks ask for the same values, in the same order."""

        study = SimpleNamespace(_is_multi_objective=lambda: multiple)

        def _share(self, way: str, name: str, *args: Any, **kwargs: Any) -> Any:
            self._params[name] = messages.send_from_one(lambda: getattr(trial, way)(name, *args, **kwargs))
            return getattr(super(), way)(name, *args, **kwargs)

        suggest_float = functools.partialmethod(_share, "suggest_float")
        suggest_int = functools.partialmethod(_share, "suggest_int")
        suggest_categorical = functools.partialmethod(_share, "suggest_categorical")

        def report(self, value: float, step: int) -> None:
            if trial is not None:
                trial.report(value, step)

        def set_user_attr(self, key: str, value: Any) -> None:
            super().set_user_attr(key, value)
            if trial is not None:
                trial.set_user_attr(key, value)

        def should_prune(self) -> bool:
            return messages.send_from_one(lambda: trial.should_prune())

    return SharedTrial({}, number)
