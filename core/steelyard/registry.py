"""Key to class, for every kind: listing imports nothing, resolving imports the one plugin that was asked for.

A plugin goes through three states here: offered (metadata), imported (its module and its hook's signature hold),
resolved (its hook was called once and every key that it declares is in exactly one class). Whatever fails on that
way is kept, raised as `BrokenPlugin` when the key is asked for, and tried again when it is asked for again.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, Final

from steelyard.discovery import NOT_INSTALLED, Catalog, Offer, core_version, normalized
from steelyard.errors import AmbiguousPlugin, BrokenPlugin, ConfigError, PluginError, UnknownPlugin
from steelyard.kinds import BY_NOUN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from steelyard.kinds import Kind, KindName

BY_HAND: Final = "added by hand"

_log = logging.getLogger(__name__)


class KindRegistry(Mapping[str, type[Any]]):
    """The classes of one kind by key: everything offered and everything added by hand, in sorted order.

    ``len``, ``in``, ``keys`` and iteration import nothing. ``[]`` and ``get`` import the plugin that offers the
    key; ``values`` and ``items`` import them one by one and raise `BrokenPlugin` at the first that fails.
    """

    def __init__(self, registry: Registry, kind: Kind) -> None:
        self.kind = kind
        self._registry = registry

    def __getitem__(self, key: str) -> type[Any]:
        return self._registry.resolve(self.kind.noun, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.list_keys())

    def __len__(self) -> int:
        return len(self.list_keys())

    def __contains__(self, key: object) -> bool:
        return key in self.list_keys()

    def __repr__(self) -> str:
        return f"<{self.kind.noun}: {', '.join(self) or 'none'}>"

    def list_keys(self) -> list[str]:
        """Return every key, sorted."""
        return self._registry.list_keys(self.kind.noun)


class Registry:
    """The classes of every kind, resolved on demand; safe to share among threads.

    Attributes:
        catalog: What is offered.
        import_errors: Kind and key to the message of the last try to resolve it, if that failed.

    Args:
        catalog: What is offered.
        prefer: Kind to key to the distribution that serves the key where several offer it.
        strict_plugins: Let `available` raise on a broken plugin instead of warning.

    Raises:
        ConfigError: ``prefer`` has a kind that does not exist.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        prefer: Mapping[str, Mapping[str, str]] | None = None,
        strict_plugins: bool = False,
    ) -> None:
        self.catalog = catalog
        self.import_errors: dict[tuple[str, str], str] = {}
        self._strict = strict_plugins
        self._prefer = {noun: dict(chosen) for noun, chosen in (prefer or {}).items()}
        for noun in self._prefer:
            if noun not in BY_NOUN:
                raise ConfigError(f"prefer: there is no kind named {noun!r}; the kinds are {', '.join(BY_NOUN)}")
        self._kinds = {noun: KindRegistry(self, kind) for noun, kind in BY_NOUN.items()}
        self._offers: dict[str, dict[str, list[Offer]]] = {noun: {} for noun in BY_NOUN}
        for offer in catalog.offers:
            self._offers[offer.noun].setdefault(offer.key, []).append(offer)
        self._added: dict[str, dict[str, Offer]] = {noun: {} for noun in BY_NOUN}
        self._classes: dict[Offer, type[Any]] = {}
        self._introduced: dict[tuple[str, str], tuple[type[Any], ...]] = {}  # kind and module: the hook's answer
        self._warned: set[str] = set()
        self._lock = RLock()

    @classmethod
    def from_environment(
        cls,
        *,
        path: Iterable[str] | None = None,
        block: Iterable[str] | None = None,
        prefer: Mapping[str, Mapping[str, str]] | None = None,
        strict_plugins: bool = False,
    ) -> Registry:
        """Build a registry of what is installed; for the arguments see `Catalog.from_environment` and `Registry`."""
        return cls(Catalog.from_environment(path=path, block=block), prefer=prefer, strict_plugins=strict_plugins)

    def under(self, *, prefer: Mapping[str, Mapping[str, str]], strict_plugins: bool) -> Registry:
        """Return the registry with further options; what is resolved already is shared, not imported again."""
        if not prefer and strict_plugins <= self._strict:
            return self
        merged = {noun: {**self._prefer.get(noun, {}), **prefer.get(noun, {})} for noun in {*self._prefer, *prefer}}
        other = Registry(self.catalog, prefer=merged, strict_plugins=strict_plugins or self._strict)
        with self._lock:
            for noun, added in self._added.items():
                other._added[noun].update(added)
            other._classes.update(self._classes)
            other._introduced.update(self._introduced)
        return other

    def __getitem__(self, noun: KindName) -> KindRegistry:
        return self._kinds[noun]

    def list_keys(self, noun: KindName) -> list[str]:
        """Return every key of a kind, sorted, and import nothing."""
        with self._lock:
            return sorted(self._offers[noun].keys() | self._added[noun].keys())

    def offer(self, noun: KindName, key: str) -> Offer:
        """Return who serves a key, and import nothing.

        A class that was added by hand has no metadata; its offer has no version and the class's module.

        Raises:
            UnknownPlugin: nothing offers the key.
            AmbiguousPlugin: several distributions do, and the user prefers none.
            ConfigError: the user prefers a distribution that does not.
        """
        with self._lock:
            if key in self._added[noun]:
                return self._added[noun][key]
            offers = self._offers[noun].get(key, [])
            if not offers:
                raise self._unknown(noun, key)
            wanted = self._prefer.get(noun, {}).get(key)
            names = [offer.distribution for offer in offers]
            if wanted is None:
                if len(offers) > 1:
                    raise AmbiguousPlugin(noun, key, names)
                return offers[0]
            if normalized(wanted) not in names:
                raise ConfigError(
                    f"prefer names {wanted!r} for {noun} {key!r}, which does not offer it; offered by {' and '.join(names)}"
                )
            return offers[names.index(normalized(wanted))]

    def resolve(self, noun: KindName, key: str) -> type[Any]:
        """Return the class that serves a key; ``registry[noun][key]`` is the same.

        Raises:
            UnknownPlugin: nothing offers the key.
            AmbiguousPlugin: several distributions do, and the user prefers none.
            BrokenPlugin: the plugin that does could not be used; the cause is chained.
            ConfigError: the user prefers a distribution that does not.
        """
        with self._lock:
            return self.resolve_offer(self.offer(noun, key))

    def resolve_offer(self, offer: Offer) -> type[Any]:
        """Return the class of one offer of the catalog, also where several distributions offer its key.

        Raises:
            BrokenPlugin: the plugin could not be used; the cause is chained.
        """
        with self._lock:  # held during the import, so that the hook is called once however many threads ask
            if offer not in self._classes:
                self._resolve(offer)
            return self._classes[offer]

    def available(self, noun: KindName) -> list[tuple[str, type[Any]]]:
        """Return key and class of everything of a kind that can be used, and warn once of each plugin that cannot.

        Raises:
            PluginError: a plugin cannot be used, and the registry was made with ``strict_plugins``.
        """
        found = []
        for entry in self.catalog.broken:
            if entry.noun in (noun, ""):
                place = entry.module or "entry_points.txt"
                self._complain(BrokenPlugin(entry.distribution, entry.version, place, entry.why))
        for key in self.list_keys(noun):
            try:
                found.append((key, self.resolve(noun, key)))
            except (BrokenPlugin, AmbiguousPlugin) as error:
                self._complain(error)
        return found

    def add(self, noun: KindName, cls: type[Any], *, distribution: str = BY_HAND, override: bool = False) -> None:
        """Add a class under each of its ``keys``; adding the class that already serves a key changes nothing.

        Args:
            noun: The kind.
            cls: A class with ``keys``.
            distribution: Where it comes from, for messages and reports.
            override: Let it replace whatever else serves its keys; each replacement is warned of.

        Raises:
            PluginError: the class has no usable ``keys``.
            AmbiguousPlugin: another class serves one of the keys and ``override`` is off; no key is added then.
        """
        with self._lock:
            fresh = [key for key in keys_of(cls) if not self._serves(noun, key, cls)]
            replaced = {key: self._distributions(noun, key) for key in fresh}
            for key, names in replaced.items():
                if names and not override:
                    raise AmbiguousPlugin(noun, key, [*names, distribution])
            for key, names in replaced.items():
                if names:
                    _log.warning("%s %r of %s replaces that of %s", noun, key, distribution, " and ".join(names))
                offer = Offer(noun, key, distribution, "", cls.__module__)
                self._added[noun][key] = offer
                self._classes[offer] = cls

    def _serves(self, noun: KindName, key: str, cls: type[Any]) -> bool:
        """Whether a key is served by this very class; a plugin that cannot be used serves nothing."""
        try:
            return key in self._kinds[noun] and self.resolve(noun, key) is cls
        except PluginError:
            return False

    def _distributions(self, noun: KindName, key: str) -> list[str]:
        if key in self._added[noun]:
            return [self._added[noun][key].distribution]
        return [offer.distribution for offer in self._offers[noun].get(key, [])]

    def _unknown(self, noun: KindName, key: str) -> UnknownPlugin:
        kind = BY_NOUN[noun]
        broken = [text for (of, _), text in sorted(self.import_errors.items()) if of == noun]
        broken += [str(entry) for entry in self.catalog.broken if entry.noun in (noun, "")]
        blocked = [
            f"{offer.distribution} {offer.version}"
            for offer in self.catalog.blocked
            if (offer.noun, offer.key) == (noun, key)
        ]
        installed, hint = self.list_keys(noun), kind.known.get(key)
        return UnknownPlugin(noun, key, installed, hint, broken=list(dict.fromkeys(broken)), blocked=blocked)

    def _complain(self, error: PluginError) -> None:
        if self._strict:
            raise error
        with self._lock:
            if str(error) in self._warned:
                return
            self._warned.add(str(error))
        _log.warning("%s", error)

    def _resolve(self, offer: Offer) -> None:
        """Import the plugin of an offer, ask its hook and keep the classes of every key that it promises."""
        if (offer.noun, offer.key) in self.import_errors:
            importlib.invalidate_caches()  # what failed may have been repaired or installed since
        promised = [
            other
            for others in self._offers[offer.noun].values()
            for other in others
            if (other.distribution, other.module) == (offer.distribution, offer.module)
        ]
        place = (offer.noun, offer.module)
        try:
            check_range(offer)
            if place not in self._introduced:
                self._introduced[place] = introduced(importlib.import_module(offer.module), BY_NOUN[offer.noun])
            served = by_key(self._introduced[place], [other.key for other in promised])
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may fail in any way; it may not end the program
            self._introduced.pop(place, None)
            why = str(error) if type(error) is PluginError else f"{type(error).__name__}: {error}"
            broken = BrokenPlugin(offer.distribution, offer.version, offer.module, why)
            self.import_errors[offer.noun, offer.key] = str(broken)
            raise broken from error
        for other in promised:
            self._classes[other] = served[other.key]
            self.import_errors.pop((other.noun, other.key), None)


