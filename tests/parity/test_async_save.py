"""`async_save=true`: the same checkpoints, written beside the training, which stops for as long as a copy takes."""

import threading
import time
from pathlib import Path

import pytest
from transformers import TrainerCallback

from tests import models
from tests.distributed import RankFailure, run
from tests.refusals import find_line
from tests.resuming import STEPS, STOP, checkpoint_differences, log_differences, train, trained
from tests.training import activate, axes, none

pytestmark = pytest.mark.clock

KEY = ",async_save=true"


def test_the_same_checkpoints(runs, tmp_path):
    """Saved while the next steps run; and what was saved resumes bit for bit."""
    spec = "pp=2,dp_shard=2"
    jobs = {key: {"folder": runs.initial("qwen3"), "out": str(tmp_path / key), "save_steps": 2} for key in "ab"}
    now, later = trained(spec, jobs["a"])[0], trained(spec + KEY, jobs["b"])[0]
    found = log_differences(later, now, range(1, STEPS + 1), 0)
    for step in range(2, STEPS + 1, 2):
        folders = (f"{tmp_path}/{key}/checkpoint-{step}" for key in "ba")
        found += [f"step {step}: {text}" for text in checkpoint_differences(*folders, models.build("qwen3"))]
    none(found)
    again = {**jobs["b"], "out": str(tmp_path / "c"), "resume": f"{tmp_path}/b/checkpoint-{STOP}"}
    none(log_differences(trained(spec + KEY, again)[0], now, range(STOP + 1, STEPS + 1), 0))


class GoesOn(TrainerCallback):
    """Tells that the third step is over."""

    def __init__(self):
        self.third = threading.Event()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            self.third.set()


def held_up(spec: str, folder: str, out: str) -> tuple[set[str], list[bool]]:
    """A disk that takes no optimizer's state before the third step is over: the threads that write, and if it was."""
    from hf_parallel.checkpoint import resume

    activate(spec)
    write, training, threads, over = resume._write_tensors, GoesOn(), set(), []

    def slow(*args):
        threads.add(threading.current_thread().name)
        over.append(training.third.wait(60))
        write(*args)

    resume._write_tensors = slow
    change = {"change": lambda trainer: trainer.add_callback(training)}
    train(folder, out, axes(spec)["data_ranks"], **change, max_steps=3, save_steps=2)
    return threads, over


def test_training_goes_on_while_a_slow_disk_is_written(runs, tmp_path):
    """The second save waits for the first, the end for the second; what is written late is what it was in its step."""
    job = {"folder": runs.initial("llama"), "max_steps": 3, "save_steps": 2}
    trained("dp_shard=2", {**job, "out": f"{tmp_path}-now"})
    for threads, over in run(held_up, 2, "dp_shard=2" + KEY, runs.initial("llama"), str(tmp_path), init=False):
        assert threads == {"save checkpoint-2", "save checkpoint-3"}
        assert all(over)
    names = ["checkpoint-2", "checkpoint-3"]
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == names
    for name in names:
        none(checkpoint_differences(f"{tmp_path}/{name}", f"{tmp_path}-now/{name}", models.build("llama")))


class Witness(TrainerCallback):
    """What a script sees of saves, in order: the step it is told, and whether its folder is whole."""

    def __init__(self, trainer):
        self.trainer, self.seen, self.told, self.steps = trainer, [], [], 0
        self.sixth = threading.Event()
        trainer.args.push_to_hub = True
        trainer._push_from_checkpoint = lambda folder: self.note("push", folder, trainer.state)
        trainer.add_callback(self)

    def note(self, what, folder, state):
        files = ("manifest.json", "model.safetensors", "optimizer/state.safetensors")
        whole = all((Path(folder) / file).exists() for file in files)
        self.seen.append((what, state.global_step, round(state.epoch, 6), Path(folder).name, whole))

    def on_step_begin(self, args, state, control, **kwargs):
        self.steps += 1
        unfinished = self.trainer._hf_parallel.unfinished_save
        if self.steps == 6 and unfinished is not None:
            self.sixth.set()
            unfinished.thread.join(60)

    def on_save(self, args, state, control, **kwargs):
        self.note("save", f"{args.output_dir}/checkpoint-{state.global_step}", state)
        self.told.append((state.global_step, self.steps))

    def on_train_end(self, args, state, control, **kwargs):
        left = sorted(path.name for path in Path(args.output_dir).glob("*checkpoint*"))
        self.seen.append(("end", state.global_step, left, Path(state.best_model_checkpoint or "").name, True))


