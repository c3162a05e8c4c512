"""The plug-in that vLLM finds under the entry point ``vllm.general_plugins``. Imports vLLM only when vLLM asks for it.

vLLM calls `register` in each of its processes, before it reads its configuration. It makes the load format ``headrace`` known. With ``HEADRACE_VLLM=1`` it also takes over
what vLLM calls ``runai_streamer`` (see `headrace.engines.vllm_takeover`), so that ``vllm serve s3://bucket/model`` needs no further word.
"""

from __future__ import annotations

import logging
import os

from headrace.settings import says_yes

LOAD_FORMAT = "headrace"
VARIABLE = "HEADRACE_VLLM"


class _VllmLog(logging.Handler):
    """Passes what Headrace says on to vLLM's log, with the handlers and the level that it has by then."""

    def emit(self, record: logging.LogRecord) -> None:
        log = logging.getLogger("vllm")
        if log.isEnabledFor(record.levelno):
            log.handle(record)


def register() -> None:
    """Make Headrace known to vLLM in this process. May be called twice.

    Raises `InvalidSetting` for a vLLM that the takeover was not tested with, where the takeover is asked for: vLLM then does not start.
    """
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    from headrace.engines.vllm_loader import HeadraceLoader

    _join_log()
    if _LOAD_FORMAT_TO_MODEL_LOADER.get(LOAD_FORMAT) is not HeadraceLoader:
        register_model_loader(LOAD_FORMAT)(HeadraceLoader)
    if is_wanted(os.environ.get(VARIABLE, "")):
        from headrace.engines.vllm_takeover import take_over

        take_over()


def is_wanted(text: str) -> bool:
    """Say whether the variable's ``text`` asks for the takeover. Raises `InvalidSetting` for what says neither yes nor no."""
    return says_yes(VARIABLE, text)


def _join_log() -> None:
    """Let vLLM's log show what Headrace says, unless somebody has arranged otherwise. vLLM sets its log up after this, and its level counts then."""
    ours = logging.getLogger("headrace")
    if not ours.handlers and ours.level == logging.NOTSET:
        ours.addHandler(_VllmLog())
        ours.setLevel(logging.DEBUG)
        ours.propagate = False
