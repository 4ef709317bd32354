"""What a model hands to its loss is seen by running its forward on stand-ins."""

import pytest
import transformers
from torch import nn

from hf_parallel.model.calls import find_keywords_of_loss
from tests import models


class PassesOn(transformers.LlamaForCausalLM):
    """A head of a script, which does to its logits what stand-ins must take."""

    def forward(self, input_ids, labels=None, **kwargs):
        hidden = self.model(input_ids, **kwargs).last_hidden_state
        logits = nn.functional.gelu(self.lm_head(hidden[:, -3:, :])) / 2 - hidden.float().mean()
        return self.loss_function(logits, labels, self.config.vocab_size, **kwargs)


class KeepsBack(PassesOn):
    def forward(self, input_ids, labels=None, **kwargs):
        return self.loss_function(self.lm_head(self.model(input_ids)[0]), labels, self.config.vocab_size)


class DoesNotEnd(PassesOn):
    def forward(self, input_ids, labels=None, **kwargs):
        while not self.model(input_ids).done:
            pass
        return self.loss_function(input_ids, labels, **kwargs)


class CannotBeRehearsed(PassesOn):
    def forward(self, input_ids, labels=None, **kwargs):
        rows, length = input_ids.shape
        return self.loss_function(rows, labels, length, **kwargs)


@pytest.mark.parametrize(
    ("kind", "reads"),
    [(transformers.LlamaForCausalLM, True), (PassesOn, True), (KeepsBack, False)]
    + [(DoesNotEnd, False), (CannotBeRehearsed, False), (transformers.LlamaForTokenClassification, False)],
)
def test_does_the_model_hand_the_count_to_its_loss(kind, reads):
    """Where nothing can be seen of it, it counts as one that does not."""
    found = find_keywords_of_loss(kind(models.llama()), num_items_in_batch=1)
    assert ("num_items_in_batch" in found) is reads


def test_the_model_is_not_changed():
    """Heads of BERT's kind write into their config what their loss is."""
    model = transformers.BertForSequenceClassification(models.bert(num_labels=3))
    assert "num_items_in_batch" not in find_keywords_of_loss(model, num_items_in_batch=1)
    assert model.config.problem_type is None
