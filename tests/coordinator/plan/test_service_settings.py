"""The settings of a coordinator's process: what is read, and what is said about each mistake."""

import re
import tomllib
from pathlib import Path

import msgspec
import pytest
from fleetlearn_coordinator.plan.bus_settings import NatsSettings
from fleetlearn_coordinator.plan.canary_settings import CanarySettings
from fleetlearn_coordinator.plan.content_settings import ContentSettings
from fleetlearn_coordinator.plan.gateway_settings import GatewaySettings
from fleetlearn_coordinator.plan.plugins_section import PluginsSection
from fleetlearn_coordinator.plan.service_settings import (
    Admin,
    AlertSettings,
    MetricsPort,
    Page,
    ServiceError,
    ServiceSettings,
    Tls,
    TraceSettings,
    is_service_file,
)
from fleetlearn_protocol.errors import Code

EXAMPLE = Path(__file__).parents[3] / "examples" / "service.toml"


def refusal(folder: Path, text: str) -> str:
    file = folder / "my.toml"
    file.write_text(text)
    with pytest.raises(ServiceError) as refused:
        ServiceSettings.load(file)
    assert refused.value.code is Code.BAD_MESSAGE
    assert refused.value.text.startswith(f"{file}: ")
    return refused.value.text


def test_the_example_has_every_key_with_its_default() -> None:
    assert ServiceSettings.load(EXAMPLE) == ServiceSettings()
    text = EXAMPLE.read_text("utf-8")
    stated = dict(
        re.findall(r"^(\w+) = .*#.*\bdefault ([\d.]*\d|none|false|text)", text, re.MULTILINE)
    )
    values = msgspec.structs.asdict(ServiceSettings())
    values |= msgspec.structs.asdict(values.pop("limits"))
    assert values.pop("exempt") == ("127.0.0.0/8", "::1/128")
    assert (
        values.pop("tls")
        is values.pop("identities")
        is values.pop("admin")
        is values.pop("runs")
        is values.pop("ledger")
        is values.pop("blobs")
        is values.pop("metrics")
        is values.pop("contents")
        is values.pop("region")
        is values.pop("alerts")
        is values.pop("traces")
        is values.pop("canary")
        is values.pop("plugins")
        is values.pop("bus")
        is values.pop("nats")
        is values.pop("gateway")
        is None
    )
    assert values.pop("page") is None
    assert re.search(r"^# identities = ", text, re.MULTILINE)
    assert re.search(r"^# runs = ", text, re.MULTILINE)
    assert re.search(r"^# region = ", text, re.MULTILINE)
    assert re.search(r"^# ledger = ", text, re.MULTILINE)
    assert re.search(r"^# blobs = ", text, re.MULTILINE)
    assert re.search(r"^# bus = ", text, re.MULTILINE)
    canary = re.search(r"(?s)# \[canary\](.*?)\n\n", text)
    assert canary is not None
    keys_of_canary = re.findall(r"(?m)^# (\w+ = [^#]*)", canary[1])
    assert CanarySettings() == msgspec.convert(
        tomllib.loads("\n".join(keys_of_canary)), CanarySettings
    )
    assert len(keys_of_canary) == len(CanarySettings.__struct_fields__)
    sections = (
        *(Tls, Admin, MetricsPort, ContentSettings, AlertSettings, TraceSettings, Page),
        *(NatsSettings, GatewaySettings, PluginsSection),
    )
    keys = [key for section in sections for key in section.__struct_fields__]
    assert all(re.search(rf"^# {key} = ", text, re.MULTILINE) for key in keys)
    defaults = {
        key: "false" if value is False else "none" if value in (None, "", ()) else str(value)
        for key, value in values.items()
    }
    assert stated == {key: value.removesuffix(".0") for key, value in defaults.items()} | {
        "host": "127.0.0.1"
    }


