"""A small part of `python -m tests.sweep_losses`: one class of some kinds of losses on data and tp ranks."""

import pytest
from transformers import ChineseCLIPModel, CLIPModel

from tests import sweep_losses

#: Kinds of losses and a class that is small and quick, or was not right once.
CLASSES = [
    ("ctc", "Wav2Vec2BertForCTC"),
    ("ctc", "ParakeetForCTC"),  # adds a vector per head to its queries
    ("detection", "YolosForObjectDetection"),
    ("segments", "MaskFormerForInstanceSegmentation"),
    ("semantic", "SegformerForSemanticSegmentation"),
    ("spoken", "SpeechT5ForTextToSpeech"),
    ("answer", "BertForQuestionAnswering"),
    ("answer", "DebertaV2ForQuestionAnswering"),  # logits of padding count, which sees the whole row
    ("sequence", "DebertaV2ForSequenceClassification"),  # no loss where all labels are -100
    ("sound", "Wav2Vec2ForXVector"),  # knows no -100
    ("several classes", "BertForSequenceClassification"),
    ("masked", "SqueezeBertForMaskedLM"),  # calls `layer.forward(…)`
    ("seq2seq", "MBartForConditionalGeneration"),  # looks for the last label of each row
    ("seq2seq", "SwitchTransformersForConditionalGeneration"),  # data ranks choose unlike experts of a list
]


@pytest.mark.parametrize(("kind", "name"), CLASSES)
def test_a_loss_of_this_kind_is_that_of_one_process(kind, name):
    """Or refused at the start, in words."""
    found = sweep_losses.classes([kind], [])
    cls, config_class = next((cls, kind_of) for _, _, cls, kind_of in found if cls.__name__ == name)
    outcome = sweep_losses.outcome_of(kind, cls, config_class)
    assert {case["class"] for case in outcome["cases"].values()} <= {"ok", "refused"}, outcome
    assert {case["class"] for case in outcome["cases"].values()} != {"refused"} or kind == "spoken", outcome


@pytest.mark.parametrize(("model", "on_data_ranks"), [(CLIPModel, "ok"), (ChineseCLIPModel, "refused")])
def test_a_loss_that_compares_rows_is_that_of_all_data_ranks(model, on_data_ranks):
    """Or refused, where it is not known what to gather: one process has more rows to tell apart, and another loss."""
    cls, config_class = next((c, kind) for _, _, c, kind in sweep_losses.classes(["pairs"], []) if c is model)
    cases = sweep_losses.outcome_of("pairs", cls, config_class)["cases"]
    assert [cases[spec]["class"] for spec in sweep_losses.SPECS] == [on_data_ranks, "ok"]
    assert cases["dp_shard=2"]["text"].endswith("dp_shard_size=1 works" if on_data_ranks == "refused" else "")
