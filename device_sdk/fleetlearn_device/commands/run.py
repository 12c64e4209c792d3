"""``fleetlearn-device run``: serve a coordinator."""

from __future__ import annotations

import argparse
import logging
import signal
from typing import TYPE_CHECKING, Any

from fleetlearn_protocol.paths import in_home

from fleetlearn_device.commands.exits import EXIT, fail
from fleetlearn_device.settings.sources import (
    SettingError,
    Values,
    add_flags,
    read_settings,
    required,
    unknown_variables,
)

if TYPE_CHECKING:
    from fleetlearn_device.conditions.conditions import Conditions
    from fleetlearn_device.device import Device
    from fleetlearn_device.limits.device_limits import DeviceLimits
    from fleetlearn_device.session.privacy_demands import PrivacyDemands
    from fleetlearn_device.session.secure_demands import SecureDemands

log = logging.getLogger("fleetlearn.device")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every setting's flag."""
    parser.description = (
        "Serve a coordinator: train its tasks on this device's data. The data do not leave the "
        "device.\n\n"
        "A setting's flag counts before its variable (--log-level: FLEETLEARN_LOG_LEVEL), and that "
        "before\nits key in the file of --config (level in the table [log]). `fleetlearn-device "
        "config` shows\nwhat counts, and from where."
    )
    parser.epilog = EXIT
    add_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal comes, or the training is finished. Returns the exit status."""
    values = read_settings(options)
    for key in ("coordinator", "state", "data.source"):
        required(values, key)

    from fleetlearn_protocol.command_line import needs

    from fleetlearn_device.commands.logs import begin_log

    with needs("fleetlearn-device", "device"):
        from fleetlearn_device.device import Device
    from fleetlearn_device.own_code import FunctionError
    from fleetlearn_device.runtimes.checks import DataError

    begin_log(values)
    for name, near in unknown_variables():
        log.warning("%s is set and no setting; did you mean %s?", name, near)
    try:
        device = Device(**device_arguments(values))
    except (DataError, FunctionError) as error:
        _tell(values, str(error))
        return fail(2, str(error))
    except ValueError as error:
        return fail(2, str(error))
    device.tells_systemd = True
    return _served(device, values)


def device_arguments(values: Values) -> dict[str, Any]:
    """Return the arguments of ``Device`` that the settings make."""
    value = {key: each.value for key, each in values.items()}
    return {
        "url": value["coordinator"],
        "data": value["data.source"],
        "hold_out": value["data.hold_out"],
        "state_dir": value["state"],
        "runtime": value["training.runtime"],
        "threads": value["limits.threads"],
        "provider": value["training.provider"],
        "name": value["name"],
        "ca": value["connection.ca"],
        "certificate": value["connection.certificate"],
        "key": value["connection.key"],
        "insecure": value["connection.insecure"],
        "download_from": value["connection.download_from"],
        "token": value["connection.token"] or token_in(values),
        "trust": value["connection.trust"],
        "own_model": value["training.own_model"],
        "own_bundle": value["training.own_bundle"],
        "own_distillation": value["training.own_distillation"],
        "socket": value["socket"],
        "keep_model": value["training.keep_model"],
        "checkpoint_every": value["training.checkpoint_every"],
        "feature_cache": value["limits.feature_cache"],
        "tags": value["states.tags"],
        "tier": value["states.tier"],
        "charging": value["states.charging"],
        "network": value["states.network"],
        "conditions": _conditions(value),
        "limits": _limits(value),
        "privacy": _demands(value),
        "secure": _secure_demands(value),
        "functions": value["functions.allow"],
        "metrics_file": value["log.metrics_file"],
        "until_finished": value["until_finished"],
    }


def token_in(values: Values) -> str | None:
    """Return the token of the token file, or None. Raises SettingError where it cannot be read."""
    found = values["connection.token_file"]
    if found.value is None:
        return None
    try:
        return in_home(found.value).read_text("utf-8").strip() or None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise SettingError(f"{found.source}: {found.value} cannot be read: {why}") from None


def _conditions(value: dict[str, Any]) -> Conditions:
    from fleetlearn_device.conditions.conditions import Conditions

    return Conditions(**{name: value[f"conditions.{name}"] for name in Conditions._fields})


def _limits(value: dict[str, Any]) -> DeviceLimits:
    from fleetlearn_device.limits.device_limits import DeviceLimits

    return DeviceLimits(**{name: value[f"limits.{name}"] for name in DeviceLimits._fields})


def _demands(value: dict[str, Any]) -> PrivacyDemands:
    from fleetlearn_device.session.privacy_demands import PrivacyDemands

    return PrivacyDemands(value["privacy.require"], value["privacy.participations"])


def _secure_demands(value: dict[str, Any]) -> SecureDemands:
    from fleetlearn_device.session.secure_demands import SecureDemands

    return SecureDemands(**{name: value[f"secure.{name}"] for name in SecureDemands._fields})


def _served(device: Device, values: Values) -> int:
    from fleetlearn_protocol.errors import Code, FleetError, ProtocolError

    from fleetlearn_device.driver.dead_ends import NoConnectionError
    from fleetlearn_device.runtimes.checks import DataError
    from fleetlearn_device.runtimes.import_onnxruntime import RuntimeUnavailableError

    try:
        device.run()
    except DataError as error:
        return fail(2, str(error))
    except ProtocolError as error:
        return fail({Code.REPLACED: 3, Code.BAD_VERSION: 6}.get(error.code, 1), error.text)
    except FleetError as error:
        return fail(1, error.text)
    except NoConnectionError as error:
        return fail({"not-admitted": 4, "tls": 5, "unreachable": 7}[error.kind], str(error))
    except RuntimeUnavailableError as error:
        _tell(values, str(error))
        return fail(1, str(error))
    except KeyboardInterrupt:
        return 130
    return 130 if device.stopped_by is signal.SIGINT else 0


def _tell(values: Values, error: str) -> None:
    """Tell the coordinator why this device cannot work, if it can be reached at once."""
    import asyncio

    from fleetlearn_device.driver.address import checked_address
    from fleetlearn_device.driver.cannot_work import tell_cannot_work

    names = ("ca", "certificate", "key", "insecure")
    options = {name: values[f"connection.{name}"].value for name in names}
    try:
        address = checked_address(values["coordinator"].value, **options)
    except ValueError:  # the error that the process ends with came first
        return
    asyncio.run(tell_cannot_work(address, values["state"].value, error))
