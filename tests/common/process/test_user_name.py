"""Users without a name. Oracle: getpass.getuser, by which libraries name their caches."""

from __future__ import annotations

import getpass
import os

from allstep.common.process.environment import name_user


def test_a_user_without_a_name_gets_one(monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987654)
    name_user()
    assert getpass.getuser() == os.environ.pop("LOGNAME") == "user-987654"


def test_a_name_stays():
    for environ in ({"USER": "ada"}, {}):  # the user id of the tests has a name
        before = dict(environ)
        name_user(environ)
        assert environ == before
