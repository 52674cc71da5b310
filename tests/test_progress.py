import logging

from disco_jax import progress
from disco_jax.progress import Progress


def test_where_there_is_no_terminal_the_log_tells_now_and_then(monkeypatch, caplog):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with caplog.at_level(logging.INFO, logger="absl"), Progress("images encoded", 10, done=2) as counter:
        counter.update(1)
        now = 11.0
        counter.update(4)
        counter.update(1)
        now = 22.0
        counter.update(4)  # some of it padding
    assert [record.getMessage() for record in caplog.records] == ["7 of 10 images encoded", "10 of 10 images encoded"]
