"""A page of `jax-specdec view` in the system's Chromium."""

import json
import shutil

from jax_specdec.export import html_page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium():
    """The path of the system's browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Window:
    """A page in the browser, with a real mouse and keyboard.

    Attributes:
      page: Playwright's page.
      complaints: what the page logged or threw, refused scripts included.
      requests: every URL that was asked for.
    """

    def __init__(self, browser, file, *, width=1280, scheme="light", ready="[data-ready=all]"):
        viewport = {"width": width, "height": 900}
        self.page = browser.new_page(viewport=viewport, color_scheme=scheme)
        self.complaints, self.requests = [], []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector(ready)

    def js(self, expression):
        return self.page.evaluate(expression)

    def all(self, selector, what):
        """An expression of JavaScript about each element x."""
        return self.js(f"[...document.querySelectorAll({json.dumps(selector)})].map(x => {what})")

    def colors(self):
        return self.all(".t", "getComputedStyle(x).backgroundColor")

    def text(self, selector):
        return self.page.locator(selector).first.inner_text()

    def says(self, selector, *words):
        text = self.text(selector).replace("\n\n", "\n")
        assert [word for word in words if word not in text] == [], text

    def shown(self, selector):
        return self.page.locator(selector).is_visible()

    def hover(self, selector, at=0):
        self.page.mouse.move(1, 1)  # the panel must not cover what is hovered over next
        self.page.locator(selector).nth(at).hover()

    def click(self, selector):
        self.page.locator(selector).first.click()

    def press(self, key):
        self.page.keyboard.press(key)

    def wait(self, selector):
        self.page.wait_for_selector(selector)


def written(tmp_path, *responses, beside=(), title="t"):
    """The page of some responses, and of others `beside` them."""
    view = html_page.View()
    for name, part in (("left", responses), ("right", beside)):
        if part:
            view.add(map(json.dumps, part), name)
    file = tmp_path / "page.html"
    file.write_text(html_page.page(view, title), encoding="utf-8")
    return file
