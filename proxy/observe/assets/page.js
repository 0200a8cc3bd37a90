// The page: reads `live` as a stream of events, and shows it. Read-only; all text goes in as text.
"use strict";

const MODES = ["delta", "full", "http"];
const WINDOW_S = 3600;
const SHORTEST_S = 120;
const dark = matchMedia("(prefers-color-scheme: dark)");

let told = null; // the last snapshot, with what came after it laid over
let paused = false;

const $ = (id) => document.getElementById(id);

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// --- how values are written ----------------------------------------------------------------

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (Math.abs(value) >= 1000 && place < units.length - 1) {
    value /= 1000;
    place += 1;
  }
  const digits = place === 0 || Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[place]}`;
}

function milliseconds(value) {
  if (value === null || value === undefined) return "-";
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return `${value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toFixed(2)} ms`;
}

function percent(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(part === whole ? 0 : 1)} %` : "-";
}

function duration(seconds) {
  seconds = Math.max(0, Math.round(seconds));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

const clock = (unix) => new Date(unix * 1000).toLocaleTimeString([], { hour12: false });
const ago = (unix) => `${duration(told.now - unix)} ago`;
const sum = (turns) => MODES.reduce((total, mode) => total + turns[mode], 0);
const reasonText = (reason) => (told.reasons && told.reasons[reason]) || reason;
const isShadow = () => told.mode === "shadow";

function modeText(mode) {
  const would = isShadow() ? "would be " : "";
  return would + { delta: "delta", full: "in full", http: "HTTP" }[mode];
}

// --- what came in --------------------------------------------------------------------------

function takeSnapshot(data) {
  told = data;
  told.byId = new Map(data.conversations.map((each) => [each.id, each]));
  told.steps = new Map(data.series.map((row) => [row[0], row]));
}

function takeUpdate(data) {
  for (const row of data.series) told.steps.set(row[0], row);
  for (const at of told.steps.keys()) if (at < data.now - WINDOW_S) told.steps.delete(at);
  for (const each of data.conversations) told.byId.set(each.id, each);
  const latest = [...told.byId.values()].sort((a, b) => b.last - a.last).slice(0, 40);
  told.byId = new Map(latest.map((each) => [each.id, each]));
  const kept = { reasons: told.reasons, byId: told.byId, steps: told.steps };
  told = Object.assign(data, kept);
}

function listen() {
  const source = new EventSource("live");
  source.addEventListener("snapshot", (event) => {
    takeSnapshot(JSON.parse(event.data));
    render();
  });
  source.addEventListener("update", (event) => {
    takeUpdate(JSON.parse(event.data));
    render();
  });
  source.onerror = () => showState("no connection, trying again", true);
}

// --- sums ------------------------------------------------------------------------------------

function tiles() {
  const { turns, bytes_in: received, bytes_up: sent, first_event_ms: first } = told.totals;
  const all = sum(turns);
  const saved = received - sent;
  const verdicts = told.totals.verdicts;
  const made = [
    ["Bytes saved", bytes(Math.max(0, saved)), `${percent(Math.max(0, saved), received)} of ${bytes(received)}`],
    ["Sent as a delta", percent(turns.delta, all), `${turns.delta} of ${all} turns`],
    ["First event, delta", milliseconds(first.delta.p50), `median; 95 % within ${milliseconds(first.delta.p95)}`],
    ["First event, in full", milliseconds(first.full.p50), `median; 95 % within ${milliseconds(first.full.p95)}`],
    ["Turnwire's own time", milliseconds(told.totals.overhead_ms.p50), `median; 95 % within ${milliseconds(told.totals.overhead_ms.p95)}`],
    ["Turns now", String(told.totals.in_flight), `${turns.full} in full, ${turns.http} over HTTP so far`],
  ];
  if (isShadow()) {
    const right = verdicts.right || 0;
    const wrong = verdicts.wrong || 0;
    made.splice(2, 3, ["Deltas judged right", String(right), `${wrong} wrong, ${verdicts.unchecked || 0} not checked`]);
  }
  return made;
}

function renderTiles() {
  const list = $("tiles");
  const made = tiles();
  while (list.children.length > made.length) list.lastChild.remove();
  made.forEach(([name, value, more], place) => {
    let tile = list.children[place];
    if (!tile) {
      tile = element("div");
      tile.append(element("dt"), element("dd", "value"), element("dd", "more"));
      list.append(tile);
    }
    setText(tile.children[0], name);
    setText(tile.children[1], value);
    setText(tile.children[2], more);
  });
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// --- charts ----------------------------------------------------------------------------------

// A row of the series: time, deltas, full, http, bytes in, bytes up, first event of deltas and of
// the others, own time p50 and p95.
const CHARTS = [
  {
    title: "Bytes a step",
    lines: [
      { name: "from agents", colour: "full", of: (row) => row[4], rest: 0 },
      { name: "sent upstream", colour: "delta", of: (row) => row[5], rest: 0, fill: true },
    ],
    write: bytes,
  },
  {
    title: "Share of deltas",
    lines: [
      {
        name: "of all turns",
        colour: "delta",
        of: (row) => (row[1] + row[2] + row[3] ? (100 * row[1]) / (row[1] + row[2] + row[3]) : null),
        rest: null,
        fill: true,
      },
    ],
    write: (value) => `${Math.round(value)} %`,
    range: [0, 100],
  },
  {
    title: "First event, median",
    lines: [
      { name: "in full or HTTP", colour: "full", of: (row) => row[7], rest: null },
      { name: "delta", colour: "delta", of: (row) => row[6], rest: null },
    ],
    write: milliseconds,
  },
  {
    title: "Turnwire's own time",
    lines: [
      { name: "95 % within", colour: "full", of: (row) => row[9], rest: null },
      { name: "median", colour: "delta", of: (row) => row[8], rest: null },
    ],
    write: milliseconds,
  },
];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function buildCharts() {
  $("charts").replaceChildren();
  for (const chart of CHARTS) {
    const figure = element("figure", "chart");
    const caption = element("figcaption");
    caption.append(element("h3", "", chart.title));
    for (const line of chart.lines) caption.append(element("span", `key ${line.colour}`, line.name));
    chart.reading = element("span", "reading");
    caption.append(chart.reading);
    const place = element("div", "plot");
    place.setAttribute("role", "img");
    figure.append(caption, place);
    $("charts").append(figure);
    chart.place = place;
    chart.plot = new uPlot(options(chart), emptyData(chart), place);
    new ResizeObserver(() => chart.plot.setSize(sizeOf(place))).observe(place);
  }
}

const emptyData = (chart) => [[], ...chart.lines.map(() => [])];
const sizeOf = (place) => ({ width: Math.max(200, place.clientWidth), height: 160 });

function options(chart) {
  const axis = { stroke: colour("quiet"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
  return {
    ...sizeOf(chart.place),
    legend: { show: false },
    cursor: { y: false, points: { size: 7 } },
    scales: {
      x: { time: true },
      y: { range: chart.range || ((_, low, high) => [0, high > 0 ? high * 1.08 : 1]) },
    },
    axes: [
      { ...axis, space: 70, size: 28, values: writeTimes },
      { ...axis, size: 64, values: (_, ticks) => ticks.map((value) => chart.write(value)) },
    ],
    series: [
      {},
      ...chart.lines.map((line) => ({
        label: line.name,
        stroke: colour(line.colour),
        width: 2,
        fill: line.fill ? `${colour(line.colour)}22` : undefined,
        spanGaps: true,
        points: { size: 5 },
      })),
    ],
    hooks: { setCursor: [(plot) => readAt(chart, plot.cursor.idx)] },
  };
}

/** Minutes, and seconds where the marks are closer than that. */
function writeTimes(_, ticks) {
  const isClose = ticks.length > 1 && ticks[1] - ticks[0] < 60;
  return ticks.map((at) => clock(at).slice(0, isClose ? 8 : 5));
}

/** Say what the lines are at a place, or at the end. */
function readAt(chart, index) {
  if (!chart.data || !chart.data[0].length) return;
  const isHovered = index !== null && index !== undefined;
  const at = isHovered ? index : lastStep(chart.data[0]);
  const values = chart.lines.map((line, place) => {
    const value = chart.data[place + 1][at];
    return `${line.name} ${value === null ? "-" : chart.write(value)}`;
  });
  setText(chart.reading, `${clock(chart.data[0][at])}: ${values.join(", ")}`);
}

/** The last step in which a turn ended, and that is over. */
function lastStep(times) {
  for (let place = times.length - 1; place >= 0; place -= 1) {
    if (told.steps.has(times[place]) && times[place] + told.bucket_s <= told.now) return place;
  }
  return times.length - 1;
}

function renderCharts() {
  const step = told.bucket_s;
  const last = Math.floor(told.now / step) * step;
  const begun = Math.floor(told.started / step) * step;
  const first = Math.max(last - WINDOW_S + step, Math.min(begun, last - SHORTEST_S));
  const times = [];
  for (let at = first; at <= last; at += step) times.push(at);
  for (const chart of CHARTS) {
    chart.data = [times, ...chart.lines.map((line) => times.map((at) => valueAt(line, at)))];
    chart.plot.setData(chart.data);
    readAt(chart, null);
    const spoken = `${chart.title}: ${chart.reading.textContent}`;
    if (chart.place.getAttribute("aria-label") !== spoken) chart.place.setAttribute("aria-label", spoken);
  }
  if (document.querySelector("details.table").open) renderSteps(times);
}

function valueAt(line, at) {
  const row = told.steps.get(at);
  return row ? line.of(row) : line.rest;
}

function renderSteps(times) {
  const rows = times.filter((at) => told.steps.has(at)).slice(-20).reverse();
  fillTable($("steps"), rows.map((at) => {
    const row = told.steps.get(at);
    return [
      clock(at),
      String(row[1] + row[2] + row[3]),
      String(row[1]),
      bytes(row[4]),
      bytes(row[5]),
      milliseconds(row[6] ?? row[7]),
      milliseconds(row[8]),
    ];
  }));
}

// --- conversations ----------------------------------------------------------------------------

const FEW = 12;
const rows = new Map(); // id -> its details element

function renderConversations() {
  const onlyFull = $("only-full").checked;
  const fitting = [...told.byId.values()].filter((each) => !onlyFull || hasLaterFull(each));
  const showsAll = $("all").getAttribute("aria-expanded") === "true";
  const shown = showsAll ? fitting : fitting.slice(0, FEW);
  $("all").hidden = fitting.length <= FEW;
  setText($("all"), showsAll ? `Only the last ${FEW}` : `All ${fitting.length}`);
  const ids = new Set(shown.map((each) => each.id));
  for (const [id, row] of rows) {
    if (!ids.has(id)) {
      row.remove();
      rows.delete(id);
    }
  }
  const list = $("rows");
  const mayMove = !list.contains(document.activeElement); // a row that moves would lose the focus
  shown.forEach((each, place) => {
    let row = rows.get(each.id);
    if (!row) {
      row = makeRow();
      rows.set(each.id, row);
      list.insertBefore(row, list.children[place] || null);
    } else if (mayMove && list.children[place] !== row) {
      list.insertBefore(row, list.children[place] || null);
    }
    fillRow(row, each);
  });
  const hidden = told.conversations_in_all - told.byId.size;
  setText($("more"), hidden > 0 ? `${hidden} earlier ones are not shown.` : "");
}

const hasLaterFull = (each) => each.recent.some((turn) => turn[1] !== "delta" && turn[2] !== "new_conversation");

function makeRow() {
  const row = element("details", "conversation");
  const summary = element("summary");
  for (const name of ["name", "turns-count", "saved", "strip", "ago"]) summary.append(element("span", name));
  row.append(summary, element("ol", "turns"));
  row.addEventListener("toggle", () => fillTurns(row));
  return row;
}

function fillRow(row, each) {
  row.conversation = each;
  const [name, count, saved, strip, when] = row.firstChild.children;
  const all = sum(each.turns);
  setText(name, `${each.id}${each.model ? ` ${each.model}` : ""}`);
  name.title = `caller ${each.label}${each.connection ? `, connection ${each.connection}` : ""}`;
  setText(count, `${all} ${all === 1 ? "turn" : "turns"}, ${each.turns.delta} ${each.turns.delta === 1 ? "delta" : "deltas"}`);
  setText(saved, `saved ${percent(Math.max(0, each.bytes_in - each.bytes_up), each.bytes_in)} of ${bytes(each.bytes_in)}`);
  setText(when, ago(each.last));
  const mark = `${all} ${each.last}`;
  if (row.mark !== mark) {
    row.mark = mark;
    strip.replaceChildren(...each.recent.map(square));
    strip.setAttribute("aria-label", `the last turns: ${each.recent.map((turn) => modeText(turn[1])).join(", ")}`);
    strip.setAttribute("role", "img");
    fillTurns(row);
  }
}

function square(turn) {
  const made = element("span", `turn ${turn[1]}${turn[3] >= 400 ? " failed" : ""}`);
  made.title = `${modeText(turn[1])}: ${reasonText(turn[2])}`;
  return made;
}

function fillTurns(row) {
  const list = row.lastChild;
  if (!row.open) {
    list.replaceChildren();
    return;
  }
  list.replaceChildren(...row.conversation.recent.slice().reverse().map(describeTurn));
}

function describeTurn([at, mode, reason, status, received, sent, first, whole]) {
  const item = element("li");
  item.append(element("span", "quiet", clock(at)), element("span", `mode ${mode}`, modeText(mode)));
  const why = element("span", "why", reasonText(reason));
  if (status >= 400) why.append(" ", element("span", "failed-status", `status ${status}`));
  const timing = first === null ? milliseconds(whole) : `${milliseconds(first)} / ${milliseconds(whole)}`;
  item.append(why, element("span", "cost", `${bytes(received)} \u2192 ${bytes(sent)}, ${timing}`));
  return item;
}

// --- connections and troubles -------------------------------------------------------------------

function fillTable(table, lines) {
  const body = table.tBodies[0];
  while (body.rows.length > lines.length) body.deleteRow(-1);
  lines.forEach((cells, place) => {
    const row = body.rows[place] || body.insertRow();
    cells.forEach((value, column) => {
      const cell = row.cells[column] || row.insertCell();
      if (value instanceof Node) cell.replaceChildren(value);
      else setText(cell, value);
    });
  });
}

function renderConnections() {
  const lines = told.connections.map((each) => {
    const life = element("span");
    const meter = element("meter");
    const whole = each.age_s + each.left_s;
    Object.assign(meter, { min: 0, max: whole || 1, value: each.left_s, low: whole * 0.15, optimum: whole });
    meter.setAttribute("aria-hidden", "true");
    life.append(meter, duration(each.left_s));
    return [String(each.id), each.state, each.label, String(each.turns), duration(each.age_s), life];
  });
  fillTable($("connections"), lines);
  $("no-connections").hidden = lines.length > 0;
  $("connections").parentElement.hidden = lines.length === 0;
}

const KINDS = {
  resend: "sent again",
  fallback: "over HTTP",
  connect: "not connected",
  status: "error to client",
  wrong: "wrong delta",
};

function renderTroubles() {
  const lines = told.troubles.map((each) => [
    KINDS[each.kind] || each.kind,
    each.text,
    String(each.count),
    ago(each.last),
  ]);
  fillTable($("troubles"), lines);
  for (const row of $("troubles").tBodies[0].rows) row.cells[1].className = "words";
  $("no-troubles").hidden = lines.length > 0;
  $("troubles").parentElement.hidden = lines.length === 0;
}

// --- all of it ------------------------------------------------------------------------------------

function showState(text, bad) {
  setText($("state"), text);
  $("state").classList.toggle("bad", Boolean(bad));
}

function render() {
  if (!told) return;
  showState(paused ? `${told.state}, paused here` : told.state, told.state !== "ready");
  if (paused) return;
  setText($("where"), `${told.version} \u2192 ${told.upstream}, for ${duration(told.now - told.started)}`);
  $("shadow").hidden = !isShadow();
  const none = sum(told.totals.turns) === 0;
  $("empty").hidden = !none;
  if (none) setText($("empty"), `No turn yet. Point an agent here: export OPENAI_BASE_URL=${told.base_url}`);
  renderTiles();
  renderCharts();
  renderConversations();
  renderConnections();
  renderTroubles();
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  setText($("pause"), paused ? "Go on" : "Pause");
  render();
});
$("all").addEventListener("click", () => {
  $("all").setAttribute("aria-expanded", String($("all").getAttribute("aria-expanded") !== "true"));
  renderConversations();
});
$("only-full").addEventListener("change", () => told && renderConversations());
document.querySelector("details.table").addEventListener("toggle", () => told && renderCharts());
dark.addEventListener("change", () => {
  for (const chart of CHARTS) chart.plot.destroy();
  buildCharts();
  render();
});

buildCharts();
listen();
