"""The browser, and windows in it; Playwright (extra `browser-test`) is imported on first use."""

import pytest


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    from tests.browser.window import chromium

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def show(browser):
    """Open a file in a window of its own."""
    from tests.browser.window import Window

    opened = []

    def show(file, **options):
        opened.append(Window(browser, file, **options))
        return opened[-1]

    yield show
    for window in opened:
        window.page.close()
