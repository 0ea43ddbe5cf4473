"""Compares the skipped tests of a run with tests/allowed-skips.txt, and with the file that BATON_MORE_SKIPS names.

As a program: reads the log of pg_prove --directives.
"""

import fnmatch
import os
import re
import sys
from pathlib import Path

LISTS = [Path(__file__).resolve().parents[2] / "tests/allowed-skips.txt"]
if more := os.environ.get("BATON_MORE_SKIPS"):
    LISTS.append(Path(more))


def strict() -> bool:
    return bool(os.environ.get("BATON_STRICT_SKIPS"))


def unlisted(skips):
    """Those of (name, reason) that no list holds."""
    allowed = []
    for line in [line for file in LISTS for line in file.read_text().splitlines()]:
        if line.strip() and not line.startswith("#"):
            name, _, reason = line.partition("  ")
            if not reason.strip():
                raise SystemExit(f"allowed skips: no reason after two spaces: {line}")
            allowed.append((name.replace("[", "[[]"), reason.strip()))
    return [(name, reason) for name, reason in skips
            if not any(fnmatch.fnmatchcase(name, pattern) and reason == why for pattern, why in allowed)]


def tap_skips(log):
    """(file, reason) of each directive that pg_prove shows."""
    file = "?"
    for line in log.splitlines():
        if found := re.match(r"(\S+\.sql) \.\.+", line):
            file = found[1]
        if found := re.search(r"# (?:SKIP|TODO):? ?(.*)$", line, re.I) or re.search(r"skipped: (.*)$", line):
            yield file, found[1].strip()


def main():
    bad = unlisted(tap_skips(Path(sys.argv[1]).read_text()))
    for name, reason in bad:
        print(f"skipped, but not in tests/allowed-skips.txt: {name}  {reason}", file=sys.stderr)
    return 1 if bad and strict() else 0


if __name__ == "__main__":
    sys.exit(main())
