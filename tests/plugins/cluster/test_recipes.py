"""The files of recipes/cluster: the script's syntax, the manifest's fields, the recipe's keys."""

import re
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "recipes" / "cluster"
# fields of KubeRay's CRDs (ray.io/v1, KubeRay 1.5.1) and of the pods in them, by where they stand
JOB = """
entrypoint shutdownAfterJobFinishes backoffLimit rayClusterSpec ttlSecondsAfterFinished
activeDeadlineSeconds submissionMode runtimeEnvYAML suspend clusterSelector
"""
CLUSTER = """
rayVersion authOptions headGroupSpec workerGroupSpecs enableInTreeAutoscaling autoscalerOptions
suspend gcsFaultToleranceOptions
"""
HEAD = {"rayStartParams", "template", "serviceType", "enableIngress", "headService"}
WORKERS = """
groupName replicas minReplicas maxReplicas numOfHosts idleTimeoutSeconds rayStartParams template
scaleStrategy suspend
"""
CONTAINER = {"name", "image", "ports", "resources", "volumeMounts", "env", "command", "args"}


def test_the_slurm_script_is_bash_and_asks_for_what_sbatch_knows():
    script = FOLDER / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    options = re.findall(r"^#SBATCH --([a-z-]+)=\S+$", text, re.M)
    assert len(options) == text.count("\n#SBATCH") >= 4
    known = (
        "job-name nodes ntasks-per-node cpus-per-task gpus-per-node time output partition account"
    )
    assert set(options) <= set(known.split())
    first_command = re.search(r"^(?!#|$)", text, re.M).start()
    assert text.rindex("#SBATCH") < first_command  # sbatch reads none behind it
    assert "RAY_AUTH_MODE=token" in text and "--include-dashboard=false" in text


@pytest.fixture
def job():
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((FOLDER / "rayjob.yaml").read_text())


def test_the_manifest_has_the_fields_of_a_rayjob(job):
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(job["spec"]) <= {*JOB.split()} and isinstance(job["spec"]["backoffLimit"], int)
    cluster = job["spec"]["rayClusterSpec"]
    assert set(cluster) <= {*CLUSTER.split()} and cluster["authOptions"] == {"mode": "token"}
    head, [workers] = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert {"rayStartParams", "template"} <= set(head) <= HEAD
    assert {"groupName", "rayStartParams", "template"} <= set(workers) <= {*WORKERS.split()}
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for group in (head, workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert {"name", "image"} <= set(container) <= CONTAINER
        mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in pod.get("volumes", [])}
        asked, limit = container["resources"]["requests"], container["resources"]["limits"]
        assert all(asked[name] == limit[name] for name in asked)


def test_the_manifest_starts_a_run_that_can_go_on(job):
    entrypoint = job["spec"]["entrypoint"].split()
    assert entrypoint[:2] == ["tandem", "train"]
    folder = next(word for word in entrypoint if word.startswith("run.folder="))
    mounts = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    places = [mount["mountPath"] for mount in mounts["volumeMounts"]]
    assert folder.removeprefix("run.folder=").rpartition("/")[0] in places


def test_the_address_is_that_of_the_head_and_not_of_the_pod_that_submits(job):
    """The entrypoint goes through two shells, and in between Ray joins the words."""
    words = shell(f"hostname() {{ echo submitter; }}; words {job['spec']['entrypoint']}")
    words = shell(f"hostname() {{ echo head; }}; words {subprocess.list2cmdline(words)}")
    assert "cluster.address=head:6379" in words


def shell(line):
    """The words that a shell makes of `words ...`."""
    line = f'words() {{ printf "%s\n" "$@"; }}; {line}'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
