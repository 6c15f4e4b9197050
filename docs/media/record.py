#!/usr/bin/env python3
"""Makes team.svg, terminals.svg and killed.svg, the pictures in the README, from real terminals and a real daemon.

Usage: docs/media/record.py PATH-OF-QD [NAME...]

It starts shells in tmux, types the commands below, waits until the screen shows the outcome, and draws the screens that
tmux then shows. For an animation it draws every screen in between. Nothing in the pictures is written by hand. It needs
tmux and Python's standard library.
"""

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
COLUMNS = 92
ROWS = 24
# How long an animation shows its poster and its last shot, in seconds.
POSTER, LAST = 2, 4

# Sizes in pixels: one character cell, the margin, and the title bar.
CELL_W, CELL_H, PAD, BAR = 8.4, 19, 16, 30
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
PAPER, INK, FRAME = "#12161c", "#d7dde5", "#232a33"
COLOURS = {31: "#f07178", 32: "#9ccc65", 33: "#ffcb6b", 34: "#82aaff", 35: "#c792ea", 36: "#7fdbca"}


class Terminal:
    """A shell on a screen of its own."""

    def __init__(self, server, name, folder, env):
        self.tmux = ["tmux", "-L", server, "-f", "/dev/null"]
        self.name = name
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        shell = "env PS1='$ ' bash --norc --noprofile"
        subprocess.run([*self.tmux, "new-session", "-d", "-s", name, *size, "-c", folder, shell], check=True, env=env)
        self.wait(r"^\$ $")

    def type(self, line):
        subprocess.run([*self.tmux, "send-keys", "-t", self.name, "-l", line], check=True)
        subprocess.run([*self.tmux, "send-keys", "-t", self.name, "Enter"], check=True)

    def screen(self, *flags):
        shown = subprocess.run(
            [*self.tmux, "capture-pane", "-p", "-N", *flags, "-t", self.name], check=True, capture_output=True, text=True
        )
        return shown.stdout.rstrip("\n")

    def wait(self, pattern):
        """Polls the screen until it matches: a screen sends no event."""
        for _ in range(600):
            found = re.search(pattern, re.sub(r" +$", lambda s: s[0][:1], self.screen(), flags=re.M).rstrip("\n"), re.M)
            if found:
                return found
            time.sleep(0.05)
        raise SystemExit(f"{self.name} never showed {pattern}:\n{self.screen()}")

    def lines(self):
        return self.screen("-e").rstrip().split("\n")


def answer(one, two):
    """One terminal asks for a permission, the other one gives it."""
    one.type("qd run --agent script --title tidy \"$(cat tidy.json)\"")
    one.wait(r"^ask ask_")
    two.type("qd ps")
    two.wait(r"waiting, 1 ask")
    two.type("qd asks")
    two.wait(r"q\(uit\)")
    two.type("y")
    two.wait(r"allowed once")
    two.wait(r"no more asks")
    one.wait(r"works again[^$]*^\$ $")
    two.type("qd ps")
    two.wait(r"done[^$]*\$0\.04")


def kill(one, two):
    """The daemon is killed in the middle of a turn. Agent and watcher continue."""
    one.type("qd run --agent script --title night - < night.json")
    one.wait(r"^Reading the tests")
    two.type("qd ps")
    two.wait(r"running")
    two.type('kill -9 $(cat "$QD_HOME/lock")')
    one.wait(r"the daemon was gone")
    two.type("qd ps")
    two.wait(r"running(?s:.*)running")
    two.type("qd wait night")
    one.wait(r"all pass\.[^$]*^\$ $")
    two.wait(r"end_turn")


def team(one):
    """A team at work: each screen that differs from the one before, with its time."""
    one.type("qd up review.yaml")
    shots, begun = [], time.monotonic()
    while not shots or not re.search(r"^flt_\w+ done", one.screen(), re.M):
        lines = one.lines()
        if not shots or shots[-1][1] != lines:
            shots.append((time.monotonic() - begun, lines))
        time.sleep(0.1)
    one.wait(r"tests pass\.[^$]*^\$ $")
    return [*shots, (time.monotonic() - begun, one.lines()[:-1])]


# By the name of the picture: the function that types and waits, and the picture's title.
SCENES = {
    "team": (team, "qd up shows a team of four agents at work"),
    "terminals": (answer, "qd run in one terminal waits for a permission that is given in another"),
    "killed": (kill, "qd run in one terminal goes on while the daemon is killed in another"),
}


def runs(line, style):
    """Cuts a line of the screen where its colours change: (column, text, style). A style holds until it changes, also
    across lines, so the caller owns it and this function updates it."""
    column, found = 0, []
    for text, codes in re.findall(r"([^\x1b]+)|\x1b\[([\d;]*)m", line):
        if text:
            found.append((column, text, dict(style)))
            column += len(text)
            continue
        for code in (int(code or 0) for code in codes.split(";")):
            if code == 0:
                style.clear()
            elif code == 1:
                style["font-weight"] = "bold"
            elif code == 2:
                style["opacity"] = "0.6"
            elif code == 39:
                style.pop("fill", None)
            elif code in COLOURS:
                style["fill"] = COLOURS[code]
    return found


