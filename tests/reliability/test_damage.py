"""Damaged checkpoints: named file by file on every rank before anything changes, and never chosen by themselves."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.distributed import run
from tests.reliability.faults import LIMIT_S, SPEC, delete, flip, truncate
from tests.resuming import train
from tests.training import activate, axes

FILES = [
    "model.safetensors",
    "config.json",
    "optimizer/state.safetensors",
    "optimizer/index.json",
    "scheduler.pt",
    "rng_state_0.pth",
    "rng_state_1.pth",
    "trainer_state.json",
    "hf_parallel.json",
    "manifest.json",
]
DAMAGES = {"truncated": truncate, "flipped": flip, "missing": delete}


def resumed_from_damage(initial: str, out: str, copies: str) -> tuple[dict, dict]:
    """For each damage to the second of two checkpoints: what a resume from it says, and what `True` takes instead."""
    from hf_parallel import checkpoint
    from hf_parallel.hooks.trainer import resuming

    activate(SPEC)
    _, trainer = train(initial, out, axes(SPEC)["data_ranks"], max_steps=2, save_steps=1)
    weights = [p.to_local().clone() for p in trainer.model.parameters()]
    torch.manual_seed(5)
    random_state = torch.get_rng_state()
    taken = []
    resuming.folders.load_weights = lambda model, folder: taken.append(Path(folder).name)
    texts, chosen = {}, {}
    for file in FILES:
        for name, damage in DAMAGES.items():
            folder = Path(copies) / f"{file.replace('/', '-')}-{name}"
            if torch.distributed.get_rank() == 0:
                shutil.copytree(out, folder)
                damage(folder / "checkpoint-2" / file)
            torch.distributed.barrier()
            with pytest.raises(checkpoint.CheckpointError) as caught:
                trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
            texts[file, name] = str(caught.value)
            chosen[file, name] = Path(resuming._find_newest_whole(str(folder))).name
    same = all(torch.equal(p.to_local(), w) for p, w in zip(trainer.model.parameters(), weights, strict=True))
    assert same
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not taken
    return texts, chosen


@pytest.fixture(scope="module")
def told(runs, tmp_path_factory):
    out, copies = (str(tmp_path_factory.mktemp(name)) for name in ("whole", "damaged"))
    return run(resumed_from_damage, 2, runs.initial("qwen3"), out, copies, init=False, timeout=LIMIT_S)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_damage(told, file, damage):
    (text, other), chosen = [texts[file, damage] for texts, _ in told], told[0][1]
    assert text == other
    words = {"truncated": "bytes", "flipped": "differs from its checksum", "missing": "is missing"}[damage]
    assert file in text
    assert (words in text) or file == "manifest.json"
    assert "checkpoint-1 looks whole" in text
    assert chosen[file, damage] == "checkpoint-1"
