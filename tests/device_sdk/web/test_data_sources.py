"""Where a tab's data come from, in Chromium: files, the camera, the motion sensors; and its check
of signatures."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import browsing
from playwright.sync_api import Page, Route
from web_sdk import RUNTIME_FILES, built, runtime_file

ORIGIN = "http://localhost/"
"""A secure context; every request is answered by ``answer``."""
SIGNING = Path(__file__).parents[3] / "protocol" / "vectors" / "signing.json"
FAKE_CAMERA = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
COLLECT = "const columns = await sdk.collectExamples(source); return shown(columns);"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("profile"), *FAKE_CAMERA) as browser:
        opened = browser.new_page()
        opened.route("**/*", answer)
        opened.goto(ORIGIN)
        yield opened


def answer(route: Route) -> None:
    name = route.request.url.removeprefix(ORIGIN)
    if name in ("sdk.js", "worker.js"):
        route.fulfill(body=built(f"browser/{name}").read_bytes(), content_type="text/javascript")
    elif name in RUNTIME_FILES:
        kind = "text/javascript" if name.endswith(".mjs") else "application/wasm"
        route.fulfill(body=runtime_file(name).read_bytes(), content_type=kind)
    else:
        route.fulfill(body='<!doctype html><input type="file" multiple>', content_type="text/html")


def run(page: Page, script: str, given: Any = None) -> Any:
    """Return what the body of an async function returns, or the text of what it throws."""
    return page.evaluate(
        """async ([script, given]) => {
          const sdk = await import("/sdk.js");
          const shown = (columns) =>
            Object.fromEntries(Object.entries(columns).map(([name, { values, shape }]) =>
            [name, { kind: values.constructor.name, shape, values: Array.from(values, Number) }]));
          const body = new (async () => {}).constructor("sdk", "shown", "given", script);
          try {
            return await body(sdk, shown, given);
          } catch (error) {
            return `${error.name}: ${error.message}`;
          }
        }""",
        [script, given],
    )


def png(width: int, height: int, colour: tuple[int, int, int]) -> bytes:
    """A picture of one colour."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes(colour) * width) * height
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def choose(page: Page, *files: tuple[str, bytes]) -> None:
    """Have the page's file input hold these files."""
    payloads = [
        {"name": name, "mimeType": "image/png", "buffer": content} for name, content in files
    ]
    page.set_input_files("input", payloads)  # type: ignore[arg-type]


def test_images_from_files(page: Page) -> None:
    choose(page, ("red_1.png", png(8, 4, (255, 0, 0))), ("blue_1.png", png(3, 9, (0, 0, 255))))
    found = run(
        page,
        f"""const source = sdk.imagesFromFiles(document.querySelector("input").files,
          {{ width: 2, height: 2, mean: 0.5, std: 0.5, label: "name", classes: ["blue", "red"] }});
        {COLLECT}""",
    )
    red, blue = [1.0] * 4 + [-1.0] * 8, [-1.0] * 8 + [1.0] * 4
    assert found == {
        "x": {"kind": "Float32Array", "shape": [2, 3, 2, 2], "values": red + blue},
        "y": {"kind": "Int32Array", "shape": [2], "values": [1, 0]},
    }


def test_a_grey_image_in_the_middle_of_black(page: Page) -> None:
    choose(page, ("white.png", png(6, 2, (255, 255, 255))))
    options = '{ width: 3, height: 3, channels: 1, fit: "pad", names: { input: "image" } }'
    found = run(
        page,
        f'const source = sdk.imagesFromFiles(document.querySelector("input").files, {options}); '
        f"{COLLECT}",
    )
    assert found["image"]["shape"] == [1, 1, 3, 3]
    assert found["image"]["values"] == pytest.approx([0, 0, 0, 1, 1, 1, 0, 0, 0])


def test_a_file_that_is_no_image_is_named(page: Page) -> None:
    choose(page, ("good.png", png(2, 2, (0, 0, 0))), ("notes.png", b"hello"))
    script = (
        'const source = sdk.imagesFromFiles(document.querySelector("input").files, { width: 2, '
        "height: 2 });"
    )
    assert run(page, script + COLLECT).startswith(
        "DataError: notes.png is no image that this browser can read"
    )


