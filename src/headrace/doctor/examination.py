"""The steps in order: each is carried out if those that it needs went well, and ends in a finding, whatever happens in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

from headrace.doctor import cachefolder, identity, network, objects, ranges, skew, throughput, tls, whereabouts
from headrace.doctor.finding import Finding, State, failed, failed_with, ok, skipped, warning
from headrace.doctor.naming import describe_uri, remarks_on
from headrace.doctor.whereabouts import Whereabouts, find_whereabouts, has_snapshot, judge_settings
from headrace.doctor.world import World
from headrace.errors import HeadraceError
from headrace.settings import Settings, TransportSettings
from headrace.storage import ObjectStore, Uri, parse_uri
from headrace.storage.revision import with_revision

NAME = "name"

_OFFLINE = "The hub is not asked; its cache on this machine is used."


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a single request may take. Shorter than for a load, where waiting pays."""

    connect_timeout_s: float = 5.0
    idle_timeout_s: float = 10.0
    total_timeout_s: float = 30.0
    max_attempts: int = 2

    def applied(self, transport: TransportSettings) -> TransportSettings:
        """Return ``transport`` with no limit longer than these."""
        return replace(
            transport,
            connect_timeout_s=min(transport.connect_timeout_s, self.connect_timeout_s),
            idle_timeout_s=min(transport.idle_timeout_s, self.idle_timeout_s),
            total_timeout_s=min(transport.total_timeout_s, self.total_timeout_s),
            max_attempts=min(transport.max_attempts, self.max_attempts),
            backoff_most_s=min(transport.backoff_most_s, 1.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be examined, and how far."""

    uri: str
    read_settings: Callable[[], Settings]
    """Called once; what it raises is a finding."""
    revision: str | None = None
    measures: bool = True
    """Whether weights are read to see how fast they come."""
    bounds: throughput.Bounds = field(default_factory=throughput.Bounds)
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class _Step:
    name: str
    needs: tuple[str, ...]
    run: Callable[[], Finding]
    is_remote: bool = False
    """Whether it is about a server, and left out for files."""


class Examination:
    """One examination: `run` it once, and close it. What the steps find out is kept for those that follow."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._plan = plan
        self._world = world
        self._uri: Uri | None = None
        self._settings: Settings | None = None
        self._whereabouts: Whereabouts | None = None
        self._store: ObjectStore | None = None
        self._inventory: objects.Inventory | None = None
        self._was_listed = False
        self._may_not_list = False
        self._shown = ""
        """Which credentials requests go with, in words."""
        self._blocked: dict[str, str] = {}
        """Steps that did not go well, and the one at which it began."""

    @property
    def uri(self) -> str:
        """The canonical uri; empty where there is none."""
        return "" if self._uri is None else str(self._uri)

    def run(self, wanted: Collection[str] | None = None) -> Iterator[Finding]:
        """Carry the steps out and yield the findings, each as soon as it is there; with ``wanted`` only these, and those that they need."""
        steps = self._steps()
        if wanted is not None:
            needed = _with_needs(steps, wanted)
            steps = [step for step in steps if step.name in needed]
        for step in steps:
            if step.is_remote and self._whereabouts is not None and self._whereabouts.origin is None:
                continue
            yield self._carry_out(step)

    def close(self) -> None:
        """Close the store. May be called twice."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _steps(self) -> list[_Step]:
        reach = (network.STEP, tls.STEP)
        return [
            _Step(NAME, (), self._name),
            _Step(whereabouts.STEP, (NAME,), self._configuration),
            _Step(network.STEP, (whereabouts.STEP,), self._network, is_remote=True),
            _Step(tls.STEP, (network.STEP,), self._tls, is_remote=True),
            _Step(skew.STEP, reach, self._clock, is_remote=True),
            _Step(identity.STEP, (whereabouts.STEP,), self._credentials, is_remote=True),
            _Step(objects.LIST, (*reach, identity.STEP), self._list),
            _Step(objects.STAT, (*reach, identity.STEP), self._stat),
            _Step(ranges.READ, (objects.STAT,), self._range),
            _Step(ranges.CONDITION, (ranges.READ,), self._condition),
            _Step(throughput.STEP, (ranges.READ,), self._throughput),
            _Step(cachefolder.STEP, (whereabouts.STEP,), self._cache),
        ]

    def _carry_out(self, step: _Step) -> Finding:
        """Return the finding of a step, and keep it from those that need it if it is not a good one."""
        root = next((self._blocked[name] for name in step.needs if name in self._blocked), None)
        if root is not None:
            self._blocked[step.name] = root
            return skipped(step.name, f"Not tried, because {root} failed.")
        clock = self._world.surroundings.clock
        started = clock()
        try:
            finding = step.run()
        except HeadraceError as error:
            finding = failed_with(step.name, error)
        except Exception as error:  # noqa: BLE001  A check that breaks must not take the others with it.
            # Its words are not shown: nobody knows what they hold.
            finding = failed(
                step.name,
                f"The check itself failed ({type(error).__name__}).",
                "Headrace does not expect this.",
                "Run it again with --debug, and report what it says.",
            )
            self._world.on_unexpected(error)
        if finding.state is State.FAILED:
            self._blocked[step.name] = step.name
            if self._shown and finding.is_refusal:
                finding = replace(finding, details=(("shown", self._shown), *finding.details))
        return replace(finding, seconds=clock() - started)

    # -- the steps

    def _name(self) -> Finding:
        self._uri = with_revision(parse_uri(self._plan.uri), self._plan.revision)
        remarks = remarks_on(self._uri)
        if remarks:
            what = f"{describe_uri(self._uri)} There may be a slip in it."
            return warning(NAME, what, " ".join(remarks), "Correct the uri, if that is not meant.")
        return ok(NAME, describe_uri(self._uri))

    def _configuration(self) -> Finding:
        assert self._uri is not None
        settings = self._plan.read_settings()
        self._settings = replace(settings, transport=self._plan.limits.applied(settings.transport))
        self._whereabouts = find_whereabouts(self._uri, self._settings, self._world)
        return judge_settings(self._uri, self._whereabouts, settings, self._world.environment)

    def _network(self) -> Finding:
        place = self._place()
        if place.is_offline:
            return skipped(network.STEP, _OFFLINE)
        assert place.origin is not None
        finding = network.examine_network(place.origin, self._transport, self._world, by_path=place.by_path)
        if finding.state is State.FAILED and place.kind == "hf" and has_snapshot(self._uri):
            self._whereabouts = replace(place, is_offline=True)
            why = f"{finding.why} A load then uses the snapshot in the hub's cache on this machine, which may be an older one."
            return replace(finding, state=State.WARNING, why=why)
        return finding

    def _tls(self) -> Finding:
        place = self._place()
        if place.is_offline:
            return skipped(tls.STEP, _OFFLINE)
        assert place.origin is not None
        return tls.examine_tls(place.origin, place.kind, self._transport, self._world)

    def _clock(self) -> Finding:
        place = self._place()
        if place.is_offline:
            return skipped(skew.STEP, _OFFLINE)
        assert place.origin is not None
        return skew.examine_clock(
            place.origin, place.kind, self._transport, self._world, is_anonymous=place.is_anonymous
        )

    def _credentials(self) -> Finding:
        place, environment = self._place(), self._world.environment
        try:
            if place.kind == "hf":  # Opening such a store is to list it.
                assert self._uri is not None and self._settings is not None
                source = self._world.describe_hub(self._uri, self._settings, environment)
            else:
                source = self._world.describe_credentials(self._open(), environment)
        except HeadraceError as error:
            return identity.without_credentials(error, place.kind, environment)
        self._shown = identity.describe_source(source)
        return identity.judge_credentials(source, self._world.wall_clock())

    def _list(self) -> Finding:
        store = self._open()
        finding, self._inventory = objects.examine_listing(store, self._open_other)
        self._was_listed = self._inventory is not None
        self._may_not_list = finding.is_refusal
        if store.uri.scheme == "file" and self._place().kind == "hf":
            return replace(finding, details=(("read from", f"the hub's cache: {store.uri}"), *finding.details))
        if store.endpoint != self._place().endpoint:  # A bucket of another region: the store has learnt where it is.
            return replace(finding, details=(("served from", store.endpoint), *finding.details))
        return finding

    def _stat(self) -> Finding:
        if self._inventory is None and self._may_not_list:
            self._inventory = objects.find_without_listing(self._open())
        if self._inventory is None or self._inventory.probe is None:
            self._blocked[objects.STAT] = objects.LIST
            return skipped(objects.STAT, "There is no object that could be looked up.")
        return objects.examine_stat(self._open(), self._inventory, was_listed=self._was_listed)

    def _range(self) -> Finding:
        assert self._inventory is not None and self._inventory.probe is not None
        return ranges.examine_range(self._open(), self._inventory.probe, self._transport, self._world)

    def _condition(self) -> Finding:
        assert self._inventory is not None and self._inventory.probe is not None
        return ranges.examine_condition(self._open(), self._inventory.probe, self._transport, self._world)

    def _throughput(self) -> Finding:
        if not self._plan.measures:
            return skipped(throughput.STEP, "Not measured, as --no-throughput says.")
        inventory = self._inventory
        assert inventory is not None and self._settings is not None
        readable = inventory.weights or tuple(stored for stored in inventory.objects.values() if stored.size_bytes)
        return throughput.examine_throughput(
            self._open(),
            readable,
            self._transport,
            self._world,
            load_bytes=inventory.weight_bytes,
            bounds=self._plan.bounds,
        )

    def _cache(self) -> Finding:
        assert self._settings is not None
        source = self._settings.sources.get("cache_dir", whereabouts.DEFAULT)
        needed = 0
        if self._inventory is not None and self._place().kind != "file":
            needed = self._inventory.side_bytes
        return cachefolder.examine_cache(self._settings.cache_dir, source, needed, self._world)

    # -- what steps share

    @property
    def _transport(self) -> TransportSettings:
        assert self._settings is not None
        return self._settings.transport

    def _place(self) -> Whereabouts:
        assert self._whereabouts is not None
        return self._whereabouts

    def _open(self) -> ObjectStore:
        """Return the store, opened at the first call. Raises what opening raises."""
        if self._store is None:
            assert self._uri is not None
            self._store = self._open_other(self._uri)
        return self._store

    def _open_other(self, uri: Uri) -> ObjectStore:
        assert self._settings is not None
        return self._world.open_store(uri, self._settings)


def _with_needs(steps: list[_Step], wanted: Collection[str]) -> set[str]:
    """Return ``wanted`` and all that they need."""
    found = set(wanted)
    for step in reversed(steps):  # What a step needs comes before it.
        if step.name in found:
            found.update(step.needs)
    return found
