"""Every setting of a device, once: its flag, its variable, its key in a settings file and its help
all come from its row here.

To add a setting: a row here, and its use in ``commands/run.py``. Nothing heavy may be imported:
``--help`` reads this table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fleetlearn_device.settings.kinds import (
    SWITCH,
    YES_OR_NO,
    SettingKind,
    choice,
    data,
    number,
    path,
    text,
    texts,
    whole,
)


class Setting(NamedTuple):
    """A setting."""

    key: str
    """In a settings file: ``name``, or ``group.name`` for a name in the table ``[group]``."""
    kind: SettingKind
    default: Any
    """What counts where nobody says anything. None: nothing is set."""
    help: str
    name: str = ""
    """Its flag without the dashes, such as ``log-level``. Empty: the key with dashes."""
    unset: str = ""
    """What the help says of the default. Empty: the default itself."""
    secret: bool = False
    """Its value is never shown."""

    @property
    def flag(self) -> str:
        """The flag, such as ``--log-level``."""
        return f"--{self.name or self.key.replace('.', '-').replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The environment's variable, such as ``FLEETLEARN_LOG_LEVEL``."""
        return f"FLEETLEARN_{self.flag[2:].replace('-', '_').upper()}"


GROUPS: dict[str, str] = {
    "": "the device",
    "connection": "the connection to the coordinator",
    "states": "what the device states of itself, for a coordinator that chooses by it",
    "conditions": "what must hold while the device serves",
    "data": "data",
    "training": "training",
    "functions": "functions of the owner that runs may compute, train or encode by",
    "limits": "limits",
    "privacy": "what the owner demands of a run, whatever the coordinator says",
    "secure": "what the owner demands of secure aggregation, whatever the coordinator says",
    "peers": "training with neighbours, without a coordinator (`fleetlearn-device peer`)",
    "log": "log and numbers",
}
"""The tables of a settings file, "" being its top -> what each is about. The help's order."""
OF_PEERS = "peers"
"""The group of settings that only ``fleetlearn-device peer`` reads."""

