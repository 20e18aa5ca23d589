"""The files in cluster/: mistakes that containers, Kubeflow's operators or Apptainer would stumble over.

Oracles: bash; shellcheck; the fields that we use of the operators' published schemas (MPIJob v2beta1, Trainer
v1alpha1).
"""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml
from ranks import REPOSITORY
from requirements import need

CLUSTER = REPOSITORY / "cluster"
MPIJOB, ELASTIC, RUNTIME, TRAINJOB = (
    document
    for name in ("mpijob", "mpijob-elastic", "trainjob")
    for document in yaml.safe_load_all((CLUSTER / f"{name}.yaml").read_text())
)
# Fields of each object in the published schemas.
FIELDS = {
    "MPIJob": {"slotsPerWorker", "mpiImplementation", "sshAuthMountPath", "launcherCreationPolicy"}
    | {"runPolicy", "mpiReplicaSpecs", "runLauncherAsWorker"},
    "TrainingRuntime": {"mlPolicy", "podGroupPolicy", "template"},
    "TrainJob": {"runtimeRef", "trainer", "initializer", "suspend", "labels", "annotations", "managedBy"},
}
TRAINER = {"image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"}


@pytest.mark.parametrize(
    "document", [MPIJOB, ELASTIC, RUNTIME, TRAINJOB], ids=lambda document: document["metadata"]["name"]
)
def test_fields_are_those_of_the_schema(document):
    group = "kubeflow.org/v2beta1" if document["kind"] == "MPIJob" else "trainer.kubeflow.org/v1alpha1"
    assert document["apiVersion"] == group
    assert set(document["spec"]) <= FIELDS[document["kind"]]


def test_job_and_runtime_fit_each_other():
    reference, trainer = TRAINJOB["spec"]["runtimeRef"], TRAINJOB["spec"]["trainer"]
    assert (reference["kind"], reference["name"]) == (RUNTIME["kind"], RUNTIME["metadata"]["name"])
    assert set(trainer) <= TRAINER
    # The Trainer fills in the container `node` of the replicated job `node`.
    [node] = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node"
    assert [one["name"] for one in node["template"]["spec"]["template"]["spec"]["containers"]] == ["node"]


@pytest.mark.parametrize("job", [MPIJOB, ELASTIC], ids=["fixed", "elastic"])
def test_workers_listen_where_the_launcher_looks(job):
    """Both sides use the same port and the same keys."""
    config, client = ((CLUSTER / name).read_text() for name in ("sshd_config", "ssh_config"))
    keys = job["spec"]["sshAuthMountPath"]
    assert re.search("Port ([0-9]+)", config)[1] == re.search("Port ([0-9]+)", client)[1]
    assert f"HostKey {keys}/id_rsa" in config and f"IdentityFile {keys}/id_rsa" in client
    [worker] = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert worker["command"][-1] == "/opt/allstep/cluster/sshd_config"
    specs = job["spec"]["mpiReplicaSpecs"]
    ranks = job["spec"]["slotsPerWorker"] * specs["Worker"]["replicas"]
    assert f"-np {ranks} " in specs["Launcher"]["template"]["spec"]["containers"][0]["args"][0]


def test_dockerfile():
    """Its commands are valid shell, the files it copies exist, and it ends as an unprivileged user."""
    text = (CLUSTER / "Dockerfile").read_text()
    instructions = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    for command in (line[4:] for line in instructions if line.startswith("RUN ")):
        assert subprocess.run(["bash", "-n", "-c", command]).returncode == 0, command
    copied = [line.split() for line in instructions if line.startswith("COPY ") and "--from" not in line]
    assert copied and all((REPOSITORY / words[1]).exists() for words in copied)
    assert [line for line in instructions if line.startswith("USER ")][-1] == "USER 1000"
    assert re.fullmatch(r"ARG BASE=debian:[0-9.]+-slim", instructions[0])  # pinned


def test_apptainer_s_definition():
    text = (CLUSTER / "allstep.def").read_text()
    assert text.startswith("Bootstrap: docker\nFrom: debian:")
    sections = dict(re.findall(r"^%(\w+)\n((?:(?!^%).*\n?)*)", text, re.MULTILINE))
    for name in ("setup", "post", "test", "runscript"):
        assert subprocess.run(["bash", "-n", "-c", sections[name]]).returncode == 0, name


def test_shellcheck_has_nothing_to_say():
    """Check the scripts of the repository, and those in the launchers of MPIJobs."""
    need("shellcheck")
    files = [*REPOSITORY.glob("tools/*.sh"), *REPOSITORY.glob("tests/cluster/*.sh")]
    calls = [(files, "")]
    for job in (MPIJOB, ELASTIC):
        [launcher] = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
        calls.append((["--shell=bash", "-"], launcher["args"][0]))
    for words, text in calls:
        result = subprocess.run(["shellcheck", *words], input=text, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


def test_images_are_of_one_release():
    bases = {re.search(r"debian:[\w.-]+", (CLUSTER / name).read_text())[0] for name in ("Dockerfile", "allstep.def")}
    assert len(bases) == 1
