"""configs/specs: every file is a spec; those of the classical recipes train a small model as one process does."""

from pathlib import Path

import pytest
import torch

from hf_parallel import parallelize
from hf_parallel.ask.config import ParallelConfig
from tests import loops, models
from tests.distributed import run, run_alone

FILES = sorted((Path(__file__).parents[2] / "configs" / "specs").glob("*.yaml"))
RECIPES = ("full_fine_tuning", "lora", "long_sequences")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_a_spec(path):
    config = ParallelConfig.parse(str(path))
    assert config.resolve(1024).world_size == 1024
    assert path.read_text().startswith("# ")


def losses(spec: str | None, adapters: bool) -> list[float]:
    """Of two steps on the same 2 rows of 36 tokens on each rank."""
    from peft import LoraConfig, get_peft_model

    model = models.build("llama").train()
    if spec:
        parallelize(model, spec)
    if adapters:
        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(r=3, target_modules="all-linear"))
    return loops.losses(model, loops.rows(3, 2, 36), rate=0.5)


def all_recipes(paths: list[str]) -> list[list[float]]:
    return [losses(path, Path(path).stem == "lora") for path in paths]


def test_the_classical_recipes_give_the_numbers_of_one_process():
    pytest.importorskip("peft")
    paths = [str(path) for path in FILES if path.stem in RECIPES]
    assert len(paths) == len(RECIPES)
    expected = [run_alone(losses, None, Path(path).stem == "lora") for path in paths]
    for found in run(all_recipes, 2, paths):
        for numbers, wanted in zip(found, expected, strict=True):
            assert numbers == pytest.approx(wanted, rel=1e-5)
            assert wanted[0] != wanted[-1]
