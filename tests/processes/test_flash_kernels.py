"""Flash kernels over a ring of ranks give the numbers of one process."""

import dataclasses

import pytest

from hf_parallel.axes.context.flash import PACKAGES
from tests.distributed import run
from tests.flash_kernels import standing_in
from tests.processes import test_context_attention as whole


def gaps(kernel, variants, width):
    """The largest difference to a matrix of scores, in outputs and gradients, by case."""
    whole.WIDTH, found = width, {}
    with standing_in():
        for variant in variants:
            shape, exchanged = whole.groups(variant)
            exchanged = dataclasses.replace(exchanged, kernel=kernel)
            for cap in (None, whole.CAP) if kernel in PACKAGES else (None,):
                found |= {(variant, cap, case): whole.gap(case, shape, exchanged, cap) for case in whole.CASES}
    return found


@pytest.mark.parametrize("kernel", ["auto", "flash_attention_2", "flash_attention_3"])
@pytest.mark.parametrize(
    ("ranks", "variants", "width"), [(2, ("ring", "ulysses"), 12), (3, ("ring",), 8), (4, ("allgather", "hybrid"), 8)]
)
def test_same_as_one_process(kernel, ranks, variants, width):
    """Windows in documents shorter and longer than they are, sinks, caps, padding; heads of a width that is padded."""
    for rank in run(gaps, ranks, kernel, variants, width):
        wrong = {case: size for case, size in rank.items() if not size < 2e-6}  # sums of 33 numbers of size 1, fp32
        assert not wrong