SETTINGS: tuple[Setting, ...] = (
    Setting("coordinator", text("URL"), None, "ws://HOST:PORT or wss://HOST:PORT"),
    Setting("state", path("DIR"), None, "directory for what outlives the process"),
    Setting(
        "name", text("ID"), None, "the device's name at its first start", unset="a random name"
    ),
    Setting(
        "socket",
        path("SOCKET"),
        None,
        "UNIX socket by which programs on this machine use the device",
        unset="none",
    ),
    Setting("until_finished", SWITCH, False, "end when the training is finished"),
    Setting(
        "connection.ca",
        path(),
        None,
        "PEM of the only CA that TLS trusts",
        name="ca",
        unset="the system's CAs",
    ),
    Setting(
        "connection.certificate",
        path(),
        None,
        "PEM by which the coordinator knows this device; with --key",
        name="certificate",
    ),
    Setting(
        "connection.key",
        path(),
        None,
        "PEM of the certificate's key, without a password",
        name="key",
    ),
    Setting(
        "connection.insecure",
        SWITCH,
        False,
        "let another machine's address be ws://, without TLS",
        name="insecure",
    ),
    Setting(
        "connection.download_from",
        texts("HOST", "a list of hosts"),
        (),
        "host from which models may be fetched by HTTP, where the coordinator names one; may be "
        "given again",
        name="download-from",
        unset="the coordinator's own host",
    ),
    Setting(
        "connection.token",
        text("TOKEN"),
        None,
        "enrols the device, once",
        name="token",
        secret=True,
    ),
    Setting(
        "connection.token_file",
        path(),
        None,
        "file with the token, in place of it; an empty file is none",
        name="token-file",
    ),
    Setting(
        "connection.trust",
        texts("KEY", "a list of public keys"),
        (),
        "do only tasks that this public key signed, at later starts too; may be given again",
        name="trust",
        unset="what the token brings",
    ),
    Setting(
        "states.tags",
        texts("TAG", "a list of tags"),
        (),
        "to be chosen by; may be given again",
        name="tag",
    ),
    Setting("states.tier", text("TIER"), None, "the kind of device that this is", name="tier"),
    Setting(
        "states.charging",
        YES_OR_NO,
        None,
        "whether a charger is connected",
        name="charging",
        unset="as Linux says at each check-in",
    ),
    Setting(
        "states.network",
        choice("metered", "unmetered"),
        None,
        "what the network costs",
        name="network",
        unset="not stated",
    ),
    Setting("conditions.mains", SWITCH, False, "serve on mains power alone", name="only-on-mains"),
    Setting(
        "conditions.battery",
        number(0, 100, "PERCENT", "percent"),
        None,
        "serve on mains power, or with at least so much in the battery",
        name="min-battery",
    ),
    Setting(
        "conditions.unmetered",
        SWITCH,
        False,
        "serve on a network that is not paid for by the byte alone",
        name="only-unmetered",
    ),
    Setting(
        "conditions.load",
        number(0, 100, "PERCENT", "percent"),
        None,
        "serve while other programs use at most so much of all processors",
        name="max-load",
    ),
    Setting(
        "conditions.temperature",
        number(20, 120, "CELSIUS", "degrees Celsius"),
        None,
        "serve while no sensor is hotter",
        name="max-temperature",
    ),
    Setting(
        "conditions.full_speed",
        SWITCH,
        False,
        "serve while heat or a weak power supply does not slow the processor down",
        name="only-at-full-speed",
    ),
    Setting(
        "conditions.hours",
        texts("HOURS", "a list of hours such as mon-fri@22:00-06:00"),
        (),
        "serve at these hours of the day alone, such as 22:00-06:00 or sat,sun@00:00-24:00, in "
        "local time; may be given again",
        name="hours",
    ),
    Setting(
        "conditions.free_memory",
        number(0, 2**40, "MIB", "MiB"),
        None,
        "serve while other programs leave so much memory",
        name="min-free-memory",
    ),
    Setting(
        "conditions.free_disk",
        number(0, 2**40, "MIB", "MiB"),
        None,
        "serve while the state directory's disk has so much room",
        name="min-free-disk",
    ),
    Setting(
        "conditions.check",
        text("COMMAND", "a command"),
        None,
        "serve while this command, run once a minute, ends with exit status 0",
        name="check",
    ),
    Setting(
        "conditions.check_timeout",
        number(0.1, 600, "SECONDS", "seconds"),
        10,
        "after which the command is killed, and the device does not serve",
        name="check-timeout",
    ),
    Setting(
        "data.source",
        data(),
        None,
        "[KIND:]PATH[?OPTIONS] of .npz, CSV and other data, or MODULE:FUNCTION",
        name="data",
    ),
    Setting(
        "data.hold_out",
        number(0.0, 0.9),
        0.0,
        "share of the examples that is never trained on, and that models are measured on",
        name="hold-out",
    ),
    Setting(
        "training.runtime",
        choice("auto", "onnx", "ort-training"),
        "auto",
        "what computes a step",
        name="runtime",
        unset="auto (onnx)",
    ),
    Setting(
        "training.provider",
        choice("cpu", "cuda"),
        "cpu",
        "where onnx computes",
        name="provider",
    ),
    Setting(
        "training.own_model",
        path(),
        None,
        "ONNX file of this device's own model, written after each task",
        name="own-model",
    ),
    Setting(
        "training.own_bundle",
        path(),
        None,
        "training bundle of this device's own model, for runs that exchange class scores (FedMD)",
        name="own-bundle",
    ),
    Setting(
        "training.own_distillation",
        path(),
        None,
        "what export_distillation made of the same model",
        name="own-distillation",
    ),
    Setting(
        "training.keep_model",
        SWITCH,
        False,
        "keep the newest shared model for predictions",
        name="keep-model",
    ),
    Setting(
        "training.checkpoint_every",
        whole(0, 86400, "SECONDS", "seconds"),
        60,
        "training between two checkpoints, at least; 0: a training that is interrupted begins "
        "again",
        name="checkpoint-every",
    ),
    Setting(
        "functions.allow",
        texts("[NAME=]MODULE:FUNCTION", "a list of functions"),
        (),
        "a function that runs may compute, train or encode by on this device, under this name; or "
        "a short name that an installed package gives; may be given again",
        name="allow-function",
        unset="none",
    ),
    Setting("limits.threads", whole(1, 1024), 1, "threads inside an operator", name="threads"),
    Setting(
        "limits.feature_cache",
        whole(0, 2**20, "MIB", "MiB"),
        128,
        "memory for a frozen model's features; 0: none are kept",
        name="feature-cache",
    ),
    Setting(
        "limits.nice",
        whole(0, 19),
        None,
        "priority of the training's threads, 19 being the lowest; Linux only",
        name="nice",
    ),
    Setting(
        "limits.io",
        choice("low", "idle"),
        None,
        "priority of the training's disk traffic; idle: only while the disk has nothing else to "
        "do; Linux only",
        name="io",
    ),
    Setting(
        "limits.cpu",
        number(1, 100_000, "PERCENT", "percent of one processor"),
        None,
        "processor time that the device uses while it trains: 50 is half a processor",
        name="max-cpu",
    ),
    Setting(
        "limits.memory",
        number(32, 2**30, "MIB", "MiB"),
        None,
        "memory of the process; a task that needs more is given back",
        name="max-memory",
    ),
    Setting(
        "limits.upload",
        number(16, 2**30, "KIB", "KiB a second"),
        None,
        "how fast updates are sent",
        name="max-upload",
    ),
    Setting(
        "limits.download",
        number(16, 2**30, "KIB", "KiB a second"),
        None,
        "how fast models and bundles are fetched",
        name="max-download",
    ),
    Setting(
        "limits.cache",
        number(1, 2**30, "MIB", "MiB"),
        None,
        "disk for bundles; those that were not used for longest go",
        name="max-cache",
    ),
    Setting(
        "privacy.require",
        SWITCH,
        False,
        "take part only in runs with differential privacy",
        name="require-privacy",
    ),
    Setting(
        "privacy.participations",
        whole(1, 2**31),
        None,
        "how many updates the device makes in one run at most",
        name="max-participations",
        unset="any number",
    ),
    Setting(
        "secure.require",
        SWITCH,
        False,
        "take part only where the coordinator learns sums of updates alone",
        name="require-secure",
    ),
    Setting(
        "secure.helper",
        text("KEY", "a helper's public key"),
        None,
        "public key of the only helper that the owner trusts",
        name="trust-helper",
        unset="the one that the task names",
    ),
    Setting(
        "secure.minimum",
        whole(2, 65537, unit="devices"),
        None,
        "the fewest devices whose updates may be added up with this one's",
        name="min-sum",
        unset="what the task says",
    ),
    Setting(
        "secure.least_factor",
        number(1e-9, 1),
        None,
        "the smallest part of itself that a late update may count for",
        name="min-factor",
        unset="what the task says; with secure.require, none may count for less",
    ),
    Setting(
        "secure.roster",
        path("FILE"),
        None,
        "devices, with their keys, that pairwise masks may be agreed on with",
        name="roster",
        unset="any that the coordinator names",
    ),
    Setting("peers.book", path(), None, "address book (TOML), the same for all peers", name="book"),
    Setting("peers.bundle", path("PATH"), None, "the bundle that all peers train", name="bundle"),
    Setting("peers.steps", whole(1, 2**31), None, "the last step's number", name="steps"),
    Setting(
        "peers.listen",
        text("HOST:PORT"),
        None,
        "where to listen for neighbours; :PORT is on all addresses",
        name="listen",
        unset="the device's address in the book",
    ),
    Setting(
        "peers.discover",
        text("ADDRESS", "the IPv4 address of one of the device's interfaces"),
        None,
        "look for neighbours on the local network of this IPv4 address of the device",
        name="discover",
        unset="off",
    ),
    Setting(
        "peers.output",
        path(),
        None,
        "ONNX file for the model when all steps are done",
        name="output",
        unset="model.onnx in the state directory",
    ),
    Setting("log.level", choice("debug", "info", "warning", "error"), "info", "what is logged"),
    Setting(
        "log.format", choice("text", "json"), "text", "how each line is written; json: for programs"
    ),
    Setting(
        "log.file",
        path(),
        None,
        "file that the log is written to as well",
    ),
    Setting(
        "log.size",
        whole(1, 2**20, "MIB", "MiB"),
        5,
        "size at which the log file is put aside and a new one begins",
    ),
    Setting("log.files", whole(1, 1000), 3, "log files that are kept, the newest included"),
    Setting(
        "log.metrics_file",
        path(),
        None,
        "file of numbers for Prometheus' textfile collector, such as "
        "/var/lib/prometheus/node-exporter/fleetlearn.prom",
        name="metrics-file",
    ),
)
