"""Models whose loss or mask is of all heads of an attention, which tp ranks would have a part of: refused by name."""

import pytest
import torch
from transformers import (
    EomtConfig,
    EomtForUniversalSegmentation,
    SpeechT5Config,
    SpeechT5ForSpeechToText,
    SpeechT5ForTextToSpeech,
)

from hf_parallel.axes.tensor.read import read_split

TINY = {"vocab_size": 20, "hidden_size": 32, "encoder_layers": 1, "decoder_layers": 1}
GUIDED, NOT_GUIDED = (SpeechT5Config(**TINY, use_guided_attention_loss=guided) for guided in (True, False))


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        (SpeechT5ForTextToSpeech, GUIDED, "use_guided_attention_loss=True"),
        (SpeechT5ForTextToSpeech, NOT_GUIDED, None),
        (SpeechT5ForSpeechToText, GUIDED, None),
        (EomtForUniversalSegmentation, EomtConfig(hidden_size=32, num_hidden_layers=2), "masks all heads at once"),
    ],
)
def test_refused_where_ranks_would_have_other_losses(kind, config, reason):
    with torch.device("meta"):
        refusal = read_split(kind(config)).refusal
    assert reason is None or reason in refusal
    assert reason is not None or "use_guided" not in (refusal or "")
