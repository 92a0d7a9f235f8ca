"""Kill, stop and stall small runs, and see what comes of it.

    python benchmarks/chaos.py [--quick] [--parts kill stop stall silence] [--kills 500] [--stops 20] [--cuts 10]

The runs are the tests' own: two processes with two devices each, started by `affinage.launch.supervise`. Kill: kill -9
of one of them at random moments, from its start to its last save; the curve and the final state must be those of an
undisturbed run, bit for bit. Stop: SIGTERM to one of them in each of six phases; both end with status 75, and no
finished step is lost. Stall: one stands still (SIGSTOP), sleeps, or waits for a disk; it must be named. Silence: each
is on a machine of its own (network namespaces of Linux), and the cable between them is pulled; both must name the
other, and end. A cable that is plugged in again in time, and a host that stands still, must end nothing.
`python benchmarks/rot.py` damages checkpoints.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS / "launch"))

import cabled  # noqa: E402
import gangs  # noqa: E402

from affinage.launch import Restarts, supervise  # noqa: E402

STEPS = 60
KILLS_OF_A_RUN = 20
STUCK = 10  # seconds, in place of 30
PAUSE = 0.3  # seconds before each batch, so that a run outlasts a cut
MENDED = 4.5  # seconds of a cut that is to be borne, of the 5 that are
STOPPED = 8.0  # seconds that a host stands still

Figures = dict[str, float]


def order(folder: Path, **more: object) -> list[str]:
    return gangs.order(folder, STEPS, **more)


def same(one: Path, other: Path) -> bool:
    return gangs.ended_alike(one, other, STEPS)


def kill(folder: Path, nursery: gangs.Nursery, kills: int) -> Figures:
    """Runs are killed until there were enough kills; each goes on by itself until its end, and is compared."""
    supervise(nursery, order(folder / "undisturbed"), Restarts(), say=print)
    done = wrong = stranded = most_lost = number = 0
    noticed: list[float] = []
    back: list[float] = []
    while done < kills:
        run_folder = folder / f"killed-{number}"
        killing = gangs.Killing(nursery, run_folder, min(KILLS_OF_A_RUN, kills - done), seed=number)
        status = supervise(killing, order(run_folder), Restarts(failures=2 * KILLS_OF_A_RUN), say=lambda line: None)
        number, done = number + 1, done + killing.killed
        stranded += status != 0
        wrong += status == 0 and not same(run_folder, folder / "undisturbed")
        most_lost, noticed, back = max(most_lost, killing.lost), noticed + killing.noticed, back + killing.back
        print(f"kill: {done} of {kills}, runs {number}, stranded {stranded}, other bits {wrong}", flush=True)
        shutil.rmtree(run_folder)
    told = {"kills": done, "runs": number, "runs that did not come to their end": stranded}
    told |= {"runs that ended with other bits": wrong, "most steps lost": most_lost}
    return told | _spread("seconds to notice", noticed) | _spread("seconds from the kill to the next step", back)


def stop(folder: Path, nursery: gangs.Nursery, each: int) -> Figures:
    """SIGTERM to one of the hosts in each phase."""
    saved, lost, apart, draw = 0, 0, 0, random.Random(0)
    seconds: dict[str, list[float]] = {}
    for turn in range(each):
        run_folder = folder / f"stopped-{turn}"
        for phase in gangs.PHASES:
            host = draw.randrange(nursery.hosts)
            gang = nursery.start(order(run_folder, hurt={"host": host, "phase": phase, "by": int(signal.SIGTERM)}))
            while "hurt in" not in gang.said(host):
                time.sleep(0.01)
            told = time.monotonic()
            saved += set(gang.wait()) == {75}
            seconds.setdefault(phase, []).append(time.monotonic() - told)
            made = [gangs.steps_of(run_folder, host) for host in range(nursery.hosts)]
            apart += made[0] != made[1]
            behind = max([gangs.newest(run_folder), *made[0]]) - gangs.newest(run_folder)
            lost += behind
            if behind:
                print(f"{behind} steps lost in the {phase}:", *map(gang.said, range(nursery.hosts)), sep="\n")
        print(f"stop: {6 * (turn + 1)} of {6 * each}, ended with 75: {saved}, steps lost {lost}", flush=True)
        shutil.rmtree(run_folder)
    told: Figures = {"stops": 6 * each, "both hosts ended with 75": saved, "steps lost": lost}
    told["stops at different steps"] = apart
    for phase, found in seconds.items():
        told |= _spread(f"seconds, told in the {phase}", found)
    return told


def stall(folder: Path, nursery: gangs.Nursery, each: int) -> Figures:
    """A host that is alive and does nothing: from then until it is named, and until the next step."""
    told: Figures = {}
    for kind, by in (("stopped", int(signal.SIGSTOP)), ("asleep", "sleep"), ("waiting for a disk", "disk")):
        named: list[float] = []
        back: list[float] = []
        wrong = 0
        for turn in range(each):
            run_folder = folder / f"{kind}-{turn}"
            settings = {"survival": {"stuck_seconds": STUCK}}
            host = 0 if by == "disk" else turn % nursery.hosts
            gang = nursery.start(order(run_folder, hurt={"host": host, "phase": "step", "by": by}, settings=settings))
            while "hurt in" not in gang.said(host):
                time.sleep(0.01)
            hurt = time.monotonic()
            files = [run_folder / name for name in ("stuck.txt", "stuck-1.txt")]
            while not any(f"host {host} " in file.read_text() for file in files if file.exists()):
                gang.ended(0.05)
            named.append(time.monotonic() - hurt)
            text = "".join(file.read_text() for file in files if file.exists())
            blamed = {
                "stopped": f"host {host} shows no sign" if host else "host 0 does not answer",
                "asleep": f"host {host} is behind",
            }.get(kind, "the save")
            wrong += blamed not in text or "Thread 0x" not in text
            if kind != "waiting for a disk":
                gang.wait_for_one()
                ended = time.monotonic()
                gang.end()
                gang = nursery.start(order(run_folder, settings=settings))
                while not gangs.steps_of(run_folder):
                    gang.ended(0.01)
                back.append(time.monotonic() - ended)
            gang.end()
        told |= {f"{kind}: times": each, f"{kind}: not named": wrong}
        told |= _spread(f"{kind}: seconds until it is named, of which {STUCK} are waited for", named)
        told |= _spread(f"{kind}: seconds from the end of the hosts to the next step", back) if back else {}
    return told


def silence(folder: Path, cache: Path, each: int) -> Figures:
    """A machine that is cut off: until it is named and both have ended; then what must not be taken for one."""
    told: Figures = {"cuts": each, "cuts after which a host did not name the other": 0}
    draw, named, ended, back = random.Random(0), [], [], []
    with cabled.Machines() as machines, gangs.Nursery(cache, machines=machines) as nursery:
        supervise(nursery, order(folder / "undisturbed"), Restarts(failures=0), say=print)

        def begin(run_folder: Path) -> gangs.ForkedGang:
            gang = nursery.start(order(run_folder, pause=PAUSE))
            while len(gangs.steps_of(run_folder)) < 3:
                gang.ended(0.01)
            time.sleep(draw.uniform(2.5, 3.5))
            return gang

        def names(gang: gangs.ForkedGang, host: int) -> bool:
            return f"host {1 - host} is not answering" in gang.said(host)

        for turn in range(each):
            run_folder = folder / f"cut-{turn}"
            gang = begin(run_folder)
            machines.pull()
            cut = time.monotonic()
            while not (names(gang, 0) or names(gang, 1)):
                gang.ended(0.01)
            named.append(time.monotonic() - cut)
            statuses = gang.wait()
            ended.append(time.monotonic() - cut)
            machines.plug()
            right = all(f"Stopped: host {1 - host} is gone" in gang.said(host) for host in (0, 1))
            told["cuts after which a host did not name the other"] += not right or statuses != [1, 1]
            gang = nursery.start(order(run_folder))
            while not gangs.steps_of(run_folder):
                gang.ended(0.01)
            back.append(time.monotonic() - cut - (ended[-1]))
            told["runs that ended with other bits"] = told.get("runs that ended with other bits", 0) + (
                gang.wait() != [0, 0] or not same(run_folder, folder / "undisturbed")
            )
            print(f"silence: {turn + 1} of {each} cuts, named {named[-1]:.2f} s, ended {ended[-1]:.2f} s", flush=True)
        for what in ("mended", "stopped"):
            wrong = spoken = 0
            for turn in range(each):
                gang = begin(folder / f"{what}-{turn}")
                if what == "mended":
                    machines.pull()
                    time.sleep(MENDED)
                    machines.plug()
                else:
                    gang.kill(turn % 2, signal.SIGSTOP)
                    time.sleep(STOPPED)
                    gang.kill(turn % 2, signal.SIGCONT)
                wrong += gang.wait() != [0, 0] or not same(folder / f"{what}-{turn}", folder / "undisturbed")
                spoken += any("answering" in gang.said(host) for host in (0, 1))
                print(f"silence: {turn + 1} of {each} {what}, wrong {wrong}, named {spoken}", flush=True)
            kind = f"cuts of {MENDED:g} s" if what == "mended" else f"stops (SIGSTOP) of {STOPPED:g} s"
            told |= {kind: each, f"{kind}: runs that ended, or with other bits": wrong, f"{kind}: named": spoken}
    told |= _spread("seconds from the cut until it is named", named)
    told |= _spread("seconds from the cut until both hosts have ended, of which 5 are waited for", ended)
    return told | _spread("seconds from the end of the hosts to the next step", back)


def _spread(name: str, found: list[float]) -> Figures:
    return {f"{name}, median": round(statistics.median(found), 2), f"{name}, most": round(max(found), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few of each, for a minute or two")
    parts = ("stop", "stall", "kill", "silence")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--stops", type=int, default=20, help="of each phase")
    parser.add_argument("--cuts", type=int, default=10, help="of each kind")
    asked = parser.parse_args()
    kills, stops, cuts = (5, 1, 1) if asked.quick else (asked.kills, asked.stops, asked.cuts)
    found: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as root, gangs.Nursery(Path(root) / "cache") as nursery:
        works = {
            "stop": lambda: stop(Path(root), nursery, stops),
            "stall": lambda: stall(Path(root), nursery, 1 if asked.quick else max(1, stops // 4)),
            "kill": lambda: kill(Path(root), nursery, kills),
            "silence": lambda: silence(Path(root) / "silence", Path(root) / "cache", cuts),
        }
        for name in asked.parts:
            before = time.monotonic()
            found[name] = {**works[name](), "seconds": round(time.monotonic() - before, 1)}
            found[name]["load of the machine's processors"] = round(os.getloadavg()[1] / (os.cpu_count() or 1), 1)
            print(name, found[name], flush=True)
    lines = [
        {"name": f"{part}: {name}", "ours": value, "peer": None, "unit": "", "ratio": None}
        for part, facts in found.items()
        for name, value in facts.items()
    ]
    print(json.dumps({"benchmark": "chaos", "results": lines}))


if __name__ == "__main__":
    main()
