"""`pytest --cpu`: CPU seconds and peak memory of every test file, whatever else the machine does.

CPU seconds are those of this process and of the processes that it has waited for. Under xdist each
worker measures its own files, and one table adds them up.
"""

from collections import defaultdict

import pytest

from tests.support.resources import cpu_seconds, forget_peak, memory


def pytest_addoption(parser):
    parser.addoption("--cpu", action="store_true", help="print CPU seconds and peak memory by file")


def pytest_configure(config):
    if config.getoption("--cpu"):
        config.pluginmanager.register(CpuReport(config), "cpu-report")


class CpuReport:
    """One process's figures by file; under xdist, the controller has those of all workers."""

    def __init__(self, config):
        self.config = config
        self.file = ""
        self.seconds = defaultdict(float)
        self.peaks = defaultdict(int)  # MB
        self.collecting = [0.0]  # seconds, a process each

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector):
        begin = cpu_seconds()
        try:
            return (yield)
        finally:
            if isinstance(collector, pytest.Module):
                self.collecting[0] += cpu_seconds() - begin

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        if self.file != (file := item.nodeid.partition("::")[0]):
            self.file = file
            forget_peak()
        begin = cpu_seconds()
        try:
            return (yield)
        finally:
            self.seconds[file] += cpu_seconds() - begin
            self.peaks[file] = max(self.peaks[file], memory("VmHWM"))

    def pytest_sessionfinish(self):
        if hasattr(self.config, "workeroutput"):
            found = dict(self.seconds), dict(self.peaks), self.collecting
            self.config.workeroutput["cpu"] = found

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        seconds, peaks, collecting = getattr(node, "workeroutput", {}).get("cpu", ({}, {}, []))
        for file, value in seconds.items():
            self.seconds[file] += value
            self.peaks[file] = max(self.peaks[file], peaks[file])
        self.collecting += collecting

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("CPU seconds and peak memory by file")
        for file, seconds in sorted(self.seconds.items(), key=lambda pair: -pair[1]):
            terminalreporter.line(f"{seconds:8.1f} s {self.peaks[file]:6} MB  {file}")
        total, collecting = sum(self.seconds.values()), sum(self.collecting)
        terminalreporter.line(f"{total:8.1f} s in tests, {collecting:.1f} s collecting them")
