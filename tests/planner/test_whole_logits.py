"""`--parallel auto` of scripts that read whole logits: room is left for them, and a line says why."""

import sys
from types import SimpleNamespace

import pytest
from transformers import Trainer

from hf_parallel.ask.session import of_session
from hf_parallel.hooks import auto, logits_read
from hf_parallel.planner import detect as detection
from hf_parallel.planner import make_cluster
from hf_parallel.planner.search import search
from tests import models
from tests.distributed import run
from tests.training import OwnTrainer, arguments_of, own_loss

SMOOTHED, PLAIN = SimpleNamespace(label_smoothing_factor=0.1), SimpleNamespace(label_smoothing_factor=0.0)


def data_alone(config):
    return config.tp_size == config.pp_size == config.cp_size == 1


def best(**changes):
    """For 1 B parameters and 4 x 4,096 tokens of a vocabulary of 128,256, among layouts that share out data alone."""
    shape = {**models.LLAMA_8B, "layers": 16, "hidden": 2048, "heads": 32, "ffn_hidden": 8192}
    given = {"seq": 4096, "global_batch": None, "precision": "mixed", "rows": 4, **changes}
    return search(model=shape, cluster=make_cluster("l40s-48gb", 4), top=1, accept=data_alone, **given).best


def test_the_plan_leaves_room_for_them():
    """12 bytes per token and word of the vocabulary are 23 GiB, half of a GPU."""
    chunks, whole = best(), best(whole_logits=True)
    saves = ("none", "selective", "full")
    assert chunks.prediction.job.lean_loss
    assert not whole.prediction.job.lean_loss
    assert saves.index(whole.config.activation_checkpointing) > saves.index(chunks.config.activation_checkpointing)
    assert whole.prediction.fits


class Plain(Trainer):
    """A subclass that leaves the loss alone."""


@pytest.mark.parametrize(
    ("kind", "given", "arguments", "reader"),
    [
        (Trainer, {}, PLAIN, None),
        (Plain, {}, None, None),
        (Trainer, {"compute_loss_func": own_loss}, PLAIN, "compute_loss_func computes the loss"),
        (Trainer, {}, SMOOTHED, "label_smoothing_factor reads them"),
        (OwnTrainer, {}, PLAIN, "OwnTrainer computes the loss"),
    ],
)
def test_who_reads_them(kind, given, arguments, reader):
    assert logits_read.find_trainer_reader(kind, given, arguments) == reader


def test_trl_keeps_none_where_it_has_a_fused_head():
    trl = pytest.importorskip("trl")
    assert logits_read.find_trainer_reader(trl.SFTTrainer, {}, PLAIN) is None
    assert logits_read.find_trainer_reader(trl.RewardTrainer, {}, PLAIN) == "RewardTrainer computes the loss"


@pytest.mark.parametrize(
    ("names", "reader"),
    [
        ({"Trainer": Trainer}, None),
        ({"Trainer": Trainer, "Mine": type("Mine", (OwnTrainer,), {"__module__": "__main__"})}, "Mine computes"),
        ({"Trainer": Trainer, "Accelerator": type("Accelerator", (), {})}, None),
        ({"Accelerator": type("Accelerator", (), {})}, "a loop of the script's own"),
        ({}, None),
    ],
)
def test_what_a_script_shows_before_its_trainer(monkeypatch, names, reader):
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(**names))
    found = logits_read.find_script_reader(PLAIN)
    assert found is reader is None or found.startswith(reader)


def said(out: str) -> list[str]:
    """The first reason of a choice, with a reader and without."""
    detection.detect = lambda *args: make_cluster("l40s-48gb", 2)
    of_session(auto._Shown).arguments = arguments_of(out)
    auto.make_acceptance_test = lambda config, pack: lambda layout: layout.data_parallel_size == 2
    return [
        auto._find_best(auto.Shown(models.llama(), reader=reader), devices=[]).reasons[0]
        for reader in ("OwnTrainer computes the loss", None)
    ]


def test_the_report_says_so(tmp_path):
    """A model too small for it to matter: what is counted is said all the same."""
    read, unread = run(said, 2, str(tmp_path))[0]
    assert read.endswith("whole logits (OwnTrainer computes the loss)")
    assert "whole logits" not in unread
