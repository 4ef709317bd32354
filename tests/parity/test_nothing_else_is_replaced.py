"""What a layout changes in the libraries below is what docs/reference/patches.md lists, and nothing else."""

import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from hf_parallel.hooks.patches import list_patches
from tests import patch_list, training
from tests.distributed import run
from tests.training import Script, axes

LIBRARIES = {"torch", "transformers", "accelerate", "huggingface_hub", "safetensors", "peft", "trl"}
HERE = "hf_parallel"


def owners() -> Iterator[tuple[str, Any]]:
    """Every module of the libraries and every class that is defined in one, by name."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in LIBRARIES or not isinstance(module, ModuleType):
            continue
        yield f"{name}:", module
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == name:
                yield f"{name}:{value.__qualname__}.", value


def held() -> dict[str, Any]:
    """By target, what each of them holds itself."""
    return {f"{owner}{key}": value for owner, of in owners() for key, value in list(vars(of).items())}


def is_ours(value: Any) -> bool:
    """Is it a function, a property, or a class of this package? Wrappers have the names of what they wrap."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    if inspect.isfunction(value):
        return f"/{HERE}/" in value.__code__.co_filename
    return isinstance(value, type) and value.__module__.startswith(HERE)


def changed(spec: str, script: Script, initial: str, out: str) -> list[str]:
    """Targets that hold something of this package after a training, under names that are not listed."""
    before = held()
    training.train_rank(spec, script, initial, out)
    after = held()
    found = {key for key, value in after.items() if is_ours(value) and value is not before.get(key)}
    patches = list_patches()
    listed = {patch.target for patch in patches} | {row.target for row in patch_list.other_replacements()}
    copied = [after.get(patch.target) for patch in patches if patch.copies]
    return sorted(key for key in found - listed if not any(after[key] is value for value in copied))


@pytest.mark.parametrize("spec", ["tp=2,pp=2", "dp_shard=2"])
def test_after_a_training(runs, tmp_path, spec):
    script = Script(model="llama")
    for rank in run(changed, axes(spec)["world"], spec, script, runs.initial("llama"), str(tmp_path), init=False):
        assert rank == []


def test_a_replacement_that_nobody_lists_is_seen(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(patch_list, "other_replacements", dict)
    found = run(changed, 2, "dp_shard=2", Script(model="llama"), runs.initial("llama"), str(tmp_path), init=False)[0]
    assert "torch.distributed.distributed_c10d:ProcessGroup.allreduce" in found
