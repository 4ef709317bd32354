"""Loading reads a rank's own slices, from the files that hold them, and of all other files no more than the header."""

import collections
import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch

from tests import models
from tests.distributed import run, run_alone
from tests.training import activate

SPECS = ["dp_shard=4", "tp=2,dp_shard=2", "pp=2,dp_shard=2"]
FORMATS = {"consolidated": "50GB", "sharded": "40KB"}


def loaded(spec: str, root: str) -> dict[str, tuple[int, dict[str, int], dict[str, int], set[str]]]:
    """By folder: bytes that this rank must read, those it has read of each file in two ways, its tensors' names."""
    from hf_parallel.checkpoint import lazy_tensor, load_weights

    activate(spec)
    seen, read = collections.Counter(), os.preadv

    def counted(handle, buffers, start):
        count = read(handle, buffers, start)
        seen[os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))] += count
        return count

    lazy_tensor.os.preadv, found = counted, {}
    for name in FORMATS:
        seen.clear()
        model = models.auto_class(models.llama()).from_pretrained(f"{root}/{name}")
        first = dict(seen)
        seen.clear()
        load_weights(model, f"{root}/{name}")
        found[name] = sum(map(needed, model.parameters())), first, dict(seen), set(model.state_dict())
    return found


def needed(parameter: torch.Tensor) -> int:
    """Its part; of what is cut into columns whole rows, since a file has them in rows."""
    own = getattr(parameter, "_local_tensor", parameter)
    return own.shape[0] * parameter[0].numel() * own.element_size() if own.numel() else 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")

    def write() -> None:
        for name, size in FORMATS.items():
            models.build("llama").save_pretrained(root / name, max_shard_size=size)

    run_alone(write)
    return root


@pytest.mark.parametrize("spec", SPECS)
def test_only_what_a_rank_needs(folders, spec):
    """By `from_pretrained`, and when a checkpoint is read into a model that is there."""
    for rank in run(partial(loaded, spec, str(folders)), 4, init=False):
        for name, (expected, *ways, names) in rank.items():
            for seen in ways:
                assert sum(seen.values()) == expected
                assert set(seen) <= files_of(folders / name, names)
                assert name == "consolidated" or "pp" not in spec or set(seen) < files_of(folders / name, None)


def files_of(folder: Path, names: set[str] | None) -> set[str]:
    """The files with these tensors, or all."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return {"model.safetensors"}
    return {file for key, file in json.loads(index.read_text())["weight_map"].items() if names is None or key in names}
