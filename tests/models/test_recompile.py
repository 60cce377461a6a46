"""A training step that is compiled a second time says for which shapes."""

import numpy as np
import pytest
import tensorflow as tf
import tiny

from vit_tpu import optim
from vit_tpu.errors import UserError
from vit_tpu.models import accept


@pytest.fixture
def told(monkeypatch):
    lines = []
    monkeypatch.setattr(accept.logging, "warning", lambda text, *values: lines.append(text % values))
    return lines


def model():
    made = tiny.Scalar()
    made.compile(optim.SGD(1.0), tiny.Given(), metrics=())
    return made


def test_one_shape_is_compiled_once_in_silence(told):
    trained = model()
    for _ in range(2):
        trained.fit(tiny.scalar_data(np.ones(8), 4), verbose=0)
    assert trained.compilations() == 1 and told == []


def test_another_type_is_named_with_the_one_before(told):
    trained = model()
    trained.fit(tiny.scalar_data(np.ones(8), 4), verbose=0)
    images, labels = np.ones((8, 1), np.float32), np.ones(8, np.int32)
    trained.fit(tiny.batches(images, labels, batch=4), verbose=0)
    assert trained.compilations() == 2
    (line,) = told
    assert "for images float32 (4, 1), labels int32 (4,) after images float32 (4, 1), labels float32 (4,)" in line


def test_another_batch_size_is_named_and_refused(told):
    trained = model()
    trained.fit(tiny.scalar_data(np.ones(8), 4), verbose=0)
    with pytest.raises(UserError, match="not static"):
        trained.fit(tiny.scalar_data(np.ones(8), 2), verbose=0)
    assert "after images float32 (4, 1)" in told[0]


def test_shape_that_was_compiled_for_before_the_last_one_is_no_news(told):
    seen: tuple[str, ...] = ()
    with tf.Graph().as_default():
        for batch in (4, 2, 4):
            seen = accept.note_trace(seen, tf.zeros([batch, 1]), tf.zeros([batch]))
    assert len(seen) == 2 and len(told) == 1
