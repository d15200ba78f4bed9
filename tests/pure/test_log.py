"""Messages carry the rank."""

import logging

import pytest

from pfeife_accelerate import log


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch):
    monkeypatch.setattr(log, "_STATE", log._ProcessState())
    root = logging.getLogger("pfeife_accelerate")
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


def test_messages_start_with_the_rank_once_it_is_known(caplog):
    logger = log.get_logger("pfeife_accelerate.planner.search")
    logger.warning("early %d", 1)
    log.set_rank(1, 2)
    logger.warning("late")
    assert caplog.messages == ["[pfeife] early 1", "[pfeife rank 1/2] late"]


def test_warn_once_warns_once_per_key(caplog):
    logger = log.get_logger("somewhere")
    assert logger.logger.name == "pfeife_accelerate.somewhere"
    for key in ("a", "a", "b"):
        log.warn_once(logger, key, f"100% {key}")
    assert caplog.messages == ["[pfeife] 100% a", "[pfeife] 100% b"]


def test_verbose_sets_the_level_of_the_whole_package():
    log.set_verbose(0)
    assert not log.get_logger("x").isEnabledFor(logging.INFO)
    log.set_verbose(1)
    log.set_verbose(1)
    assert log.get_logger("x").isEnabledFor(logging.INFO)
    assert not log.get_logger("x").isEnabledFor(logging.DEBUG)
    log.set_verbose(9)
    assert log.get_logger("x").isEnabledFor(logging.DEBUG)
    root = logging.getLogger("pfeife_accelerate")
    assert sum(isinstance(handler, log._FallbackHandler) for handler in root.handlers) == 1


def test_the_fallback_handler_is_silent_where_the_script_configured_logging(capsys, monkeypatch):
    log.set_verbose(1)
    handler = log._FallbackHandler()
    record = logging.LogRecord("pfeife_accelerate", logging.INFO, "f", 1, "hello", (), None)
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    handler.emit(record)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    handler.setStream(__import__("sys").stderr)
    handler.emit(record)
    assert capsys.readouterr().err == "hello\n"