def window(title, lines, top):
    """Draws one terminal. Also returns its height."""
    width = COLUMNS * CELL_W + 2 * PAD
    height = BAR + len(lines) * CELL_H + PAD
    drawn = [
        f'<rect x="0" y="{top}" width="{width:g}" height="{height:g}" rx="8" fill="{PAPER}" stroke="{FRAME}"/>',
        f'<text x="{PAD}" y="{top + 20}" fill="{INK}" opacity="0.45">{html.escape(title)}</text>',
    ]
    style = {}
    for row, line in enumerate(lines):
        y = top + BAR + row * CELL_H + 14
        for column, text, look in runs(line, style):
            words = text.rstrip()
            if not words:
                continue
            x, length = PAD + column * CELL_W, len(words) * CELL_W
            look = "".join(f' {name}="{value}"' for name, value in look.items())
            drawn.append(
                f'<text x="{x:g}" y="{y:g}" textLength="{length:g}" lengthAdjust="spacingAndGlyphs"{look}>'
                f"{html.escape(words)}</text>"
            )
    return drawn, height


def picture(about, windows):
    drawn, top = [], 0
    for title, lines in windows:
        more, height = window(title, lines, top)
        drawn += more
        top += height + 12
    return drawing(about, drawn, top - 12)


def drawing(about, drawn, height):
    width = COLUMNS * CELL_W + 2 * PAD
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {width + 2:g} {height + 2:g}" '
            f'width="{width + 2:g}" font-family="{FONT}" font-size="14" fill="{INK}" style="white-space: pre" xml:space="preserve">',
            f"<title>{html.escape(about)}</title>",
            *drawn,
            "</svg>\n",
        ]
    )


def with_poster(shots):
    """Begins an animation with its busiest shot, which is also what a viewer shows that does not animate."""
    busiest = lambda lines: ("".join(lines).count("works"), len("".join(lines)))
    poster = max((lines for _, lines in shots[:-1]), key=busiest)
    return [(0, poster), *((begins + POSTER, lines) for begins, lines in shots)]


def film(about, shots):
    """One terminal as an endless animation: each shot until the next one, the last one for a while."""
    shots = with_poster(shots)
    whole = shots[-1][0] + LAST
    rows = max(len(lines) for _, lines in shots)
    drawn = []
    for nth, (begins, lines) in enumerate(shots):
        ends = shots[nth + 1][0] if nth + 1 < len(shots) else whole
        seen, height = window("", lines + [""] * (rows - len(lines)), 0)
        times = [0, begins / whole, ends / whole] if begins else [0, ends / whole]
        values = ["hidden", "visible", "hidden"] if begins else ["visible", "hidden"]
        if nth + 1 == len(shots):
            times, values = times[:-1], values[:-1]
        times = ";".join(f"{at:.4f}" for at in times)
        drawn += [
            f'<g visibility="{values[0]}"><animate attributeName="visibility" calcMode="discrete" dur="{whole:.2f}s" '
            f'repeatCount="indefinite" keyTimes="{times}" values="{";".join(values)}"/>',
            *seen,
            "</g>",
        ]
    return drawing(about, drawn, height)


def record(qd, play, about):
    server = f"qd-record-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="qd-") as home:
        shop = Path("/tmp/shop")
        shop.mkdir()
        for script in [*HERE.glob("*.json"), *HERE.glob("../../examples/fleets/*.yaml")]:
            shutil.copy(script, shop)
        path = f"{Path(qd).resolve().parent}:{os.environ['PATH']}"
        env = {**os.environ, "QD_HOME": home, "PATH": path, "LANG": "C.UTF-8"}
        env.pop("NO_COLOR", None)
        env.pop("TMUX", None)
        try:
            if play is team:
                return film(about, team(Terminal(server, "one", shop, env)))
            one, two = (Terminal(server, name, shop, env) for name in ("one", "two"))
            play(one, two)
            return picture(about, [("terminal 1", one.lines()[:-1]), ("terminal 2", two.lines()[:-1])])
        finally:
            subprocess.run(["tmux", "-L", server, "kill-server"], check=False)
            subprocess.run([qd, "stop", "--workers"], env=env, check=False, capture_output=True)
            shutil.rmtree(shop)


def main(qd, names):
    for name in names or SCENES:
        play, about = SCENES[name]
        (HERE / f"{name}.svg").write_text(record(qd, play, about))


if __name__ == "__main__":
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= set(SCENES):
        raise SystemExit(__doc__)
    main(sys.argv[1], sys.argv[2:])
