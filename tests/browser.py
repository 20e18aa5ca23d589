"""Headless Chromium, driven by its DevTools protocol over a pipe: real widths of phones, dark mode, and errors."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ranks import environment

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe", "--mute-audio")
WIDTHS = (360, 1200)
"""Pixels of a phone and of a laptop's window."""
CUT_OFF = """[...document.querySelectorAll("body *")].filter(element => {
  const box = element.getBoundingClientRect();
  if (!box.width || box.right <= innerWidth + 1 || getComputedStyle(element).position === "fixed") return false;
  for (let outer = element.parentElement; outer; outer = outer.parentElement)
    if (["auto", "scroll", "hidden"].includes(getComputedStyle(outer).overflowX)) return false;
  return true;
}).map(element => element.tagName + " " + element.textContent.slice(0, 40))"""
"""Expression for the elements that reach beyond the window, without those that scroll by themselves."""


class Page:
    """One tab. `errors` has what the console and the network reported as errors since the page was opened."""

    def __init__(self, reading: int, writing: int) -> None:
        self._input, self._output = os.fdopen(reading, "rb"), os.fdopen(writing, "wb")
        self._number, self._session, self._buffer = 0, None, b""
        self._loaded = False
        self.errors: list[str] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def open(self, url: str, *, width: int = WIDTHS[1], height: int = 900, dark: bool = False) -> None:
        """Load a page in a window of this width and wait until it is complete."""
        self.errors.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self._send("Page.navigate", url=url)
        while not self._loaded:
            self._receive()
        self.run("document.fonts.ready.then(() => 1)")

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of the promise that it is."""
        result = self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path: Path, *, max_height: int = 6000) -> None:
        """Write a picture of the whole page."""
        size = self._send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], max_height), "scale": 1}
        shot = self._send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._output.write(json.dumps(message).encode() + b"\0")
        self._output.flush()
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        """Return the next message, after a look at it if it is an event."""
        while b"\0" not in self._buffer:
            part = os.read(self._input.fileno(), 1 << 20)
            assert part, "Chromium has ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        name, what = message.get("method"), message.get("params", {})
        if name == "Page.loadEventFired":
            self._loaded = True
        elif name == "Runtime.exceptionThrown":
            self.errors.append(str(what["exceptionDetails"]))
        elif name == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning"):
            self.errors.append(str(what["args"]))
        elif name == "Log.entryAdded" and what["entry"]["level"] == "error":
            self.errors.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")
        elif name == "Network.loadingFailed" and not what.get("canceled"):
            self.errors.append(what["errorText"])
        return message


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Start Chromium with an empty profile and yield its tab; the browser ends with the block."""
    pipes = (*os.pipe(), *os.pipe())
    # The protocol's pipes are descriptors 3 and 4 of the browser: the shell must not overwrite one with the other.
    from_us, to_browser, from_browser, to_us = (fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in pipes)
    for one in pipes:
        os.close(one)
    words = f'exec chromium {" ".join(FLAGS)} --user-data-dir="$0" 3<&{from_us} 4>&{to_us}'
    process = subprocess.Popen(
        ["bash", "-c", words, profile],
        env=environment(),
        pass_fds=(from_us, to_us),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(from_us)
    os.close(to_us)
    try:
        yield Page(from_browser, to_browser)
    finally:
        process.terminate()
        process.wait()
