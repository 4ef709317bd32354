"""The planner's tests count bytes of models whose vocabulary the ranks share evenly."""

import pytest

from tests import models, training


@pytest.fixture(autouse=True)
def even_vocabulary(monkeypatch):
    """Padded shards of an uneven vocabulary are not among a dry run's weights."""
    monkeypatch.setitem(models.DECODER, "vocab_size", 256)
    monkeypatch.setattr(models, "VOCABULARY", 256)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Apart from those of other tests, whose models have an uneven vocabulary."""
    return training.Runs(tmp_path_factory.mktemp("planner"))
