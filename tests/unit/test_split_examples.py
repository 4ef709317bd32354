"""Batches cut to micro-batches: tensors and lists alike."""

import torch

from hf_parallel.axes.pipeline.batches import split_examples
from hf_parallel.hooks.trainer import rows


def test_lists_are_cut_as_tensors_are():
    batch = {"input_ids": torch.arange(12).view(6, 2), "texts": list("abcdef"), "ids": ["x", "y", "z"], "k": [1, 2]}
    plain = split_examples(batch, 2, 1, 6)
    assert [part["texts"] for part in plain] == [["a", "b", "c"], ["d", "e", "f"]]
    assert plain[0]["k"] == [1, 2]  # no entry per example: shared
    pairs = split_examples(batch, 3, 2, 6)  # chosen a, b, c; rejected d, e, f
    assert [part["texts"] for part in pairs] == [["a", "d"], ["b", "e"], ["c", "f"]]
    assert [part["ids"] for part in pairs] == [["x"], ["y"], ["z"]]
    assert [part["input_ids"][:, 0].tolist() for part in pairs] == [[0, 6], [2, 8], [4, 10]]


def test_lists_of_a_ragged_batch_are_trimmed():
    batch = {"pixel_values": torch.zeros(4, 3), "labels": [{"boxes": i} for i in range(4)]}
    assert [one["boxes"] for one in rows.trim(batch, 3, 4)["labels"]] == [0, 1, 2]
