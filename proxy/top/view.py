"""
What the page shows, as lines of text. Pure.

The order is that of the page: sums, steps over time, conversations with the reason of their last
full send, connections, troubles. Where the screen is too low, conversations give way first.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from proxy.observe.live import reason_texts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_BARS: Final = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_MARKS: Final = {"delta": "=", "full": "F", "http": "H"}
_COLOURS: Final = {"=": "34", "F": "33", "H": "35"}
_UNITS: Final = ("B", "kB", "MB", "GB", "TB")
_SPARK_STEPS: Final = 60
_MOST_TROUBLES: Final = 5
_MOST_CONNECTIONS: Final = 8


def draw(
    told: Mapping[str, Any], *, width: int, height: int | None, colour: bool = False
) -> list[str]:
    """Return the lines, none longer than `width`, and at most `height` of them if that is given."""
    above = [*_sums(told), "", *_steps(told, width), ""]
    below = ["", *_connections(told), "", *_troubles(told)]
    room = None if height is None else max(1, height - len(above) - len(below) - 2)
    rows = _conversations(told)
    lines = [*above, *rows[: None if room is None else room + 1], *below]
    cut = [line[:width] for line in lines][:height]
    return [_coloured(line) for line in cut] if colour else cut


def _sums(told: Mapping[str, Any]) -> list[str]:
    totals = told["totals"]
    turns, received, sent = totals["turns"], totals["bytes_in"], totals["bytes_up"]
    everything, saved = sum(turns.values()), max(0, received - sent)
    first, own = totals["first_event_ms"], totals["overhead_ms"]
    other = f"{turns['full']} in full, {turns['http']} over HTTP, {totals['in_flight']} now"
    rows = [
        ("saved", _bytes(saved), f"{_share(saved, received)} of {_bytes(received)} from agents"),
        (
            "deltas",
            _share(turns["delta"], everything),
            f"{turns['delta']} of {everything} turns; {other}",
        ),
        (
            "first event",
            _ms(first["delta"]["p50"]),
            f"delta; in full {_ms(first['full']['p50'])} (medians of the last hour)",
        ),
        ("own time", _ms(own["p50"]), f"median; 95 % within {_ms(own['p95'])}"),
    ]
    if totals["verdicts"]:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in totals["verdicts"].items())
        rows.append(("judged", "", counts))
    would = " (shadow mode: what would have been)" if told["mode"] == "shadow" else ""
    since = _duration(told["now"] - told["started"])
    return [
        f"Turnwire {told['version']}  {told['state']}, for {since}  {told['upstream']}{would}",
        *(f"  {name:<12}{value:>9}  {more}" for name, value, more in rows),
    ]


def _steps(told: Mapping[str, Any], width: int) -> list[str]:
    """Draw the last minutes as bars, one a step."""
    step, rows = told["bucket_s"], {row[0]: row for row in told["series"]}
    last = int(told["now"] // step) * step
    count = max(10, min(_SPARK_STEPS, width - 24))
    times = [last - step * back for back in reversed(range(count))]
    shown = [rows.get(at) for at in times]
    share = [None if row is None else row[1] / max(1, row[1] + row[2] + row[3]) for row in shown]
    names = (
        ("from agents", [row and row[4] for row in shown]),
        ("sent up", [row and row[5] for row in shown]),
    )
    most = max((value for _, values in names for value in values if value), default=0)
    lines = [f"  {name:<12}{_bars(values, most)}" for name, values in names]
    lines.append(f"  {'delta share':<12}{_bars(share, 1)}")
    return [f"The last {_duration(count * step)}, {step} s a step", *lines]


def _bars(values: Sequence[float | None], most: float) -> str:
    def bar(value: float | None) -> str:
        if not value or not most:
            return _BARS[0]
        return _BARS[max(1, round(value / most * (len(_BARS) - 1)))]

    return "".join(map(bar, values))


def _conversations(told: Mapping[str, Any]) -> list[str]:
    texts = reason_texts()
    lines = [
        f"{'Conversation':<22}{'turns':>6}{'deltas':>7}{'saved':>8}  last turns (F full, H HTTP)"
    ]
    for each in told["conversations"]:
        turns = each["turns"]
        saved = _share(max(0, each["bytes_in"] - each["bytes_up"]), each["bytes_in"])
        marks = "".join(_MARKS[turn[1]] for turn in each["recent"])
        name = f"{each['id']} {each['model'] or ''}"
        lines.append(
            f"{name[:21]:<22}{sum(turns.values()):>6}{turns['delta']:>7}{saved:>8}  {marks:<17}"
            f"{texts.get(_why(each), '')}".rstrip()
        )
    return lines


def _why(conversation: Mapping[str, Any]) -> str:
    """Return the reason of the last turn that was no delta; that it was the first needs none."""
    reasons = (turn[2] for turn in reversed(conversation["recent"]) if turn[1] != "delta")
    return next((reason for reason in reasons if reason != "new_conversation"), "")


def _connections(told: Mapping[str, Any]) -> list[str]:
    lines = [f"{'Connection':<12}{'state':<12}{'turns':>6}{'age':>10}{'left':>10}"]
    connections = told["connections"]
    lines += [
        f"{each['id']:<12}{each['state']:<12}{each['turns']:>6}{_duration(each['age_s']):>10}"
        f"{_duration(each['left_s']):>10}"
        for each in connections[:_MOST_CONNECTIONS]
    ]
    if len(connections) > _MOST_CONNECTIONS:
        lines.append(f"and {len(connections) - _MOST_CONNECTIONS} more")
    return lines if connections else ["No connection is open."]


def _troubles(told: Mapping[str, Any]) -> list[str]:
    if not told["troubles"]:
        return ["No faults and no fallbacks so far."]
    return ["Faults and fallbacks"] + [
        f"  {each['count']:>6} {each['kind']:<9} {each['text']},"
        f" last at {time.strftime('%H:%M:%S', time.localtime(each['last']))}"
        for each in told["troubles"][:_MOST_TROUBLES]
    ]


def _coloured(line: str) -> str:
    """Colour the marks of turns: what follows the first two spaces after a row's figures."""
    head, gap, rest = line.partition("%  ")
    marks, space, why = rest.partition(" ")
    if not gap or not marks or marks.strip("=FH"):
        return line
    painted = "".join(f"\x1b[{_COLOURS[mark]}m{mark}" for mark in marks)
    return f"{head}{gap}{painted}\x1b[0m{space}{why}"


def _bytes(value: float) -> str:
    place = 0
    while value >= 1000 and place < len(_UNITS) - 1:
        value, place = value / 1000, place + 1
    return f"{value:.0f} B" if place == 0 else f"{value:.1f} {_UNITS[place]}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms" if value < 1000 else f"{value / 1000:.1f} s"


def _duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
