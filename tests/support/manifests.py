"""For tests: the manifests of deploy/kubernetes as kubectl renders them, and whether they agree
with each other and with the product. Nothing here needs a cluster."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.gateways.draining import DRAIN_TIMEOUT
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.storage.stored_elsewhere import FILE, StoredElsewhere, read_stores
from processes import ROOT
from typer.main import get_command

FOLDER = ROOT / "deploy" / "kubernetes"
PAGE = ROOT / "docs" / "operate" / "kubernetes.md"
NAME = "app.kubernetes.io/name"


def render() -> list[dict[str, Any]] | None:
    """Return all documents; None: there is no kubectl."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        return None
    words = [kubectl, "kustomize", str(FOLDER)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


class Manifests:
    """The documents, by what they are."""

    def __init__(self, documents: list[dict[str, Any]]) -> None:
        self.documents = documents

    def of(self, *kinds: str) -> Iterator[dict[str, Any]]:
        return (each for each in self.documents if each["kind"] in kinds)

    def named(self, kind: str, name: str) -> dict[str, Any]:
        return next(each for each in self.of(kind) if each["metadata"]["name"] == name)

    def pods(self) -> dict[str, dict[str, Any]]:
        """Return name -> the pod's specification, with its labels."""
        return {
            each["metadata"]["name"]: {
                **each["spec"]["template"]["spec"],
                "labels": each["spec"]["template"]["metadata"]["labels"],
                "selector": each["spec"]["selector"]["matchLabels"],
            }
            for each in self.of("Deployment", "StatefulSet")
        }

    def files_of(self, pod: dict[str, Any]) -> dict[str, str | None]:
        """Return path -> text of each file that a pod's volumes bring: None: it is a secret."""
        (container,) = pod["containers"]
        places = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        found: dict[str, str | None] = {}
        for volume in pod.get("volumes", ()):
            place = places[volume["name"]]
            if "configMap" in volume:
                data = self.named("ConfigMap", volume["configMap"]["name"])["data"]
                found |= {f"{place}/{name}": text for name, text in data.items()}
            for item in volume.get("secret", {}).get("items", ()):
                found[f"{place}/{item['path']}"] = None
            if volume.get("secret", {}).get("secretName") == "tls":  # of the kind kubernetes.io/tls
                found |= dict.fromkeys([f"{place}/tls.crt", f"{place}/tls.key"])
        return found

    def services(self, name: str, folder: Path) -> ServiceSettings:
        """Return the settings of a pod's process, read by the product from the pod's file."""
        text = self.files_of(self.pods()[name])["/etc/fleetlearn/service.toml"]
        assert text is not None
        file = folder / f"{name}.toml"
        file.write_text(text)
        return ServiceSettings.load(file)

    def plan(self, folder: Path) -> Plan:
        text = self.files_of(self.pods()["engine"])["/etc/fleetlearn/plan.toml"]
        assert text is not None
        file = folder / "plan.toml"
        file.write_text(text)
        return Plan.load(file)


def check(manifests: Manifests, folder: Path) -> None:
    """Raise AssertionError where two files disagree. ``folder``: an empty one."""
    pods = manifests.pods()
    _check_selectors(manifests, pods)
    _check_volumes(manifests, pods)
    for name, pod in pods.items():
        _check_hardened(name, pod)
    engine, gateway = (manifests.services(name, folder) for name in ("engine", "gateway"))
    _check_settings(manifests, engine, gateway, manifests.plan(folder))
    _check_gateway(manifests, gateway)
    for name in ("engine", "gateway"):
        _check_command(name, pods[name])


def _check_selectors(manifests: Manifests, pods: dict[str, Any]) -> None:
    for name, pod in pods.items():
        assert pod["selector"].items() <= pod["labels"].items(), name
        assert pod["labels"][NAME] == name
    for each in manifests.of("Service", "PodDisruptionBudget", "NetworkPolicy"):
        name, spec = each["metadata"]["name"], each["spec"]
        selector = spec.get("podSelector", spec.get("selector", {}))
        labels = selector.get("matchLabels", selector)
        if name == "nobody":
            assert not labels
            continue
        assert labels == {NAME: name}, (each["kind"], name)
        (container,) = pods[name]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for port in spec.get("ports", ()):
            assert port["targetPort"] in ports, (name, port)
        for rule in spec.get("ingress", ()):
            assert {port["port"] for port in rule["ports"]} <= ports.keys(), name
            for peer in rule.get("from", ()):
                for wanted in peer.get("podSelector", {}).get("matchExpressions", ()):
                    assert {*wanted["values"]} <= pods.keys(), name
    policies = {each["metadata"]["name"] for each in manifests.of("NetworkPolicy")}
    assert policies == {"nobody", *pods}, "who may connect to each pod is said"
    (scaler,) = manifests.of("HorizontalPodAutoscaler")
    target = scaler["spec"]["scaleTargetRef"]
    scaled = manifests.named(target["kind"], target["name"])
    assert "replicas" not in scaled["spec"], "two would say how many there are"
    assert scaled["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def _check_volumes(manifests: Manifests, pods: dict[str, Any]) -> None:
    page = PAGE.read_text()
    for name, pod in pods.items():
        (container,) = pod["containers"]
        volumes = {each["name"] for each in pod.get("volumes", ())}
        if name == "postgres":
            volumes.add("data")  # of its claim
        assert volumes == {each["name"] for each in container.get("volumeMounts", ())}, name
        secrets = {
            each["secret"]["secretName"]: {item["key"] for item in each["secret"].get("items", ())}
            for each in pod.get("volumes", ())
            if "secret" in each
        }
        for variable in container.get("env", ()):
            if "valueFrom" in variable:
                key = variable["valueFrom"]["secretKeyRef"]
                secrets.setdefault(key["name"], set()).add(key["key"])
        for source in container.get("envFrom", ()):
            secrets.setdefault(source["secretRef"]["name"], set())
        for secret, keys in secrets.items():
            made = [
                line for line in page.splitlines() if f" {secret} " in line and "create" in line
            ]
            assert made, f"{PAGE.name} says how to make the secret {secret} of {name}"
            assert all(f"={key}" in page or f"{key}=" in page for key in keys), (secret, keys)
        files = manifests.files_of(pod)
        for variable in container.get("env", ()):
            value = variable.get("value", "")
            assert not value.startswith("/secrets") or value in files, (name, value)


def _check_hardened(name: str, pod: dict[str, Any]) -> None:
    """Check what the namespace's label `restricted` demands, and a bit more."""
    shared = pod["securityContext"]
    assert shared["runAsNonRoot"] is True
    assert shared["runAsUser"] > 0
    assert shared["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["readOnlyRootFilesystem"] is True
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name
        assert "memory" in container["resources"]["limits"]


def _check_settings(
    manifests: Manifests, engine: ServiceSettings, gateway: ServiceSettings, plan: Plan
) -> None:
    pods = manifests.pods()
    assert engine.bus == gateway.bus
    assert engine.blobs == gateway.blobs
    assert gateway.gateway is not None
    assert gateway.gateway.run == plan.name
    assert engine.gateways == 0
    for url in (engine.bus, engine.ledger):
        assert url is not None
        host = url.partition("://")[2].rpartition("@")[2].partition("/")[0]
        name, _, port = host.partition(":")
        ports = {each["port"] for each in manifests.named("Service", name)["spec"]["ports"]}
        assert int(port or 5432) in ports, url
    assert plan.bundle.is_relative_to("/srv")
    copies = (FOLDER / "Containerfile").read_text()
    assert f" {plan.bundle}" in copies, "the image has the bundle"
    assert plan.data_dir.is_relative_to("/data")
    assert gateway.gateway.data_dir.is_relative_to("/data")
    assert not gateway.open, "enrolled devices connect, and nobody else"
    (claim,) = manifests.of("PersistentVolumeClaim")
    volumes = {each["name"]: each for each in pods["engine"]["volumes"]}
    kept = {
        each["mountPath"]
        for each in pods["engine"]["containers"][0]["volumeMounts"]
        if volumes[each["name"]].get("persistentVolumeClaim")
        == {"claimName": claim["metadata"]["name"]}
    }
    assert {str(engine.identities)} == kept, "who may connect outlives the engines"
    for name, settings in (("engine", engine), ("gateway", gateway)):
        files = manifests.files_of(pods[name])
        named = [settings.nats.password_file] if settings.nats is not None else []
        if settings.tls is not None:
            named += [settings.tls.certificate, settings.tls.key]
            named += [] if settings.tls.clients is None else [settings.tls.clients]
        for path in named:
            assert str(path) in files, f"{path} of {name} is in none of its secrets"
    _check_stores(manifests, engine, plan)
    users = yaml_users(manifests.files_of(pods["nats"])["/etc/nats/nats.conf"] or "")
    assert {engine.nats.user, gateway.nats.user} == users  # type: ignore[union-attr]
    metrics = engine.metrics
    assert metrics is not None
    (port,) = pods["engine"]["containers"][0]["ports"]
    assert (port["name"], port["containerPort"]) == ("metrics", metrics.port)


def _check_stores(manifests: Manifests, engine: ServiceSettings, plan: Plan) -> None:
    """Check that an empty folder of the engine is told where the run is."""
    pod = manifests.pods()["engine"]
    text = manifests.files_of(pod)["/etc/fleetlearn/stores.toml"]
    assert text is not None
    with TemporaryDirectory() as folder:
        (Path(folder) / FILE).write_text(text)
        assert read_stores(Path(folder)) == StoredElsewhere(plan.name, engine.ledger, engine.blobs)
    (first,) = pod["initContainers"]
    assert first["command"][-1].endswith(f" {plan.data_dir}")
    assert first["command"][-1].startswith(f"mkdir -p {plan.data_dir} &&")


def yaml_users(configuration: str) -> set[str]:
    """Return who may connect to a NATS server of this configuration."""
    lines = [line.partition("user:")[2] for line in configuration.splitlines() if "user:" in line]
    return {line.partition(",")[0].strip() for line in lines}


def _check_gateway(manifests: Manifests, gateway: ServiceSettings) -> None:
    pod = manifests.pods()["gateway"]
    (container,) = pod["containers"]
    (port,) = container["ports"]
    assert port["containerPort"] == gateway.port
    scheme = "HTTP" if gateway.tls is None else "HTTPS"
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("readiness", "liveness")}
    for probe in (*probes.values(), container["startupProbe"]["httpGet"]):
        assert (probe["port"], probe["scheme"]) == (port["name"], scheme)
    assert probes["readiness"]["path"] == "/readyz"
    assert probes["liveness"]["path"] == "/healthz"
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep", "until no load balancer sends devices here any more"
    assert pod["terminationGracePeriodSeconds"] > float(command[1]) + DRAIN_TIMEOUT + 10


def _check_command(name: str, pod: dict[str, Any]) -> None:
    """Check that the product has the command, and that its files are there."""
    (container,) = pod["containers"]
    word, *rest = container["args"]
    commands = get_command(app)
    command = commands.get_command(None, word)  # type: ignore[attr-defined]
    assert command is not None, f"there is no command {word}"
    context = command.make_context(word, [*rest], resilient_parsing=True)
    assert not context.args
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    assert {each for each in rest if each.startswith("-")} <= known
