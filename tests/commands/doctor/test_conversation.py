"""Answers of a host that are malformed. Oracle: the lines that a fake ssh prints."""

from __future__ import annotations

import json
import socket
import sys

import pytest

from allstep.commands.doctor.agent import MARK, Address, Connected, Hello, Question
from allstep.commands.doctor.conversation import Agent, NoAnswer, is_this_host

pytestmark = pytest.mark.launch

HELLO = MARK + json.dumps({"unix_time": 1.5, "port": 4711})


@pytest.fixture
def answering(tmp_path, monkeypatch):
    """Return a function that installs a fake ssh, which prints lines and ends with a status at the end of its input."""

    def install(*lines: str, status: int = 0) -> Agent:
        program = f"#!{sys.executable}\nimport sys\nprint({chr(10).join(lines)!r}, flush=True)\nsys.stdin.read()\n"
        (tmp_path / "ssh").write_text(f"{program}sys.exit({status})\n")
        (tmp_path / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return Agent("server9", [], is_here=False)

    return install


def test_what_a_shell_prints_before_does_no_harm(answering):
    agent = answering("Welcome!", "allstep is not here", HELLO)
    assert agent.ask(Question("hello"), Hello) == Hello(1.5, 4711)
    agent.end()


@pytest.mark.parametrize(
    "line",
    [
        MARK,
        f"{MARK}{{",
        f"{MARK}{'[' * 40}{']' * 40}",
        f'{MARK}{{"unix_time": NaN, "port": 1}}',
        f'{MARK}{{"unix_time": 1, "port": 1, "port": 2}}',
        f'{MARK}{{"unix_time": "now", "port": 1}}',
        f'{MARK}{{"port": 1}}',
        f"{MARK}[]",
    ],
)
def test_other_answers_are_a_finding(line, answering):
    agent = answering(line)
    with pytest.raises(NoAnswer) as raised:
        agent.ask(Question("hello"), Hello)
    assert raised.value.finding.found.startswith("answers with something else: expected ")
    agent.end()


def test_an_agent_here_answers():
    agent = Agent("localhost", [], is_here=True)
    clock, port = agent.clock()
    assert abs(clock.seconds_ahead) <= clock.uncertainty + 0.1
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen, so a connection is refused
        question = Question("connect", (Address("127.0.0.1", port), Address("localhost", closed.getsockname()[1])))
        assert agent.ask(question, Connected) == Connected({"localhost": "Connection refused"})
    agent.end()


def test_which_host_is_this_one():
    assert is_this_host("localhost") and is_this_host("127.0.0.1")
    assert not is_this_host("192.0.2.1") and not is_this_host("no-such-host.invalid")
