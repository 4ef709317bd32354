"""Data ranks whose batches have no images beside others whose batches have: the numbers of one process."""

import pytest
import torch
from accelerate import Accelerator

from hf_parallel import parallelize
from hf_parallel.axes.data import shared_towers
from tests import models
from tests.counting import CountCollectives
from tests.distributed import RankFailure, run, run_alone
from tests.loops import take_step
from tests.parity.test_ragged_media import join, qwen2_vl, seen
from tests.refusals import pattern_of_refusal
from tests.rows import IMAGE_TOKEN, Captions
from tests.training import Outcome, activate, check_numbers, fit, trainer_of

#: Of each half of a batch of eight: has it images? Data ranks differ in three steps of five, each in another way.
HALVES = (False, True, True, False, False, False, True, True, False)


def join_captions(rows: list[dict]) -> dict:
    """Pixels of the rows that have an image."""
    batch = {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "attention_mask", "labels")}
    pixels = [row["pixel_values"] for row in rows if (row["input_ids"] == IMAGE_TOKEN).any()]
    return {**batch, "pixel_values": torch.stack(pixels)} if pixels else batch


def captions(images: bool) -> list[dict]:
    rows = [Captions(4, 11)[i] for i in range(4)]
    for row in rows if not images else ():
        row["input_ids"] = row["input_ids"].clamp(max=IMAGE_TOKEN - 1)
    return rows


def examples(name: str, halves: tuple[bool, ...]) -> list[dict]:
    found = []
    for place, images in enumerate(halves):
        found += captions(images) if name == "llava" else seen(4, place, 2, 0 if images else 4)
    return found


def train(spec: str | None, out: str, name: str, frozen: bool, steps: int = 1) -> Outcome:
    """The last step has the four examples of one data rank, and the other none."""
    data_ranks = activate(spec)
    model = models.build("llava") if name == "llava" else qwen2_vl()
    tower = [p for key, p in model.named_parameters() if "visual" in key or "vision_tower" in key]
    for parameter in tower if frozen else ():
        parameter.requires_grad_(False)
    assert tower
    settings = {
        **{"remove_unused_columns": False, "train_sampling_strategy": "sequential", "learning_rate": 0.02},
        **{"gradient_accumulation_steps": steps, "max_grad_norm": 1.0},
    }
    options = {"train_dataset": examples(name, HALVES), "eval_dataset": examples(name, HALVES[1:4])}
    options["data_collator"] = join_captions if name == "llava" else join
    return fit(*trainer_of(model, out, data_ranks, settings, **options), f"{out}/saved")


@pytest.mark.parametrize(
    ("name", "spec", "frozen", "steps"),
    [
        ("qwen2_vl", "dp_shard=2", False, 1),
        ("llava", "dp_shard=2", False, 1),
        ("llava", "dp_shard=2", True, 1),
        ("llava", "dp_shard=2,zero_stage=1", False, 2),
        ("qwen2_vl", "dp_replicate=2", False, 1),
        ("qwen2_vl", "dp_replicate=2,dp_shard=2", False, 1),
        ("qwen2_vl", "dp_shard=2,tp=2", False, 1),
        ("llava", "dp_shard=2,activation_checkpointing=full", False, 1),
    ],
)
def test_same_numbers_as_one_process(runs, name, spec, frozen, steps):
    for rank in runs.compare(train, spec, name, frozen, steps):
        assert len(rank.logs) == (5 if steps == 1 else 3)


def without_readers(spec: str, out: str) -> None:
    """A model whose language model is not known."""
    shared_towers._READERS = ()
    train(spec, out, "llava", False)


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2"])
def test_a_model_of_another_build_is_refused(tmp_path, spec):
    key = spec.replace("=", "_size=")
    line = pattern_of_refusal(key, 1, "pixel_values", works=f"{key[:-1]}1 works")
    with pytest.raises(RankFailure, match=line) as failure:
        run(without_readers, 2, spec, str(tmp_path), init=False)
    assert set(failure.value.kinds.values()) == {"NotImplementedError"}


def count_gathers(name: str) -> int:
    """Gathers of a step, among hosts too."""
    activate("dp_shard=2")
    model = parallelize(models.build(name), "dp_shard=2")
    tokens = torch.arange(33).view(1, 33) + 4
    for _ in range(2):
        with CountCollectives() as counted:
            model(input_ids=tokens, labels=tokens).loss.backward()
    return counted.counts["gather"]


def test_a_model_without_a_tower_tells_nobody_what_it_reads():
    """Gemma3ForCausalLM has the modalities of Gemma 3 with images: four layers, twice, and what is around them."""
    assert run(count_gathers, 2, "gemma3", init=False) == [9, 9]


class Maps(torch.nn.ModuleDict):
    """Layers by name that give what each of them makes, as torchvision's IntermediateLayerGetter does."""

    def forward(self, x):
        found = {}
        for name, layer in self.items():
            found[name] = x = layer(x).tanh()
        return found


def train_on_maps(spec: str | None) -> list[float]:
    """Losses and gradient norms of two steps; all data ranks have the same rows."""
    activate(spec)
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(Maps({"first": torch.nn.Linear(7, 5), "second": torch.nn.Linear(5, 3)}))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    found, rows = [], torch.arange(14.0).view(2, 7) / 14
    for _ in range(2):
        maps = model(rows)
        found += take_step(accelerator, model, optimizer, maps["first"].square().mean() + maps["second"].mean())
    return found


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2"])
def test_a_list_of_layers_that_gives_a_dictionary(spec):
    check_numbers(run(train_on_maps, 2, spec, init=False), run_alone(train_on_maps, None))
