"""Masks of a batch whose parts run: what transformers would ask the device is answered for the whole batch."""

from unittest import mock

import pytest
import torch
from transformers import BertForQuestionAnswering, masking_utils

from hf_parallel.hooks import model_parts
from hf_parallel.model.known_masks import is_hiding_nothing, refuse_masked_targets, share_known_mask
from tests import models
from tests.refusals import pattern_of_refusal

TOKENS = torch.zeros(4, 7, dtype=torch.long)
FULL = torch.ones(4, 7, dtype=torch.long)
PADDED = FULL.index_fill(1, torch.tensor([6]), 0)


def asked(batch, mask):
    """Whether transformers may leave a part's mask out, and whether it has looked at the mask."""
    length, looked = mask.shape[1], mock.Mock(side_effect=masking_utils.fast_all)
    with mock.patch.object(masking_utils, "fast_all", looked), share_known_mask(batch, TOKENS):
        left_out = model_parts.ignore_causal_mask(masking_utils._ignore_causal_mask_sdpa, mask, length, length, 0, 0)
        return left_out, looked.called


@pytest.mark.parametrize(("mask", "left_out"), [(FULL, True), (PADDED, False)], ids=["full", "padded"])
def test_parts_are_not_looked_at(mask, left_out):
    assert asked({"attention_mask": mask}, mask[:2].bool()) == (left_out, False)


def test_a_padded_mask():
    """Sequence parallelism pads rows at their end: causal attention sees nothing there, any other has to look."""
    longer = torch.nn.functional.pad(FULL, (0, 1)).bool()
    assert asked({"attention_mask": FULL}, longer) == (True, False)
    with share_known_mask({"attention_mask": FULL}, TOKENS):
        assert not is_hiding_nothing(longer)
        assert is_hiding_nothing(FULL[:1])
    assert not is_hiding_nothing(PADDED)


@pytest.mark.parametrize("given", [False, True])
def test_positions_start_again_only_where_the_batch_has_some(given):
    """A model without them counts from zero."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    with share_known_mask({"position_ids": positions} if given else {}, TOKENS):
        found = model_parts.find_packs(masking_utils.find_packed_sequence_indices, positions)
    assert (found is not None) == given


ALONG, AGAIN = torch.arange(7).expand(4, 7), torch.tensor([[0, 1, 2, 0, 1, 2, 3], *[range(7)] * 3])


@pytest.mark.parametrize(("positions", "looks"), [(ALONG, 0), (AGAIN, 0), (AGAIN[:, :6], 2)])
def test_positions_of_parts_are_not_looked_at(positions, looks):
    """A part without packs is numbered where another one has some; a padded part has to be looked at."""
    ask = mock.Mock(side_effect=masking_utils.find_packed_sequence_indices)
    with share_known_mask({"position_ids": positions}, TOKENS):
        found = [model_parts.find_packs(ask, part) for part in positions.split(2)]
    assert ask.call_count == looks
    if positions is ALONG:
        assert found == [None, None]
    else:
        assert found[0].tolist() == [[0, 0, 0, 1, 1, 1, 1][: positions.shape[1]], [0] * positions.shape[1]]
        assert (found[1] is None) == (looks > 0)
        assert looks > 0 or not found[1].any()


@pytest.mark.parametrize("used", ["cp", "torch_flash"])
def test_spans_are_predicted_at_padding(used):
    """Kernels that leave padding out would give others than one process's: refused, but not where there is none."""
    model = BertForQuestionAnswering(models.bert(num_labels=2))
    refuse_masked_targets(model, "sdpa", used, "cp_size=2", "cp_size=1", shifts=False)
    spans = {"start_positions": torch.tensor([1, 2, 3, 1]), "end_positions": torch.tensor([2, 2, 4, 5])}
    assert model(TOKENS, attention_mask=FULL, **spans).loss.isfinite()
    assert model(TOKENS, attention_mask=PADDED).start_logits.shape == TOKENS.shape
    with pytest.raises(ValueError, match=pattern_of_refusal("cp_size=2", works="cp_size=1")):
        model(TOKENS, attention_mask=PADDED, **spans)
