"""For tests: somebody who uses the page for people, with the keyboard alone or with a mouse."""

from __future__ import annotations

from collections.abc import Sequence

from playwright.sync_api import ConsoleMessage, Page, expect
from web_sdk import FOLDER

PATIENCE = 60_000
"""Milliseconds: a busy machine is no failure."""
Line = Sequence[tuple[float, float]]
DIGITS: dict[int, Sequence[Line]] = {
    1: [[(0.38, 0.3), (0.52, 0.15), (0.52, 0.85)]],
    4: [[(0.5, 0.15), (0.27, 0.55), (0.75, 0.55)], [(0.6, 0.35), (0.58, 0.88)]],
    7: [[(0.28, 0.18), (0.72, 0.18), (0.45, 0.86)]],
}


def watched(page: Page) -> list[str]:
    """Return a list that fills with the page's errors, and with what its policy forbids."""
    problems: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        # A coordinator that is not there, or a test that is offline, is no fault of the page.
        if (
            message.type == "error"
            and "WebSocket" not in message.text
            and "Failed to load resource" not in message.text
        ):
            problems.append(message.text)

    page.on("console", hear)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.set_default_timeout(PATIENCE)
    expect.set_options(timeout=PATIENCE)
    return problems


def join(page: Page, address: str) -> None:
    page.goto(address)
    page.get_by_role("button", name="Agree and join").click()
    expect(page.locator("#joined")).to_be_visible()


def draw(page: Page, digit: int, keep: bool = True) -> None:
    """Draw with the mouse, and label the drawing."""
    pad = page.locator("#pad")
    pad.scroll_into_view_if_needed()
    box = pad.bounding_box()
    assert box is not None
    for line in DIGITS[digit]:
        for number, (x, y) in enumerate(line):
            page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=4)
            if number == 0:
                page.mouse.down()
        page.mouse.up()
    expect(page.locator("#undo")).to_be_enabled()
    if keep:
        page.get_by_role("button", name=f"Keep as {digit}").click()
        expect(page.locator("#undo")).to_be_disabled()


def tab_to(page: Page, name: str) -> None:
    """Press Tab until what has the focus has this name or this id, or is in what has this id."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(
            """name => {
              const { activeElement } = document;
              const place = document.getElementById(name);
              const within = place !== null && place.contains(activeElement);
              return activeElement.textContent.trim() === name || within;
            }""",
            name,
        ):
            return
    raise AssertionError(f"Tab does not come to {name}")


def draw_with_keys(page: Page, digit: int) -> None:
    """Draw a 1 or a 7 with the keys of the pad, which has the focus, and label it."""
    page.keyboard.press("Space")
    if digit == 7:
        for _ in range(4):
            page.keyboard.press("Shift+ArrowRight")
    for _ in range(5):
        page.keyboard.press("Shift+ArrowDown")
        page.keyboard.press("ArrowLeft")
    page.keyboard.press("Space")
    expect(page.locator("#undo")).to_be_enabled()
    page.keyboard.press(str(digit))
    expect(page.locator("#undo")).to_be_disabled()


def axe_problems(page: Page) -> list[str]:
    """Return what axe finds wrong in the page as it is now, of any severity."""
    if not page.evaluate("'axe' in window"):
        page.evaluate((FOLDER / "node_modules" / "axe-core" / "axe.min.js").read_text("utf-8"))
    found = page.evaluate(
        "axe.run(document, { resultTypes: ['violations'] }).then(result => result.violations)"
    )
    return [
        f"{row['impact']} {row['id']}: {node['target']} {node['html']}"
        for row in found
        for node in row["nodes"]
    ]


def fits(page: Page) -> bool:
    """Whether nobody has to scroll sideways."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))
