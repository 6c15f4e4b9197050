#!/usr/bin/env python3
"""Counts the types of production code whose name another type has too, and fails above a tenth.

    tests/style/shared_type_names.py [--list]

A name has to be understood without its module path (CONTRIBUTING.md), so it should be the only one of its kind. What
counts: every struct, enum, trait, union and type alias in `crates/*/src`, but not in tests, nor in the crates that only
serve tests, nor an associated type, whose name its trait has chosen.
"""

import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEST_CRATES = {"testkit", "interop"}
ALLOWED_SHARE = 0.10
DEFINITION = re.compile(r"^( *)(?:pub(?:\([^)]*\))? )?(?:unsafe )?(struct|enum|trait|union|type) ([A-Z]\w*)", re.M)


def production_code(path):
    """The text of a file without its unit tests, which are its last item."""
    text = path.read_text()
    return re.split(r"^#\[cfg\(test\)\]\n(?:#\[[^\n]*\n)*mod \w+ \{", text, maxsplit=1, flags=re.M)[0]


def is_test(path):
    return "tests" in path.parts or path.name == "tests.rs"


def definitions():
    for crate in sorted((ROOT / "crates").iterdir()):
        if crate.name in TEST_CRATES:
            continue
        source = crate / "src"
        for path in sorted(source.rglob("*.rs")):
            if is_test(path.relative_to(source)):
                continue
            for indent, kind, name in DEFINITION.findall(production_code(path)):
                # Within an `impl` or a trait: an associated type.
                if not (kind == "type" and indent):
                    yield name, path.relative_to(ROOT)


def main():
    places = collections.defaultdict(list)
    for name, path in definitions():
        places[name].append(path)
    total = sum(len(paths) for paths in places.values())
    shared = {name: paths for name, paths in places.items() if len(paths) > 1}
    count = sum(len(paths) for paths in shared.values())
    share = count / total
    print(f"{count} of {total} types share their name with another type: {share:.1%} (at most {ALLOWED_SHARE:.0%})")
    if "--list" in sys.argv or share > ALLOWED_SHARE:
        for name, paths in sorted(shared.items(), key=lambda entry: -len(entry[1])):
            print(f"  {name}: {', '.join(map(str, paths))}")
    if total < 500:
        sys.exit("too few types were found; has the layout of the crates changed?")
    sys.exit(share > ALLOWED_SHARE)


main()
