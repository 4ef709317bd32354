"""A small part of `python -m tests.sweep_losses`: one class of some kinds of losses on data and tp ranks."""

import pytest

from tests import sweep_losses

#: Kind of loss -> a class that is small and quick.
CLASSES = {
    "ctc": "Wav2Vec2BertForCTC",
    "detection": "YolosForObjectDetection",
    "segments": "MaskFormerForInstanceSegmentation",
    "semantic": "SegformerForSemanticSegmentation",
    "spoken": "SpeechT5ForTextToSpeech",
    "answer": "BertForQuestionAnswering",
    "several classes": "BertForSequenceClassification",
}


@pytest.mark.parametrize("kind", CLASSES)
def test_a_loss_of_this_kind_is_that_of_one_process(kind):
    """Or refused at the start, in words."""
    found = sweep_losses.classes([kind], [])
    cls, config_class = next((cls, kind_of) for _, _, cls, kind_of in found if cls.__name__ == CLASSES[kind])
    outcome = sweep_losses.outcome_of(kind, cls, config_class)
    assert {case["class"] for case in outcome["cases"].values()} <= {"ok", "refused"}, outcome
