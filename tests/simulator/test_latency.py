"""The latency model: arithmetic, and what its presets promise."""

import pytest

from proxy.simulator.latency import PRESETS, LatencyModel, TurnCost

COLD = TurnCost(sent_bytes=1024 * 1000, unseen_bytes=1024 * 100, is_warm=False)
WARM = TurnCost(sent_bytes=1024, unseen_bytes=1024, is_warm=True)


def test_each_constant_is_paid_where_it_belongs():
    """A cold turn pays all of them, a warm one no statelessness and only for what is new."""
    model = LatencyModel(
        per_request_ms=10,
        stateless_ms=300,
        per_new_kb_ms=2,
        first_token_ms=50,
        tokens_per_second=100,
        uplink_mbit=8.192,
    )
    assert model.first_event_s(COLD) == pytest.approx(0.010 + 0.300 + 0.200 + 1.0)
    assert model.first_event_s(WARM) == pytest.approx(0.010 + 0.002 + 0.001)
    assert model.turn_s(WARM, 20) == pytest.approx(0.013 + 0.050 + 0.200)


def test_time_can_be_compressed():
    """A scale multiplies every delay."""
    model = PRESETS["openai-post-2026-04"]
    assert model.scaled(0.1).turn_s(COLD, 50) == pytest.approx(model.turn_s(COLD, 50) / 10)


def test_events_are_due_as_their_tokens_are():
    """What comes before output is due at once, the rest with its tokens."""
    model = LatencyModel(per_request_ms=100, first_token_ms=200, tokens_per_second=10)
    assert model.schedule(WARM, [None, None, 0, 1, 1, 0]) == pytest.approx(
        [0.1, 0.1, 0.3, 0.4, 0.5, 0.5]
    )


def test_instant_has_no_delays():
    """Nothing is due later than now."""
    assert set(PRESETS["instant"].schedule(COLD, [None, 5, 5])) == {0.0}


def test_the_alpha_preset_gives_the_published_means():
    """20 tool calls with 405 output tokens: 20.24 s over HTTP, 14.30 s over a connection."""
    model = PRESETS["openai-alpha-2026-02"]
    cold, warm = TurnCost(0, 0, is_warm=False), TurnCost(0, 0, is_warm=True)
    tokens_s = 405 / 65
    assert 21 * model.turn_s(cold, 0) + tokens_s == pytest.approx(20.24, rel=0.001)
    chained = model.turn_s(cold, 0) + 20 * model.turn_s(warm, 0) + tokens_s
    assert chained == pytest.approx(14.30, rel=0.001)


def test_the_post_preset_saves_two_fifths_over_24_calls():
    """The arithmetic of the preset's source: 41 % with one call a turn."""
    model = PRESETS["openai-post-2026-04"]
    cold, warm = TurnCost(0, 0, is_warm=False), TurnCost(0, 0, is_warm=True)
    http = 25 * model.turn_s(cold, 19)
    chained = model.turn_s(cold, 19) + 24 * model.turn_s(warm, 19)
    assert 0.40 < 1 - chained / http < 0.43


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_names_its_source(name):
    """Constants come with where they come from."""
    assert PRESETS[name].source
