"""
The rows of the reliability catalogue, each with its proof, or with why it has none, or not all.

A proof is a test (`tests/FILE.py::NAME`, without parameters) or a trial (`run.py NAME`). A test
checks that every row is here once and that every proof exists. The letters: load, soak, faults of
the upstream and the network, client faults, races, protocol in, security, deployment.
"""

from __future__ import annotations

from dataclasses import dataclass

CONNECTION = "tests/upstream/test_connection.py"
POOL = "tests/upstream/test_pool.py"
PASSTHROUGH = "tests/upstream/test_passthrough.py"
FAULTS = "tests/test_faults.py"
LIFE = "tests/test_lifecycle.py"
FRONT = "tests/test_front.py"
ENDURANCE = "tests/test_endurance.py"
DIAL = "tests/upstream/test_dial.py"
SAFETY = "tests/test_history_safety.py"
ORACLE = "tests/test_oracle.py"
STREAM = "tests/downstream/test_stream.py"
BODIES = "tests/downstream/test_bodies.py"
DEADLINES = "tests/downstream/test_deadlines.py"
HOSTILE = "tests/hostile"
LOG = "tests/observe/test_log.py"
MANIFESTS = "deploy/tests/test_manifests.py"


@dataclass(frozen=True)
class Row:
    """One row: what it is about, its proofs, and what is to be said besides."""

    id: str
    what: str
    proofs: tuple[str, ...] = ()
    why: str = ""


def _row(id_: str, what: str, *proofs: str, why: str = "") -> Row:
    return Row(id_, what, proofs, why)


