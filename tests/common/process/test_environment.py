"""Environment variables after a block; a Session leaves those of the process as they were."""

import os

from allstep.common.process.environment import restored_environment


def test_it_is_as_before_after_an_error(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.delenv("ADDED", raising=False)
    before = dict(os.environ)
    try:
        with restored_environment():
            os.environ.update(KEPT="2", ADDED="3")
            del os.environ["PATH"]
            raise KeyError
    except KeyError:
        pass
    assert dict(os.environ) == before
