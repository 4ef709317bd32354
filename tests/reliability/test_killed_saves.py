"""A rank that is killed at any moment of a save: the others say so at once, and the last good checkpoint resumes."""

import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from transformers import AutoModelForCausalLM

from hf_parallel.checkpoint import find_damages
from tests.distributed import RankFailure, run
from tests.reliability.faults import BAD, FOUR, LAST, PHASES, SPEC, STEPS, die_at, disturbed, failure, whole
from tests.resuming import log_differences
from tests.training import activate, axes, none

pytestmark = pytest.mark.clock

LATER = SPEC + ",async_save=true"
CASES = [(phase, rank, SPEC) for phase in PHASES if phase != "adapter" for rank in (0, 1)]
CASES += [("weights", 0, LATER), ("weights", 1, LATER), ("optimizer", 1, LATER), ("publish", 1, LATER)]
CASES += [("rename", 0, LATER)]
CASES += [("weights", 3, FOUR), ("publish", 2, FOUR)]
LIMIT_S = 60  # seconds; on a free machine 4


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """Where the killed runs have left their folders, and the newest step that must be whole in each."""
    return tmp_path_factory.mktemp("killed"), {}


@pytest.mark.parametrize(("phase", "rank", "spec"), CASES)
def test_killed(runs, left, phase, rank, spec):
    root, newest = left
    out = root / f"{phase}-{rank}-{spec}"
    start = time.monotonic()
    ended = failure(spec, runs.initial("qwen3"), str(out), partial(die_at, phase, rank))
    assert time.monotonic() - start < LIMIT_S
    assert ended.kinds.pop(rank) == "Killed"
    assert set(ended.kinds.values()) <= {"CheckpointError", "RuntimeError"}, str(ended)
    assert len(ended.kinds) == axes(spec)["world"] - 1
    renamed = phase == "after" or (phase == "rename" and rank == 1)
    newest[out] = LAST + renamed
    assert {path.name for path in out.glob("checkpoint-*")} == {f"checkpoint-{1 + n}" for n in range(1 + renamed)}
    if not renamed and spec == SPEC:
        lost = f"all of checkpoint-{BAD} was written" if phase == "rename" else f"checkpoint-{LAST} is the newest"
        assert ended.kinds == {1 - rank: "CheckpointError"}
        assert lost in str(ended)


def lora(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))


def resumed(spec: str, folder: str, out: str) -> set[int]:
    """The steps that are left after the last good checkpoint, of a run with an adapter."""
    return set(disturbed(spec, folder, out, lambda trainer: None, resume=True, adapt=lora).logs)


@pytest.mark.parametrize(("phase", "rank"), [("adapter", 1), ("optimizer", 1)])
def test_killed_while_an_adapter_is_saved(runs, tmp_path, phase, rank):
    ended = failure(SPEC, runs.initial("qwen3"), str(tmp_path), partial(die_at, phase, rank), adapt=lora)
    assert ended.kinds == {rank: "Killed", 1 - rank: "CheckpointError"}, str(ended)
    assert "a rank was lost" in str(ended)
    assert not find_damages(str(tmp_path / f"checkpoint-{LAST}"))
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{LAST}"}
    if phase == "optimizer":
        steps = run(resumed, 2, SPEC, runs.initial("qwen3"), str(tmp_path), init=False)
        assert steps == [set(range(LAST + 1, STEPS + 1))] * 2


def states(spec: str, folder: str, project: str, fault: Callable | None) -> float:
    """A script that saves its state twice, and meets an accident the second time; or loads the newest whole one."""
    activate(spec)
    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(project_dir=project, automatic_checkpoint_naming=True)
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for number in (0, 1):
        if fault is None:
            accelerator.load_state()
            break
        accelerator.backward(model(input_ids=torch.ones(2, 8, dtype=int), labels=torch.ones(2, 8, dtype=int)).loss)
        optimizer.step()
        fault(None) if number else None
        accelerator.save_state()
    return float(sum(s["exp_avg"].to_local().abs().sum() for s in optimizer.state.values()))


@pytest.mark.parametrize(("phase", "rank"), [("weights", 1), ("publish", 1), ("rename", 0)])
def test_killed_while_a_state_is_saved(runs, tmp_path, phase, rank):
    fault = partial(die_at, phase, rank)
    with pytest.raises(RankFailure) as caught:
        run(states, 2, SPEC, runs.initial("qwen3"), str(tmp_path), fault, init=False, timeout=LIMIT_S)
    assert caught.value.kinds == {rank: "Killed", 1 - rank: "CheckpointError"}, str(caught.value)
    assert [path.name for path in (tmp_path / "checkpoints").glob("checkpoint_*")] == ["checkpoint_0"]
    if phase == "publish":
        assert all(run(states, 2, SPEC, runs.initial("qwen3"), str(tmp_path), None, init=False, timeout=LIMIT_S))


def test_what_they_have_left_is_whole(runs, left, tmp_path):
    """Compare each file with that of a run that nobody disturbed; some are resumed, and end as that one does."""
    root, newest = left
    initial = runs.initial("qwen3")
    some = [out for out in newest if FOUR not in out.name][:: max(1, len(newest) // 3)]
    copies = [Path(shutil.copytree(out, tmp_path / out.name)) for out in some]  # a repetition resumes them anew
    through, *resumed = whole(
        SPEC, (initial, str(tmp_path / "through"), None), *((initial, str(copy), True) for copy in copies)
    )
    found = []
    for out, copy, on in zip(some, copies, resumed, strict=True):
        texts = log_differences(on, through, range(newest[out] + 1, STEPS + 1), 0)
        texts += [f"{path.name} is still there" for path in copy.glob("_tmp-*")]
        found += [f"{out.name}: {text}" for text in texts]
    for out in {out for out in newest if FOUR not in out.name} - set(some):
        step = newest[out]
        folder, reference = (place / f"checkpoint-{step}" for place in (out, tmp_path / "through"))
        found += [f"{out.name}: {text}" for text in find_damages(str(folder)) + file_differences(folder, reference)]
    none(found)


def file_differences(folder: Path, reference: Path) -> list[str]:
    """List files that are not equal, but for those that name the run and its folder."""
    own = {"training_args.bin", "hf_parallel.json", "manifest.json"}
    names = [{str(path.relative_to(place)) for path in place.rglob("*.*")} for place in (folder, reference)]
    found = [f"{name} is on one side only" for name in names[0] ^ names[1]]
    same = sorted((names[0] & names[1]) - own)
    return found + [f"{n} differs" for n in same if read_unmeasured(folder / n) != read_unmeasured(reference / n)]


def read_unmeasured(file: Path) -> Any:
    """Read a file; leave out of Trainer's state what the monitor has measured."""
    if file.name != "trainer_state.json":
        return file.read_bytes()
    state = json.loads(file.read_text())
    state["log_history"] = [
        {key: value for key, value in line.items() if not key.startswith("perf/")} for line in state["log_history"]
    ]
    return state