def test_keys_that_are_given_are_read(tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text('port = 0\norigins = ["https://good.example", "http://[::1]:8000"]\n')
    found = ServiceSettings.load(file)
    assert found == ServiceSettings(port=0, origins=("https://good.example", "http://[::1]:8000"))


def test_plugins_are_looked_for_beside_the_file(tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text('[plugins]\nmodules = ["my_package"]\n')
    found = ServiceSettings.load(file).plugins
    assert found == PluginsSection(modules=("my_package",), folder=tmp_path)
    file.write_text('[plugins]\nmodules = ["my_package"]\nfolder = "own"\n')
    again = ServiceSettings.load(file).plugins
    assert again == PluginsSection(modules=("my_package",), folder=tmp_path / "own")


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text(
        'host = "0.0.0.0"\nidentities = "ids"\n[tls]\ncertificate = "tls/a.pem"\nkey = "/b.pem"\n'
    )
    found = ServiceSettings.load(file)
    assert found.tls == Tls(certificate=tmp_path / "tls/a.pem", key=Path("/b.pem"))
    assert found.identities == tmp_path / "ids"
    file.write_text('identities = "ids"\n[admin]\nport = 0\n')
    assert ServiceSettings.load(file).admin == Admin(port=0)
    assert not is_service_file(file)
    file.write_text('runs = "all/runs"\n')
    assert ServiceSettings.load(file).runs == tmp_path / "all/runs"
    assert is_service_file(file)
    assert not is_service_file(tmp_path / "missing.toml")
    file.write_text('host = "0.0.0.0"\ninsecure = true\nopen = true\n')
    assert ServiceSettings.load(file).insecure


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port = ", ["this is not TOML"]),
        ("port = " + "[" * 5000, ["this is not TOML"]),
        ('name = "a"\nbundle = "b"', ["this is a plan, and a service file is expected here"]),
        ("port = 70000", ["port = 70000", "at least 0 and at most 65535"]),
        ("heartbeat = 0", ["heartbeat = 0"]),
        ("hearbeat = 1.0", ["hearbeat is not a key of a service file", "did you mean heartbeat?"]),
        ("[service]\nport = 1", ["service is not a key of a service file"]),
        ('durable = "power"', ["durable is a key of the plan"]),
        ('origins = "https://a.example"', ["origins = 'https://a.example'"]),
        ("origins = [5]", ["origins[0] = 5"]),
        ('origins = ["https://a.example/"]', ["'https://a.example/'", "scheme://host", "without"]),
        ('origins = ["HTTPS://A.example"]', ["'HTTPS://A.example'", "lower case"]),
        ('origins = ["*"]', ["origins names '*'", 'there is no "*"']),
        ('origins = ["null"]', ["origins names 'null'"]),
        ('host = "0.0.0.0"\ninsecure = true', ["without identities", "open = true"]),
        ('identities = "a"\nopen = true', ["contradict each other"]),
        (
            'host = "0.0.0.0"',
            ['host = "0.0.0.0" lets other machines connect', "[tls]", "insecure = true"],
        ),
        (
            'proxies = ["10.0.0.1/8"]',
            ["proxies names '10.0.0.1/8'", "has host bits set", '"10.0.0.0/8"'],
        ),
        ('proxies = ["proxy.example"]', ["proxies names 'proxy.example'"]),
        ('[limits]\nexempt = ["here"]', ["limits.exempt names 'here'"]),
        ("[limits]\nconnections = 0", ["limits.connections = 0"]),
        (
            "[limits]\nconection = 5",
            ["limits.conection is not a key", "did you mean limits.connections?"],
        ),
        ("[admin]", ["[admin] needs identities"]),
        (
            'identities = "a"\n[admin]\nhost = "0.0.0.0"',
            ['admin.host = "0.0.0.0"', "administrators' tokens"],
        ),
        ("[page]", ["page.folder is missing"]),
        (
            '[page]\nfolder = "p"\nhost = "0.0.0.0"',
            ['page.host = "0.0.0.0"', "browsers do not let it train"],
        ),
        ('[page]\nfolder = "p"\naddress = "fleet.example"', ["page.address = 'fleet.example'"]),
        (
            '[page]\nfolder = "p"\ncoordinator = "https://a.example"',
            ["page.coordinator = 'https://a.example'"],
        ),
        ('[page]\nfolder = "p"\nrun = "a"', ["page.run", "goes with nothing else"]),
        ('runs = "r"\n[page]\nfolder = "p"', ["page.run", "is needed with runs"]),
        (
            'identities = "p/ids"\n[page]\nfolder = "p"',
            ["page.folder = ", "p holds ", "p/ids: whoever can connect"],
        ),
        (
            'tls.certificate = "a"\ntls.key = "key"\n[page]\nfolder = "."',
            ["page.folder = ", "key: whoever"],
        ),
        ('signing_keys = ["link/key"]\n[page]\nfolder = "p/../p"\nport = -1', ["page.port = -1"]),
        (
            'identities = "a"\n[admin]\nprot = 1',
            ["admin.prot is not a key", "did you mean admin.port?"],
        ),
        ('[tls]\ncertificate = "a.pem"', ["tls.key is missing"]),
        ('[tls]\ncertificate = ""\nkey = "b"', ["tls.certificate = ''"]),
        (
            '[tls]\ncertificate = "a"\nkey = "b"\nclients = "c"',
            ["tls.clients", 'add identities = "identities"'],
        ),
        (
            '[tls]\ncertificat = "a.pem"',
            ["tls.certificat is not a key", "did you mean tls.certificate?"],
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    said = refusal(tmp_path, text)
    for word in words:
        assert word in said


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ServiceError,
        match=r"~no-such-user/s\.toml: the service file cannot be read: .* no home folder",
    ):
        ServiceSettings.load("~no-such-user/s.toml")
    assert not is_service_file("~no-such-user/s.toml")
    with pytest.raises(ServiceError, match=r"nowhere\.toml: the service file cannot be read"):
        ServiceSettings.load(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    "url", ["s3://key:secret@bucket/fleet", "ftp://bucket/secret", "s3:/secret", "s3://", "secret"]
)
def test_an_object_store_is_named_without_keys(url: str) -> None:
    with pytest.raises(ServiceError, match="s3://bucket/folder") as refused:
        ServiceSettings.read({"blobs": url})
    assert "secret" not in refused.value.text


STORE = 'blobs = "s3://bucket/fleet"\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('bus = "nats://me:secret@host"\n' + STORE, "bus takes the address of a NATS server"),
        ('bus = "http://host:4222"\n' + STORE, "bus takes the address of a NATS server"),
        ('bus = "nats://a:4222,b:4222"\n' + STORE, "several with commas"),
        ('bus = "nats://host:4222"\n', "bus needs blobs"),
        ('runs = "runs"\nbus = "nats://host"\n' + STORE, "bus and runs do not go together"),
        ('[nats]\nprefix = "a"\n', r"\[nats\] is about the bus, which is missing"),
        ('[gateway]\nrun = "digits"\n', r"\[gateway\] .* add bus"),
        ('[nats]\nuser = "me"\n', "nats.user and nats.password_file go together"),
        ('[nats]\ncertificate = "me.pem"\n', "nats.certificate and nats.key go together"),
        ('[nats]\ntoken_file = "a"\ncredentials = "b"\n', "more than one of user"),
        ('[nats]\nca = "ca.pem"\n', "write tls://"),
        ('[nats]\nprefix = "a.*"\n', "prefix"),
        ('[gateway]\nrun = "digits"\nname = "a.b"\n', "name"),
        ("[gateway]\n", "run"),
    ],
)
def test_a_bus_that_cannot_be_used(tmp_path: Path, text: str, why: str) -> None:
    alone = "is missing" in why or "add bus" in why
    if text.startswith("[") and not alone:
        text = 'bus = "nats://host"\n' + STORE + text
    refused = refusal(tmp_path, text)
    assert re.search(why, refused), refused
    assert "secret" not in refused


def test_a_bus() -> None:
    raw = {
        "bus": "tls://a.example.org:4222,tls://[::1]:4222",
        "nats": {"user": "berlin", "password_file": "password", "ca": "ca.pem"},
        "gateway": {"run": "digits.v2"},
    }
    settings = ServiceSettings.read(raw, "/etc/fleet")
    assert settings.nats is not None
    assert settings.nats.password_file == Path("/etc/fleet/password")
    assert settings.gateway is not None
    assert settings.gateway.data_dir == Path("gateway")
    assert re.fullmatch("[A-Za-z0-9_-]{1,64}", settings.gateway.own_name)
