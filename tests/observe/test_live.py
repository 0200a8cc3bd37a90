"""What the page is told: sums, steps, conversations, troubles, and that all of it is bounded."""

from __future__ import annotations

import json

import pytest

from proxy.core.reasons import Mode, Reason
from proxy.observe import live as live_module
from proxy.observe.facts import ConnectionFacts, TurnFacts, Would
from proxy.observe.live import Latencies, Live, reason_texts

START = 1_796_104_800.0  # a Unix time at which a step begins


class Clock:
    """A clock that goes when told; the wall shows `START` when it shows 0."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Give the loop's time."""
        return self.now

    def wall(self) -> float:
        """Give the Unix time."""
        return START + self.now


@pytest.fixture
def clock() -> Clock:
    """Return a clock at 0."""
    return Clock()


@pytest.fixture
def live(clock) -> Live:
    """Return what a process shows that has just begun."""
    return Live({"mode": "live"}, clock, clock.wall)


def facts(clock: Clock, **changes: object) -> TurnFacts:
    """Return a turn that ends now, by default a delta."""
    given = {
        "turn_id": "t",
        "principal": "secret principal key",
        "label": "12345678",
        "mode": Mode.DELTA,
        "reason": Reason.CONTINUED,
        "status": 200,
        "bytes_in": 1000,
        "bytes_up": 100,
        "ended_at": clock.now,
        "duration_s": 2.0,
        "first_event_s": 0.5,
        "overhead_s": 0.001,
        "model": "gpt-5.2",
        "connection": 7,
        **changes,
    }
    return TurnFacts(**given)


@pytest.mark.parametrize("seconds", [2e-6, 0.0005, 0.0421, 1.7, 300.0])
def test_a_latency_is_told_to_within_six_percent(seconds):
    """A distribution of one value has it as all its quantiles, about."""
    latencies = Latencies()
    latencies.add(seconds)

    for fraction in (0.01, 0.5, 0.95):
        assert latencies.quantile_ms(fraction) == pytest.approx(seconds * 1000, rel=0.06, abs=1e-3)


def test_quantiles_are_those_of_all_values():
    """Of 1 to 100 ms the median is about 50 and the 95th about 95; of none there is none."""
    latencies = Latencies()
    for value in range(1, 101):
        latencies.add(value / 1000)

    assert latencies.quantile_ms(0.5) == pytest.approx(50, rel=0.1)
    assert latencies.quantile_ms(0.95) == pytest.approx(95, rel=0.1)
    assert len(latencies) == 100
    assert Latencies().quantile_ms(0.5) is None


def test_sums_and_steps(live, clock):
    """Turns are summed up, and told by the step of ten seconds in which they ended."""
    live.turn_finished(facts(clock))
    clock.now = 12.0
    live.turn_finished(facts(clock, mode=Mode.FULL, reason=Reason.NEW_CONVERSATION, bytes_up=1010))
    told = live.snapshot()

    assert told["totals"]["turns"] == {"delta": 1, "full": 1, "http": 0}
    assert (told["totals"]["bytes_in"], told["totals"]["bytes_up"]) == (2000, 1110)
    assert told["totals"]["first_event_ms"]["delta"]["p50"] == pytest.approx(500, rel=0.06)
    assert [row[:6] for row in told["series"]] == [
        [START, 1, 0, 0, 1000, 100],
        [START + 10, 0, 1, 0, 1000, 1010],
    ]


def test_an_update_has_what_changed(live, clock):
    """Of steps and conversations only those since the snapshot before are told again."""
    live.turn_finished(facts(clock, response="r1"))
    clock.now = 1.0
    before = live.snapshot()
    clock.now = 100.0
    live.turn_finished(facts(clock, response="other"))
    told = live.snapshot(since=before["now"])

    assert [row[0] for row in told["series"]] == [START, START + 100]
    assert [row["id"] for row in told["conversations"]] == [2]
    clock.now = 200.0
    assert live.snapshot(since=START + 150)["conversations"] == []


def test_the_hour_before_last_is_forgotten(live, clock):
    """Steps older than an hour go, sums stay."""
    live.turn_finished(facts(clock))
    live.fold()
    clock.now = 3700.0
    told = live.snapshot()

    assert told["series"] == []
    assert told["totals"]["turns"]["delta"] == 1
    assert told["totals"]["overhead_ms"]["count"] == 0


