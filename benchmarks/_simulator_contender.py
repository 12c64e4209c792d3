"""One contender of simulator.py in a separate process: does its device-rounds, and prints what
they cost as JSON.

    _simulator_contender.py simulator|kernel|pytorch|pfl|flower SETTINGS.json LAUNCHED

``LAUNCHED`` is time.monotonic() when the process was started. The first two need the simulator with
a runtime, the rest (_other_frameworks.py) PyTorch and what is compared, and nothing of this
project.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import _other_frameworks
import numpy as np
from _process_usage import Usage, cpu_between, usage_of_all

Settings = dict[str, Any]
Figures = dict[str, float]


def simulator(settings: Settings, launched: float) -> Figures:
    """Rounds of ``simulate``, with all that belongs to a run: data, engine, event log, checkpoints,
    exact sums."""
    from fleetlearn_simulator.run import Options, simulate
    from fleetlearn_simulator.scenario.scenario import Scenario

    base = Path(settings["folder"])
    run = Scenario.read(settings["scenario"], base)
    marks: list[tuple[float, float, int]] = []  # clock, this process's CPU, reports
    # by all processes, when the counted rounds begin and when they end
    used: list[dict[int, Usage]] = []

    def progress(fleet: Any) -> None:
        marks.append((time.monotonic(), time.process_time(), fleet.history[-1]["reports"]))
        last = (
            fleet.history[-1]["how"] == "committed"
            and fleet.engine.version + 1 == run.plan.stop.rounds
        )
        if len(marks) == settings["warm"] or last:
            used.append(usage_of_all(os.getpid()))

    options = Options(
        backend=settings["backend"], workers=settings["workers"], provider=settings["provider"]
    )
    done = simulate(run, base / "run", options, progress=progress)
    assert done is not None
    if len(used) != 2:
        raise RuntimeError(f"the run came to an early end: {done.summary}")
    warm = settings["warm"]
    (begin, begin_cpu, _), (end, end_cpu, _) = marks[warm - 1], marks[-1]
    rounds, reports = len(marks) - warm, sum(reports for *_, reports in marks[warm:])
    return {
        "device_rounds_per_s": reports / (end - begin),
        "cpu_us_per_device_round": 1e6 * cpu_between(*used) / reports,
        "first_round_s": marks[0][0] - launched,
        "parent_cpu_ms_per_round": 1e3 * (end_cpu - begin_cpu) / rounds,
        "parent_cpu_us_each": 1e6 * (end_cpu - begin_cpu) / reports,
        "clock_ms_per_round": 1e3 * (end - begin) / rounds,
        "parent_peak_rss_mib": used[1][os.getpid()].peak_rss,
        "peak_rss_mib": sum(usage.peak_rss for usage in used[1].values()),
        "reports": reports / rounds,
        "lost": sum(done.summary["lost"].values()) / len(marks),
        "loss": done.summary["metrics"]["loss"],
    }


def kernel(settings: Settings, launched: float) -> Figures:
    """train_many.onnx and nothing around it: the same block of devices again and again."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime
    from fleetlearn_device.runtimes.providers import open_provider

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    provider = open_provider(settings["provider"])
    session = onnxruntime.InferenceSession(
        settings["graph"], options, **provider.session_arguments()
    )
    random = np.random.default_rng(0)
    feed: dict[str, Any] = {}
    for row in session.get_inputs():
        shape = [settings["batch"] if isinstance(size, str) else size for size in row.shape]
        whole = row.type == "tensor(int64)"
        feed[row.name] = (
            random.integers(10, size=shape) if whole else random.standard_normal(shape, np.float32)
        )
    devices, steps = feed["batch.x"].shape[:2]
    feed |= {"steps": np.full(devices, steps), "hyper.lr": np.array(settings["lr"], np.float32)}
    session.run(None, feed)
    begin, begin_cpu = time.monotonic(), time.process_time()
    for _ in range(settings["rounds"]):
        session.run(None, feed)
    clock, cpu, done = (
        time.monotonic() - begin,
        time.process_time() - begin_cpu,
        devices * settings["rounds"],
    )
    return {"device_rounds_per_s": done / clock, "cpu_us_per_device_round": 1e6 * cpu / done}


def main() -> None:
    kind, file, launched = sys.argv[1:]
    contenders = {"simulator": simulator, "kernel": kernel, **_other_frameworks.CONTENDERS}
    figures = contenders[kind](json.loads(Path(file).read_text()), float(launched))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
