"""What users copy for launchers, against the fields that the launchers know."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lossycoll import OptionError, Options

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "packaging" / "kubernetes" / "trainjob.yaml"
PAGE = ROOT / "docs" / "several-machines.md"

Schema = dict[str, Any]

SELECTOR: Schema = {"matchLabels": {str: str}}
POLICY: Schema = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str, "labels": {str: str}},
    "spec": {
        "podSelector": SELECTOR,
        "policyTypes": [str],
        "ingress": [
            {
                "from": [
                    {
                        "podSelector": SELECTOR,
                        "namespaceSelector": SELECTOR,
                        "ipBlock": {"cidr": str, "except": [str]},
                    }
                ],
                "ports": [{"protocol": str, "port": int, "endPort": int}],
            }
        ],
    },
}
"""networking.k8s.io/v1's NetworkPolicy, without its egress and expressions of labels."""

TASK: Schema = {
    "name": str,
    "workdir": str,
    "num_nodes": int,
    "resources": {"accelerators": str, "infra": str, "cpus": str, "use_spot": bool},
    "envs": {str: str},
    "secrets": {str: str},
    "file_mounts": {str: str},
    "setup": str,
    "run": str,
}
"""SkyPilot's task: common fields of its get_task_schema and get_resources_schema (0.14.1)."""
SKYPILOT = {
    *("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"),
    *("SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_TASK_ID"),
}
"""Variables that it sets for ``run``."""


def strange(given: Any, schema: Any, where: str = "") -> list[str]:
    """Places in ``given`` that the schema lacks or has another type for."""
    if isinstance(schema, type):
        return [] if type(given) is schema else [f"{where}: {given!r}"]
    if isinstance(schema, list):
        if not isinstance(given, list):
            return [f"{where}: {given!r}"]
        return [one for each in given for one in strange(each, schema[0], f"{where}[]")]
    if not isinstance(given, dict):
        return [f"{where}: {given!r}"]
    found = []
    for name, value in given.items():
        known = schema.get(name, schema.get(str))
        inside = f"{where}.{name}"
        found += [inside] if known is None else strange(value, known, inside)
    return found


def test_a_mistake_is_found() -> None:
    ports = [{"protocol": "UDP", "port": 1, "endport": 2}, {"protocol": "TCP", "port": "1"}]
    policy = {"spec": {"ingress": [{"ports": ports}], "podselector": {}}}
    assert strange(policy, POLICY) == [
        ".spec.ingress[].ports[].endport",
        ".spec.ingress[].ports[].port: '1'",
        ".spec.podselector",
    ]
    assert strange({"envs": {"A": 1}, "nodes": 2}, TASK) == [".envs.A: 1", ".nodes"]


@pytest.mark.long
def test_the_network_policy_opens_the_ports_of_the_job() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML isn't installed")
    runtime, _, policy = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    assert strange(policy, POLICY) == []
    assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    spec = policy["spec"]
    assert spec["policyTypes"] == ["Ingress"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]
    assert spec["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    (rule,) = spec["ingress"]
    assert rule["from"] == [{"podSelector": spec["podSelector"]}]  # nobody else
    (container,) = pod["spec"]["containers"]
    env = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    ports = Options.from_env(env).port_range
    assert [
        (one["protocol"], f"{one['port']}-{one['endPort']}")
        for one in rule["ports"]
        if "endPort" in one
    ] == [("UDP", ports), ("TCP", ports)]
    # torch's store: PET_MASTER_PORT of Kubeflow Trainer's torch jobs.
    assert [one for one in rule["ports"] if "endPort" not in one] == [
        {"protocol": "TCP", "port": 29400}
    ]


@pytest.mark.long
def test_the_jobs_pods_have_what_ranks_need() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML isn't installed")
    text = MANIFEST.read_text(encoding="utf-8")
    runtime, job, _ = yaml.safe_load_all(text)
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]["template"]["spec"]
    # Else a service named lossycoll-... sets variables that no option has: all ranks refuse them.
    assert spec["enableServiceLinks"] is False
    with pytest.raises(OptionError, match="LOSSYCOLL_TRAIN_SERVICE_HOST"):
        Options.from_env({"LOSSYCOLL_TRAIN_SERVICE_HOST": "10.0.0.7"})
    env = {one["name"]: one for one in spec["containers"][0]["env"]}
    assert "secretKeyRef" in env["LOSSYCOLL_SECRET"]["valueFrom"]  # not in the manifest
    first, last = map(int, env["LOSSYCOLL_PORT_RANGE"]["value"].split("-"))
    assert last - first + 1 >= job["spec"]["trainer"]["numProcPerNode"]
    assert "net.core.rmem_max" in text


@pytest.mark.long
def test_the_skypilot_task_has_fields_that_skypilot_knows() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML isn't installed")
    (text,) = re.findall(r"^\*SkyPilot\*.*?```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.M | re.S)
    task = yaml.safe_load(text)
    assert strange(task, TASK) == []
    assert set(re.findall(r"\$\{?(SKYPILOT_\w+)", task["run"])) <= SKYPILOT
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n", "-c", script], check=True)
    # Ports of "resources" are open to the internet, and TCP alone. The nodes reach each other.
    assert "ports" not in task["resources"]
