"""Kill, stop and stall small runs, and see what comes of it.

    python benchmarks/chaos.py [--quick] [--parts kill aimed gone stop stall silence borne sick] [--kills 500]
        [--aimed 20] [--gone 20] [--stops 20] [--cuts 10] [--stalls 3] [--stuck 28] [--sick 300] [--keep]

The runs are the tests' own: two processes with two devices each, started by `affinage.launch.supervise`. Kill: kill -9
of one of them at random moments, from its start to its last save; the curve and the final state must be those of an
undisturbed run, bit for bit. Hosts are forked from a process that has imported all; every tenth time they are Pythons
of their own, killed while they import, too. Aimed: the same in phases that last milliseconds, where a host kills
itself. Gone: nobody watches over the hosts; one is killed, and the other must end by itself. Stop: SIGTERM to one of
them in each of six phases, in the compilation with an empty cache; both end with status 75, and no finished step is
lost. Stall: one stands still (SIGSTOP), sleeps, or waits for a disk, in a step, and once each while it joins the other,
in a compilation, a restore, a save, a last save, an evaluation and a stage of data; it must be named, with stacks where
it has joined. Silence: each is on a machine of its own (network namespaces of Linux), and the cable between them is
pulled; both must name the other, and end. Borne: a cable that is plugged in again in time, and a host that stands
still, must end nothing. Sick: NaN, Inf and spikes in any layer and at any step of trainings in one process, each left
out or gone back from; they must end with the bits of one that lacks these batches.

With --keep what each part has found takes the place of what `results/chaos.json` has of it.
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
from collections import Counter
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import cabled
import gangs
import noted_phases

from affinage.launch import Restarts, supervise

STEPS = 60
KILLS_OF_A_RUN = 20
ANEW_EVERY = 10  # kills
COMPILING = 1.5  # seconds in which a host is told to stop while it compiles, which takes longer
KEPT = Path(__file__).parent / "results" / "chaos.json"
STUCK = 28.0  # seconds of hang_timeout, as by default
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
    phases: Counter[str] = Counter()
    noticed: list[float] = []
    back: list[float] = []
    while done < kills:
        run_folder = folder / f"killed-{number}"
        killing = gangs.Killing(nursery, run_folder, min(KILLS_OF_A_RUN, kills - done), number, ANEW_EVERY)
        status = supervise(killing, order(run_folder), Restarts(failures=2 * KILLS_OF_A_RUN), say=lambda line: None)
        number, done, phases = number + 1, done + killing.killed, phases + killing.phases
        stranded += status != 0
        wrong += status == 0 and not same(run_folder, folder / "undisturbed")
        most_lost, noticed, back = max(most_lost, killing.lost), noticed + killing.noticed, back + killing.back
        print(f"kill: {done} of {kills}, runs {number}, stranded {stranded}, other bits {wrong}", flush=True)
        shutil.rmtree(run_folder)
    told = {"kills": done, "runs": number, "runs that did not come to their end": stranded}
    told |= {"runs that ended with other bits": wrong, "most steps lost": most_lost}
    told |= {f"killed in: {phase}": phases[phase] for phase in noted_phases.PHASES}
    return told | _spread("seconds to notice", noticed) | _spread("seconds from the kill to the next step", back)


def aimed(folder: Path, nursery: gangs.Nursery, each: int) -> Figures:
    """Hosts that kill themselves in each of `gangs.AIMS`, a few times a run."""
    supervise(nursery, order(folder / "undisturbed"), Restarts(), say=print)
    wanted = {phase: each if phase in ("restore", "evaluation") else (each + 1) // 2 for phase in gangs.AIMS}
    left, draw = dict(wanted), random.Random(0)
    amid: Counter[str] = Counter()
    wrong = stranded = most_lost = number = 0
    back: dict[bool, list[float]] = {False: [], True: []}
    while any(kills > 0 for kills in left.values()):
        run_folder, before = folder / f"aimed-{number}", dict(left)
        aiming = gangs.Aimed(nursery, run_folder, STEPS, left, draw)
        status = supervise(aiming, order(run_folder), Restarts(failures=5 * each), say=lambda line: None)
        number, amid, most_lost = number + 1, amid + aiming.amid, max(most_lost, aiming.lost)
        stranded += status != 0
        wrong += status == 0 and not same(run_folder, folder / "undisturbed")
        back = {anew: back[anew] + aiming.back[anew] for anew in back}
        hit = {phase: before[phase] - left[phase] for phase in left}
        print(
            f"aimed: run {number}: {hit}, noted {dict(aiming.noted)}, stranded {stranded}, other bits {wrong}",
            flush=True,
        )
        shutil.rmtree(run_folder)
    told: Figures = {"runs": number, "runs that did not come to their end": stranded}
    told |= {"runs that ended with other bits": wrong, "most steps lost": most_lost}
    for phase, lacking in left.items():
        name = "last save" if phase == "writing" else phase
        told |= {f"killed in the {name}": wanted[phase] - lacking, f"killed in the {name}: amid its work": amid[phase]}
    for anew, found in back.items():
        kind = ", hosts that are Pythons of their own" if anew else ""
        told |= {f"next steps that were timed{kind}": len(found)}
        told |= _spread(f"seconds from the kill to the next step{kind}", found) if found else {}
    return told


def gone(folder: Path, nursery: gangs.Nursery, each: int) -> Figures:
    """kill -9 where nobody watches over the hosts: the other one must end by itself."""
    told: Figures = {}
    for phase in ("step", "start", "restore", "evaluation", "save"):
        draw, ended, named, times = random.Random(0), [], 0, each if phase == "step" else (each + 4) // 5
        for turn in range(times):
            run_folder, host = folder / f"gone-{phase}-{turn}", turn % nursery.hosts
            hurt: dict[str, object] = {"host": host, "phase": phase, "by": int(signal.SIGKILL)}
            if phase == "restore":
                _saved_once(nursery, run_folder)
            gang = nursery.start(order(run_folder, **({} if phase == "step" else {"hurt": hurt})))
            if phase == "step":
                while not gangs.steps_of(run_folder):
                    time.sleep(0.005)
                time.sleep(draw.uniform(0.0, 0.4))
                gang.kill(host)
            dead = gangs.dies(gang, host)
            ended.append(max(gangs.dies(gang, other) for other in range(nursery.hosts) if other != host) - dead)
            statuses = gang.wait()
            assert statuses[host] == -signal.SIGKILL and statuses[1 - host], statuses
            named += f"host {host} is gone" in gang.said(1 - host)  # else JAX's thread was faster, which names nobody
            print(f"gone: host {host} in the {phase}: {ended[-1]:.3f} s, statuses {statuses}", flush=True)
            shutil.rmtree(run_folder)
        told |= {f"killed in the {phase}": times, f"killed in the {phase}: named by the other": named}
        told |= _spread(f"killed in the {phase}: seconds until the other has ended", ended)
    return told


def stop(folder: Path, nursery: gangs.Nursery, each: int) -> Figures:
    """SIGTERM to one of the hosts in each phase."""
    saved, lost, apart, compiling, draw = 0, 0, 0, 0, random.Random(0)
    seconds: dict[str, list[float]] = {}
    for turn in range(each):
        run_folder = folder / f"stopped-{turn}"
        for phase in gangs.PHASES:
            host = draw.randrange(nursery.hosts)
            hurt: dict[str, object] = {"host": host, "phase": phase, "by": int(signal.SIGTERM)}
            empty: dict[str, object] = {}
            if phase == "compilation":
                hurt["within"] = COMPILING
                empty = {"cache": str(folder / f"compiled-{turn}")}
            gang = nursery.start(order(run_folder, hurt=hurt, **empty))
            while "hurt in" not in gang.said(host):
                time.sleep(0.01)
            told = time.monotonic()
            saved += set(gang.wait()) == {75}
            seconds.setdefault(phase, []).append(time.monotonic() - told)
            compiling += phase == "compilation" and "compilation done" not in gang.said(host)
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
    told["told in the compilation: left while the compiler still ran"] = compiling
    for phase, found in seconds.items():
        told |= _spread(f"seconds, told in the {phase}", found)
    return told


STOP = int(signal.SIGSTOP)
# Where, how, and which hosts in turn.
STALLS: tuple[tuple[str, int | str, tuple[int, ...]], ...] = (
    ("step", STOP, (0, 1)),
    ("step", "sleep", (0, 1)),
    ("step", "disk", (0,)),
    ("step", "disk", (1,)),
    ("joining", STOP, (0, 1)),
    ("compilation", STOP, (0, 1)),
    ("restore", STOP, (0, 1)),
    ("save", STOP, (0, 1)),
    ("last save", "disk", (0,)),
    ("evaluation", STOP, (1,)),
    ("evaluation", "sleep", (1,)),
    ("data", STOP, (1,)),
    ("data", STOP, (0,)),
    ("data", "sleep", (0,)),
)
KINDS = {STOP: "stopped", "sleep": "asleep", "disk": "waiting for a disk"}


def stall(folder: Path, nursery: gangs.Nursery, each: int, stuck: float) -> Figures:
    """A host that is alive and does nothing: from then until it is named, and until the next step."""
    told: Figures = {}
    for number, (where, by, hosts) in enumerate(STALLS):
        named: list[float] = []
        back: list[float] = []
        of_one = where == "data" or (by == "disk" and hosts[0] > 0)
        wrong, kind = 0, f"{KINDS[by]} in the {where}" + (f", host {hosts[0]}" if of_one else "")
        for turn in range(each if where == "step" else len(hosts)):
            run_folder, host = folder / f"stalled-{number}-{turn}", hosts[turn % len(hosts)]
            runtime: dict[str, object] = {"hang_timeout": stuck}
            phase = "step" if where in ("last save", "evaluation", "data") else where
            hurt: dict[str, object] = {"host": host, "phase": phase, "by": by}
            job: dict[str, object] = {"runtime": runtime, "hurt": hurt}
            if where == "last save":
                runtime["checkpoint"] = {"every_steps": STEPS, "keep_every": STEPS}
            elif where in ("evaluation", "data"):
                job = {"stage": where, "hang_timeout": stuck, "hurt": hurt}
            if where == "restore":
                _saved_once(nursery, run_folder)
            gang = nursery.start(order(run_folder, **job))
            while "hurt in" not in gang.said(host):
                time.sleep(0.01)
            hurt_at, joined = time.monotonic(), where != "joining"
            while f"host {host} " not in _told_of(gang, run_folder, joined) and not gang.ended(0.05):
                pass  # one may end by itself, as by an error of Gloo's
            named.append(time.monotonic() - hurt_at)
            text = _told_of(gang, run_folder, joined)
            if _blamed(where, by, host) not in text or (joined and "Thread 0x" not in text):
                print(text, *map(gang.said, (0, 1)), sep="\n")
                wrong += 1
            if where == "step" and by != "disk":
                gang.wait_for_one()
                ended = time.monotonic()
                gang.end()
                gang = nursery.start(order(run_folder, runtime=runtime))
                while not gangs.steps_of(run_folder):
                    gang.ended(0.01)
                back.append(time.monotonic() - ended)
            gang.end()
            print(f"stall: {kind}, named after {named[-1]:.1f} s, wrong {wrong}", flush=True)
        told |= {f"{kind}: times": len(named), f"{kind}: not named": wrong}
        told |= _spread(f"{kind}: seconds until it is named, of which {stuck:g} are waited for", named)
        told |= _spread(f"{kind}: seconds from the end of the hosts to the next step", back) if back else {}
    return told


def _saved_once(nursery: gangs.Nursery, run_folder: Path) -> None:
    """Let a run come so far that there is something to restore."""
    gang = nursery.start(order(run_folder))
    while not gangs.newest(run_folder):
        gang.ended(0.01)
    gang.end()


def _told_of(gang: gangs.ForkedGang, run_folder: Path, joined: bool) -> str:
    """What the hosts tell of each other; before they have joined, a process beside each tells of it."""
    return _stacks_of(run_folder) if joined else gang.said(0) + gang.said(1)


def _stacks_of(run_folder: Path) -> str:
    files = [run_folder / name for name in ("stuck.txt", "stuck-1.txt")]
    return "".join(file.read_text() for file in files if file.exists())


def _blamed(where: str, by: int | str, host: int) -> str:
    """What must be said of a host."""
    if where == "joining":
        return f"host {host} shows no sign of life"
    if by == STOP:
        return f"host {host} shows no sign" if host else "host 0 does not answer"
    if by == "disk":
        behind = "" if host else "behind, "
        return f": host {host} is {behind}at the {'save' if where == 'step' else where}"
    return f"host {host} is behind" if where == "step" else f"host {host} is "


def _begun(nursery: gangs.Nursery, run_folder: Path, draw: random.Random) -> gangs.ForkedGang:
    """A run that has made some steps, long enough for the kernels to know each other."""
    gang = nursery.start(order(run_folder, pause=PAUSE))
    while len(gangs.steps_of(run_folder)) < 3:
        gang.ended(0.01)
    time.sleep(draw.uniform(3.5, 4.5))
    return gang


def silence(folder: Path, cache: Path, each: int) -> Figures:
    """A machine that is cut off: until it is named, both have ended, and the run, started again, makes a step."""
    told: Figures = {"cuts": each, "cuts after which a host did not name the other": 0}
    told["runs that ended with other bits"] = 0
    draw, named, ended, again = random.Random(0), [], [], []
    with cabled.Machines() as machines, gangs.Nursery(cache, machines=machines) as nursery:
        supervise(nursery, order(folder / "undisturbed"), Restarts(failures=0), say=print)

        def names(gang: gangs.ForkedGang, host: int) -> bool:
            return f"host {1 - host} is not answering" in gang.said(host)

        for turn in range(each):
            run_folder = folder / f"cut-{turn}"
            gang = _begun(nursery, run_folder, draw)
            machines.pull()
            cut = time.monotonic()
            when: dict[int, float] = {}
            while len(when) < nursery.hosts:
                when = {host: time.monotonic() - cut for host in (0, 1) if names(gang, host)} | when
                if gang.ended(0.01):
                    break
            named += when.values()
            statuses = gang.wait()
            ended.append(time.monotonic() - cut)
            machines.plug()
            right = all(f"Stopped: host {1 - host} is gone" in gang.said(host) for host in (0, 1))
            told["cuts after which a host did not name the other"] += not right or statuses != [1, 1]
            gang = nursery.start(order(run_folder))
            while not gangs.steps_of(run_folder):
                gang.ended(0.01)
            again.append(time.monotonic() - cut)
            told["runs that ended with other bits"] += gang.wait() != [0, 0] or not same(
                run_folder, folder / "undisturbed"
            )
            after = f"named after {max(when.values()):.2f} s, ended {ended[-1]:.2f}, next step {again[-1]:.2f}"
            print(f"silence: {turn + 1} of {each} cuts, {after}", flush=True)
    told |= _spread("seconds from the cut until a host has named the other", named)
    told |= _spread("seconds from the cut until both hosts have ended, of which 5 are waited for", ended)
    return told | _spread("seconds from the cut to the next step of the run, started again", again)


def borne(folder: Path, cache: Path, each: int) -> Figures:
    """What must not be taken for a machine that is gone: a cut that is mended in time, and a host that stands still."""
    told: Figures = {}
    draw = random.Random(0)
    with cabled.Machines() as machines, gangs.Nursery(cache, machines=machines) as nursery:
        supervise(nursery, order(folder / "undisturbed"), Restarts(failures=0), say=print)
        for what in ("mended", "stopped"):
            wrong = spoken = 0
            for turn in range(each):
                gang = _begun(nursery, folder / f"{what}-{turn}", draw)
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
                print(f"borne: {turn + 1} of {each} {what}, wrong {wrong}, named {spoken}", flush=True)
            kind = f"cuts of {MENDED:g} s" if what == "mended" else f"stops (SIGSTOP) of {STOPPED:g} s"
            told |= {kind: each, f"{kind}: runs that ended, or with other bits": wrong, f"{kind}: named": spoken}
    return told


def _injected(folder: Path, times: int) -> Figures:
    from sick import inject  # imports JAX, for which `chaos_ray`'s drivers do not wait

    return inject(folder, times)


def _spread(name: str, found: list[float]) -> Figures:
    return {f"{name}, median": round(statistics.median(found), 2), f"{name}, most": round(max(found), 2)}


def keep(part: str, lines: list[dict[str, object]]) -> None:
    """Put what a part has found in the place of what is kept of it; other parts stay."""
    kept = json.loads(KEPT.read_text())
    places = [number for number, line in enumerate(kept["results"]) if line["name"].startswith(f"{part}: ")]
    others = [line for line in kept["results"] if not line["name"].startswith(f"{part}: ")]
    place = places[0] if places else len(others)
    kept["results"] = [*others[:place], *lines, *others[place:]]
    command = " ".join(["python benchmarks/chaos.py", *sys.argv[1:]])
    kept.setdefault("parts", {})[part] = {"date": time.strftime("%Y-%m-%d"), "command": command}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few of each, for a minute or two")
    parts = ("stop", "stall", "kill", "aimed", "gone", "silence", "borne", "sick")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--aimed", type=int, default=20, help="kills in each phase")
    parser.add_argument("--gone", type=int, default=20, help="kills in each phase")
    parser.add_argument("--stops", type=int, default=20, help="of each phase")
    parser.add_argument("--cuts", type=int, default=10, help="of each kind")
    parser.add_argument("--stalls", type=int, default=3, help="of each kind in a step; 1 of each host elsewhere")
    parser.add_argument("--stuck", type=float, default=STUCK, help="seconds: runtime.hang_timeout")
    parser.add_argument("--sick", type=int, default=300, help="injections")
    parser.add_argument("--keep", action="store_true", help=f"in {KEPT.name}")
    asked = parser.parse_args()
    kills, stops, cuts = (5, 1, 1) if asked.quick else (asked.kills, asked.stops, asked.cuts)
    stalls, stuck, sick = (1, 5.0, 20) if asked.quick else (asked.stalls, asked.stuck, asked.sick)
    aims, leaves = (2, 2) if asked.quick else (asked.aimed, asked.gone)
    lines: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as root, gangs.Nursery(Path(root) / "cache") as nursery:
        works = {
            "stop": lambda: stop(Path(root), nursery, stops),
            "stall": lambda: stall(Path(root), nursery, stalls, stuck),
            "kill": lambda: kill(Path(root), nursery, kills),
            "aimed": lambda: aimed(Path(root) / "aimed", nursery, aims),
            "gone": lambda: gone(Path(root) / "gone", nursery, leaves),
            "silence": lambda: silence(Path(root) / "silence", Path(root) / "cache", cuts),
            "borne": lambda: borne(Path(root) / "borne", Path(root) / "cache", cuts),
            "sick": lambda: _injected(Path(root) / "sick", sick),
        }
        for part in asked.parts:
            before = time.monotonic()
            facts = {**works[part](), "seconds": round(time.monotonic() - before, 1)}
            facts["load of the machine's processors"] = round(os.getloadavg()[1] / (os.cpu_count() or 1), 1)
            print(part, facts, flush=True)
            told = [
                {"name": f"{part}: {name}", "ours": value, "peer": None, "unit": "", "ratio": None}
                for name, value in facts.items()
            ]
            if asked.keep:
                keep(part, told)
            lines += told
    print(json.dumps({"benchmark": "chaos", "results": lines}))


if __name__ == "__main__":
    main()
