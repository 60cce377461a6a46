"""A headless Chromium driven over the DevTools protocol, through two pipes: no port, no package."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# All visible text of a page, that of open shadow roots and frames of the same origin included.
TEXT = """(() => {
  const parts = [];
  const walk = node => {
    if (!node) return;
    if (node.nodeType === Node.TEXT_NODE) { if (node.data.trim()) parts.push(node.data.trim()); return; }
    if (node.checkVisibility && !node.checkVisibility()) return;
    if (node.nodeType !== Node.ELEMENT_NODE && node.nodeType !== Node.DOCUMENT_FRAGMENT_NODE) return;
    if (['SCRIPT', 'STYLE', 'TEMPLATE', 'NOSCRIPT'].includes(node.nodeName)) return;
    if (node.shadowRoot) node.shadowRoot.childNodes.forEach(walk);
    if (node.nodeName === 'IFRAME' && node.contentDocument) walk(node.contentDocument.body);
    node.childNodes.forEach(walk);
  };
  walk(document.body);
  return parts.join('\\n');
})()"""

# The elements that a selector finds, in open shadow roots and frames, too.
FIND = """const found = (selector, root = document) => {
  const all = [...root.querySelectorAll(selector)];
  for (const element of root.querySelectorAll('*')) {
    if (element.shadowRoot) all.push(...found(selector, element.shadowRoot));
    if (element.nodeName === 'IFRAME' && element.contentDocument) all.push(...found(selector, element.contentDocument));
  }
  return all;
};"""


def find():
    """The path of a browser, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One tab of a headless browser.

    Args:
      profile: folder for its own files.
      answers: part of an address -> the script that it gets instead of going to the network.
      size: of the window, in pixels.
    """

    def __init__(self, profile, answers=None, size=(1600, 1300)):
        ours, theirs = os.pipe(), os.pipe()  # we write to it, it writes to us
        self.to, self.back = ours[1], theirs[0]

        # Copies with numbers above 4, so that neither is overwritten on the way to 3 and 4.
        read, write = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (ours[0], theirs[1]))

        def three_and_four():
            os.dup2(read, 3)
            os.dup2(write, 4)

        self.process = subprocess.Popen(
            [find(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--hide-scrollbars", f"--window-size={size[0]},{size[1]}", f"--user-data-dir={profile}",
             "--remote-debugging-pipe",
             "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "about:blank"],
            close_fds=False, preexec_fn=three_and_four, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (ours[0], theirs[1], read, write):
            os.close(end)
        self.number, self.rest, self.session = 0, b"", None
        target = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        self.answers = answers or {}
        self.ask("Page.enable")
        if self.answers:
            self.ask("Fetch.enable", patterns=[{"urlPattern": f"*{part}*"} for part in self.answers])

    def ask(self, method, seconds=60, **parameters):
        """The result of one command."""
        number = self._tell(method, parameters)
        end = time.monotonic() + seconds
        while True:
            while b"\0" not in self.rest:
                if not select.select([self.back], [], [], max(end - time.monotonic(), 0))[0]:
                    raise TimeoutError(f"{method}: no answer in {seconds} s")
                part = os.read(self.back, 2**20)
                if not part:
                    raise EOFError("the browser has ended")
                self.rest += part
            answer, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(answer)
            if answer.get("method") == "Fetch.requestPaused":
                self._answer(answer["params"])
            if answer.get("id") == number:  # everything else is an event
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _tell(self, method, parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        return self.number

    def _answer(self, request):
        body = next(text for part, text in self.answers.items() if part in request["request"]["url"])
        self._tell("Fetch.fulfillRequest", {
            "requestId": request["requestId"], "responseCode": 200, "body": base64.b64encode(body.encode()).decode(),
            "responseHeaders": [{"name": "Content-Type", "value": "text/javascript"}],
        })  # fmt: skip

    def open(self, address):
        self.ask("Page.navigate", url=address)

    def run(self, script):
        """The value of a script."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", "script failed"))
        return answer["result"].get("value")

    def text(self):
        return self.run(TEXT)

    def count(self, selector, condition="true"):
        """How many elements `e` a selector finds that satisfy a JavaScript condition."""
        return self.run(f"(() => {{ {FIND} return found({json.dumps(selector)}).filter(e => {condition}).length; }})()")

    def until(self, ready, seconds=40):
        """Waits until a function returns something true, and returns it."""
        end, value = time.monotonic() + seconds, None
        while time.monotonic() < end:
            value = ready()
            if value:
                return value
            time.sleep(0.25)
        return value

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def close(self):
        self.process.terminate()
        self.process.wait(20)
        os.close(self.to)
        os.close(self.back)
