"""The catalogue, its drivers and its tables."""

import contextlib
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from clients import catalogue, install, report
from clients.harness import DRIVERS, Result
from clients.rows import Ecosystem, NotRun
from proxy.core.reasons import Reason


def test_names_are_unique():
    """Rows are chosen by name, and clients share a cache by theirs."""
    names = [row.name for row in catalogue.ROWS]
    clients = {row.client for row in catalogue.ROWS}

    assert len(set(names)) == len(names)
    assert len({client.name for client in clients}) == len(clients)


@pytest.mark.parametrize("row", catalogue.ROWS, ids=lambda row: row.name)
def test_each_row_has_its_driver(row):
    """A row names a driver that is there, and a pinned package."""
    pinned = r".+==[\d.]+" if row.client.ecosystem is Ecosystem.PIP else r".+@\d[\w.-]*"

    assert (DRIVERS / row.driver).is_file()
    assert all(re.fullmatch(pinned, package) for package in row.client.packages)


def test_rows_are_chosen_by_row_client_or_quick():
    """Without a name all are; an unknown name is an error."""
    assert catalogue.select([]) == list(catalogue.ROWS)
    assert {row.name for row in catalogue.select(["quick"])} == set(catalogue.QUICK)
    assert {row.client.name for row in catalogue.select(["ai-sdk-7"])} == {"ai-sdk-7"}
    with pytest.raises(ValueError, match="nobody"):
        catalogue.select(["nobody"])


def test_an_install_counts_for_its_pins_only(tmp_path, monkeypatch):
    """Another pin is another install; Node comes before the npm clients that need it."""
    monkeypatch.setenv("CLIENTS_CACHE_DIR", str(tmp_path))
    client = catalogue.select(["openai-node"])[0].client
    place = install.directory(client)
    place.mkdir(parents=True)
    (place / "installed.txt").write_text("openai@1.0.0\n")

    assert install.needed([client, client]) == [install.NODE, client]
    (place / "installed.txt").write_text("openai@7.59.0\n")
    assert install.needed([client]) == [install.NODE]


def test_who_misses_what_another_installs_waits_for_it(tmp_path, monkeypatch):
    """Two test runs, or two of its workers, get a client once."""
    monkeypatch.setenv("CLIENTS_CACHE_DIR", str(tmp_path))
    both, installed = threading.Barrier(2), []

    def npm(client, target):
        installed.append(client)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)  # the other one would come by now

    monkeypatch.setattr(install, "_install_npm", npm)
    with ThreadPoolExecutor() as pool:
        list(pool.map(install.install, [install.NODE] * 2))

    assert installed == [install.NODE]
    assert install.is_installed(install.NODE)


def result(**changes):
    """The result of a row."""
    made = Result(catalogue.select(["codex"])[0], turns=6, follow_ups=5, deltas=4)
    made.others[Reason.HISTORY_CHANGED.value] = 1
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_line_tells_what_a_row_showed():
    """It ends with the problems, if there are any."""
    assert report.line(result()).startswith("ok   codex ")
    assert "4/5 deltas" in report.line(result())
    assert report.line(result(problems=["a bad thing"])).endswith("a bad thing")


def test_the_markdown_table_has_a_row_for_each_client():
    """Turns that were no deltas are explained, and so is what did not run."""
    table = report.markdown([result()], [NotRun("Crush", "it needs GitHub")])

    assert "| Codex CLI | 0.171.0 | own provider, resumed | 6 | 4 of 5 |" in table
    assert "1 `history_changed`: unexplained" in table
    assert "* Crush: it needs GitHub." in table


def test_a_table_is_put_between_its_markers():
    """What stood there before goes; a document without markers is left alone."""
    document = "a\n<!-- clients:begin -->\nold\n<!-- clients:end -->\nb\n"

    assert report.embed(document, "new\n") == document.replace("\nold\n", "\n\nnew\n\n")
    with pytest.raises(ValueError, match="clients:begin"):
        report.embed("nothing here", "new")