def check_range(offer: Offer) -> None:
    """Compare the steelyard that runs with the versions that a distribution works with, before it is imported.

    Raises:
        PluginError: the running version is out of the range, or the range cannot be read.
    """
    running = core_version()
    if not offer.requires or running == NOT_INSTALLED:
        return
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        fits = SpecifierSet(offer.requires).contains(running, prereleases=True)
    except InvalidSpecifier:
        raise PluginError(f"its metadata requires steelyard{offer.requires}, which is no version range") from None
    if not fits:
        raise PluginError(
            f"it requires steelyard{offer.requires}, this is steelyard {running}; install a version of it that works "
            f"with {running}, or a steelyard in that range: pip install --upgrade {offer.distribution} steelyard"
        )


def introduced(module: ModuleType, kind: Kind) -> tuple[type[Any], ...]:
    """Return the classes that a plugin's module offers for a kind, its hooks checked and called once.

    The module gets a plugin manager of its own: a rejected plugin stays registered in pluggy's manager, with
    the hooks that were found good before the bad one, and the next plugin would be blamed for it.

    Raises:
        PluginError: the module has no such hook, or it does not return classes with ``keys``.
        pluggy.PluginValidationError: a hook has an unknown name or a parameter that its specification has not.
    """
    import pluggy

    from steelyard import hookspecs

    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(module)
    manager.check_pending()
    hook = getattr(manager.hook, kind.hook)
    if not hook.get_hookimpls():
        raise PluginError(f"it declares keys under {kind.group}, but has no hook {kind.hook}")
    answers = [answer for answer in hook() if isinstance(answer, Iterable)]
    if not answers:
        raise PluginError(f"{kind.hook} returned no classes")
    classes = tuple(dict.fromkeys(answers[0]))
    for cls in classes:
        keys_of(cls)
    return classes


