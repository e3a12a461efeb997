"""The traceback of a plugin that JAX cannot use is not in a worker's output."""

import inspect
import io
import logging

from jax._src import xla_bridge

from jax_specdec.device.worker.plugin_messages import SPEAKER, Shortened


def said_of(plugin, files):
    """What a worker's output has of a plugin that fails."""
    logger, stream = logging.getLogger(f"{SPEAKER}.of_a_test"), io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    logger.addFilter(Shortened(files))
    try:
        raise RuntimeError("Unable to load cuDNN.")
    except RuntimeError:
        logger.exception(
            "Jax plugin configuration error: Exception when calling %s.initialize()", plugin
        )
    finally:
        logger.handlers.clear()
        logger.filters.clear()
    return stream.getvalue()


def test_it_is_a_line_and_nothing_of_cuda_without_a_gpu(tmp_path):
    assert said_of("jax_plugins.xla_cuda13", tmp_path) == ""
    said = said_of("jax_plugins.xla_other", tmp_path)
    assert said.endswith("jax_plugins.xla_other.initialize(): Unable to load cuDNN.\n")
    assert said.count("\n") == 1
    (tmp_path / "nvidia0").touch()
    assert said_of("jax_plugins.xla_cuda13", tmp_path).count("\n") == 1


def test_other_errors_are_left_alone():
    error = (RuntimeError, RuntimeError("of something else"), None)
    record = logging.LogRecord(SPEAKER, logging.ERROR, "", 0, "words", (), error)
    assert Shortened().filter(record)
    assert record.exc_info == error


def test_jax_says_it_under_that_name_and_in_those_words():
    assert xla_bridge.logger.name == SPEAKER
    assert "Jax plugin configuration error" in inspect.getsource(xla_bridge.discover_pjrt_plugins)