def witnessed(spec: str, folder: str, out: str, patience: float, settings: dict) -> tuple[list, list]:
    """A run under a disk that writes the optimizer's state of step 4 until step 6 begins."""
    from hf_parallel.checkpoint import resume

    activate(spec)
    write, witnesses = resume._write_tensors, []
    resume._write_tensors = lambda *args: (witnesses[0].sixth.wait(patience), write(*args))
    train(folder, out, axes(spec)["data_ranks"], change=lambda t: witnesses.append(Witness(t)), **settings)
    return witnesses[0].seen, witnesses[0].told


#: Every loss is better than the one before it: the best is the first, which stays beside the last.
BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "greater_is_better": True}


@pytest.mark.parametrize(
    ("settings", "patience", "told"),
    [
        ({"max_steps": 7}, 60, [(4, 6), (7, 7)]),  # whole when step 6 begins, at whose end all ranks know
        ({"save_steps": 1, "max_steps": 3, "save_total_limit": 1, **BEST}, 0.2, [(1, 2), (2, 3), (3, 3)]),
    ],
    ids=["callbacks", "best"],
)
def test_callbacks_and_uploads_find_whole_folders(runs, tmp_path, settings, patience, told):
    """As without the key: the same steps in the same order, the same folders left; told while the training goes on."""
    found = {}
    for key, wait in (("", 0), (KEY, patience)):
        job = (runs.initial("llama"), f"{tmp_path}/out{key}", wait, settings)
        found[key] = run(witnessed, 2, "dp_shard=2" + key, *job, init=False)
    now, later = found[""][0][0], found[KEY][0][0]
    assert later == now
    assert all(whole for *_, whole in later)
    assert [rank[1] for rank in found[KEY]] == [told, told]


def copies(spec: str, folder: str, out: str) -> None:
    """A callback that saves the model itself: by then it is the model of a later step."""
    from hf_parallel.checkpoint import resume

    activate(spec)
    write = resume._write_tensors
    resume._write_tensors = lambda *args: (time.sleep(0.5), write(*args))

    class Copy(TrainerCallback):
        def on_save(self, args, state, control, model=None, **kwargs):
            model.save_pretrained(f"{out}/copy-{state.global_step}")

    train(folder, out, axes(spec)["data_ranks"], change=lambda t: t.add_callback(Copy()), max_steps=2, save_steps=1)


def test_a_callback_that_saves_by_itself_is_refused(runs, tmp_path):
    with pytest.raises(RankFailure) as caught:
        run(copies, 2, "dp_shard=2" + KEY, runs.initial("llama"), str(tmp_path), init=False)
    assert caught.value.kinds == {0: "SpecError", 1: "SpecError"}
    assert find_line(caught.value.message, "async_save=true", "checkpoint-1", "step 2")


def fails_later(spec: str, folder: str, out: str) -> str:
    """The disk fills up while training goes on."""
    from hf_parallel.checkpoint import CheckpointError
    from tests.reliability.faults import full_disk

    activate(spec)
    with full_disk("optimizer/state.safetensors"), pytest.raises(CheckpointError) as caught:
        train(folder, out, axes(spec)["data_ranks"], max_steps=3, save_steps=2)
    return str(caught.value)


def test_an_error_of_the_writer_surfaces(runs, tmp_path):
    texts = set(run(fails_later, 2, "dp_shard=2" + KEY, runs.initial("llama"), str(tmp_path), init=False))
    assert len(texts) == 1
    assert "checkpoint-2 was not written" in texts.pop()
    assert not list(tmp_path.glob("*checkpoint*"))