def by_key(classes: Iterable[type[Any]], promised: Iterable[str]) -> dict[str, type[Any]]:
    """Return the one class of each promised key.

    Raises:
        PluginError: no class has a promised key, or two have it.
    """
    owners: dict[str, list[type[Any]]] = {}
    for cls in classes:
        for key in keys_of(cls):
            owners.setdefault(key, []).append(cls)
    served = {}
    for key in promised:
        match owners.get(key, []):
            case [cls]:
                served[key] = cls
            case []:
                offered = ", ".join(sorted(owners)) or "none"
                raise PluginError(f"its metadata declares {key!r}, but its classes have the keys: {offered}")
            case several:
                names = " and ".join(_name(cls) for cls in several)
                raise PluginError(f"the key {key!r} is in two classes: {names}")
    return served


def keys_of(cls: Any) -> tuple[str, ...]:
    """Return the keys of a plugin class.

    Raises:
        PluginError: it is not a class, or its ``keys`` are not a tuple of non-empty strings.
    """
    is_class = isinstance(cls, type)
    if not is_class:
        raise PluginError(f"{cls!r} is not a class")
    try:
        keys = cls.keys
    except AttributeError:
        raise PluginError(f"{_name(cls)} has no keys; give it a tuple of strings with that name") from None
    if not isinstance(keys, tuple) or not keys or not all(isinstance(key, str) and key for key in keys):
        raise PluginError(f"{_name(cls)}.keys must be a tuple of non-empty strings, is {keys!r}")
    return keys


def _name(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


_default: Registry | None = None
_default_lock = Lock()


def default_registry() -> Registry:
    """Return the registry of this process, built from the environment at the first call.

    A process that was spawned has none yet and builds its own, so nothing has to be handed over to it.
    """
    global _default
    with _default_lock:
        if _default is None:
            _default = Registry.from_environment()
        return _default


def reset_default_registry() -> None:
    """Forget the registry of this process, so that the next call of `default_registry` reads the environment again."""
    global _default
    with _default_lock:
        _default = None
