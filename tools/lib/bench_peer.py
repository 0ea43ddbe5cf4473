"""What the peers of the benchmark share: how they are installed, and how their own statements are learnt."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from cluster import ROOT, clean_environ

FOLDER = ROOT / "build/bench"
DRIVERS = ROOT / "tools/lib"
# As in the log: "execute NAME: with j as (...", its further lines begin with a tab; then the parameters.
LOGGED = re.compile(r"LOG:  execute [^:]*: (.*(?:\n\t.*)*)(?:\n.*DETAIL:  parameters: (.*(?:\n\t.*)*))?")
PARAMETER = re.compile(r"\$(\d+) = ('(?:[^']|'')*'|NULL)")


class Peer:
    """What somebody uses today. Its scripts for pgbench are by the number of messages that one of them handles."""

    name: str
    packages: list[str]
    driver: str  # a program beside this file: PROGRAM ACTION NUMBER ..., which answers a line of JSON
    schema: str
    left: str  # counts the messages that are due and unclaimed
    clear: str  # removes all
    delayed: str  # adds messages that are not due for a day, and others that are finished
    finished: str
    enqueue: dict[int, str] = {}
    finish: dict[int, str] = {}
    step = ""  # a durable step, of one and the same run from transaction to transaction

    def versions(self) -> str:
        return ", ".join(package.replace("==", " ").replace("@", " ") for package in self.packages)

    def drive(self, bench, action: str, *arguments) -> dict:
        url = f"postgresql://postgres@127.0.0.1:{bench.cluster.port}/postgres"
        command = [*self.program(), str(DRIVERS / self.driver), action, *map(str, arguments)]
        result = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=300,
                                env={**clean_environ(), **self.environ(), "DATABASE_URL": url})
        if result.returncode:
            sys.exit(f"tools/bench: {self.name} failed: {action}\n{result.stdout}{result.stderr}")
        return json.loads(result.stdout.strip().rsplit("\n", 1)[-1] or "null")

    def environ(self) -> dict[str, str]:
        return {}

    def learn(self, bench, *arguments) -> list[tuple[str, list[str]]]:
        """What the library sends to the server while the driver takes a sample: statements with their parameters."""
        with bench.connect() as conn:
            conn.execute("alter role postgres set log_statement = 'all'")
            size = os.path.getsize(bench.cluster.log)
            self.drive(bench, "sample", *arguments)
            conn.execute("alter role postgres reset log_statement")
        text = Path(bench.cluster.log).read_bytes()[size:].decode()
        return [(sql.replace("\n\t", "\n").rstrip("; \n"), [value for _, value in PARAMETER.findall(values)])
                for sql, values in LOGGED.findall(text)]


class FromNpm(Peer):
    """Installed by npm, without the packages' own scripts."""

    def program(self):
        return ["node"]

    def environ(self):
        return {"NODE_PATH": str(FOLDER / self.name / "node_modules")}

    def install(self) -> str | None:
        """Why it can't be measured, or None."""
        if not (shutil.which("npm") and shutil.which("node")):
            return "npm is not here"
        folder = FOLDER / self.name
        if (folder / "installed").exists() and (folder / "installed").read_text() == self.versions():
            return None
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}\n')
        result = subprocess.run(["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", *self.packages],
                                cwd=folder, capture_output=True, text=True)
        if result.returncode:
            return f"npm could not install {self.versions()}"
        (folder / "installed").write_text(self.versions())
        return None


class FromPyPI(Peer):
    """Installed by pip, each into an environment of its own."""

    def program(self):
        return [f"{FOLDER}/{self.name}/bin/python"]

    def install(self) -> str | None:
        """Why it can't be measured, or None."""
        folder = FOLDER / self.name
        if (folder / "installed").exists() and (folder / "installed").read_text() == self.versions():
            return None
        venv.create(folder, with_pip=True, clear=True)
        result = subprocess.run([folder / "bin/pip", "install", "-q", "--disable-pip-version-check", *self.packages],
                                capture_output=True, text=True)
        if result.returncode:
            return f"pip could not install {self.versions()}"
        (folder / "installed").write_text(self.versions())
        return None


def bind(logged: tuple[str, list[str]], **variables: str) -> str:
    """The statement with the parameters that it had, but p2 = ":id" for the second, where pgbench has a variable."""
    sql, values = logged

    def put(match):
        # A colon before a letter would be a variable.
        return variables.get(f"p{match[1]}") or re.sub(r":(?=[a-z])", ": ", values[int(match[1]) - 1])

    return re.sub(r"\$(\d+)", put, sql)


def find(logged, pattern: str, nth: int = 0):
    """The statement that has these words."""
    found = [entry for entry in logged if re.search(pattern, entry[0])]
    if len(found) <= nth:
        sys.exit(f"tools/bench: the library did not send {pattern!r}")
    return found[nth]
