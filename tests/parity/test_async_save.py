"""`async_save=true`: the same checkpoints, written beside the training, which stops for as long as a copy takes."""

import threading
import time

import pytest
from transformers import TrainerCallback

from tests import models
from tests.distributed import run
from tests.resuming import STEPS, STOP, checkpoint_differences, log_differences, train, trained
from tests.training import axes, none, weight_differences

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


def stopped_for(spec: str, folder: str, out: str) -> dict:
    """A disk that takes two seconds for the optimizer's state: what the training waits for, and in which thread."""
    from hf_parallel import hooks
    from hf_parallel.checkpoint import resume

    hooks.activate(spec, source="test")
    write, seen = resume._write_tensors, {"threads": set(), "saves": []}

    def slow(*args):
        seen["threads"].add(threading.current_thread().name)
        time.sleep(2.0)
        write(*args)

    resume._write_tensors = slow

    def timed(trainer):
        save = trainer._save_checkpoint

        def call(*args):
            start = time.monotonic()
            save(*args)
            seen["saves"].append(time.monotonic() - start)

        trainer._save_checkpoint = call

    train(folder, out, axes(spec)["data_ranks"], change=timed, max_steps=3, save_steps=2)
    return seen


def test_training_goes_on_while_a_slow_disk_is_written(runs, tmp_path):
    """The second save waits for the first, the end for the second; what is written late is what it was in its step."""
    job = {"folder": runs.initial("llama"), "max_steps": 3, "save_steps": 2}
    trained("dp_shard=2", {**job, "out": f"{tmp_path}-now"})
    for rank in run(stopped_for, 2, "dp_shard=2" + KEY, runs.initial("llama"), str(tmp_path), init=False):
        assert rank["threads"] == {"save checkpoint-2", "save checkpoint-3"}
        assert rank["saves"][0] < 1.0, rank["saves"]
    names = ["checkpoint-2", "checkpoint-3"]
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == names
    for name in names:
        none(checkpoint_differences(f"{tmp_path}/{name}", f"{tmp_path}-now/{name}", models.build("llama")))


def saves_meanwhile(spec: str, folder: str, out: str) -> None:
    """A callback that saves the model itself while the checkpoint of that step is still being written."""
    from hf_parallel import hooks
    from hf_parallel.checkpoint import resume

    hooks.activate(spec, source="test")
    write = resume._write_tensors
    resume._write_tensors = lambda *args: (time.sleep(0.5), write(*args))

    class Copy(TrainerCallback):
        def on_save(self, args, state, control, model=None, **kwargs):
            model.save_pretrained(f"{out}/copy-{state.global_step}")

    train(folder, out, axes(spec)["data_ranks"], change=lambda t: t.add_callback(Copy()), max_steps=2, save_steps=1)


def test_a_script_that_saves_by_itself_meanwhile(runs, tmp_path):
    run(saves_meanwhile, 2, "dp_shard=2" + KEY, runs.initial("llama"), str(tmp_path), init=False)
    for step in (1, 2):
        none(weight_differences(f"{tmp_path}/copy-{step}", f"{tmp_path}/checkpoint-{step}", 0.0))


def fails_later(spec: str, folder: str, out: str) -> str:
    """The disk fills up while training goes on."""
    from hf_parallel import hooks
    from hf_parallel.checkpoint import CheckpointError
    from tests.reliability.faults import full_disk

    hooks.activate(spec, source="test")
    with full_disk("optimizer/state.safetensors"), pytest.raises(CheckpointError) as caught:
        train(folder, out, axes(spec)["data_ranks"], max_steps=3, save_steps=2)
    return str(caught.value)


def test_an_error_of_the_writer_surfaces(runs, tmp_path):
    texts = set(run(fails_later, 2, "dp_shard=2" + KEY, runs.initial("llama"), str(tmp_path), init=False))
    assert len(texts) == 1
    assert "checkpoint-2 was not written" in texts.pop()
    assert not list(tmp_path.glob("*checkpoint*"))
