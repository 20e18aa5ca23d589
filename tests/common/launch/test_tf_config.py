"""TF_CONFIG. Oracle: TensorFlow's documentation of its format, and hand-computed placements."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.common.base.errors import UserError
from allstep.common.launch import tf_config
from allstep.common.launch.placement import ALONE, Placement

STRATEGY = "multi-worker-mirrored"
MPIRUN = Placement("mpirun", 1, 2, 1, 2, 0, ("server1",))


def text(cluster: dict, role: object = "worker", index: object = 0) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})


def test_written_and_read_again():
    config = tf_config.TFConfig({"worker": ("10.0.0.1:5000", "10.0.0.2:5001")}, "worker", 1)
    expected = {"cluster": {"worker": ["10.0.0.1:5000", "10.0.0.2:5001"]}, "task": {"type": "worker", "index": 1}}
    assert json.loads(config.to_json()) == expected
    assert tf_config.parse(config.to_json(), STRATEGY) == config


def test_roles_of_a_parameter_server():
    configs = [tf_config.parameter_server_config(["a:1", "b:1", "c:1"], "a:2", rank) for rank in range(3)]
    assert [(config.role, config.index) for config in configs] == [("chief", 0), ("worker", 0), ("worker", 1)]
    assert configs[0].cluster == {"chief": ("a:1",), "ps": ("a:2",), "worker": ("b:1", "c:1")}


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("", "expected JSON"),
        ("[]", '{"cluster"'),
        ('{"task": {}}', '{"cluster"'),
        (
            text({"worker": ["a:1"], "ps": ["b:1"]}),
            "roles chief, worker for multi-worker-mirrored in TF_CONFIG, received 'ps'",
        ),
        (text({"worker": "a:1"}), "list of HOST:PORT for 'worker'"),
        (text({"worker": ["a"]}), "list of HOST:PORT for 'worker'"),
        (text({"worker": ["a:0"]}), "list of HOST:PORT for 'worker'"),
        (text({"worker": ["a:65536"]}), "list of HOST:PORT for 'worker'"),
        (text({"worker": ["a:1", "a:1"]}), "a:1 twice"),
        (text({"worker": ["a:1"]}, index=1), "type 'worker', index 1"),
        (text({"worker": ["a:1"]}, index=-1), "type 'worker', index -1"),
        (text({"worker": ["a:1"]}, role="chief"), "type 'chief', index 0"),
        (text({"worker": ["a:1"]}, index=None), "type 'worker', index None"),
        (text({"worker": ["a:1"]}, role=["worker"]), "type list, index 0"),
        (text({"worker": ["a:1"]}, index=True), "type 'worker', index True"),
        (text({"worker": ["a:1"]}, index="\u0660"), "index '\\u0660'"),
        (text({"worker": ["a:\u0661"]}), "one with 'a:\\u0661'"),
        (text({"worker": ["a" * 9999]}), "... (9999 characters)"),
        ("[" * 99999, "expected JSON"),
        ("1" * 5000, "expected JSON"),
        ('{"cluster": {"worker": ["a:1"]}, "task": []}', "type None, index None"),
        (text({"chief": ["a:1", "b:1"]}, "chief"), "expected at most one chief in TF_CONFIG, received 2"),
    ],
)
def test_a_wrong_one_is_refused_in_one_line(wrong, expected):
    with pytest.raises(UserError) as caught:
        tf_config.parse(wrong, STRATEGY)
    assert expected in str(caught.value) and "TF_CONFIG" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["chief", "ps", "worker"])
def test_a_parameter_server_needs_every_role(missing):
    cluster = {role: [f"{role}:1"] for role in ("chief", "ps", "worker") if role != missing}
    with pytest.raises(
        UserError, match=f"expected a chief, a ps, a worker for parameter-server .*received no {missing}"
    ):
        tf_config.parse(text(cluster, next(iter(cluster))), "parameter-server")


def test_processes_are_counted_whatever_their_roles():
    assert tf_config.num_processes("") == 1
    assert tf_config.num_processes(text({"worker": ["a:1", "b:1"], "evaluator": ["c:1"]})) == 3


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["a:1", "b:2", "worker", "chief", "0"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["cluster", "task", "type", "index", "worker", "chief", "ps", "\x1b"]), inner)
    ),
    max_leaves=12,
)


@given(given_text=values.map(json.dumps) | st.text(max_size=30))
def test_any_text_is_a_cluster_or_refused_in_one_line(given_text):
    for strategy in tf_config.ROLES:
        try:
            config = tf_config.parse(given_text, strategy)
        except UserError as error:
            assert re.match("expected .+, received .+; .+", str(error)) and str(error).isprintable(), str(error)
            assert str(error).isascii() and len(str(error)) < 600
        else:
            assert 0 <= config.index < len(config.cluster[config.role])


def test_an_index_may_be_text():
    assert tf_config.parse(text({"worker": ["a:1", "b:1"]}, index="1"), STRATEGY).index == 1


def test_place():
    cluster = {"worker": ["b:1", "b:2", "a:2"], "chief": ["a:1"]}
    places = [
        tf_config.find_placement(tf_config.parse(text(cluster, role, index), STRATEGY), ALONE)
        for role, index in (("chief", 0), ("worker", 0), ("worker", 1), ("worker", 2))
    ]
    assert places == [
        Placement("TF_CONFIG", 0, 4, 0, 2, 0, ("a", "b")),
        Placement("TF_CONFIG", 1, 4, 0, 2, 1, ("a", "b")),
        Placement("TF_CONFIG", 2, 4, 1, 2, 1, ("a", "b")),
        Placement("TF_CONFIG", 3, 4, 1, 2, 0, ("a", "b")),
    ]


def test_a_launcher_has_to_agree():
    cluster = {"worker": ["a:1", "a:2"]}
    assert tf_config.find_placement(tf_config.parse(text(cluster, index=1), STRATEGY), MPIRUN) == MPIRUN
    with pytest.raises(UserError, match="rank 1 of 2 as mpirun does, received worker 0, process 0 of 2"):
        tf_config.find_placement(tf_config.parse(text(cluster), STRATEGY), MPIRUN)
