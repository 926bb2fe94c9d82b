"""Remember which store entries a build came to, by the content of all that decides it, so that no unchanged build is planned again."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tkbuild.digest import file_digest, key_digest
from tkbuild.facts import BuildFacts, own_digest
from tkbuild.store import Store

KIND = "plans"
_KEY_SCHEMA = 1
_FILE = "entries.json"


def plan_fields(specs_dir: Path, choice: Mapping[str, Any], facts: BuildFacts, store: Store) -> dict[str, Any] | None:
    """Return everything that can change which entries a build needs: files of specs, what was asked for, tools, tkbuild itself.

    None if a file cannot be read: planning then says which, if it needs it. The store itself may lie among the specs.
    """
    try:
        return {
            "specs": {_name(path.relative_to(specs_dir)): file_digest(path) for path in _files_below(specs_dir, store.root)},
            "choice": dict(choice),
            "tkbuild": own_digest(path.name for path in Path(__file__).parent.glob("*.py")),
            **facts.lowering,
            **facts.compiling,
        }
    except OSError:
        return None


def _name(path: Path) -> str:
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


def _files_below(folder: Path, left_out: Path) -> Iterator[Path]:
    outside = left_out.resolve()
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if Path(at, name).resolve() != outside]
        yield from (path for name in names if (path := Path(at, name)).is_file())


def recall(store: Store, fields: Mapping[str, Any]) -> int | None:
    """Return how many variants an equal build had, if each of its entries is in the store, verified; else None."""
    found = store.get(KIND, key_digest(_KEY_SCHEMA, fields))
    if found is None:
        return None
    recorded = json.loads(found.files[_FILE])
    if all(store.get(kind, key) is not None for kind, key in recorded["entries"]):
        return int(recorded["variants"])
    return None


def plans_of(store: Store, keys: Collection[str]) -> set[str]:
    """Return the keys of those recorded builds that need no entry beside ``keys``."""
    found = (store.get(KIND, entry.key) for entry in store.entries(KIND))
    return {one.key for one in found if one and all(key in keys for _, key in json.loads(one.files[_FILE])["entries"])}


def remember(store: Store, fields: Mapping[str, Any], keys: Iterable[tuple[str, str]]) -> None:
    """Record a build by the keys of its variants: those of the lowered kernel and of the cubin of each."""
    pairs = list(keys)
    entries = sorted({("lowered", lowered) for lowered, _ in pairs} | {("cubins", cubin) for _, cubin in pairs})
    content = json.dumps({"variants": len(pairs), "entries": entries}).encode()
    store.put(KIND, key_digest(_KEY_SCHEMA, fields), fields=fields, facts={}, files={_FILE: content})
