"""The plug-in that SGLang finds under the entry point ``sglang.srt.plugins``. Imports SGLang only when SGLang asks for it.

SGLang calls `register` in each of its processes, before it reads its arguments. It makes the load format ``headrace`` known. With ``HEADRACE_SGLANG=1`` it also takes over
what SGLang calls ``runai_streamer`` (see `headrace.engines.sglang_takeover`), so that ``python -m sglang.launch_server --model-path s3://bucket/model`` needs no further word.

All that is changed in SGLang is changed through SGLang's own registry of hooks, and the log says where.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from headrace.errors import HeadraceError, InvalidSetting
from headrace.settings import says_yes

_LOG = logging.getLogger("headrace")

LOAD_FORMAT = "headrace"
VARIABLE = "HEADRACE_SGLANG"
TESTED = ("0.5.23",)
"""The releases of SGLang that the plug-in was tested with."""

_VERIFY = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
_ADAPTER = "sglang.srt.lora.lora.LoRAAdapter.initialize_weights"
_CONFIGURE_LOG = "sglang.srt.utils.common.configure_logger"


class _SglangLog(logging.Handler):
    """Passes what Headrace says on to the log of SGLang's process, once SGLang has set that up. What is said before waits for it, unless it is a warning or worse."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[logging.LogRecord] | None = []

    def emit(self, record: logging.LogRecord) -> None:
        if self._held is not None and record.levelno < logging.WARNING:
            self._held.append(record)
        elif logging.getLogger().isEnabledFor(record.levelno):
            logging.getLogger().handle(record)

    def hand_on(self, result: Any, *arguments: Any, **options: Any) -> None:
        """Hand on what was held. A hook after SGLang's ``configure_logger``."""
        held, self._held = self._held or [], None
        for record in held:
            self.emit(record)


def register() -> None:
    """Make Headrace known to SGLang in this process. May be called twice.

    Leaves with a message (`SystemExit`, since SGLang logs any other error of a plug-in and goes on without it) where the takeover is asked for and cannot be:
    ``HEADRACE_SGLANG`` says neither yes nor no, or this SGLang was not tested. Without the takeover, an SGLang that was not tested refuses once the load format is used.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import LOAD_FORMAT_CHOICES, add_load_format_choices

    log = _join_log()
    if log is not None:
        HookRegistry.register(_CONFIGURE_LOG, log.hand_on, HookType.AFTER)
    try:
        takes_over = is_wanted(os.environ.get(VARIABLE, ""))
        if takes_over:
            check_version()
    except HeadraceError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    if LOAD_FORMAT in LOAD_FORMAT_CHOICES:
        return
    add_load_format_choices([LOAD_FORMAT])
    names = {LOAD_FORMAT}

    def verify(original: Any, config: Any) -> None:
        if str(getattr(config.load_format, "value", config.load_format)).lower() in names:
            config.load_format = loader_class()
        else:
            original(config)

    hooks: dict[str, Callable[..., Any]] = {_VERIFY: verify, _ADAPTER: load_adapter}
    if takes_over:
        from headrace.engines.sglang_takeover import TAKEN, Answers, replacements

        names.add(TAKEN)
        hooks |= replacements(Answers())
    for path, hook in hooks.items():
        HookRegistry.register(path, hook, HookType.AROUND)
    _say(names, [*hooks, *([_CONFIGURE_LOG] if log is not None else [])])


def load_adapter(original: Any, adapter: Any) -> None:
    """Let SGLang read a LoRA adapter's own files. It does so with its `DefaultModelLoader` and the model's configuration, which names our loader."""
    from sglang.srt.configs.load_config import LoadConfig

    given = adapter.load_config
    if isinstance(given.load_format, type) and given.load_format is loader_class():
        adapter.load_config = LoadConfig(load_format="auto", download_dir=given.download_dir)
    original(adapter)


def loader_class() -> type:
    """Return the class that SGLang is to load with. Raises `InvalidSetting` for an SGLang that was not tested."""
    check_version()
    from headrace.engines.sglang_loader import HeadraceLoader

    return HeadraceLoader


def check_version() -> None:
    """Raise `InvalidSetting` for an SGLang that the plug-in was not tested with."""
    import sglang

    version = str(sglang.__version__)
    if version not in TESTED:
        raise InvalidSetting(
            f"Headrace does not load into SGLang {version}.",
            f"It replaces parts of SGLang, and was tested with {', '.join(TESTED)}.",
            f"Install that, or leave {VARIABLE} and --load-format {LOAD_FORMAT} out.",
        )


def is_wanted(text: str) -> bool:
    """Say whether the variable's ``text`` asks for the takeover. Raises `InvalidSetting` for what says neither yes nor no."""
    return says_yes(VARIABLE, text)


def _say(names: set[str], paths: list[str]) -> None:
    """Say what is taken over, once, in the first process."""
    if multiprocessing.parent_process() is None:
        who = (
            "models from s3, gs, az, hf, http and https uris in place of Run:ai Model Streamer"
            if len(names) > 1
            else ""
        )
        _LOG.info(
            "Headrace loads %s for SGLang's load format %s. It has hooks at %s.",
            f"{who} ({VARIABLE}=1)" if who else "models",
            " and ".join(sorted(names)),
            ", ".join(path.removeprefix("sglang.srt.") for path in paths),
        )


def _join_log() -> _SglangLog | None:
    """Let SGLang's log show what Headrace says, unless somebody has arranged otherwise; return what does it, once."""
    ours = logging.getLogger("headrace")
    if ours.handlers or ours.level != logging.NOTSET:
        return None
    log = _SglangLog()
    ours.addHandler(log)
    ours.setLevel(logging.DEBUG)
    ours.propagate = False
    return log