def test_turns_of_one_conversation_make_one_row(live, clock):
    """A turn belongs to the conversation of the response that it continued, or came nearest to."""
    live.turn_finished(facts(clock, mode=Mode.FULL, reason=Reason.NEW_CONVERSATION, response="r1"))
    live.turn_finished(facts(clock, previous="r1", response="r2"))
    live.turn_finished(
        facts(clock, mode=Mode.FULL, reason=Reason.CHANGED_TOOLS, previous="r2", response="r3")
    )
    live.turn_finished(facts(clock, response="x"))
    live.turn_finished(facts(clock, principal="another", previous="r1"))
    rows = live.snapshot()["conversations"]

    assert [row["id"] for row in rows] == [3, 2, 1]
    assert rows[2]["turns"] == {"delta": 1, "full": 2, "http": 0}
    assert [turn[2] for turn in rows[2]["recent"]] == [
        "new_conversation",
        "continued",
        "changed_tools",
    ]
    assert rows[2]["connection"] == 7


def test_troubles_are_counted_by_cause_in_plain_words(live, clock):
    """Resends, turns over HTTP, errors to clients and failed connects, the latest first."""
    live.turn_finished(facts(clock, resends=(Reason.UPSTREAM_CLOSED,)))
    clock.now = 1.0
    live.turn_finished(facts(clock, mode=Mode.HTTP, reason=Reason.COOLING_DOWN, status=429))
    clock.now = 2.0
    live.connect("refused")
    live.connect("ok")
    live.connect("refused")
    told = live.snapshot()["troubles"]

    assert [(each["kind"], each["reason"], each["count"]) for each in told] == [
        ("connect", "refused", 2),
        ("fallback", "cooling_down", 1),
        ("status", "429", 1),
        ("resend", "upstream_closed", 1),
    ]
    assert told[1]["text"] == Reason.COOLING_DOWN.text


def test_shadow_mode_shows_what_would_have_been(live, clock):
    """The decision counts, not the plain HTTP by which the turn went; a wrong one is a trouble."""
    would = Would(Mode.DELTA, Reason.CONTINUED, 50, "right")
    shadow = {"mode": Mode.HTTP, "reason": Reason.SHADOW, "bytes_up": 1000}
    live.turn_finished(facts(clock, **shadow, would=would))
    wrong = Would(Mode.DELTA, Reason.CONTINUED, 50, "wrong")
    live.turn_finished(facts(clock, **shadow, would=wrong))
    told = live.snapshot()

    assert told["totals"]["turns"] == {"delta": 2, "full": 0, "http": 0}
    assert told["totals"]["bytes_up"] == 100
    assert told["totals"]["verdicts"] == {"right": 1, "wrong": 1}
    assert [each["kind"] for each in told["troubles"]] == ["wrong"]


def test_connections_are_told_as_they_are(live):
    """Age and remaining life in whole seconds, with the caller's label."""
    live.connections = lambda: [ConnectionFacts(3, "idle", "12345678", 61.4, 2939.0, 5)]

    assert live.snapshot()["connections"] == [
        {"id": 3, "state": "idle", "label": "12345678", "age_s": 61, "left_s": 2939, "turns": 5}
    ]


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("gpt-5.2", "gpt-5.2"),
        ("openai/gpt-5:free@latest", "openai/gpt-5:free@latest"),
        ("Please tell me a secret", None),
        ("<script>", None),
        ("x" * 65, None),
        (None, None),
    ],
)
def test_only_what_looks_like_a_name_is_shown_as_the_model(live, clock, model, shown):
    """The model is the client's to write: a prompt in its place goes nowhere."""
    live.turn_finished(facts(clock, model=model))

    assert live.snapshot()["conversations"][0]["model"] == shown


def test_nothing_that_is_secret_leaves(live, clock):
    """Keys of principals and ids of responses are not in what is told."""
    live.turn_finished(facts(clock, previous="resp_before", response="resp_after"))
    told = json.dumps(live.snapshot())

    assert "secret principal key" not in told
    assert "resp_" not in told


def test_everything_is_bounded(live, clock, monkeypatch):
    """Whatever the traffic, so much is kept and no more."""
    monkeypatch.setattr(live_module, "MAX_HEADS", 50)
    for number in range(500):
        clock.now = number * 30.0
        live.turn_finished(facts(clock, response=f"r{number}", status=400 + number % 300))
        live.turn_finished(facts(clock, previous=f"r{number}", response=f"r{number}"))
        if number % 10 == 0:
            live.fold()
    told = live.snapshot()

    assert len(told["series"]) <= live_module.BUCKETS
    assert len(told["conversations"]) == live_module.MAX_SHOWN
    assert told["conversations_in_all"] == 500
    assert len(live._conversations) == live_module.MAX_CONVERSATIONS
    assert len(live._by_head) == 50
    assert len(told["troubles"]) <= 201
    for _ in range(100):
        live.turn_finished(facts(clock, previous="r499", response="r499"))
    assert len(live.snapshot()["conversations"][0]["recent"]) == live_module.MAX_RECENT


def test_every_reason_has_its_sentence():
    """The page can say each full send in plain words."""
    assert reason_texts() == {reason.value: reason.text for reason in Reason}
