"""Errors of former versions, which trained on other numbers without a word: with its mend taken out, each is found."""

import io
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.apply import mixed
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.axes.axis import PipelineServices
from hf_parallel.axes.context import axis as context
from hf_parallel.axes.data import zero
from hf_parallel.axes.pipeline.stages import AddsNothing, StandIn
from hf_parallel.axes.tensor.lean_loss import LazyLogits
from hf_parallel.cli.prove import NotProvedError, Proof, Script
from hf_parallel.hooks import own_loops, transformers
from hf_parallel.hooks.trainer import evaluation, joining, means, refused_batches, training
from hf_parallel.model import known_masks
from tests.distributed import run_alone
from tests.prove.strange import save_base
from tests.prove.test_faults import ARGUMENTS
from tests.training import axes

SCRIPT = Path(__file__).parent / "strange.py"


@dataclass(frozen=True)
class Mend:
    """What mended an error, and how to take it out on a rank.

    Attributes:
        kind: of `strange.py`.
        more: arguments of the script.
    """

    name: str
    kind: str
    spec: str
    take_out: Callable[[], None]
    more: tuple[str, ...] = ()


def setting(owner: object, name: str, value: object) -> Callable[[], None]:
    """Take a mend out by putting something in its place."""
    return lambda: setattr(owner, name, value)


def sums_own_parts() -> None:
    for module in (own_loops, mixed):
        module.reduce_to_whole_number = lambda tensor: tensor.to_local()


def reduces_over_the_world() -> None:
    def reduce(tensor, reduction="mean", scale=1.0):
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    accelerate.utils.reduce = reduce


def makes_logits_without_a_graph() -> None:
    def plain(self):
        if self.made is None:
            self.made = self.source.plain()
        return self.made

    LazyLogits.plain = plain


def leaves_replicas_apart() -> None:
    """At the limit of a user's run: the tests' own reduces by layer."""
    zero.BUCKET = 25 * 2**20
    PipelineServices.reduce_stages = property(lambda self: lambda: None, lambda self, value: None)


def embeds_nothing() -> None:
    forward = StandIn.forward

    def embed(self, *args, **kwargs):
        return (AddsNothing.forward if isinstance(self, nn.Embedding) else forward)(self, *args, **kwargs)

    StandIn.forward = embed


def forget_counted_labels(batches: list) -> list:
    """Count the labels that are left in joined batches."""
    joining.with_counted_labels(batches)
    return batches


def joins_what_cannot_be() -> None:
    joining.find_reason_not_joined = joining.find_reason_for_other_numbers = lambda _: None


MENDS = [
    Mend("reduce_over_data_ranks", "reduced", "tp=2", reduces_over_the_world),
    Mend(
        "tokens_of_all_ranks",
        "plain",
        "dp_shard=2",
        setting(training, "_count_all_targets", lambda args: None),
        ("--average_tokens_across_devices=false",),
    ),
    Mend(
        "split_batches_in_evaluation",
        "plain",
        "dp_shard=2",
        setting(evaluation, "replacing", lambda *_, **__: torch.no_grad()),
        ('--accelerator_config={"split_batches": true}',),
    ),
    Mend(
        "joined_rows_of_a_model_that_cannot_tell",
        "opt",
        "dp_shard=2,padding_free=true",
        setting(joining, "find_reason_for_other_numbers", lambda trainer: None),
    ),
    Mend(
        "joined_rows_of_a_mean_over_examples",
        "examples",
        "dp_shard=2,padding_free=true",
        setting(joining, "find_reason_for_other_numbers", lambda trainer: None),
    ),
    Mend(
        "first_labels_that_trainer_counts",
        "gpt2",
        "dp_shard=2,padding_free=true",
        setting(refused_batches, "with_counted_labels", forget_counted_labels),
    ),
    Mend("positions_that_go_on", "positions", "dp_shard=2,padding_free=true", joins_what_cannot_be),
    Mend("masks_with_a_hole", "hole", "dp_shard=2,padding_free=true", joins_what_cannot_be),
    Mend(
        "labels_at_hidden_tokens",
        "hidden",
        "cp=2",
        setting(known_masks, "_check_mask_of_call", lambda *_: None),
    ),
    Mend("logits_read_without_a_graph", "hook", "dp_replicate=2,pp=2,lean_loss=true", makes_logits_without_a_graph),
    Mend("replicas_of_the_last_stage", "own", "dp_replicate=2,pp=2", leaves_replicas_apart),
    Mend(
        "documents_that_see_each_other", "packed", "cp=2", setting(context, "_can_tell_packs_apart", lambda *_: True)
    ),
    Mend(
        "sums_of_weights",
        "sums",
        "tp=2",
        sums_own_parts,
    ),
    Mend("a_module_of_another_stage", "embedding", "pp=2", embeds_nothing),
    Mend("sums_of_ctc_over_data_ranks", "ctc", "dp_shard=2", setting(means, "SUMMED", frozenset())),
    Mend(
        "noise_of_whole_examples",
        "plain",
        "cp=2",
        setting(transformers, "get_held_tokens", lambda: None),
        ("--neftune_noise_alpha=20",),
    ),
    Mend(
        "numbers_for_a_head_after_computed_weights",
        "head",
        "dp_shard=2",
        setting(zero, "_name_as_before", lambda kind: setattr(kind, "__name__", kind.__name__.removeprefix("FSDP"))),
    ),
]


@pytest.mark.parametrize("mend", MENDS, ids=lambda mend: mend.name)
def test_found(mend, tmp_path, monkeypatch):
    """The layout with its mend is proved or refused by name; without it, it differs."""
    if mend.kind == "head":
        monkeypatch.setenv("BASE", str(tmp_path / "base"))
        run_alone(save_base, str(tmp_path / "base"))
    config = ParallelConfig.parse(mend.spec).resolve(axes(mend.spec)["world"])
    proof = Proof(tmp_path, config, Script(str(SCRIPT), [mend.kind, *ARGUMENTS, *mend.more]), limit_s=200)
    with redirect_stderr(io.StringIO()):
        verdict = proof.judge(proof.run_layout(lambda rank: mend.take_out()))
        try:
            mended = proof.judge(proof.run_layout()).compared.differences
        except NotProvedError as error:
            mended = [] if error.refused else [error]
    assert verdict.compared.differences, verdict.told(mend.spec, 0)
    assert mended == []


@pytest.mark.parametrize(("spec", "is_off"), [("dp_shard=2", True), ("tp=2,padding_free=true", True), ("pp=2", False)])
def test_noise(spec, is_off, tmp_path):
    """Data ranks draw for their own examples, joined rows for no padding: then it is off, and a note says so."""
    config = ParallelConfig.parse(spec).resolve(2)
    script = Script(str(SCRIPT), ["plain", *ARGUMENTS, "--neftune_noise_alpha=20"])
    proof = Proof(tmp_path, config, script, limit_s=200)
    with redirect_stderr(io.StringIO()):
        verdict = proof.judge(proof.run_layout())
    told = verdict.told(spec, 0)
    assert verdict.compared.differences == [], told
    assert ("NEFTune is off" in told) is is_off
