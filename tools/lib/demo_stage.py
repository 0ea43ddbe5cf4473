"""What every act of the demo uses: databases with the package, sender processes, the screen, and the figures."""
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psycopg
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from cluster import clean_environ

ROOT = Path(__file__).resolve().parents[2]


class Stage:
    def __init__(self, short, plain):
        self.short = short
        self.console = Console(highlight=False, soft_wrap=plain or not sys.stdout.isatty())
        self.live = self.console.is_terminal and not plain
        self.checks = []

    def say(self, text=""):
        self.console.print(text, markup=False)

    def check(self, what, expected, seen, ok=None):
        self.checks.append((what, str(expected), str(seen), expected == seen if ok is None else ok))

    @property
    def wrong(self):
        return sum(not ok for *_, ok in self.checks)

    def report(self):
        """Print the figures; the exit status."""
        table = Table(box=box.SIMPLE_HEAD, title="The figures", title_justify="left", pad_edge=False)
        for column in ("what", "expected", "seen", ""):
            table.add_column(column, overflow="fold")
        for what, expected, seen, ok in self.checks:
            table.add_row(what, expected, seen, "ok" if ok else "WRONG")
        self.console.print(table)
        self.say(f"{len(self.checks) - self.wrong} of {len(self.checks)} figures are as they should be.")
        return 0 if self.checks and not self.wrong else 1

    @contextlib.asynccontextmanager
    async def screen(self, table, line):
        """Show table() as it changes, or, where there is no terminal, print line() every few seconds."""
        async def refresh():
            if self.live:
                with Live(table(), console=self.console, auto_refresh=False) as live:
                    try:
                        while True:
                            await asyncio.sleep(0.25)
                            live.update(table(), refresh=True)
                    finally:
                        live.update(table(), refresh=True)
            while True:
                await asyncio.sleep(3)
                self.say(line())
        task = asyncio.create_task(refresh())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not self.live:
                self.say(line())


def install(cluster, dbname, more):
    """A new database with the package, through the driver, and then more SQL."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "pg_baton.sql")
        subprocess.run([ROOT / "tools/build", "plain"], check=True, stdout=subprocess.DEVNULL,
                       env={**os.environ, "OUT": str(file)})
        package = file.read_text()
    with psycopg.connect(cluster.dsn(), autocommit=True) as connection:
        connection.execute(f'create database "{dbname}"')
    for text in (package, more):
        with psycopg.connect(cluster.dsn(dbname)) as connection:
            connection.execute(text)


async def connect(cluster, dbname):
    return await psycopg.AsyncConnection.connect(
        cluster.dsn(dbname), autocommit=True, row_factory=psycopg.rows.dict_row)


@contextlib.contextmanager
def process(command, environment, log):
    """A child of its own: stopped by SIGTERM at the end, and killed if that takes long."""
    with open(log, "ab") as output:
        child = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=output,
                                 stderr=output, env={**clean_environ(), "NO_PROXY": "127.0.0.1", **environment})
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def sender(cluster, dbname, log, secrets):
    return process([sys.executable, ROOT / "tools/sender", "--poll", "0.2", "--concurrency", "40", "--database-url",
                    cluster.dsn(dbname)], {f"BATON_SECRET_{name}": value for name, value in secrets.items()}, log)


class Clock:
    def __init__(self):
        self.started = time.monotonic()

    def __call__(self):
        return time.monotonic() - self.started


async def beside(coroutine, *endless):
    """The coroutine's answer; the endless ones run as long, and an error of theirs is the answer, too."""
    tasks = [asyncio.create_task(one) for one in (coroutine, *endless)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def side_by_side(stage, sides, play, line):
    """play(side) of all sides at once, while they are looked at: line(sides) every few seconds, and at the end."""
    clock = Clock()

    async def all_of_them():
        await asyncio.gather(*(play(side) for side in sides))

    async def watch():
        said = 0
        while True:
            for side in sides:
                await side.look()
            if clock() >= said + 5:
                said = clock()
                stage.say(f"{said:5.1f} s  {line(sides)}")
            await asyncio.sleep(0.2)

    await beside(all_of_them(), watch())
    for side in sides:
        await side.look()
    stage.say(f"{clock():5.1f} s  {line(sides)}")
