"""Ragged batches whose tensors are not one row per example: patches of all images, lists of boxes or texts."""

import os

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import (
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    YolosConfig,
    YolosForObjectDetection,
    set_seed,
)

from hf_parallel.ask.spec import SpecError
from hf_parallel.hooks.trainer import evaluation
from tests.distributed import run, run_alone
from tests.training import activate, arguments_of, axes, fit, trainer_of

IMAGE, START, END, WORDS = 500, 501, 502, 515


def qwen2_vl() -> Qwen2VLForConditionalGeneration:
    """A vision-language model of two layers, whose images are 4 or 8 patches."""
    set_seed(3)
    text = {"vocab_size": WORDS, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False}
    rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 10000.0}}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    ids = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config={**text, **heads, **rope}, vision_config=vision, tie_word_embeddings=False, **ids)
    )


def seen(size: int, seed: int, most: int, texts: int = 0) -> list[dict]:
    """Examples with one to `most` images each, of one or two merged patches, and words behind them.

    The last `texts` of them have words alone.
    """
    drawn, found = torch.Generator().manual_seed(seed), []
    for i in range(size):
        merged = [1 + (i + j) % 2 for j in range(1 + i % most)] if i < size - texts else []
        images: list[int] = [token for count in merged for token in [START, *[IMAGE] * count, END]]
        words = torch.randint(3, 490, (14 - len(images),), generator=drawn)
        patches = torch.randn(4 * sum(merged), 2 * 3 * 4 * 4, generator=drawn)
        grid = torch.tensor([[1, 2, 2 * count] for count in merged], dtype=torch.long).view(-1, 3)
        found.append(
            {"ids": torch.cat([torch.tensor(images, dtype=torch.long), words]), "patches": patches, "grid": grid}
        )
    return found


def join(rows: list[dict]) -> dict:
    """As Qwen2-VL's processor does: the patches of all images lie one behind another."""
    ids = torch.stack([row["ids"] for row in rows])
    types = (ids == IMAGE).long()
    words = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(ids >= IMAGE, -100),
        "mm_token_type_ids": types,
    }
    patches, grid = (torch.cat([row[key] for row in rows]) for key in ("patches", "grid"))
    return {**words, "pixel_values": patches, "image_grid_thw": grid} if len(grid) else words


def look(spec: str | None, out: str, most: int, eval_rows: int = 5, texts: int = 0):
    """Train on 11 examples, evaluate 5 with metrics."""
    ranks, saw = activate(spec), []

    def metrics(seen) -> dict:
        logits, *images = seen.predictions if isinstance(seen.predictions, tuple) else (seen.predictions,)
        features = [torch.as_tensor(each["last_hidden_state"]) for each in images]  # from transformers 5.24 on
        saw.append((torch.as_tensor(logits), torch.as_tensor(seen.label_ids), features))
        return {}

    settings = {"remove_unused_columns": False}
    options = {"train_dataset": seen(11, 1, most), "data_collator": join}
    options["eval_dataset"] = seen(eval_rows, 2, most, texts)
    options["compute_metrics"] = metrics
    outcome = fit(*trainer_of(qwen2_vl(), out, settings=arguments_of(out, ranks, **settings), **options))
    outcome.predictions, outcome.label_ids, outcome.features = saw[-1]
    return outcome


def asked(kinds: tuple[str, ...], labels: bool, own_loss: bool) -> object:
    """What a data rank decides whose batch is of this kind, or how it refuses."""
    activate("dp_shard=2")
    batch = {"input_ids": torch.ones(4, 3), **({"labels": torch.ones(4, 3)} if labels else {})}
    patches = {"mixed": 24, "equal": 4}.get(kinds[int(os.environ["RANK"])])
    if patches is not None:
        batch["pixel_values"] = torch.zeros(patches, 5)
    trainer = trainer_of(qwen2_vl(), "out")[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "is_ragged", lambda state: True)
        patch.setattr(evaluation.losses, "is_own", lambda trainer: own_loss)
        try:
            return evaluation.must_be_whole(trainer, batch, 4, trainer.accelerator.gradient_state)
        except SpecError as error:
            return str(error)


@pytest.mark.parametrize("kinds", [("mixed", "equal"), ("text", "mixed"), ("mixed", "mixed")])
def test_data_ranks_agree_whatever_their_own_batch_is(tmp_path, monkeypatch, kinds):
    monkeypatch.chdir(tmp_path)
    assert run(asked, 2, kinds, True, False, init=False) == [True, True]
    for said in run(asked, 2, kinds, True, True, init=False) + run(asked, 2, kinds, False, False, init=False):
        assert "dataloader_drop_last=True works" in said


