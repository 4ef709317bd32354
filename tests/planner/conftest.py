"""The planner's tests count bytes of models whose vocabulary the ranks share evenly."""

import pytest

from tests import models


@pytest.fixture(autouse=True)
def even_vocabulary(monkeypatch):
    """Padded shards of an uneven vocabulary are not among a dry run's weights."""
    monkeypatch.setitem(models.DECODER, "vocab_size", 256)
    monkeypatch.setattr(models, "VOCABULARY", 256)
