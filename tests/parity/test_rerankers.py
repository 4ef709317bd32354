"""Cross-encoders of sentence-transformers whose losses take a mean over documents or over pairs of them.

Queries have one to three documents, so that data ranks have unlike numbers and would call the model unlike numbers of
times.
"""

import pytest
import torch

pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")

from datasets import Dataset
from sentence_transformers import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder import losses

from tests.distributed import RankFailure, run
from tests.parity.test_sentence_transformers import ROWS, sentences, write_encoder
from tests.training import activate, arguments_of, fit, trainer_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An encoder to start from."""
    return write_encoder(str(tmp_path_factory.mktemp("pairs") / "bert"))


def train(spec, out, folder, loss):
    """Two steps on lists of documents, or on pairs."""
    data_ranks = activate(spec)
    torch.manual_seed(3)
    model = CrossEncoder(folder, num_labels=1)
    first, second, third = (sentences(start) for start in (0, 3, 5))
    counts = [3 - row // 4 % 3 for row in range(ROWS)]
    lists = [list(texts)[:count] for *texts, count in zip(first, second, third, counts, strict=True)]
    columns = {"query": second, "docs": lists, "labels": [[1.0, 0.0, 0.5][:count] for count in counts]}
    if loss == "MultipleNegativesRankingLoss":
        columns = {"query": first, "document": second}
    rows = Dataset.from_dict(columns)
    settings = {"learning_rate": 5e-2, "max_steps": 2, "dataloader_drop_last": True}
    arguments = arguments_of(out, data_ranks, CrossEncoderTrainingArguments, **settings)
    sets = {"train_dataset": rows, "eval_dataset": rows.select(range(11))}
    options = {**sets, "loss": getattr(losses, loss)(model)}
    return fit(*trainer_of(model, out, settings=arguments, kind=CrossEncoderTrainer, **options), f"{out}/saved")


@pytest.mark.parametrize(
    ("spec", "loss"),
    [
        *(("dp_shard=2", "RankNetLoss"), ("dp_shard=2", "LambdaLoss"), ("dp_shard=2", "ADRMSELoss")),
        ("dp_shard=2", "ListNetLoss"),
    ],
)
def test_as_in_one_process(runs, folder, spec, loss):
    runs.compare(train, spec, folder, loss)


def test_drawn_negatives_are_refused(folder, tmp_path):
    with pytest.raises(RankFailure, match=r"MultipleNegativesRankingLoss: .* 2 data ranks .*LambdaLoss"):
        run(train, 2, "dp_shard=2", str(tmp_path), folder, "MultipleNegativesRankingLoss", init=False)
