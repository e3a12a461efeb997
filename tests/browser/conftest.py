"""The browser, and windows in it; Playwright (extra `browser-test`) is imported on first use."""

import pytest

from tests.browser.window import Window, chromium


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def show(browser):
    """Open a file in a window of its own, which must not complain until the test ends."""
    opened = []

    def show(file, **options):
        opened.append(Window(browser, file, **options))
        return opened[-1]

    yield show
    for window in opened:
        window.page.close()
    assert [complaint for window in opened for complaint in window.complaints] == []
