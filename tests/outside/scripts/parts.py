"""What the scripts of this folder share, as example scripts share a file beside them."""

import numpy
import torch


def blocks_of(size):
    """A function for `Dataset.map`: join all texts, cut them into blocks of `size` tokens, drop the rest."""

    def cut(examples):
        joined = {key: sum(lists, []) for key, lists in examples.items()}
        end = len(joined["input_ids"]) // size * size
        return {key: [tokens[at : at + size] for at in range(0, end, size)] for key, tokens in joined.items()}

    return cut


class Accuracy:
    """A metric that is fed batch by batch and computed once, as those of `evaluate` are."""

    def __init__(self):
        self.predictions, self.references = [], []

    def add_batch(self, predictions, references):
        self.predictions.append(numpy.asarray(torch.as_tensor(predictions).cpu()))
        self.references.append(numpy.asarray(torch.as_tensor(references).cpu()))

    def compute(self, predictions=None, references=None):
        if predictions is None:
            predictions, references = numpy.concatenate(self.predictions), numpy.concatenate(self.references)
        self.__init__()
        right = numpy.asarray(predictions) == numpy.asarray(references)
        return {"accuracy": float(right.mean()), "rows": len(right)}