ROWS: tuple[Row, ...] = (
    _row(
        "L1",
        "latency that a turn pays",
        "tests/test_bench.py::test_a_quick_run_measures_everything",
        why="the figures are `turnwire bench`'s",
    ),
    _row(
        "L2",
        "long histories",
        "tests/test_bytes.py::test_a_tool_loop_uploads_its_new_items_only",
        why="times and memory are `turnwire bench`'s",
    ),
    _row("L3", "a thousand conversations at once", "run.py crowd"),
    _row(
        "L4",
        "twice the load that can be borne",
        f"{FRONT}::test_too_many_bodies_at_once_are_shed",
        why="what is shed is bytes, not turns: the turns that wait are bounded by the bodies that "
        "may be held",
    ),
    _row(
        "L5", "where the knee is", why="`turnwire bench load` records it; there is no release yet"
    ),
    _row("L6", "the loop stays awake", "run.py crowd"),
    _row(
        "L7",
        "everybody appears at once",
        "run.py crowd",
        f"{LIFE}::test_handshakes_are_limited",
    ),
    _row("S1", "hours of mixed traffic", "run.py soak", why="one hour"),
    _row(
        "S2",
        "more conversations than fit",
        f"{ENDURANCE}::test_memory_of_chains_is_counted_as_it_is",
        f"{LIFE}::test_a_chain_pushed_out_of_memory_costs_one_full_send",
        "run.py faults",
        why="the profile `forgetful` of the campaign evicts all the time",
    ),
    _row("S3", "clients that vanish", "run.py soak", why="one in ten does"),
    _row("S4", "rotation", "run.py soak", why="every 20 seconds, for an hour"),
    _row(
        "S5",
        "labels of metrics",
        "tests/observe/test_metrics.py::test_labels_are_closed_sets",
        "run.py soak",
    ),
    _row(
        "S6",
        "malformed requests by the thousand",
        f"{LOG}::test_floods_of_warnings_are_bounded",
        f"{LOG}::test_malformed_requests_are_short_warnings",
    ),
    _row(
        "F1",
        "reset",
        "run.py faults",
        f"{FAULTS}::test_one_resend_heals_what_came_before_the_first_event",
        f"{FAULTS}::test_a_stream_that_breaks_ends_in_one_error_and_not_cleanly",
    ),
    _row(
        "F2",
        "end without a close frame",
        "run.py faults",
        f"{CONNECTION}::test_an_end_without_a_close_frame_is_1006",
    ),
    _row(
        "F3",
        "half-open connections",
        "run.py faults",
        f"{LIFE}::test_a_dead_connection_is_found_before_it_is_used",
        f"{LIFE}::test_a_network_that_dies_in_the_middle_of_an_answer_ends_it",
        why="on WebSockets; over plain HTTP a client waits as long as it would without a proxy",
    ),
    _row(
        "F4",
        "accepted, and then silence",
        "run.py faults",
        f"{FAULTS}::test_a_connection_that_keeps_ending_is_a_502",
    ),
    _row(
        "F5",
        "the age limit",
        "run.py faults",
        f"{LIFE}::test_upstreams_own_age_limit_costs_one_resend",
    ),
    _row(
        "F6",
        "close codes",
        "run.py faults",
        f"{FAULTS}::test_http_heals_what_a_resend_can_not",
        "tests/core/test_verdicts.py::test_a_close_is_resent_only_where_that_does_no_harm",
    ),
    _row(
        "F7",
        "a forgotten response",
        "run.py faults",
        "tests/core/test_turn.py::test_a_response_forgotten_twice_goes_over_http",
    ),
    _row(
        "F8",
        "errors in all their shapes",
        "run.py faults",
        f"{FAULTS}::test_an_error_frame_becomes_the_error_that_http_gives",
    ),
    _row(
        "F9",
        "upgrades that are refused",
        "run.py faults",
        f"{FAULTS}::test_a_refused_upgrade_leaves_the_turn_to_http",
        f"{FAULTS}::test_a_rate_limited_upgrade_is_the_clients_429",
    ),
    _row(
        "F10",
        "all connections lost at once",
        f"{POOL}::test_a_storm_of_reconnections_is_held_to_the_handshake_budget",
        "run.py faults",
        why="the network goes down and comes back in the campaign",
    ),
    _row(
        "F11",
        "names that do not resolve, or whose first address is a black hole",
        f"{CONNECTION}::test_an_unknown_name_is_unreachable",
        f"{CONNECTION}::test_a_handshake_has_a_deadline",
        f"{DIAL}::test_a_black_hole_before_the_right_address_is_passed_by",
        f"{DIAL}::test_black_holes_alone_meet_the_deadline_and_leave_nothing_open",
    ),
    _row(
        "F12",
        "TLS that fails",
        f"{CONNECTION}::test_tls_is_verified",
        f"{CONNECTION}::test_a_handshake_has_a_deadline",
    ),
    _row(
        "F13",
        "slow networks",
        "run.py faults",
        f"{ENDURANCE}::test_a_long_upload_on_a_slow_line_is_not_taken_for_death",
    ),
    _row(
        "F14",
        "pieces of two bytes",
        "run.py faults",
        f"{ENDURANCE}::test_answers_are_the_same_in_pieces_of_two_bytes",
        f"{STREAM}::test_bytes_are_the_same_however_the_stream_is_split",
    ),
    _row(
        "F15",
        "malformed frames",
        "run.py faults",
        f"{CONNECTION}::test_a_broken_frame_ends_the_connection",
        f"{HOSTILE}/test_upstream_fuzz.py::test_whatever_upstream_sends_the_client_gets_valid_replies",
        f"{HOSTILE}/test_two_fronts.py::test_broken_streams_are_answered_alike",
        f"{HOSTILE}/test_json_fuzz.py::test_a_body_is_read_as_a_strict_reader_reads_it_or_left_alone",
        "tests/observe/test_openapi.py::test_schemathesis_finds_nothing",
        why="long with `TURNWIRE_FUZZ=1`; schemathesis with the extra `fuzz`",
    ),
    _row(
        "F16",
        "text that is no event",
        "run.py faults",
        f"{HOSTILE}/test_upstream_fuzz.py::test_whatever_upstream_sends_the_client_gets_valid_replies",
    ),
    _row(
        "F17",
        "huge events",
        "run.py faults",
        f"{CONNECTION}::test_messages_of_any_size_arrive_whole",
        f"{ENDURANCE}::test_an_event_beyond_the_limit_is_one_error",
    ),
    _row(
        "F18",
        "events of another response",
        "run.py faults",
        f"{FAULTS}::test_a_doubled_beginning_is_no_answer",
        f"{FAULTS}::test_an_answer_may_be_written_in_any_way",
    ),
    _row(
        "F19",
        "events after the end",
        "run.py faults",
        f"{FAULTS}::test_frames_after_the_end_spoil_the_connection_and_nothing_else",
        f"{FAULTS}::test_what_comes_late_is_not_the_answer_to_the_next_turn",
    ),
    _row(
        "F20",
        "an end without items",
        f"{FAULTS}::test_a_terminal_event_without_items_is_completed",
    ),
    _row(
        "F21",
        "an upstream that refuses for good",
        f"{ENDURANCE}::test_an_upstream_that_refuses_for_good_is_not_asked_again_and_again",
        f"{LIFE}::test_the_resend_budget_keeps_an_outage_from_doubling",
    ),
    _row(
        "F22",
        "only WebSockets are down",
        f"{LIFE}::test_websocket_mode_rests_after_a_refusal_and_comes_back",
        "run.py faults",
    ),
    _row(
        "F23",
        "clocks that jump, machines that sleep",
        f"{ENDURANCE}::test_a_process_that_was_frozen_goes_on",
        f"{ENDURANCE}::test_no_deadline_hangs_on_the_wall_clock",
        "tests/core/test_connection_state.py::test_our_own_sleep_is_not_the_peers_silence",
        f"{LIFE}::test_one_dead_connection_tells_of_the_others",
    ),
    _row(
        "F24",
        "a budget of memory",
        f"{FRONT}::test_too_many_bodies_at_once_are_shed",
        f"{BODIES}::test_a_bomb_costs_no_more_than_the_limit",
    ),
    _row(
        "F25",
        "no descriptors left",
        f"{ENDURANCE}::test_too_few_descriptors_harm_nobody_who_is_there",
        "tests/test_tuning.py::test_descriptors_are_those_that_the_system_allows",
    ),
    _row(
        "F26",
        "no processor to be had",
        f"{ENDURANCE}::test_a_process_that_was_frozen_goes_on",
        "tests/core/test_connection_state.py::test_our_own_sleep_is_not_the_peers_silence",
        why="not getting the processor at all is the sharper form of getting a tenth of it",
    ),
    _row(
        "F27",
        "a full disk",
        f"{ENDURANCE}::test_a_log_that_can_not_be_written_stops_nothing",
        f"{ENDURANCE}::test_a_log_that_nobody_reads_holds_up_nothing",
        why="nothing but the log is ever written; a reader who is slow or gone is its sibling",
    ),
    _row("C1", "heads that never end", "run.py flood", f"{DEADLINES}::test_dripping_does_not_help"),
    _row("C2", "bodies that never end", f"{BODIES}::test_a_body_that_stalls_is_a_408"),
    _row(
        "C3",
        "readers at 1 kB/s",
        "run.py readers",
        f"{FRONT}::test_a_slow_reader_stops_the_upstream_socket",
    ),
    _row(
        "C4",
        "clients that leave, at any event",
        "run.py faults",
        f"{STREAM}::test_a_client_that_leaves_ends_its_turn_at_any_point",
    ),
    _row(
        "C5",
        "the same request twice, overlapping",
        "run.py faults",
        f"{SAFETY}::test_a_retry_of_a_turn_answers_the_same_history",
        why="each is answered for itself; nobody is attached to another's stream",
    ),
    _row(
        "C6",
        "shorter histories",
        "run.py faults",
        f"{SAFETY}::test_a_changed_history_is_what_upstream_sees",
    ),
    _row(
        "C7",
        "compacted histories",
        "run.py faults",
        f"{SAFETY}::test_a_compaction_is_sent_with_the_whole_history",
    ),
    _row(
        "C8",
        "connections kept alive",
        "run.py crowd",
        f"{DEADLINES}::test_an_idle_connection_is_kept",
        why="20,000 turns on kept connections without one reset",
    ),
    _row(
        "R1",
        "one request twice at the same instant",
        "run.py faults",
        f"{SAFETY}::test_two_conversations_with_one_opening_stay_apart",
    ),
    _row(
        "R2",
        "two tails of one history",
        "run.py faults",
        f"{SAFETY}::test_two_parallel_tails_of_one_history_do_not_mix",
    ),
    _row(
        "R3",
        "one history of two credentials",
        "run.py faults",
        "tests/core/test_plan.py::test_another_principal_sees_nothing",
    ),
    _row(
        "R4",
        "cancels and a pool of one",
        "run.py cancels",
        f"{POOL}::test_cancels_never_reach_another_turn",
    ),
    _row(
        "R5",
        "answers that come too late",
        "run.py cancels",
        f"{POOL}::test_a_late_answer_never_reaches_another_turn",
    ),
    _row(
        "R6",
        "the state machines, at random",
        "tests/core/test_turn.py::test_no_order_of_events_breaks_a_rule",
        "tests/core/test_leases.py::LeaseMachine",
        "tests/core/test_plan.py::Core",
        "tests/core/test_chains.py::Store",
    ),
    _row(
        "R7",
        "tasks in another order",
        f"{ENDURANCE}::test_the_order_in_which_tasks_run_changes_no_answer",
        "run.py faults",
        why="on uvloop and on asyncio; the order of callbacks is asyncio's promise and is kept",
    ),
    _row("R8", "evicted while in flight", "run.py faults", why="the profile `forgetful`"),
    _row(
        "P1",
        "request smuggling",
        f"{HOSTILE}/test_http.py::test_a_stream_is_read_in_one_way_or_refused",
        f"{HOSTILE}/test_http.py::test_a_stream_is_read_alike_in_pieces",
        f"{HOSTILE}/test_two_fronts.py::test_hostile_streams_are_answered_alike",
        f"{HOSTILE}/test_fuzz.py::test_a_fault_never_makes_two_requests_of_one",
        f"{HOSTILE}/test_behind_nginx.py::test_nothing_is_smuggled_through_two_proxies",
        why="160 raw streams, whole and in pieces, by both ways into a turn, and behind nginx if "
        "it is installed; not behind HAProxy: h11 says what another parser would have read",
    ),
    _row(
        "P2",
        "headers of one hop",
        f"{PASSTHROUGH}::test_hop_by_hop_headers_stay_on_their_hop",
        f"{PASSTHROUGH}::test_what_tells_of_the_hop_to_us_stays_here",
        f"{CONNECTION}::test_the_handshake_carries_the_callers_headers_and_little_else",
    ),
    _row(
        "P3",
        "HTTP as it comes",
        f"{PASSTHROUGH}::test_any_method_passes",
        f"{PASSTHROUGH}::test_an_http_1_0_client_gets_no_chunks",
        f"{PASSTHROUGH}::test_expect_continue_is_answered_here",
        f"{PASSTHROUGH}::test_a_chunked_body_stays_chunked",
        f"{FRONT}::test_what_is_no_turn_is_as_it_is_straight",
        f"{HOSTILE}/test_fuzz.py::test_requests_are_served_however_they_are_cut",
    ),
    _row(
        "P4",
        "encoded requests",
        f"{BODIES}::test_every_encoding_is_undone",
        f"{BODIES}::test_stacked_encodings_are_undone_last_one_first",
        f"{BODIES}::test_a_bomb_costs_no_more_than_the_limit",
        f"{BODIES}::test_several_members_are_one_body",
        f"{FRONT}::test_an_encoded_body_is_a_turn_like_any_other",
    ),
    _row(
        "P5",
        "encoded replies",
        f"{PASSTHROUGH}::test_replies_arrive_as_they_were_sent",
        f"{PASSTHROUGH}::test_a_reply_that_breaks_off_breaks_off",
        why="replies are relayed in the encoding they came in, errors too",
    ),
    _row(
        "P6",
        "odd JSON",
        "tests/core/test_canonical.py::test_what_readers_may_take_differently_is_refused",
        "tests/core/test_canonical.py::test_forms_are_equal_just_when_values_are",
        f"{FRONT}::test_odd_bodies_get_the_answer_that_they_get_straight",
        f"{HOSTILE}/test_json_fuzz.py::test_a_body_is_read_as_a_strict_reader_reads_it_or_left_alone",
        "tests/core/test_prefix.py::test_the_prefix_way_answers_what_the_whole_parse_answers",
    ),
    _row(
        "P7",
        "numbers",
        "tests/core/test_canonical.py::test_different_values_have_different_forms",
        f"{ORACLE}::test_arguments_that_a_client_changes_cost_deltas_but_never_an_answer",
    ),
    _row("P8", "paths", f"{PASSTHROUGH}::test_paths_are_joined_without_doubling"),
    _row(
        "P9",
        "fuzzing",
        f"{HOSTILE}/test_fuzz.py::test_a_fault_never_makes_two_requests_of_one",
        f"{HOSTILE}/test_upstream_fuzz.py::test_whatever_upstream_sends_the_client_gets_valid_replies",
    ),
    _row(
        "P10",
        "real clients",
        "tests/clients/test_quick.py::test_real_clients_have_deltas_and_notice_nothing",
        why="all of them by `tests/clients/run.py`; the table is in README.md",
    ),
    _row(
        "P11",
        "event streams out",
        f"{STREAM}::test_silence_is_commented_and_has_an_end",
        f"{FRONT}::test_silence_is_filled_with_comments",
    ),
    _row(
        "X1",
        "one credential never sees another's",
        "run.py faults",
        f"{POOL}::test_principals_share_nothing",
        f"{HOSTILE}/test_isolation.py::test_many_keys_in_a_small_pool_never_meet",
        f"{HOSTILE}/test_isolation.py::test_keys_on_one_connection_do_not_mix",
    ),
    _row(
        "X2",
        "keys that change",
        f"{HOSTILE}/test_isolation.py::test_a_new_key_shares_nothing_with_the_old_one",
        f"{HOSTILE}/test_isolation.py::test_other_credentials_are_another_conversation",
        why="the old connection is the old key's, who may come back: it ends by idleness",
    ),
    _row(
        "X3",
        "requests to elsewhere",
        f"{HOSTILE}/test_isolation.py::test_no_request_chooses_where_it_goes",
        f"{HOSTILE}/test_isolation.py::test_no_redirect_is_followed_with_credentials",
        f"{PASSTHROUGH}::test_the_host_is_never_the_clients_choice",
        f"{CONNECTION}::test_a_redirect_is_refused_and_not_followed",
    ),
    _row(
        "X4",
        "canaries",
        "run.py faults",
        f"{HOSTILE}/test_canaries.py::test_turns_and_requests_that_go_well_leave_no_trace",
        f"{HOSTILE}/test_canaries.py::test_refusals_quote_nothing",
        f"{HOSTILE}/test_canaries.py::test_what_upstream_repeats_is_not_told_either",
        f"{HOSTILE}/test_canaries.py::test_a_fault_of_ours_tells_its_place_and_nothing_else",
        f"{FRONT}::test_credentials_and_content_are_nowhere",
    ),
    _row(
        "X5",
        "the admin listener",
        f"{FRONT}::test_the_admin_listener_tells_health_and_metrics",
        "tests/observe/test_page.py::test_neither_key_nor_prompt_is_in_it",
        "tests/observe/test_openapi.py::test_nothing_can_be_changed",
    ),
    _row(
        "X6",
        "web pages of elsewhere",
        f"{FRONT}::test_only_local_hosts_and_listed_origins_are_served",
        "tests/downstream/test_refusals.py::test_other_hosts_and_origins_are_refused",
        "tests/observe/test_openapi.py::test_other_origins_get_nothing",
        why="no browser is asked: what one sends of itself, `Origin`, is refused by its value",
    ),
    _row(
        "X7",
        "one credential that wants everything",
        f"{LIFE}::test_a_principal_at_its_limit_goes_over_http",
        f"{LIFE}::test_the_total_limit_counts_everybody",
        f"{HOSTILE}/test_budget.py::test_what_is_only_announced_costs_nobody_anything",
        why="connections and handshakes are limited for each credential, bytes for all together",
    ),
    _row(
        "X8",
        "guessing at sessions",
        f"{HOSTILE}/test_isolation.py::test_anothers_response_is_as_unknown_as_one_that_never_was",
        "tests/core/test_plan.py::test_another_principal_sees_nothing",
        why="there is no session key to guess: histories are matched by content, within one "
        "credential",
    ),
    _row(
        "X9",
        "caches",
        f"{HOSTILE}/test_isolation.py::test_what_we_answer_is_for_no_cache",
        "tests/test_reply_headers.py::test_no_header_comes_twice",
        why="relayed replies keep upstream's own word on caches",
    ),
    _row(
        "X10",
        "supply chain",
        "tests/test_lock.py::test_every_pin_is_exact_and_has_hashes",
        "tests/test_supply.py::test_floors_that_matter_do_not_sink",
        why="`deploy/supply-chain.sh` audits, builds twice and runs the lowest versions, as CI "
        "does too; it needs a network for the advisories",
    ),
    _row(
        "D1",
        "SIGTERM with streams in flight",
        "run.py drain",
        f"{FRONT}::test_sigterm_lets_the_stream_finish",
    ),
    _row(
        "D2",
        "a second signal; SIGKILL",
        f"{FRONT}::test_a_second_signal_ends_at_once",
        f"{LIFE}::test_a_restarted_proxy_starts_with_full_sends",
    ),
    _row("D3", "budgets of the end add up", f"{MANIFESTS}::test_the_time_to_end_is_enough"),
    _row(
        "D4",
        "rolling restarts",
        f"{LIFE}::test_a_restarted_proxy_starts_with_full_sends",
        why="a conversation that meets another replica costs one full send and never an error; "
        "there is no cluster here to roll",
    ),
    _row(
        "D5",
        "a read-only root",
        f"{MANIFESTS}::test_pods_are_restricted",
        why="manifests only: no container runs here",
    ),
    _row(
        "D6",
        "a sidecar that ends with its job",
        f"{MANIFESTS}::test_a_job_gets_the_sidecar_that_lets_it_finish",
    ),
    _row(
        "D7",
        "readiness while upstream is down",
        "tests/observe/test_admin.py::test_probes_tell_the_state",
        f"{ENDURANCE}::test_an_outage_upstream_leaves_us_ready",
    ),
    _row("D8", "charts", f"{MANIFESTS}::test_schema", f"{MANIFESTS}::test_lint"),
    _row(
        "D9",
        "rules and dashboards",
        f"{MANIFESTS}::test_the_rules_and_the_dashboard_go_with_the_chart",
    ),
    _row(
        "D10",
        "settings of another version",
        "tests/test_config.py::test_unknown_keys_of_a_file_are_refused",
        "tests/test_config.py::test_unknown_names_are_refused",
    ),
    _row("D11", "ways to install", why="of the deployment: the tests run on a fresh install"),
    _row(
        "D12",
        "a loop onto itself",
        f"{FRONT}::test_two_proxies_that_are_each_others_upstream_end_in_508",
    ),
)
"""All rows of the catalogue, in its order."""
