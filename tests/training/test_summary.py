"""The last lines of a run say what its numbers do not."""

import dataclasses
import math

from vit_tpu.training import summary


def made(**changes):
    fields = {field.name: None for field in dataclasses.fields(summary.Summary)}
    known = {
        **fields, "status": "done", "workdir": "runs/x", "steps": 40, "applied_updates": 40, "skipped_updates": 0,
        "validation": {}, "best": {}, "seconds": 1.0, "peak_host_bytes": 2**30, "compilations": 1, "rollbacks": 0,
        "unreadable": {},
    }  # fmt: skip
    return summary.ending(summary.Summary(**{**known, **changes}))


def test_a_run_that_skipped_most_updates_is_warned_of():
    text = made(applied_updates=3, skipped_updates=37)
    assert "37 of 40 updates were skipped" in text and "lower the learning rate" in text
    assert "warning" not in made(applied_updates=38, skipped_updates=2)


def test_unreadable_records_are_named_up_to_twenty():
    text = made(unreadable={f"file{i}.jpg": "truncated" for i in range(25)})
    assert "file19.jpg (truncated)" in text and "file20.jpg" not in text and "and 5 more" in text


def test_a_finished_run_whose_loss_was_not_finite_is_told_again():
    known = {"status": "done", "validation": {"accuracy": 0.1, "loss": None, "count": 3}, "mfu": None, "later": 1}
    fields = {field.name: None for field in dataclasses.fields(summary.Summary)}
    found = summary.read({**fields, **known})
    assert math.isnan(found.validation["loss"]) and found.mfu is None and found.best == {}