def test_frames_of_the_camera(page: Page) -> None:
    """Chromium's fake camera shows a moving picture. Its light goes out with ``stop``."""
    found = run(
        page,
        """const options = { width: 16, height: 12, classes: ["cup", "tin"] };
        const camera = await sdk.openCamera(options);
        const frames = camera.frames({ count: 2, every: 300, label: "tin" });
        const columns = await sdk.collectExamples(frames);
        const on = camera.on;
        camera.stop();
        let after;
        try { camera.take("cup"); } catch (error) { after = `${error.name}: ${error.message}`; }
        return { ...shown(columns), on, off: camera.on, after };""",
    )
    assert found["x"]["shape"] == [2, 3, 12, 16]
    first, second = found["x"]["values"][:576], found["x"]["values"][576:]
    assert 0 <= min(first) < max(first) <= 1
    assert first != second
    assert found["y"] == {"kind": "Int32Array", "shape": [2], "values": [1, 1]}
    assert (found["on"], found["off"]) == (True, False)
    assert found["after"] == "SourceError: the camera is off; open it again"


def test_the_camera_is_asked_for_only_when_it_is_opened(page: Page) -> None:
    """And what the person refuses is said."""
    found = run(
        page,
        """const asked = [];
        const real = navigator.mediaDevices.getUserMedia;
        navigator.mediaDevices.getUserMedia = (wanted) => {
          asked.push(wanted);
          return Promise.reject(new DOMException("Permission denied", "NotAllowedError"));
        };
        const before = asked.length;
        try { await sdk.openCamera({ width: 2, height: 2, facing: "user" }); } catch (error) {
          return { before, asked, text: `${error.name}: ${error.message}` };
        } finally { navigator.mediaDevices.getUserMedia = real; }""",
    )
    assert found == {
        "before": 0,
        "asked": [{"audio": False, "video": {"facingMode": "user"}}],
        "text": (
            "SourceError: the camera was not allowed; it can be, in the browser's settings of this "
            "page"
        ),
    }


MOVE = """
// This machine has no sensors, and Chromium says so with an event without values.
addEventListener("devicemotion", (event) => event.isTrusted && event.stopImmediatePropagation());
const move = (seconds, x, rotation = { alpha: 1, beta: 2, gamma: 3 }) => {
  const event = new DeviceMotionEvent("devicemotion",
    { accelerationIncludingGravity: { x, y: 0, z: 9.8 }, rotationRate: rotation, interval: 20 });
  Object.defineProperty(event, "timeStamp", { value: 1000 * seconds });
  dispatchEvent(event);
};
const soon = () => new Promise((resolve) => setTimeout(resolve));
"""


def test_windows_of_motion(page: Page) -> None:
    """Samples that come at 100 Hz, with a gap, as windows of 50 Hz."""
    found = run(
        page,
        MOVE
        + """await sdk.allowMotion();
        const options = { seconds: 0.3, length: 3, overlap: 1, rate: 50, label: 4 };
        const source = sdk.motionWindows(options);
        const collected = sdk.collectExamples(source);
        await soon();
        for (let n = 0; n <= 8; n++) move(n / 100, n);
        move(60, 100); move(60.02, 101); move(60.04, 102);
        const columns = await collected;
        move(61, 0); // nobody listens any longer
        return shown(columns);""",
    )
    assert found["x"]["shape"] == [3, 6, 3]
    assert found["y"] == {"kind": "Int32Array", "shape": [3], "values": [4, 4, 4]}
    windows = [found["x"]["values"][start : start + 18] for start in (0, 18, 36)]
    assert [window[:3] for window in windows] == [[0, 2, 4], [4, 6, 8], [100, 101, 102]]
    assert windows[0][3:] == pytest.approx([0] * 3 + [9.8] * 3 + [1] * 3 + [2] * 3 + [3] * 3)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("move(0, 1, { alpha: null });", "SourceError: this device has no sensor for rotation"),
        ("", "SourceError: no sample of the motion sensors came within 3 s"),
    ],
)  # fmt: skip
def test_motion_that_does_not_come(page: Page, script: str, words: str) -> None:
    options = "{ seconds: 60, length: 3 }"
    source = (
        f"const found = sdk.collectExamples(sdk.motionWindows({options})); await soon(); {script} "
        "return await found;"
    )
    assert run(page, MOVE + source) == words


