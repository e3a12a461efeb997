"""A headless Chromium, driven through its DevTools pipe: needs the browser and nothing else.

The protocol (https://chromedevtools.github.io/devtools-protocol): JSON objects that end with a zero
byte, commands on the browser's descriptor 3, answers and events on its descriptor 4.
"""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

OPTIONS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars",
    "--force-device-scale-factor=1", "--remote-debugging-pipe",
]  # fmt: skip

# Descriptors 3 and 4 may be taken in this process, so another one puts the pipe's ends there.
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(text), fcntl.F_DUPFD, 10) for text in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def path():
    """The installed browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One process of the browser with a profile of its own; use it as a context manager."""

    def __init__(self, profile):
        program = path()
        assert program, f"no browser: install one of {', '.join(NAMES)}"
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        start = [sys.executable, "-c", START, str(commands), str(answers)]
        self._process = subprocess.Popen(
            [*start, program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands, answers), stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._buffer, self._last, self.events = b"", 0, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(BrokenPipeError, EOFError):
            self.call("Browser.close")
        os.close(self._commands)
        self._process.wait(60)
        os.close(self._answers)

    def call(self, method, session=None, **params):
        """A command's result; events that come before it are kept."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self.events.append(answer)

    def wait(self, method, session):
        """The next event of that name."""
        while True:
            for index, event in enumerate(self.events):
                if event["method"] == method and event.get("sessionId") == session:
                    return self.events.pop(index)["params"]
            self.events.append(self._read())

    def _read(self):
        while b"\0" not in self._buffer:
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise EOFError("the browser has ended")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "Home": 36, "End": 35, "Tab": 9,
        "Escape": 27}  # fmt: skip


class Page:
    """One tab, with a real mouse and a real keyboard."""

    def __init__(self, browser, width=1280, height=900, scheme="light"):
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip
        scheme = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def call(self, method, **params):
        return self._browser.call(method, self._session, **params)

    def open(self, file):
        self.call("Page.navigate", url=Path(file).as_uri())
        self._browser.wait("Page.loadEventFired", self._session)
        # The browser drops mouse and keys until the page's first frame is on the screen.
        self.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return self

    def js(self, expression):
        """The value of an expression in the page (run by the debugger, whatever the policy).

        Of a promise, what it resolves to.
        """
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, condition):
        """Wait for what the page does a moment later; the test's timeout ends it."""
        while not self.js(condition):
            time.sleep(0.01)

    def text(self, selector):
        return self.js(f"document.querySelector({json.dumps(selector)})?.innerText")

    def shown(self, selector):
        return self.js(
            f"document.querySelector({json.dumps(selector)})?.checkVisibility() ?? false"
        )

    def hover(self, selector, at=0):
        """Move the mouse onto the element, as a person would."""
        x, y = self._center(selector, at)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector, at=0):
        x, y = self._center(selector, at)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key):
        code = KEYS[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                      windowsVirtualKeyCode=code)  # fmt: skip

    def screenshot(self, file):
        Path(file).write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def complaints(self):
        """What the page logged or threw, a refused script included."""
        self.js("0")  # everything before it has been reported
        names = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [e["params"] for e in self._events() if e["method"] in names]

    def requests(self):
        """Every URL that was asked for."""
        sent = [e["params"] for e in self._events() if e["method"] == "Network.requestWillBeSent"]
        return [request["request"]["url"] for request in sent]

    def _events(self):
        return [e for e in self._browser.events if e.get("sessionId") == self._session]

    def _center(self, selector, at):
        return self.js(
            f"(() => {{ const found = document.querySelectorAll({json.dumps(selector)})[{at}];"
            "found.scrollIntoView({ block: 'center', behavior: 'instant' });"
            "const box = found.getClientRects()[0];"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
