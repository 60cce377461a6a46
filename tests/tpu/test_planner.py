"""The search for the largest batch, and what is refused before anything is compiled."""

import dataclasses
import types

import pytest

from vit_tpu import settings
from vit_tpu.errors import UserError
from vit_tpu.tpu import planner, search, topologies

V3 = topologies.chip("v3")


class FakeJob:
    """Stands for a compiler for which `batch` images need fixed + batch * each bytes."""

    def __init__(self, fixed, each, accumulation_steps=1, chip=V3):
        self.fixed, self.each, self.chip = fixed, each, chip
        training = dataclasses.replace(settings.Config().training, accumulation_steps=accumulation_steps)
        self.config = dataclasses.replace(settings.Config(), training=training)
        self.compiled = []

    def plan(self, batch):
        self.compiled.append(batch)
        total = self.fixed + batch * self.each
        return types.SimpleNamespace(memory=types.SimpleNamespace(total=total, fits=total <= self.chip.hbm_bytes))


def true_limit(job):
    return (job.chip.hbm_bytes - job.fixed) // job.each


@pytest.mark.parametrize("fixed, each", [(10 * 2**30, 2**27), (2**30, 2**30), (14 * 2**30, 30 * 2**20), (0, 2**28)])
def test_largest_batch_is_exact_below_128(fixed, each):
    job = FakeJob(fixed, each)
    assert search.largest_batch(job) == true_limit(job) < 128


def test_largest_batch_above_128_fits_and_is_within_a_64th():
    job = FakeJob(2**30, 10 * 2**20)
    found, limit = search.largest_batch(job), true_limit(job)
    assert limit * 63 / 64 - 1 <= found <= limit


def test_search_compiles_few_programs():
    job = FakeJob(10 * 2**30, 100 * 2**20)
    search.largest_batch(job)
    assert len(job.compiled) <= 8, job.compiled


def test_nothing_fits_gives_zero():
    assert search.largest_batch(FakeJob(16 * 2**30, 2**20)) == 0


def test_batch_is_a_multiple_of_the_micro_batches():
    job = FakeJob(10 * 2**30, 100 * 2**20, accumulation_steps=4)
    found = search.largest_batch(job)
    assert found == true_limit(job) // 4 * 4 and all(batch % 4 == 0 for batch in job.compiled)


def test_chip_without_a_stated_limit_cannot_be_searched():
    with pytest.raises(UserError, match="never said how much memory a v5p core has"):
        search.largest_batch(FakeJob(0, 1, chip=topologies.chip("v5p")))


@pytest.mark.parametrize("batch", ["0", "-3", "many", "1000000"])
def test_impossible_batches_are_refused(batch):
    with pytest.raises(UserError, match=f'batch_per_core is "{batch}": give a number from 1'):
        planner.make_plan(settings.Config(), batch_per_core=batch)


def test_batch_that_does_not_divide_by_the_cores_is_refused():
    with pytest.raises(UserError, match="64 does not divide by 3 cores"):
        planner.make_plan(settings.Config(), cores=3)


def test_unknown_chip_is_refused_before_anything_starts():
    with pytest.raises(UserError, match='chip "v9"'):
        planner.make_plan(settings.Config(), chip="v9")
