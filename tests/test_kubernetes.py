"""deploy/kubernetes and deploy/compose.gateways.yaml. There is no cluster and no container here:
kubectl renders the manifests, Kubernetes' own schemas validate them, and they are compared with
what the product reads of them."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.private_ca import CERTIFICATE, KEY, make_certificate
from manifests import FOLDER, PAGE, Manifests, check, render, yaml_users
from processes import ROOT

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.gateways.yaml").read_text())
VERSIONS = "1.32", "1.37"
"""Of Kubernetes, the oldest and the newest that the manifests are for."""
SYSTEM = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    found = render()
    if found is None:
        pytest.skip("there is no kubectl")
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_are_valid(documents: list[dict[str, Any]], version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for document in documents:
        validate.validate(document, version, strict=True)
    engine = Manifests(copy.deepcopy(documents)).named("Deployment", "engine")
    engine["spec"]["replica"] = 3
    with pytest.raises(validate.ValidationError):
        validate.validate(engine, version, strict=True)


def test_the_manifests_agree_with_each_other_and_the_product(
    documents: list[dict[str, Any]], tmp_path: Path
) -> None:
    check(Manifests(documents), tmp_path)


def container_of(manifests: Manifests, name: str) -> dict[str, Any]:
    kind = "StatefulSet" if name == "postgres" else "Deployment"
    template = manifests.named(kind, name)["spec"]["template"]
    (container,) = template["spec"]["containers"]
    return container  # type: ignore[no-any-return]


def other_text(name: str, key: str, old: str, new: str) -> Callable[[Manifests], None]:
    """Return a change of a file in a ConfigMap."""

    def change(manifests: Manifests) -> None:
        for each in manifests.of("ConfigMap"):
            if each["metadata"]["name"].startswith(f"{name}-"):
                assert old in each["data"][key]
                each["data"][key] = each["data"][key].replace(old, new)

    return change


MISTAKES: dict[str, Callable[[Manifests], Any]] = {
    "another port": lambda found: container_of(found, "gateway")["ports"][0].update(
        containerPort=80
    ),
    "a probe without TLS": lambda found: container_of(found, "gateway")["readinessProbe"][
        "httpGet"
    ].update(scheme="HTTP"),
    "no such command": lambda found: container_of(found, "gateway")["args"].__setitem__(0, "gate"),
    "no such option": lambda found: container_of(found, "engine")["args"].append("--standbye"),
    "root": lambda found: container_of(found, "nats")["securityContext"].update(capabilities={}),
    "a volume less": lambda found: container_of(found, "engine")["volumeMounts"].pop(),
    "too little time to drain": lambda found: found.named("Deployment", "gateway")["spec"][
        "template"
    ]["spec"].update(terminationGracePeriodSeconds=30),
    "another run": other_text("gateway", "service.toml", 'run = "digits"', 'run = "letters"'),
    "another bus": other_text("gateway", "service.toml", "nats://nats:4222", "nats://nats:4223"),
    "another bucket": other_text("engine", "stores.toml", "s3://fleetlearn", "s3://others"),
    "identities that a pod takes with it": other_text(
        "engine", "service.toml", '"/identities"', '"/data/identities"'
    ),
    "another user": other_text("engine", "service.toml", 'user = "engine"', 'user = "motor"'),
    "a file in no secret": other_text("gateway", "service.toml", "tls.key", "key.pem"),
    "another database": other_text("engine", "service.toml", "@postgres/", "@database/"),
    "a service of nobody": lambda found: found.named("Service", "gateway")["spec"][
        "selector"
    ].update({"app.kubernetes.io/name": "gate"}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(
    documents: list[dict[str, Any]], tmp_path: Path, mistake: str
) -> None:
    wrong = Manifests(copy.deepcopy(documents))
    MISTAKES[mistake](wrong)
    with pytest.raises((AssertionError, StopIteration)):
        check(wrong, tmp_path)


def test_a_nats_server_reads_its_configuration() -> None:
    server = shutil.which("nats-server", path=SYSTEM)
    if server is None:
        pytest.skip("there is no nats-server")
    passwords = {"ENGINE_PASSWORD": "a" * 30, "GATEWAY_PASSWORD": "b" * 30}
    words = [server, "-t", "-c", str(FOLDER / "nats.conf")]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | passwords)
    assert done.returncode == 0, done.stderr
    assert subprocess.run(words, capture_output=True).returncode, "a password is missing"


# --- compose


def test_compose_agrees_with_itself_and_the_product(tmp_path: Path) -> None:
    services = COMPOSE["services"]
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert {*service.get("secrets", ())} <= COMPOSE["secrets"].keys(), name
        assert {*service.get("depends_on", ())} <= services.keys(), name
        for mount in service["volumes"]:
            source, _, *options = mount.split(":")
            if not source.startswith("./"):
                assert source in COMPOSE["volumes"], mount
            elif not source.startswith("./data"):  # made by the operator
                assert (DEPLOY / source).is_file(), mount
                assert options == ["ro"], mount
    settings = {}
    for name in ("engine", "gateway"):
        file = tmp_path / f"{name}.toml"
        file.write_text((DEPLOY / "gateways" / file.name).read_text())
        settings[name] = ServiceSettings.load(file)
        nats = settings[name].nats
        assert nats is not None
        secret = str(nats.password_file).removeprefix("/run/secrets/")
        assert secret in services[f"{name}-1"]["secrets"]
        assert settings[name].bus == f"nats://{'nats'}:4222"
    users = yaml_users((FOLDER / "nats.conf").read_text())
    assert {each.nats.user for each in settings.values() if each.nats} == users
    assert settings["engine"].blobs == settings["gateway"].blobs == "s3://fleetlearn"
    page = PAGE.read_text()
    for file in (each["file"] for each in COMPOSE["secrets"].values()):
        assert f"deploy/data/{Path(file).name}" in page, file
    for variable in re.findall(r"\$\{(\w+)", (DEPLOY / "compose.gateways.yaml").read_text()):
        assert f"{variable}=" in page, variable


def test_compose_is_valid() -> None:
    """Where there is a program that knows what a compose file may say."""
    for words in (["docker", "compose"], ["docker-compose"], ["podman-compose"]):
        program = shutil.which(words[0])
        if program and not subprocess.run([*words, "version"], capture_output=True).returncode:
            break
    else:
        pytest.skip("there is no docker compose")
    variables = dict.fromkeys(
        ("OBJECTS_PASSWORD", "NATS_ENGINE_PASSWORD", "NATS_GATEWAY_PASSWORD"), "x" * 30
    )
    done = subprocess.run(
        [*words, "--file", str(DEPLOY / "compose.gateways.yaml"), "config"],
        capture_output=True,
        text=True,
        env=os.environ | variables,
    )
    assert done.returncode == 0, done.stderr


def test_nginx_reads_the_page_s_configuration(tmp_path: Path) -> None:
    nginx = shutil.which("nginx", path=SYSTEM)
    if nginx is None:
        pytest.skip("there is no nginx")
    page = (ROOT / "docs" / "operate" / "proxies.md").read_text()
    text = page.split("```nginx\n")[1].split("```")[0]
    make_certificate(tmp_path, ["fleet.example"], 30)
    for name, file in (("certificate.pem", CERTIFICATE), ("key.pem", KEY)):
        assert f"/etc/fleetlearn/{name}" in text
        text = text.replace(f"/etc/fleetlearn/{name}", str(tmp_path / file))
    (tmp_path / "nginx.conf").write_text(f"pid {tmp_path}/nginx.pid;\n{text}")
    words = [nginx, "-t", "-e", "stderr", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nginx_reads_its_configuration(tmp_path: Path) -> None:
    nginx = shutil.which("nginx", path=SYSTEM)
    if nginx is None:
        pytest.skip("there is no nginx")
    text = (DEPLOY / "gateways" / "nginx.conf").read_text()
    module = Path("/usr/lib/nginx/modules/ngx_stream_module.so")
    if module.exists():  # Debian's; the image's nginx has it built in
        text = f"load_module {module};\n{text}"
    for number in (1, 2):
        assert f"gateway-{number}" in COMPOSE["services"]
        text = text.replace(f"gateway-{number}:", f"127.0.0.{number}:")
    text = text.replace("/tmp/nginx.pid", str(tmp_path / "nginx.pid"))
    (tmp_path / "nginx.conf").write_text(text)
    words = [nginx, "-t", "-e", "stderr", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
    done = subprocess.run(words, capture_output=True, text=True)
    if "unknown directive" in done.stderr and '"stream"' in done.stderr:
        pytest.skip("this nginx has no stream module")
    assert done.returncode == 0, done.stderr
