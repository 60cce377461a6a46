"""The search for the largest batch, and what is refused before anything is compiled."""

import types

import pytest

from vit_tpu import settings
from vit_tpu.errors import UserError
from vit_tpu.tpu import planner, search, topologies

V3 = topologies.chip("v3")


class Fake:
    """Stands for a compiler for which `batch` images need fixed + batch * each bytes."""

    def __init__(self, fixed, each):
        self.fixed, self.each, self.compiled = fixed, each, []

    def memory(self, batch):
        self.compiled.append(batch)
        total = self.fixed + batch * self.each
        return types.SimpleNamespace(total=total, fits=total <= V3.hbm_bytes)

    def largest(self, unit=1):
        return search.largest_batch(self.memory, V3.hbm_bytes, unit)

    @property
    def limit(self):
        return (V3.hbm_bytes - self.fixed) // self.each


@pytest.mark.parametrize("fixed, each", [(10 * 2**30, 2**27), (2**30, 2**30), (14 * 2**30, 30 * 2**20), (0, 2**28)])
def test_largest_batch_is_exact_below_128(fixed, each):
    fake = Fake(fixed, each)
    assert fake.largest() == fake.limit < 128


def test_largest_batch_above_128_fits_and_is_within_a_64th():
    fake = Fake(2**30, 10 * 2**20)
    assert fake.limit * 63 / 64 - 1 <= fake.largest() <= fake.limit


def test_search_compiles_few_programs():
    fake = Fake(10 * 2**30, 100 * 2**20)
    fake.largest()
    assert len(fake.compiled) <= 8, fake.compiled


def test_nothing_fits_gives_zero():
    assert Fake(16 * 2**30, 2**20).largest() == 0


def test_batch_is_a_multiple_of_the_micro_batches():
    fake = Fake(10 * 2**30, 100 * 2**20)
    assert fake.largest(4) == fake.limit // 4 * 4 and all(batch % 4 == 0 for batch in fake.compiled)


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


def test_more_cores_than_the_slice_has_are_refused_before_anything_is_traced(monkeypatch):
    monkeypatch.setattr(planner, "Tracer", None)
    with pytest.raises(UserError, match="9 cores asked for: plans are for one v3:2x2 slice, which has 8"):
        planner.make_plan(settings.Config(), cores=9, batch_per_core=1)