def test_a_machine_without_sensors_says_so(page: Page) -> None:
    page.reload()
    script = "return await sdk.collectExamples(sdk.motionWindows({ seconds: 60, length: 3 }));"
    assert run(page, script) == "SourceError: this device has no sensor for acceleration"


def test_sensors_give_windows(page: Page) -> None:
    """With sensors that Chromium emulates."""
    page.reload()
    session = page.context.new_cdp_session(page)
    for kind in ("accelerometer", "linear-acceleration", "gyroscope"):
        session.send("Emulation.setSensorOverrideEnabled", {"enabled": True, "type": kind})
        reading = {"xyz": {"x": 1, "y": 2, "z": 3}}
        session.send("Emulation.setSensorOverrideReadings", {"type": kind, "reading": reading})
    found = run(
        page, f"const source = sdk.motionWindows({{ seconds: 1, length: 4, rate: 25 }}); {COLLECT}"
    )
    assert found["x"]["shape"][1:] == [6, 4]
    assert found["x"]["shape"][0] > 1
    degrees = [57.2958 * value for value in (1, 2, 3)]
    expected = [value for value in (1, 2, 3, *degrees) for _ in range(4)]
    assert found["x"]["values"][:24] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        ('async () => "granted"', None),
        (
            'async () => "denied"',
            "SourceError: the motion sensors were not allowed; they can be, in the browser's",
        ),
        (
            'async () => { throw new Error("no gesture"); }',
            "SourceError: ask for the motion sensors in the handler of a",
        ),
    ],
)
def test_ios_is_asked_for_motion(page: Page, ask: str, words: str | None) -> None:
    script = f"""DeviceMotionEvent.requestPermission = {ask};
      try {{ await sdk.allowMotion(); return null; }}
      finally {{ delete DeviceMotionEvent.requestPermission; }}"""
    said = run(page, script)
    assert said == words if words is None else said.startswith(words)


def test_examples_are_collected_in_the_page_for_a_device_in_a_worker(page: Page) -> None:
    """There is no coordinator: the device loads what computes and tries to connect, with the
    examples, until it is stopped."""
    found = run(
        page,
        """const start = async (data, store) => {
          const worker = new Worker("/worker.js", { type: "module" });
          const lines = [];
          let tries;
          const tried = new Promise((resolve) => { tries = resolve; });
          const log = (text) => { lines.push(text); tries(); };
          const device = sdk.startDevice(worker, { url: "ws://127.0.0.1:1", data, store, log });
          const served = device.serve();
          await Promise.race([served, tried]);
          await device.stop();
          await served;
          return lines;
        };
        async function* source(count) {
          for (let y = 0; y < count; y++) yield { x: Float32Array.of(y), y };
        }
        const words = (error) => `${error.name}: ${error.message}`;
        const none = await start(source(0), "none").catch(words);
        return { none, lines: await start(source(3), "some") };""",
    )
    assert found["none"] == "DataError: there are no examples; expected at least one"
    assert found["lines"][0].startswith("no connection: the coordinator cannot be reached")


def test_signatures_are_checked_as_everywhere(page: Page) -> None:
    cases = json.loads(SIGNING.read_text())
    found = run(
        page,
        """const verify = await sdk.findVerifier();
        const number = (pair) => Number.parseInt(pair, 16);
        const bytes = (hex) => Uint8Array.from(hex.match(/../g) ?? [], number);
        const signed = (one) => sdk.signedBytes(one.challenge, one.device, one.message);
        const good = (one) => verify(one.key, one.signature, signed(one));
        const plain = (one) => verify(one.public, one.signature, bytes(one.message));
        return {
          rfc8032: await Promise.all(given.rfc8032.map(plain)),
          valid: await Promise.all(given.valid.map(good)),
          invalid: await Promise.all(given.invalid.map(good)),
        };""",
        cases,
    )
    assert found == {
        "rfc8032": [True] * len(cases["rfc8032"]),
        "valid": [True] * len(cases["valid"]),
        "invalid": [False] * len(cases["invalid"]),
    }
