"""A save that a script runs on one rank alone: told in seconds, by name, and where the others are."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_parallel.ask.session import of_process
from hf_parallel.ranks import assert_all_ranks
from hf_parallel.ranks.desync import Answering
from tests import models
from tests.distributed import RankFailure, run
from tests.refusals import find_line
from tests.reliability.faults import LIMIT_S, SHORT
from tests.resuming import train
from tests.training import activate, axes, none, weight_differences

pytestmark = pytest.mark.clock

SOON_S = 60  # patience, and two rounds of questions: four seconds on a free machine


def quick() -> None:
    """Less patience than a cluster needs."""
    from hf_parallel.ranks import desync

    desync.PATIENCE_S, desync.LOOK_S, desync.STILL_S, desync.DEADLOCK_S = 0.3, 0.2, 0.5, 2.0


def call_alone(call, trainer) -> None:
    """A Trainer that saves on the main process amid its step, and comes to no barrier after it."""
    log = trainer._maybe_log_save_evaluate

    def save_and_log(*args, **kwargs):
        if dist.get_rank() == 0 and trainer.state.global_step == 2:
            call(trainer, trainer.model, f"{trainer.args.output_dir}/best")
        return log(*args, **kwargs)

    trainer._maybe_log_save_evaluate = save_and_log


class Evaluates(TrainerCallback):
    """What users write, where the others wait at the end of the callback, and cannot take part."""

    def __init__(self, trainer):
        self.trainer = trainer
        trainer.add_callback(self)

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero and state.global_step == 2:
            self.trainer.evaluate()


CALLS = {
    "save_pretrained": lambda trainer, model, folder: model.save_pretrained(folder),
    "trainer.save_model": lambda trainer, model, folder: trainer.save_model(folder),
    "trainer.evaluate": lambda trainer, model, folder: trainer.evaluate(),
}


def alone(spec: str, folder: str, out: str, name: str) -> None:

    quick()
    activate(spec)
    train(folder, out, axes(spec)["data_ranks"], change=partial(call_alone, CALLS[name]), **SHORT)


@pytest.mark.parametrize(
    ("spec", "name"),
    [("dp_shard=2", "save_pretrained"), ("pp=2", "trainer.save_model"), ("tp=2", "trainer.evaluate")],
)
def test_one_rank_that_saves_while_the_others_train(runs, tmp_path, spec, name):
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run(alone, 2, spec, runs.initial("llama"), str(tmp_path), name, init=False, timeout=LIMIT_S)
    assert time.monotonic() - start < SOON_S
    assert caught.value.kinds[0] == "AloneError"
    assert find_line(caught.value.message, name, "rank 0", "rank 1", "test_desync.py", f"call {name} on all ranks")


def evaluates(folder: str, out: str) -> None:
    activate("tp=2")
    train(folder, out, change=Evaluates, **SHORT)


def test_an_evaluation_in_a_callback_of_rank_0(runs, tmp_path):
    with pytest.raises(RankFailure) as caught:
        run(evaluates, 2, runs.initial("llama"), str(tmp_path), init=False, timeout=LIMIT_S)
    assert caught.value.kinds[0] == "AloneError"
    assert find_line(caught.value.message, "trainer.evaluate", "rank 0", "end of a callback", "on all ranks")


def stop_alone(trainer) -> None:
    """A Trainer that ends the training on rank 0, after all callbacks."""
    log = trainer._maybe_log_save_evaluate

    def log_and_stop(*args, **kwargs):
        trainer.control.should_training_stop = dist.get_rank() == 0 and trainer.state.global_step == 2
        return log(*args, **kwargs)

    trainer._maybe_log_save_evaluate = log_and_stop


def stops(folder: str, out: str) -> None:

    quick()
    activate("tp=2")
    train(folder, out, change=stop_alone, **SHORT)


def test_one_rank_that_stops(runs, tmp_path, capfd):
    """Rank 0's word holds, so that nobody is left waiting."""
    run(stops, 2, runs.initial("llama"), str(tmp_path), init=False, timeout=LIMIT_S)
    assert find_line(capfd.readouterr().err, "control.should_training_stop", "True on rank 0", "False on rank 1")