def test_rows_that_tell_all_apart_are_trimmed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(asked, 2, ("text", "equal"), True, True, init=False) == [False, False]


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2", "tp=2", "tp=2,dp_shard=2"])
@pytest.mark.parametrize("most", [1, 2])
def test_patches_of_all_images_in_one_tensor(runs, spec, most):
    """With one image, or up to two, in an example; what metrics are given is compared too."""
    patches = sum(len(example["patches"]) for example in seen(5, 2, most))
    alone = runs.alone(look, most)
    for rank in runs.compare(look, spec, most):
        for ours, theirs in zip(rank.features, alone.features, strict=True):
            # accelerate cuts them in one process, as if they were rows; images of repeated examples stand behind all
            assert len(ours) >= patches >= len(theirs) > 4
            assert (ours[: len(theirs) - 1] - theirs[:-1]).abs().max() < 1e-5


def test_a_data_rank_without_images(runs):
    """One data rank evaluates images, the other words alone: both gather the same parts."""
    alone = runs.alone(look, 1, 8, 4)
    for rank in runs.compare(look, "dp_replicate=2", 1, 8, 4):
        assert len(rank.features) == len(alone.features)


def yolos() -> YolosForObjectDetection:
    set_seed(5)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return YolosForObjectDetection(
        YolosConfig(image_size=[32, 32], patch_size=8, num_detection_tokens=7, num_labels=3, **sizes)
    )


def with_boxes(size: int, seed: int) -> list[dict]:
    """Images of one to three boxes each."""
    drawn, found = torch.Generator().manual_seed(seed), []
    for i in range(size):
        boxes = 0.2 + 0.3 * torch.rand(1 + i % 3, 4, generator=drawn)
        labels = {"class_labels": torch.randint(3, (len(boxes),), generator=drawn), "boxes": boxes}
        found.append({"pixel_values": torch.randn(3, 32, 32, generator=drawn), "labels": labels})
    return found


def detect(spec: str | None, out: str):
    """What `compute_metrics` sees of eleven images: their boxes, and the logits, batch by batch."""
    ranks, saw = activate(spec), []

    def metrics(seen) -> dict:
        boxes = [label["boxes"].tolist() for batch in seen.label_ids for label in batch]
        logits = torch.cat([torch.as_tensor(batch[1]) for batch in seen.predictions])
        saw.append((boxes, logits))
        return {}

    settings = {
        "remove_unused_columns": False,
        "eval_do_concat_batches": False,
        "per_device_eval_batch_size": 4 // ranks,
    }
    options = {"train_dataset": with_boxes(11, 1), "eval_dataset": with_boxes(11, 2), "compute_metrics": metrics}
    options["data_collator"] = lambda rows: {
        "pixel_values": torch.stack([row["pixel_values"] for row in rows]),
        "labels": [row["labels"] for row in rows],
    }
    outcome = fit(*trainer_of(yolos(), out, settings=arguments_of(out, ranks, **settings), **options))
    outcome.more = saw[-1]
    return outcome


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "tp=2,dp_shard=2"])
def test_metrics_see_the_boxes_of_all_images(runs, spec):
    """One data rank has no row of the last three. One process cuts the boxes of each at the rows of a ragged batch."""
    ranks, (boxes, logits) = runs.compare(detect, spec), runs.alone(detect).more
    assert [len(found) for found in boxes] == [1 + i % 3 for i in range(11)]
    for rank in ranks:
        assert rank.more[0] == boxes
        torch.testing.assert_close(rank.more[1], logits, rtol=1e-4, atol=1e-5)


def gathered_outputs() -> list[dict[str, list[float]]]:
    """Two mappings of tensors, as a script's own loop keeps the outputs of two models."""
    activate("dp_shard=2")
    rank = float(os.environ["RANK"])
    found = Accelerator(cpu=True).gather([{"a": torch.full((2,), rank)}, {"b": torch.full((1,), rank)}])
    return [{key: tensor.tolist() for key, tensor in each.items()} for each in found]


def test_a_script_that_gathers_a_list_of_mappings_keeps_its_shape():
    """Only what belongs to the rows of a Trainer's batch is one thing per example."""
    assert run(gathered_outputs, 2, init=False) == [[{"a": [0.0, 0.0, 1.0, 1.0]}, {"b": [0.0, 1.0]}]] * 2


def with_masks(rows: list[int]) -> dict:
    """Of each image a mask for each of its one to three objects, and their classes."""
    counts = [1 + row % 3 for row in rows]
    masks = [torch.full((count, 2, 2), float(row)) for count, row in zip(counts, rows, strict=True)]
    return {
        "pixel_values": torch.tensor(rows, dtype=torch.float32)[:, None],
        "mask_labels": masks,
        "class_labels": [torch.arange(count) + row for count, row in zip(counts, rows, strict=True)],
    }


def gather_masks(spec: str | None) -> list[dict]:
    """What a loop gathers for its metrics of 11 images, the last of which fill no batch."""
    data_ranks, accelerator = activate(spec), Accelerator(cpu=True)
    loader = DataLoader(list(range(11)), batch_size=4 // data_ranks, collate_fn=with_masks)
    return [accelerator.gather_for_metrics(batch) for batch in accelerator.prepare(loader)]


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2,dp_shard=2"])
def test_a_loop_gathers_lists_of_one_tensor_per_example(spec):
    expected = run_alone(gather_masks, None)
    for found in run(gather_masks, axes(spec)["world"], spec, init=False):
        torch.testing.assert_close(found, expected)
