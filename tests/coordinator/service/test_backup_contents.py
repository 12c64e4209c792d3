"""What belongs to a backup."""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.backup_contents import (
    PLAN_PATHS,
    SERVICE_PATHS,
    BackupError,
    find_contents,
    with_relative_paths,
)
from peers import plan_text, write_test_bundle


def paths_of(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of a section's fields that are paths."""
    for name, hint in typing.get_type_hints(kind).items():
        if typing.get_origin(hint) is dict:
            name += ".*"
        for part in (hint, *typing.get_args(hint)):
            if part is Path:
                yield prefix + name
            elif isinstance(part, type) and issubclass(part, msgspec.Struct):
                yield from paths_of(part, f"{prefix}{name}.")


@pytest.mark.parametrize(("kind", "known"), [(Plan, PLAN_PATHS), (ServiceSettings, SERVICE_PATHS)])
def test_every_key_that_is_a_path_is_known(kind: Any, known: tuple[str, ...]) -> None:
    assert sorted(paths_of(kind)) == sorted(known)


def test_whole_paths_become_relative_and_all_else_stays() -> None:
    text = """\
# the digits
name = "a"  # "/srv/a.bundle" is another
bundle = '/srv/models/a.bundle'
data_dir = "/var/lib/a"
[evaluation]
data = "held-out.npz"
"""
    found = with_relative_paths(text, Path("/srv/plans/plan.toml"), PLAN_PATHS)
    assert found == text.replace("'/srv/models/a.bundle'", "'../models/a.bundle'").replace(
        '"/var/lib/a"', '"../../var/lib/a"'
    )
    service = 'signing_keys = ["/k/one.pem", "two.pem"]\ntls.key = "/k/tls.pem"\n'
    found = with_relative_paths(service, Path("/k/service.toml"), SERVICE_PATHS)
    assert tomllib.loads(found) == {
        "signing_keys": ["one.pem", "two.pem"],
        "tls": {"key": "tls.pem"},
    }


def test_a_path_that_cannot_be_replaced_is_an_error() -> None:
    with pytest.raises(BackupError, match="Write them relative to the file"):
        with_relative_paths('bundle = "/srv/\\u0061"', Path("/srv/plan.toml"), PLAN_PATHS)


def test_all_files_of_a_plan_and_its_service_are_named(tmp_path: Path, bundle_path: Path) -> None:
    plan, service = tmp_path / "plans" / "plan.toml", tmp_path / "service.toml"
    plan.parent.mkdir()
    plan.write_text(plan_text(bundle_path, "../data/run", evaluation__data="held.npz"))
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text("")
    service.write_text(
        'identities = "ids"\nsigning_keys = ["sign.pem"]\n'
        '[tls]\ncertificate = "tls/c.pem"\nkey = "tls/k.pem"\nclients = "tls/ca.pem"\n'
        '[page]\nfolder = "page"\n'
        '[alerts]\nwebhook = "https://x"\nwebhook_ca = "hook.pem"\n'
    )
    (tmp_path / "hook.pem").write_text("")
    found = find_contents(plan, service, keys=False)
    bundle = {path for path in bundle_path.rglob("*") if path.is_file()}
    assert len(bundle) > 3
    assert {*found.files} == bundle | {
        tmp_path / "plans" / "held.npz", tmp_path / "tls" / "c.pem",
        tmp_path / "tls" / "ca.pem", tmp_path / "page" / "index.html",
        tmp_path / "hook.pem",
    }  # fmt: skip
    private = [tmp_path / "sign.pem", tmp_path / "tls" / "k.pem"]
    assert found.left_out == private
    assert found.secret == {
        *private, tmp_path / "ids", tmp_path / "data" / "run", tmp_path / "plans" / "held.npz",
    }  # fmt: skip
    assert {*private} < {*find_contents(plan, service, keys=True).files}


def test_what_a_process_shows_on_the_bus_is_kept_and_its_secrets_only_with_keys(
    tmp_path: Path, bundle_path: Path
) -> None:
    plan, service = tmp_path / "plan.toml", tmp_path / "service.toml"
    plan.write_text(plan_text(bundle_path, "run"))
    service.write_text(
        'bus = "tls://nats.example.org"\nblobs = "s3://bucket/fleet"\n'
        '[nats]\nuser = "engine"\npassword_file = "word"\n'
        'ca = "ca.pem"\ncertificate = "c.pem"\nkey = "k.pem"\n'
    )
    found = find_contents(plan, service, keys=False)
    assert {tmp_path / "ca.pem", tmp_path / "c.pem"} < {*found.files}
    private = {tmp_path / "word", tmp_path / "k.pem"}
    assert {*found.left_out} == private < found.secret
    assert private.isdisjoint(found.files)
    assert private < {*find_contents(plan, service, keys=True).files}


def test_the_list_of_devices_of_pairwise_masks_is_named(tmp_path: Path, bundle_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    secure = {"secure__mode": "pairwise", "secure__clip": 1.0, "secure__roster": "devices.txt"}
    rounds = {"round__goal": 6, "round__minimum": 5, "local__evaluate": False}
    plan.write_text(plan_text(bundle_path, "run", **rounds, **secure))
    assert tmp_path / "devices.txt" in find_contents(plan, None, keys=False).files


def test_files_of_a_distillation_are_named(tmp_path: Path, bundle_path: Path) -> None:
    plan, distil = tmp_path / "plan.toml", {"distil__data": "u.npz", "distil__bundle": "d.zip"}
    (tmp_path / "d.zip").write_bytes(b"")
    plan.write_text(plan_text(bundle_path, "run", **distil))
    found = find_contents(plan, None, keys=False)
    assert {tmp_path / "u.npz", tmp_path / "d.zip"} < {*found.files}
    assert tmp_path / "u.npz" in found.secret


def test_what_does_not_go_together_is_refused(tmp_path: Path, bundle_path: Path) -> None:
    plan, service = tmp_path / "plan.toml", tmp_path / "service.toml"
    plan.write_text(plan_text(bundle_path, "run"))
    service.write_text('runs = "runs"\n')
    for source, other, words in (
        (plan, service, "back it up alone"),
        (service, service, "leave one out"),
        (tmp_path, service, "name the plan"),
    ):
        with pytest.raises(BackupError, match=words):
            find_contents(source, other, keys=False)
    plan.write_text(plan_text(bundle_path, "postgresql://db/run"))
    with pytest.raises(BackupError, match="its own tools make its backups"):
        find_contents(plan, None, keys=False)


def test_a_file_that_only_a_new_run_needs_may_be_gone(tmp_path: Path) -> None:
    bundle, weights = write_test_bundle(tmp_path / "bundle", 10), tmp_path / "weights.safetensors"
    plan = tmp_path / "plan.toml"
    plan.write_text(f'initial = "{weights}"\n{plan_text(bundle, tmp_path / "run")}')
    assert weights not in find_contents(plan, None, keys=False).files
    weights.write_bytes(b"weights")
    assert weights in find_contents(plan, None, keys=False).files
