"""Remember which store entries a build came to, by the content of all that decides it, so that no unchanged build is planned again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tkbuild.digest import file_digest, key_digest
from tkbuild.facts import BuildFacts, own_digest
from tkbuild.store import Store

KIND = "plans"
_KEY_SCHEMA = 1
_FILE = "entries.json"


def plan_fields(specs_dir: Path, choice: Mapping[str, Any], facts: BuildFacts) -> dict[str, Any]:
    """Return everything that can change which entries a build needs: files of specs, what was asked for, tools, tkbuild itself."""
    here = Path(__file__).parent
    return {
        "specs": {
            path.relative_to(specs_dir).as_posix(): file_digest(path) for path in sorted(specs_dir.rglob("*")) if path.is_file()
        },
        "choice": dict(choice),
        "tkbuild": own_digest(path.name for path in here.glob("*.py")),
        **facts.lowering,
        **facts.compiling,
    }


def recall(store: Store, fields: Mapping[str, Any]) -> int | None:
    """Return how many variants an equal build had, if each of its entries is in the store, verified; else None."""
    found = store.get(KIND, key_digest(_KEY_SCHEMA, fields))
    if found is None:
        return None
    recorded = json.loads(found.files[_FILE])
    if all(store.get(kind, key) is not None for kind, key in recorded["entries"]):
        return int(recorded["variants"])
    return None


def remember(store: Store, fields: Mapping[str, Any], keys: Iterable[tuple[str, str]]) -> None:
    """Record a build by the keys of its variants: those of the lowered kernel and of the cubin of each."""
    pairs = list(keys)
    entries = sorted({("lowered", lowered) for lowered, _ in pairs} | {("cubins", cubin) for _, cubin in pairs})
    content = json.dumps({"variants": len(pairs), "entries": entries}).encode()
    store.put(KIND, key_digest(_KEY_SCHEMA, fields), fields=fields, facts={}, files={_FILE: content})
