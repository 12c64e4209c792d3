"""What devices hear is what they hear from one process: tests of servers, of which nothing but the
connections is other here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from nats_server import nats_server

ROOT = Path(__file__).parents[3]
SERVICE = ROOT / "tests" / "coordinator" / "service"
RUNS = [
    "test_several_runs.py",
    "test_canary_runs.py",
    "test_device_history.py",
    "test_helper_asker.py",
    "test_live_state.py",
    "test_observers.py",
    "test_page.py",
    "test_private_views.py",
    "test_server_ghosts.py",
    "test_waiting_log.py",
    "test_work_in_thread.py",
    "monitoring/test_run_traces.py",
    "training_run/test_run_weighing.py",
    "views/test_run_views.py",
    "../secure/test_helper.py",
    "../storage/test_earlier_schemas.py",
]
SERVERS = [
    "test_server.py",
    "test_server_algorithms.py",
    "test_server_asynchronous.py",
    "test_server_encodings.py",
    "test_server_evaluation.py",
    "test_server_pace.py",
    "test_server_secure.py",
    "test_server_secure_sums.py",
    "test_server_limits.py",
    "test_family_runs.py",
    "test_pairwise.py",
    "test_roll_call.py",
    "test_task_privacy.py",
    "../network/test_signing.py",
]
OF_ENGINE = ["../network/test_gate.py"]
"""Of what gateways on other machines ask the engine process."""
LOOK_INSIDE = [
    # They look at the connections of the coordinator's own process.
    "test_a_file_that_cannot_be_read_any_more_ends_its_download_alone",
    "test_a_later_fetch_replaces_an_earlier_one",
    "test_a_broken_upload_resumes_where_it_was",
    "test_a_device_that_trained_anew_uploads_anew",
    "test_uploads_are_granted_a_few_at_a_time",
    "test_a_silent_device_is_ended",
    "test_a_device_is_not_silent_while_the_coordinator_stands_still",
    "test_a_device_that_stops_reading_is_ended",
    "test_a_device_that_takes_chunks_in_is_not_silent",
    "test_an_upload_ends_with_its_task",
    "test_what_a_connection_ended_is_remembered_within_bounds",
    "test_an_error_at_the_end_of_a_connection_ends_the_process_too",
    "test_a_full_disk_ends_the_process_and_nothing_is_done_after",
    "test_a_new_connection_is_no_new_budget",
    "test_a_task_whose_device_waits_for_the_coordinator_goes_on",
    # They count the spool files of one process, or break them: a gateway's are broken in
    # test_several_runs_behind.py.
    "test_many_updates_fold_into_a_written_sum",
    "test_an_upload_waits_while_all_spool_files_are_in_use",
    "test_a_full_disk_ends_its_run_alone",
    # They look at the engine in the moment in which the device is refused, a moment before a
    # gateway's word is there.
    "test_an_update_of_another_length_ends_the_task",
    "test_a_report_of_more_work_than_the_task_asked_for_ends_the_task",
    "test_a_report_of_parts_that_were_not_asked_for_ends_the_task",
    "test_bytes_that_no_encoder_writes_end_the_task",
    "test_a_report_that_cannot_be_added_or_tells_too_much_ends_its_task",
    "test_no_factor_is_told_where_no_update_can_be_stale",
    "test_what_a_refused_report_tells_is_shown_to_its_device_alone",
    "test_a_canary_whose_devices_fail_goes_back",
]
LOOK_AT_ONCE = [
    # They look at the model in the moment in which the last update is acknowledged: a run whose
    # bytes are in an object store makes it a moment later.
    "test_a_second_connection_of_a_device_replaces_the_first",
    "test_reports_that_are_refused_leave_the_round_unharmed",
    "test_a_chunk_at_the_wrong_place_is_refused_and_the_upload_goes_on",
    "test_an_update_that_is_not_finite_ends_the_task_and_not_the_round",
    "test_an_update_beyond_the_exact_sum_is_refused",
    "test_said_twice_counts_once",
    "test_chunks_under_way_when_the_round_ends_are_ignored",
    "test_a_vanished_device_is_lost_after_its_grace",
    "test_a_new_process_goes_on_with_the_round",
    "test_a_held_update_counts_after_its_device_was_lost",
    "test_who_took_part_as_often_as_it_may_is_told_so",
    "test_who_took_part_lately_is_told_when_it_may_again",
    "test_devices_vanish_in_each_phase_and_the_others_go_on",
    "test_only_enrolled_devices_connect",
]
LEAST = 80
"""Tests of each suite that are run at least: fewer would say that they are not found any more."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "left_out", "files"),
    [
        ("behind_gateways", LOOK_INSIDE, SERVERS),
        ("behind_gateways", LOOK_INSIDE, RUNS),
        ("behind_distant_gateways", LOOK_INSIDE + LOOK_AT_ONCE, SERVERS + OF_ENGINE),
    ],
    ids=["servers", "runs", "servers of distant gateways"],
)
def test_the_coordinators_tests_behind_two_gateways(
    plugin: str, left_out: list[str], files: list[str]
) -> None:
    if "distant" in plugin:
        with nats_server():  # skips where it is not installed
            pass
    support = str(ROOT / "tests" / "support")
    environment = {**os.environ, "PYTHONPATH": support}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", plugin, "-m", "not slow"]
    command += ["-k", " and ".join(f"not {name}" for name in left_out)]
    command += [str(SERVICE / file) for file in files]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed >= LEAST, done.stdout[-500:]
