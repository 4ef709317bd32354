"""Models that need all heads of an attention at once, of which tp ranks have a part, are refused by name."""

from transformers import AlbertConfig, AlbertForMaskedLM, EomtConfig, EomtForUniversalSegmentation

from hf_parallel.axes.tensor.axis import read_split


def test_masks_of_all_heads_are_refused():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 16}
    model = EomtForUniversalSegmentation(EomtConfig(**sizes, num_blocks=1, num_queries=4))
    assert "masks all heads at once" in read_split(model).refusal


def test_a_refusal_names_the_model_once():
    config = AlbertConfig(
        hidden_size=32, embedding_size=16, num_attention_heads=2, intermediate_size=64, vocab_size=99
    )
    assert read_split(AlbertForMaskedLM(config)).refusal.count("AlbertForMaskedLM") == 1
