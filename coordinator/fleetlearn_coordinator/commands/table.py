"""Every command of fleetlearn-coordinator, in the groups in which its help shows them.

A command's module is imported when the command is used: the others' imports cost nothing. The help
and the shell's completion need this table alone.
"""

from __future__ import annotations

from typing import NamedTuple

PACKAGE = "fleetlearn_coordinator.commands"


class Listed(NamedTuple):
    """A command."""

    name: str
    module: str
    """Below ``PACKAGE``; its ``app`` has the command under this name."""
    help: str
    """What it does, short enough for one line of 80 columns."""


GROUPS: dict[str, tuple[Listed, ...]] = {
    "Set up": (
        Listed("init", "initial", "Write a commented plan.toml and service.toml"),
        Listed("make-bundle", "computations", "Write a bundle that computes, and trains nothing"),
        Listed("public-bundle", "public_bundle", "Write public examples, for FedMD"),
        Listed("serve", "serving", "Run a plan's training, or all runs of a host"),
        Listed("serve-gateway", "gateway", "Hold devices' connections on another machine"),
        Listed("doctor", "doctor", "Check what a coordinator needs, and say what to do"),
        Listed("algorithms", "algorithms", "Own algorithms of installed packages, by kind"),
        Listed("privacy", "privacy", "Say what a plan's differential privacy comes to"),
        Listed("install-service", "systemd", "Write a systemd service that serves it from boot on"),
        Listed("certificate", "keys", "Make or renew the coordinator's TLS certificate"),
        Listed("device-certificate", "keys", "Make a certificate for a device"),
        Listed("signing-key", "keys", "Make a key that signs tasks"),
        Listed("vertical", "vertical", "Parties with other features of the same rows train"),
        Listed("split", "split", "Devices with other rows train a model divided at a layer"),
        Listed("helper", "helper", "Another operator's helper of secure aggregation"),
        Listed("prometheus-rules", "prometheus", "Print alert rules for Prometheus"),
    ),
    "See": (
        Listed("status", "status", "How far the training is, and when it is through"),
        Listed("runs", "look", "All runs of a host, in a line each"),
        Listed("rounds", "look", "The last rounds, and who was lost in them"),
        Listed("devices", "look", "The devices: last seen, tasks, last error"),
        Listed("models", "models", "The versions of the model, and their metrics"),
        Listed("result", "computations", "What a run without a model found, as statistics"),
        Listed("data-quality", "data_quality", "Whose data look unlike the others'"),
        Listed("compare-models", "models", "How far two versions of the model are apart"),
        Listed("view", "view", "The live page over records, while nobody serves"),
        Listed("tail", "tail", "What happens, as it happens"),
        Listed("audit", "audit", "Who was enrolled, who changed what, and when"),
        Listed("verify", "audit", "Check that nobody changed the audit log"),
    ),
    "Act": (
        Listed("run", "runs", "Add a run to a host, or remove one"),
        Listed("canary", "canary", "Try a new plan, bundle or model on a few devices"),
        Listed("pause", "acts", "Give no more tasks of a host's run"),
        Listed("resume", "acts", "Let a host's run go on"),
        Listed("drain", "acts", "Stop a host's run when its open round is over"),
        Listed("stop", "acts", "Stop a host's run at once"),
        Listed("rollback", "acts", "Go on from an earlier version of the model"),
        Listed("evaluate", "acts", "Measure the newest model on the devices' data"),
        Listed("evaluate-held-out", "models", "Measure the kept models on held-out data, here"),
        Listed("export-model", "models", "Write the model as an ONNX file"),
        Listed("results", "results", "Write the rounds for pandas, TensorBoard, MLflow"),
    ),
    "Keep": (
        Listed("backup", "backups", "Copy a run or a host, also while it is served"),
        Listed("restore", "backups", "Write a backup's content, to be served from"),
        Listed("move-ledger", "backups", "Move a run's ledger into PostgreSQL"),
        Listed("count-releases", "backups", "Count what a private copy's original released"),
    ),
    "Let in and keep out": (
        Listed("enrol", "identities", "Print a token that enrols devices"),
        Listed("revoke", "identities", "End a device's credential and certificates"),
        Listed("administrator", "administrators", "Who may use the administrators' port"),
    ),
}
"""Group -> its commands."""
HIDDEN = (Listed("gateway", "serving", "Hold connections for `serve --gateways`"),)
"""Commands that other commands start."""
ALIASES = {"token": "enrol", "roll-back": "rollback"}
"""Names of earlier releases -> today's."""


def find_command(name: str) -> Listed | None:
    """Return the command of this name or alias, or None."""
    name = ALIASES.get(name, name)
    listed = (each for group in GROUPS.values() for each in group)
    return next((each for each in (*listed, *HIDDEN) if each.name == name), None)
