"""examples/cluster: its files are what Slurm's shell, Kubernetes and SkyPilot read, and node.sh, which all three
start, is run: one of its nodes is signalled as Slurm does, then the same command comes again. Two nodes, both on
this machine, in make nightly."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from unfreeze import cli
from unfreeze.drill.sandbox import TINY_K2

CLUSTER = Path(__file__).resolve().parents[2] / "examples" / "cluster"
SCRIPTS = sorted(CLUSTER.glob("*.sh"))
STEPS = 6
RUN = [
    *("--model", str(TINY_K2), "--data", str(TINY_K2 / "yoda_train.jsonl"), "--dtype", "float32"),
    *("--tokens-per-step", "1024", "--micro-batches", "2", "--steps", str(STEPS), "--lora.rank", "2"),
    *("--watch.samples", "0", "--threads", "1", "--quiet"),
]


# --- the files


def text(name):
    return (CLUSTER / name).read_text(encoding="utf-8")


def kubernetes():
    return {part["kind"]: part for part in yaml.safe_load_all(text("kubernetes.yaml"))}


def skypilot():
    return yaml.safe_load(text("skypilot.yaml"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_the_scripts(path, tmp_path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    broken = tmp_path / "broken.sh"
    broken.write_text(
        re.sub(r"\bfi$", "", path.read_text(encoding="utf-8"), count=1, flags=re.M), encoding="utf-8"
    )
    assert subprocess.run(["bash", "-n", str(broken)], capture_output=True, check=False).returncode


def test_bash_reads_what_skypilot_runs():
    subprocess.run(["bash", "-n"], input=skypilot()["run"], text=True, check=True)


@pytest.mark.parametrize("name", ["slurm.sh", "kubernetes.yaml", "skypilot.yaml"])
def test_each_gives_node_sh_what_it_asks_for_and_obeys_its_exit_code(name):
    asked = set(re.findall(r"\$\{(\w+):\?", text("node.sh")))
    assert asked == {"RUN", "NODES", "NODE", "HEAD", "PROCESSES"}
    given = set(re.findall(r"\b([A-Z]+)=", text(name)))  # slurm, and skypilot's run
    if name == "kubernetes.yaml":
        job = kubernetes()["Job"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        given = {variable["name"] for variable in container["env"]}
        assert container["command"] == ["bash", "/shared/node.sh", "/shared/run.toml"]
        codes = [rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
        assert codes == [{"operator": "In", "values": [75]}]
    elif name == "skypilot.yaml":
        given |= skypilot()["envs"].keys()
        assert skypilot()["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    else:
        assert '"$code" = 75 ]; then\n  scontrol requeue' in text(name)
    assert asked <= given
    assert "exit 75" in text("node.sh") and "node.sh" in text(name)


def grace(name):
    """The seconds that the scheduler leaves between the signal and the kill."""
    if name == "slurm.sh":
        return int(re.search(r"--signal=USR1@(\d+)", text(name))[1])
    return kubernetes()["Job"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", ["slurm.sh", "kubernetes.yaml"])
def test_the_scheduler_waits_for_as_long_as_node_sh_may_take(name):
    own = int(re.search(r"GRACE=\$\{GRACE:-(\d+)\}", text("node.sh"))[1])
    assert grace(name) >= own + 30  # and torchrun's own 30 s


def test_pods_have_no_more_rights_than_they_need():
    """The restricted profile of https://kubernetes.io/docs/concepts/security/pod-security-standards/"""
    pod = kubernetes()["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    own = container["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own["allowPrivilegeEscalation"] is False and own["capabilities"] == {"drop": ["ALL"]}
    assert own["readOnlyRootFilesystem"] and pod["automountServiceAccountToken"] is False
    assert "privileged" not in own and not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert all(len({"emptyDir", "persistentVolumeClaim"} & v.keys()) == 1 for v in pod["volumes"])
    ingress = kubernetes()["NetworkPolicy"]["spec"]["ingress"]
    own_pods = {"podSelector": kubernetes()["NetworkPolicy"]["spec"]["podSelector"]}
    assert ingress == [{"from": [own_pods]}]


def test_images_are_named_by_digest_and_no_token_is_in_a_file():
    (container,) = kubernetes()["Job"]["spec"]["template"]["spec"]["containers"]
    for image in (container["image"], skypilot()["resources"]["image_id"]):
        assert re.search(r"@sha256:[0-9a-f]{64}$", image)
    token = next(variable for variable in container["env"] if variable["name"] == "HF_TOKEN")
    assert "value" not in token and token["valueFrom"]["secretKeyRef"]["optional"]
    assert not any(re.search(r"hf_\w{8}|TOKEN=", path.read_text("utf-8")) for path in CLUSTER.iterdir())


# --- node.sh


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(run, count, script=CLUSTER / "node.sh"):
    """So many nodes of one process each, all on this machine."""
    given = {"RUN": run, "NODES": count, "PROCESSES": 1, "HEAD": "127.0.0.1", "PORT": free_port()}
    given |= {"GRACE": 60, "MEET": 60, "RESTARTS": 0, "OMP_NUM_THREADS": 1}
    bin = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    base = {**os.environ, "PATH": bin, **{name: str(value) for name, value in given.items()}}
    return [
        subprocess.Popen(
            ["bash", str(script), *RUN], env={**base, "NODE": str(node)}, stderr=subprocess.PIPE, text=True
        )
        for node in range(count)
    ]


def wait(nodes, seconds=240):
    """-> (their exit codes, what they said); those that hang are ended, and fail the test."""
    try:
        said = [node.communicate(timeout=seconds)[1] for node in nodes]
        return [node.returncode for node in nodes], said
    finally:
        for node in nodes:
            if node.poll() is None:
                for process in [*psutil.Process(node.pid).children(recursive=True), node]:
                    process.kill()


def events(run, kind):
    path = run / "events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    every = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in every if event["kind"] == kind]


def until_it_trains(nodes, run):
    for _ in itertools.takewhile(lambda _: not events(run, "train"), range(1200)):
        assert all(node.poll() is None for node in nodes), wait(nodes)
        time.sleep(0.2)


def to_every_process_of(node, number):
    """As Slurm signals a step: the shell, torchrun, and the process that trains."""
    for process in [node, *psutil.Process(node.pid).children(recursive=True)]:
        process.send_signal(number)


@pytest.mark.nightly
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.others("clusters"))])
def test_a_preempted_node_ends_all_with_75_and_the_same_command_finishes(tmp_path, count):
    run = tmp_path / "run"
    nodes = start(run, count)
    until_it_trains(nodes, run)
    to_every_process_of(nodes[-1], signal.SIGUSR1)
    codes, said = wait(nodes)
    stopped = len(events(run, "train"))
    assert codes == [75] * count and 1 <= stopped < STEPS, said
    assert all("interrupted; the same command goes on" in words for words in said)
    assert (run / "state" / f"step-{stopped:06}").is_dir()

    codes, said = wait(start(run, count))
    assert codes == [0] * count, said
    assert [event["step"] for event in events(run, "train")] == [*range(1, STEPS + 1)]

    # what one process makes of it without an interruption
    assert cli.main(["sft", *RUN, "--out", str(tmp_path / "one")]) == 0
    losses = [[event["loss"] for event in events(folder, "train")] for folder in (run, tmp_path / "one")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_variable_that_is_missing_is_named_and_a_fault_is_no_interruption(tmp_path):
    said = subprocess.run(
        ["bash", str(CLUSTER / "node.sh")], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True
    )
    assert said.returncode == 1 and "RUN: the folder of the run" in said.stderr
    fake = tmp_path / "torchrun"
    fake.write_text("#!/bin/sh\nexit 3\n")
    fake.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN": str(tmp_path), "NODES": "1", "NODE": "0"}
    env |= {"HEAD": "localhost", "PROCESSES": "1"}
    assert subprocess.run(["bash", str(CLUSTER / "node.sh")], env=env).returncode == 3


# --- others' own checks (make nightly)


@pytest.mark.others("clusters")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_no_remark(path, programs, tmp_path):
    def remarks(file):
        return subprocess.run([programs / "shellcheck", file], capture_output=True, text=True).stdout

    assert remarks(path) == ""
    (tmp_path / "planted.sh").write_text(path.read_text(encoding="utf-8") + '\nrm -r $RUN/"old"\n')
    assert "SC2086" in remarks(tmp_path / "planted.sh")


@pytest.mark.others("clusters")
def test_kubernetes_schemas_accept_every_part_and_nothing_else(programs, tmp_path):
    def check(file):
        command = [programs / "kubernetes-validate", "--strict", file]
        return subprocess.run(command, capture_output=True, text=True)

    said = check(CLUSTER / "kubernetes.yaml")
    assert said.returncode == 0, said.stdout + said.stderr
    parts = ("service/unfreeze", "networkpolicy/unfreeze", "job/unfreeze")
    assert all(
        f"passed for resource {part} against version 1.37" in said.stdout + said.stderr for part in parts
    )
    for right, wrong in (("completionMode:", "completionmode:"), ("completions: 2", "completions: two")):
        (tmp_path / "planted.yaml").write_text(text("kubernetes.yaml").replace(right, wrong))
        assert check(tmp_path / "planted.yaml").returncode


READ_BY_SKYPILOT = """
import sys, yaml, sky
from sky.utils import common_utils, schemas
config = yaml.safe_load(open(sys.argv[1]))
common_utils.validate_schema(config, schemas.get_task_schema(), "task: ")
common_utils.validate_schema(config["resources"], schemas.get_resources_schema(), "resources: ")
print(sky.Task.from_yaml(sys.argv[1]).num_nodes)
"""


@pytest.mark.others("clusters")
def test_skypilot_reads_its_task_by_its_own_schema(programs, tmp_path):
    def read(file):
        command = [programs / "python", "-c", READ_BY_SKYPILOT, file]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path)}
        )

    said = read(CLUSTER / "skypilot.yaml")
    assert said.returncode == 0 and said.stdout.splitlines()[-1] == "2", said.stderr
    for right, wrong in (("num_nodes:", "nodes:"), ("exit_codes: [75]", "exit_codes: [750]")):
        (tmp_path / "planted.yaml").write_text(text("skypilot.yaml").replace(right, wrong))
        assert read(tmp_path / "planted.yaml").returncode


@pytest.mark.others("clusters")
@pytest.mark.parametrize(
    "guard, planted, trained",
    [
        (' && python -c "$finished" "$RUN" 2>/dev/null', "", range(1, STEPS)),
        ("  kill -TERM $(cat ", "  : $(cat ", range(STEPS, STEPS + 1)),
    ],
    ids=["an interruption passes for the end", "the signal does not arrive"],
)
def test_the_control_arms_without_a_guard_the_scheduler_sees_a_finished_run(
    tmp_path, guard, planted, trained
):
    assert text("node.sh").count(guard) == 1
    (tmp_path / "node.sh").write_text(text("node.sh").replace(guard, planted), encoding="utf-8")
    run = tmp_path / "run"
    nodes = start(run, 1, tmp_path / "node.sh")
    until_it_trains(nodes, run)
    nodes[0].send_signal(signal.SIGTERM)
    codes, said = wait(nodes)
    assert codes == [0] and len(events(run, "train")) in trained, said