def gathers_alone() -> None:
    model = made("dp_shard=2")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        model(input_ids=torch.ones(2, 7, dtype=torch.long))


def test_calls_of_every_step_that_wait_for_each_other(capfd):
    """Nothing is asked before them; the threads beside them notice."""
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run(gathers_alone, 2, timeout=LIMIT_S)
    assert time.monotonic() - start < SOON_S
    assert set(caught.value.kinds.values()) <= {"Killed", "RuntimeError", "DistBackendError"}
    told = capfd.readouterr().err
    assert find_line(told, "all ranks wait", "rank 0 is at test_desync.py", "rank 1 is at test_desync.py")


def made(spec: str):
    import hf_parallel

    quick()
    return hf_parallel.parallelize(models.build("llama"), spec)


def comes_late(out: str) -> None:
    model = made("tp=2")
    if dist.get_rank() == 1:
        time.sleep(2)
    model.save_pretrained(out)


def test_a_rank_that_does_something_else_is_waited_for(tmp_path):
    run(comes_late, 2, str(tmp_path))
    assert (tmp_path / "model.safetensors").exists()


def goes_home(out: str) -> None:
    """The end of most scripts; rank 1 has come to the end of the process."""
    from hf_parallel.ask.session import of_process
    from hf_parallel.ranks import desync

    model = made("dp_shard=2")
    if dist.get_rank() == 1:
        of_process(desync.Answering).detector.close()
    else:
        model.save_pretrained(out)


def test_a_rank_that_has_ended(tmp_path):
    with pytest.raises(RankFailure, match="save_pretrained .*rank 0.*rank 1 .*ended"):
        run(goes_home, 2, str(tmp_path))


def shows_a_sample() -> None:
    """A loop whose last lines call the model on rank 0 alone."""
    from accelerate import Accelerator

    quick()
    activate("dp_shard=2")
    accelerator, model = Accelerator(), models.build("llama")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.arange(33)[None]
    accelerator.backward(model(input_ids=batch, labels=batch).loss)
    optimizer.step()
    if dist.group.WORLD.rank() == 0:  # which nobody notices
        with torch.no_grad():
            model(input_ids=batch)
    accelerator.end_training()


def test_a_call_after_the_others_have_ended(capfd):
    """The rank at its end watches no more, but it stays until the other one has told."""
    with pytest.raises(RankFailure):
        run(shows_a_sample, 2, timeout=LIMIT_S)
    assert find_line(capfd.readouterr().err, "rank 0 waits in all_gather", "rank 1 has left")


def each_their_own(out: str, saves: int) -> None:
    model = made("dp_shard=2")
    if dist.get_rank() == saves:
        model.save_pretrained(out)
        of_process(Answering).detector.end()
    else:
        assert_all_ranks("trainer.evaluate")


def test_two_calls_at_once(tmp_path):
    with pytest.raises(RankFailure) as caught:
        run(each_their_own, 2, str(tmp_path), 1)
    assert caught.value.kinds == {0: "AloneError", 1: "AloneError"}
    assert "save_pretrained" in caught.value.message
    assert "trainer.evaluate" in caught.value.message


def test_a_call_that_rank_0_never_comes_to(tmp_path):
    """Rank 1 waits in it, takes part in a save of rank 0 alone, and hears that rank 0 has ended."""
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run(each_their_own, 2, str(tmp_path), 0)
    assert caught.value.kinds == {1: "AloneError"}
    assert find_line(caught.value.message, "trainer.evaluate", "rank 0 has ended", "on all ranks")
    assert (tmp_path / "model.safetensors").exists()
    assert time.monotonic() - start < SOON_S


def writes_what_it_has(out: str) -> None:
    """Gathered on all ranks, as it must be, and then written by the main process alone."""
    from hf_parallel.checkpoint import gather_state_dict

    model = made("pp=2")
    state = gather_state_dict(model, model._hf_parallel.mesh)
    if dist.get_rank() == 0:
        model.save_pretrained(out, state_dict=state)


def test_the_main_process_alone_writes_what_all_have_gathered(runs, tmp_path):
    run(writes_what_it_has, 2, str(tmp_path))
    none(weight_differences(str(tmp_path), runs.initial("llama"), 0.0))
