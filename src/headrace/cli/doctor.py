"""`headrace doctor`: prints what the checks find, and the doctor's words below the error of a load that failed. Asks nobody anything."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.text import Text

from headrace.cli.console import make_console, print_json, printable
from headrace.doctor import Advice, Examination, Finding, Plan, Report, State, World, advise, is_explained, lines_of
from headrace.doctor.aftermath import QUICK
from headrace.errors import HeadraceError
from headrace.settings import Settings

_STYLES = {State.OK: "green", State.WARNING: "yellow", State.FAILED: "bold red", State.SKIPPED: "dim"}
_SECRET_WORDS = ("SECRET", "TOKEN", "PASSWORD", "_KEY", "CONNECTION_STRING", "SAS")
_NO_SECRETS = ("_FILE", "_URI", "_KEY_ID")
_LEAST_SECRET = 8
_HIDDEN = "***"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """What the command line asked for."""

    uri: str
    read_settings: Callable[[], Settings]
    revision: str | None = None
    measures: bool = True
    json: bool = False
    debug: bool = False


def doctor(options: DoctorOptions, environment: Mapping[str, str]) -> int:
    """Run all checks, print each finding as soon as it is there, and return the exit code: 0, or 1 where a load would fail."""
    world = World(environment=environment, on_unexpected=_print_trace if options.debug else _ignore)
    plan = Plan(
        uri=options.uri,
        read_settings=options.read_settings,
        revision=options.revision,
        measures=options.measures,
    )
    secrets, console = secrets_of(options.uri, environment), make_console()
    examination = Examination(plan, world)
    findings = []
    try:
        for finding in examination.run():
            finding = without_secrets(finding, secrets)
            findings.append(finding)
            if not options.json:
                print_finding(finding, console)
    finally:
        examination.close()
    report = Report(examination.uri, tuple(findings))
    if options.json:
        print_json(report.to_dict())
    else:
        console.print()
        console.print(printable(report.summary()), soft_wrap=not console.is_terminal)
    return report.exit_code


def print_finding(finding: Finding, console: Console) -> None:
    """Print a finding: one line for what is so, and more below it for why, how to mend it, and the details."""
    for number, (margin, words) in enumerate(lines_of(finding)):
        text = Text(f"{margin}{printable(words)}")
        if number == 0:
            text.stylize(_STYLES[finding.state], 0, len(margin.split(" ", 1)[0]))
        if console.is_terminal:
            _print_folded(text, len(margin), console)
        else:
            console.print(text, soft_wrap=True)


def print_advice(error: HeadraceError, uri: str, revision: str | None = None) -> None:
    """Print what the doctor has to say below ``error`` on standard error; nothing where the error has nothing to do with a store. Raises nothing."""
    advice = find_advice(error, uri, revision)
    if advice is None:
        return
    console = make_console(sys.stderr)
    for number, line in enumerate(advice):
        label = "doctor" if number == 0 else "      "
        console.print(f"  {label}  {printable(line)}", soft_wrap=True)


def find_advice(error: BaseException, uri: str, revision: str | None = None) -> tuple[str, ...] | None:
    """Return the doctor's words on an error of a load, without secrets; None where it has none. Takes a few seconds at most, and raises nothing."""
    if not isinstance(error, HeadraceError) or not is_explained(error):
        return None
    plan = Plan(uri=uri, read_settings=Settings.from_environment, revision=revision, measures=False, limits=QUICK)
    try:
        advice: Advice = advise(error, plan, World(environment=os.environ))
    except KeyboardInterrupt:  # Whoever does not want to wait has read the error.
        return None
    secrets = secrets_of(uri, os.environ)
    return tuple(_hidden(line, secrets) for line in advice.lines())


def secrets_of(uri: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return what must not be printed: the query of the uri, and the values of variables that are named as secrets are; longest first."""
    found = {urlsplit(uri).query} if "://" in uri else set()
    for name, value in environment.items():
        plain = name.upper()
        if any(word in plain for word in _SECRET_WORDS) and not plain.endswith(_NO_SECRETS):
            found |= {value, value.strip()}
        if plain in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY") and "@" in value:
            found.add(value.partition("://")[2].partition("@")[0] or value.partition("@")[0])
    return tuple(sorted((one for one in found if len(one) >= _LEAST_SECRET), key=len, reverse=True))


def without_secrets(finding: Finding, secrets: tuple[str, ...]) -> Finding:
    """Return the finding with every secret taken out. No check puts one in; this is for what a server or a library says."""
    return replace(
        finding,
        what=_hidden(finding.what, secrets),
        why=_hidden(finding.why, secrets),
        mend=_hidden(finding.mend, secrets),
        details=tuple((label, _hidden(value, secrets)) for label, value in finding.details),
    )


def _hidden(text: str, secrets: tuple[str, ...]) -> str:
    for secret in secrets:
        text = text.replace(secret, _HIDDEN)
    return text


def _print_folded(text: Text, margin: int, console: Console) -> None:
    """Print a line that is folded where the window ends, with its further lines under the first word."""
    room = max(20, console.width - margin)
    words = text[margin:]
    lines = words.wrap(console, room)
    for number, line in enumerate(lines):
        console.print(text[:margin] + line if number == 0 else Text(" " * margin) + line, soft_wrap=True)


def _print_trace(error: Exception) -> None:
    traceback.print_exception(error)


def _ignore(error: Any) -> None:
    pass
