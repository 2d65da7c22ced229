// Draws a run from what Prometheus has of it, again every five seconds. uPlot draws the axes and the curves.
"use strict";

const REFRESH_S = 5;
const SCRAPE_S = 5; // nothing is drawn more finely
const COLUMNS = 180; // points in time
const CAUSES = ["outside", "data", "forward", "backward"];

const $ = (id) => document.getElementById(id);
const prefix = document.body.dataset.prefix;
const parameters = new URLSearchParams(location.search);
const choice = {
  run: parameters.get("run"), // job and run, as in the list; null: the one that has trained most lately
  range: Number(parameters.get("range")) || 900,
  window: Number(parameters.get("window")) || 30,
  end: Number(parameters.get("end")) || null, // null: now
  measure: parameters.get("measure") || "late",
  sort: "rank",
  down: false,
};

// -- numbers as text

const percent = (value) => (100 * value < 9.95 ? String(Number((100 * value).toPrecision(2))) : (100 * value).toFixed(0)) + " %";
const plain = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3))));
const times = (value) => value.toFixed(2) + " ×";
const steps = (value) => plain(value) + (value === 1 ? " step" : " steps");
function seconds(value) {
  if (value === 0) return "0 s";
  if (value < 0.9995) return (value < 0.00995 ? (1000 * value).toFixed(1) : (1000 * value).toFixed(0)) + " ms";
  return (value < 9.995 ? value.toFixed(2) : value < 120 ? value.toFixed(1) : value.toFixed(0)) + " s";
}
const known = (value) => value !== null && value !== undefined;
const text = (value, format) => (known(value) ? format(value) : "–");
function clock(at, withSeconds = true) {
  const options = { hour: "2-digit", minute: "2-digit", hour12: false };
  if (withSeconds) options.second = "2-digit";
  return new Date(1000 * at).toLocaleTimeString([], options);
}
function day(at) {
  return new Date(1000 * at).toLocaleDateString([], { month: "short", day: "numeric" });
}

// -- Prometheus

async function ask(path, values) {
  const response = await fetch(`${prefix}/api/v1/${path}?${new URLSearchParams(values)}`);
  const answer = await response.json().catch(() => ({ error: `${response.status} ${response.statusText}` }));
  if (answer.status !== "success") throw new Error(answer.error);
  return answer.data;
}

// What cannot be drawn (no deadline, 0 / 0) is null.
const number = (sample) => (Number.isFinite(Number(sample)) ? Number(sample) : null);

async function instant(query, time) {
  const data = await ask("query", { query, time });
  return data.result.map(({ metric, value }) => ({ labels: metric, value: number(value[1]) }));
}

async function course(query, span) {
  const data = await ask("query_range", { query, start: span.start, end: span.end, step: span.step });
  return data.result.map(({ metric, values }) => {
    const row = new Array(span.at.length).fill(null);
    for (const [time, value] of values) row[Math.round((time - span.start) / span.step)] = number(value);
    return { labels: metric, values: row };
  });
}

const quoted = (value) => JSON.stringify(value ?? "");
const selector = (run, more = "") => `{job=${quoted(run.job)},run=${quoted(run.run)}${more}}`;

function expressions(run, window) {
  const rate = (name, more) => `rate(straggle_${name}${selector(run, more)}[${window}s])`;
  const ranks = (inner) => `sum by (rank) (${inner})`;
  const each = (name, more) => `${ranks(rate(name, more))} / (${ranks(rate("steps_total"))} > 0)`;
  const group = (name) => `sum(${rate(name)}) / (sum(${rate("step_seconds_count")}) > 0)`;
  const last = (name) => `straggle_${name}${selector(run)}`;
  const share = (by) => `${by} (${rate("gradient_elements_dropped_total")}) / (${by} (${rate("gradient_elements_total")}) > 0)`;
  const stage = `sum by (rank, stage) (${rate("stage_contributions_total")})`;
  const work = each("whole_compute_seconds_total");
  return {
    late: `clamp_max(${each("late_steps_total")}, 1)`, // a late step may be scraped before the step
    dropped: share("sum by (rank)"),
    wait: `${ranks(rate("phase_seconds_sum", ',phase="wait"'))} / (${ranks(rate("step_seconds_sum"))} > 0)`,
    slowness: `${work} / on () group_left () quantile(0.5, ${work})`,
    lag: `max by (rank) (max_over_time(straggle_lag_steps${selector(run)}[${window}s]))`,
    absent: `max by (rank) (label_replace(max_over_time(straggle_absent_rank${selector(run)}[${window}s]), "rank", "$1", "absent", "(.+)"))`,
    step: group("step_seconds_sum"),
    all: group("step_wait_for_all_seconds_total"),
    deadline: `max(${last("deadline_seconds")})`,
    causes: `sum by (cause) (${rate("late_steps_total")}) / on () group_left () (sum(${rate("steps_total")}) > 0)`,
    droppedOfAll: share("sum"),
    loss: `avg(${last("loss")})`,
    work,
    waits: each("phase_seconds_sum", ',phase="wait"'),
    lagNow: `max by (rank) (${last("lag_steps")})`,
    since: `max by (rank) (${last("since_step_seconds")})`,
    steps: `max(${rate("steps_total")})`,
    applied: `max(${last("steps_total")})`,
    samples: `sum(${rate("samples_total")})`,
    stages: `clamp_min(1 - ${stage} / on (rank) group_left () (${ranks(rate("steps_total"))} > 0), 0)`,
    positions: `max by (stage) (${last("stage_position")})`,
    alerts: `max by (alertname, rank, severity) (ALERTS${selector(run, ',alertstate="firing"')})`,
    info: last("run_info"),
  };
}

const MEASURES = {
  late: { name: "late", note: "Share of its steps in which the rank was late.", format: percent, most: 1 },
  dropped: { name: "dropped", note: "Share of the rank's gradients that did not come in time.", format: percent, most: 1 },
  wait: { name: "waits", note: "Share of the time that the rank waits for its peers.", format: percent, most: 1 },
  slowness: { name: "slowness", note: "The rank's own work relative to the median rank's: 2 takes twice as long.", format: times, least: 1 },
  lag: { name: "lag", note: "Merged steps that the rank has not yet applied, at most.", format: steps },
  absent: { name: "absent", note: "Whether the rank was absent, that is, no member of the run.", format: percent, most: 1 },
};

// -- colours

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let palette = null;

function heatColor(part) {
  palette ??= ramp(css("--heat").split(/\s+/));
  return palette[Math.round(255 * Math.min(1, Math.max(0, part)))];
}

function ramp(stops) {
  const mixed = (i) => {
    const place = (i / 255) * (stops.length - 1);
    const from = Math.min(Math.floor(place), stops.length - 2);
    const part = (hex, k) => parseInt(hex.slice(1 + 2 * k, 3 + 2 * k), 16);
    const parts = [0, 1, 2].map((k) => part(stops[from], k) + (place - from) * (part(stops[from + 1], k) - part(stops[from], k)));
    return `rgb(${parts.map(Math.round).join()})`;
  };
  return Array.from({ length: 256 }, (_, i) => mixed(i));
}

// -- charts

const charts = new Map(); // by the element's id: {plot, key, state}

// Draw again what is there where it is the same kind of chart, so that what is under the mouse stays.
function draw(id, key, state, data, options) {
  const old = charts.get(id);
  if (old && old.key === key) {
    Object.assign(old.state, state);
    old.plot.setData(data);
    old.plot.redraw(true, true); // the labels of an axis too: uPlot keeps them while its scale stays
    return;
  }
  clear(id);
  const place = $(id);
  const plot = new uPlot({ width: place.clientWidth, ...options(state) }, data, place);
  charts.set(id, { plot, key, state });
}

function clear(id, message = "") {
  charts.get(id)?.plot.destroy();
  charts.delete(id);
  $(id).textContent = message;
}

const axisColors = { stroke: () => css("--soft"), ticks: { stroke: () => css("--line"), size: 4 }, font: "12px system-ui, sans-serif" };
const grid = { stroke: () => css("--line"), width: 1 };

function timeAxis(state, lined = true) {
  return {
    ...axisColors,
    grid: { ...grid, show: lined },
    space: 70,
    size: 28,
    values: (_, splits) => splits.map((at) => (state.span.range > 86400 ? `${day(at)} ${clock(at, false)}` : clock(at, state.span.range < 600))),
  };
}

// A part of any chart that is chosen with the mouse is then what the page shows.
const choosing = {
  setSelect: (plot) => {
    if (plot.select.width < 8) return;
    const [from, to] = [plot.select.left, plot.select.left + plot.select.width].map((x) => plot.posToVal(x, "x"));
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    before ??= choice.range;
    choose({ end: Math.ceil(to), range: Math.max(60, Math.ceil(to - from)) });
  },
};
let before = null; // the range to come back to
const drag = { x: true, y: false, setScale: false };

// Curves: [{name, values, color, dash}]
function curves(id, span, series, format, most) {
  const state = { span };
  const key = `${narrow()} ${series.map((one) => one.name)}`;
  draw(id, key, state, [span.at, ...series.map((one) => one.values)], (state) => ({
    height: 220,
    hooks: { setSelect: [choosing.setSelect] },
    cursor: { drag, sync: { key: "time" }, y: false, points: { size: 6 } },
    scales: {
      x: { time: true, range: () => [state.span.start, state.span.end] },
      y: { range: (_, low, high) => [Math.min(0, low ?? 0), most ?? 1.08 * ((high ?? 0) || 1)] },
    },
    axes: [timeAxis(state), { ...axisColors, grid, size: 62, values: (_, splits) => splits.map((value) => format(value)) }],
    series: [
      { label: "at", value: (plot, at) => clock(at ?? plot.data[0].at(-1)) },
      ...series.map((one) => ({
        label: one.name,
        stroke: () => css(one.color),
        width: 1.8,
        dash: one.dash,
        points: { show: false },
        value: (plot, value, i, at) => text(known(at) ? value : plot.data[i].findLast(known), format),
      })),
    ],
  }));
}

// Rows of coloured cells: rows are labels, values[row][column] belong to data[0][column].
function cells(id, kind, state, at) {
  const height = Math.max(state.rowHeight * state.rows.length, 20);
  const key = `${narrow()} ${state.rows.join()} ${kind === "ranks" ? at.length : ""}`;
  draw(id, key, state, [at, at.map(() => null)], (state) => ({
    height: height + 34,
    padding: [6, 8, 0, 0],
    legend: { show: false },
    cursor: {
      drag: state.span ? drag : { x: false, y: false },
      sync: state.span ? { key: "time", scales: ["x", null] } : undefined,
      points: { show: false },
      y: false,
    },
    hooks: {
      setSelect: [choosing.setSelect],
      drawClear: [(plot) => paint(plot, state)],
      setCursor: [(plot) => hover(plot, state)],
    },
    scales: {
      x: { time: false, range: () => state.reach },
      y: { range: () => [0, state.rows.length], dir: -1 },
    },
    axes: [
      state.span ? timeAxis(state, false) : { ...axisColors, grid: { show: false }, size: 28, splits: () => thinned(at.length, state.perLabel), values: (_, splits) => splits.map((i) => state.columns[i]) },
      rowAxis(state, 3, state.labelWidth, (row) => shortened(state.rows[row], state.labelWidth)),
      ...(state.right ? [rowAxis(state, 1, 48, (row) => state.right[row])] : []),
    ],
    series: [{}, { paths: () => null, points: { show: false } }],
  }));
}

function rowAxis(state, side, size, label) {
  return {
    ...axisColors,
    side,
    scale: "y",
    size,
    gap: 4,
    ticks: { show: false },
    grid: { show: false },
    splits: () => thinned(state.rows.length, Math.max(1, 14 / state.rowHeight)).map((row) => row + 0.5),
    values: (_, splits) => splits.map((split) => label(split - 0.5)),
  };
}

function thinned(count, every) {
  const nice = 2 ** Math.ceil(Math.log2(every)); // ranks come in eights
  return Array.from({ length: Math.ceil(count / nice) }, (_, i) => i * nice);
}

function shortened(label, width) {
  const most = Math.floor((width - 8) / 6.4);
  return label.length <= most ? label : label.slice(0, Math.ceil(most / 2) - 1) + "…" + label.slice(label.length - Math.floor(most / 2));
}

function paint(plot, state) {
  const { ctx, bbox, data } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  const rowGap = state.rowHeight > 5 ? devicePixelRatio : 0;
  const edge = data[0].map((at) => state.sides(at).map((side) => Math.round(plot.valToPos(side, "x", true))));
  const columnGap = edge.length > 1 && !state.span && edge[0][1] - edge[0][0] > 6 * devicePixelRatio ? devicePixelRatio : 0;
  state.values.forEach((row, i) => {
    const top = Math.round(plot.valToPos(i, "y", true));
    const height = Math.round(plot.valToPos(i + 1, "y", true)) - top - rowGap;
    row.forEach((value, j) => {
      if (!known(value)) return;
      ctx.fillStyle = heatColor((value - state.least) / (state.most - state.least));
      ctx.fillRect(edge[j][0], top, edge[j][1] - edge[j][0] - columnGap, height);
    });
  });
  ctx.restore();
}

function hover(plot, state) {
  const tip = $("tip");
  if (!plot.over.matches(":hover")) return;
  const { left, top } = plot.cursor;
  const row = Math.floor(plot.posToVal(top, "y"));
  const x = plot.posToVal(left, "x");
  const column = plot.data[0].findIndex((at) => state.sides(at)[0] <= x && x < state.sides(at)[1]);
  const inside = left >= 0 && row >= 0 && row < state.rows.length && column >= 0;
  tip.hidden = !inside;
  if (!inside) return;
  tip.textContent = state.tip(row, column, state.values[row][column]);
  const box = plot.over.getBoundingClientRect();
  tip.style.left = Math.min(box.left + left + 14, document.documentElement.clientWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(box.top + top + 14, innerHeight - tip.offsetHeight - 8) + "px";
}

function scale(id, least, most, format) {
  const bar = document.createElement("i");
  bar.style.background = `linear-gradient(to right, ${css("--heat").split(/\s+/).join()})`;
  $(id).replaceChildren(format(least), bar, format(most));
}

const between = (low, value, high) => Math.max(low, Math.min(high, value));
const byRank = (a, b) => Number(a.labels.rank) - Number(b.labels.rank);
const narrow = () => innerWidth < 700;

// -- what the page shows

function showHeat(span, found) {
  const measure = MEASURES[choice.measure];
  const rows = found.sort(byRank);
  const all = rows.flatMap((row) => row.values).filter(known);
  const least = measure.least ?? 0;
  const most = measure.most ?? Math.max(least + 1, ...all.slice(-50000));
  $("heat-note").textContent = measure.note;
  $("heat").setAttribute("role", "img");
  $("heat").setAttribute("aria-label", `${measure.name}: ${rows.length} ranks over time`);
  $("heat").dataset.ranks = rows.length;
  $("heat").dataset.cells = all.length;
  if (!rows.length) return clear("heat", "nothing in this time");
  scale("heat-scale", least, most, measure.format);
  const state = {
    span, least, most,
    rows: rows.map((row) => row.labels.rank),
    values: rows.map((row) => row.values),
    rowHeight: between(3, 420 / rows.length, 22),
    labelWidth: 44,
    reach: [span.start, span.end],
    sides: (at) => [at - span.step, at],
    tip: (row, column, value) => `rank ${state.rows[row]}   ${clock(span.at[column])}\n${measure.name}  ${text(value, measure.format)}`,
  };
  cells("heat", "time", state, span.at);
}

function showStages(found, positions) {
  const placed = positions.sort((a, b) => a.value - b.value).map((one) => one.labels.stage);
  const order = placed.length ? placed : [...new Set(found.map((one) => one.labels.stage))].sort(); // rank 0 is not scraped
  const ranks = [...new Set(found.map((one) => one.labels.rank))].sort((a, b) => a - b);
  const value = new Map(found.map((one) => [`${one.labels.rank} ${one.labels.stage}`, one.value]));
  const values = order.map((stage) => ranks.map((rank) => value.get(`${rank} ${stage}`) ?? null));
  $("stages").dataset.stages = order.length;
  $("stages").setAttribute("role", "img");
  $("stages").setAttribute("aria-label", `dropped by stage and rank: ${order.join(", ")}`);
  if (!order.length || !ranks.length) return clear("stages", "nothing in this time");
  const mean = (row) => row.filter(known).reduce((sum, part) => sum + part, 0) / Math.max(1, row.filter(known).length);
  const labelWidth = narrow() ? 104 : 210;
  const state = {
    least: 0, most: 1, values, labelWidth,
    rows: order,
    columns: ranks,
    right: values.map((row) => percent(mean(row))),
    rowHeight: between(9, 360 / order.length, 24),
    reach: [-0.5, ranks.length - 0.5],
    perLabel: Math.max(1, (26 * ranks.length) / Math.max(100, $("stages").clientWidth - labelWidth - 60)),
    sides: (at) => [at - 0.5, at + 0.5],
    tip: (row, column, part) => `${state.rows[row]}\nrank ${state.columns[column]}  dropped ${text(part, percent)}`,
  };
  scale("stages-scale", 0, 1, percent);
  cells("stages", "ranks", state, ranks.map((_, i) => i));
}

function showAlerts(span, found, described, loaded) {
  const firing = found.filter((one) => known(one.values[one.values.length - 1]));
  const name = ({ labels }) => labels.alertname + (labels.rank === undefined ? "" : ` ${labels.rank}`);
  $("alerts").replaceChildren(
    ...firing.map((one) => {
      const item = document.createElement("li");
      const more = described.find(({ labels }) => labels.alertname === one.labels.alertname && labels.rank === one.labels.rank);
      item.textContent = more ? `${one.labels.alertname}: ${more.annotations.description}` : name(one);
      return item;
    }),
  );
  $("alerts").dataset.firing = firing.length;
  let note = firing.length ? `${firing.length} ${firing.length === 1 ? "fires" : "fire"}.` : "None fires.";
  if (!loaded) note = "Prometheus has not loaded alerts.yml.";
  else if (!found.length) note = "None fired in this time.";
  $("alerts-note").textContent = note;
  if (!found.length) return clear("alerts-chart");
  found.sort((a, b) => name(a).localeCompare(name(b), undefined, { numeric: true }));
  const rows = found.slice(0, 24); // a page of alerts; the list above names all that fire now
  const state = {
    span, least: 0, most: 1.6,
    rows: rows.map(name),
    values: rows.map((row) => row.values),
    rowHeight: 16,
    labelWidth: 150,
    reach: [span.start, span.end],
    sides: (at) => [at - span.step, at],
    tip: (row, column, value) => `${state.rows[row]}   ${clock(span.at[column])}\n${value ? "fires" : "does not fire"}`,
  };
  cells("alerts-chart", "time", state, span.at);
}

function tile(value, name, more = "", bad = false) {
  const box = document.createElement("div");
  box.className = bad ? "tile bad" : "tile";
  for (const [tag, content] of [["span", name], ["b", value], ["small", more]]) {
    const part = document.createElement(tag);
    part.textContent = content;
    box.append(part);
  }
  return box;
}

function showTiles(now, numRanks) {
  const only = (name) => now[name][0]?.value;
  const saved = known(only("all")) && only("step") ? only("all") / only("step") - 1 : null;
  const stuck = now.lagNow.filter((one) => one.value > 0).length;
  $("tiles").replaceChildren(
    tile(text(only("step"), seconds), "Step", `${text(only("steps"), plain)} a second`),
    tile(now.deadline.length ? text(only("deadline"), seconds) : "–", "Deadline", now.deadline.length && !known(only("deadline")) ? "none" : "of the last step"),
    tile(text(saved, percent), "Saved", "more time if all ranks were waited for"),
    tile(text(only("droppedOfAll"), percent), "Dropped", "of all gradients", only("droppedOfAll") > 0.25),
    tile(String(numRanks), "Ranks", stuck ? `${stuck} behind` : "none behind", stuck > 0),
    tile(text(only("applied"), plain), "Steps", `${text(only("samples"), plain)} samples a second`),
    tile(text(only("loss"), plain), "Loss", "mean over ranks"),
  );
}

function showAbout(info) {
  const labels = info[0]?.labels;
  const parts = labels ? [
    ["deadline", labels.deadline], ["estimator", labels.estimator], ["world size", labels.world_size], ["backend", labels.backend],
    ["straggle", labels.version], ["torch", labels.torch_version],
  ] : [];
  $("about").replaceChildren(
    ...parts.flatMap(([name, value], i) => {
      const strong = document.createElement("b");
      strong.textContent = value;
      return [`${i ? " · " : ""}${name} `, strong];
    }),
  );
}

const COLUMNS_OF_RANKS = [
  ["rank", "Rank", String],
  ["work", "Own work", seconds],
  ["waits", "Waits", seconds],
  ["late", "Late", percent],
  ["dropped", "Dropped", percent],
  ["lag", "Lag", plain],
  ["since", "Last step", (value) => `${seconds(value)} ago`],
];

function showRanks(now) {
  const rows = new Map();
  const put = (name, found) => found.forEach(({ labels: { rank }, value }) => rows.set(rank, { ...rows.get(rank), rank: Number(rank), [name]: value }));
  for (const [name, found] of [["work", now.work], ["waits", now.waits], ["late", now.late], ["dropped", now.dropped], ["lag", now.lagNow], ["since", now.since]]) put(name, found);
  const sorted = [...rows.values()].sort((a, b) => (choice.down ? -1 : 1) * ((a[choice.sort] ?? -1) - (b[choice.sort] ?? -1)) || a.rank - b.rank);
  const most = Math.max(...sorted.map((row) => (row.work ?? 0) + (row.waits ?? 0)), 1e-9);
  $("ranks-note").replaceChildren(...waiting(sorted));
  const head = document.createElement("tr");
  for (const [name, title] of [...COLUMNS_OF_RANKS.slice(0, 1), ["bars", "A step"], ...COLUMNS_OF_RANKS.slice(1)]) head.append(heading(name, title));
  const body = document.createElement("tbody");
  body.replaceChildren(...sorted.map((row) => rankRow(row, most)));
  const top = document.createElement("thead");
  top.append(head);
  $("ranks").replaceChildren(top, body);
}

function heading(name, title) {
  const cell = document.createElement("th");
  cell.scope = "col";
  if (name === "bars") {
    cell.textContent = title;
    cell.style.textAlign = "left";
    return cell;
  }
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = title;
  button.dataset.sort = name;
  if (choice.sort === name) cell.setAttribute("aria-sort", choice.down ? "descending" : "ascending");
  cell.append(button);
  return cell;
}

function rankRow(row, most) {
  const line = document.createElement("tr");
  line.dataset.rank = row.rank;
  if (row.lag > 0) line.className = "stuck";
  for (const [name, , format] of COLUMNS_OF_RANKS) {
    const cell = document.createElement(name === "rank" ? "th" : "td");
    cell.textContent = text(row[name], format);
    line.append(cell);
    if (name === "rank") line.append(bars(row, most));
  }
  return line;
}

function bars(row, most) {
  const cell = document.createElement("td");
  cell.className = "bars";
  const bar = document.createElement("div");
  bar.className = "bar";
  for (const [kind, value] of [["work", row.work], ["wait", row.waits]]) {
    const part = document.createElement("span");
    part.className = kind;
    part.style.width = `${(100 * (value ?? 0)) / most}%`;
    bar.append(part);
  }
  cell.append(bar);
  return cell;
}

// The sentence above the table: who waits least is whom the others wait for.
function waiting(rows) {
  const key = (color, name) => {
    const box = document.createElement("span");
    box.className = "key";
    box.style.background = `var(${color})`;
    return [box, ` ${name} \u2003`];
  };
  const keys = [...key("--work", "own work, in full"), ...key("--wait", "waits")];
  const waits = rows.map((row) => row.waits).filter(known).sort((a, b) => a - b);
  if (waits.length < 2) return keys;
  const median = (waits[Math.floor((waits.length - 1) / 2)] + waits[Math.ceil((waits.length - 1) / 2)]) / 2;
  const awaited = rows.filter((row) => known(row.waits) && row.waits < 0.5 * median);
  if (!awaited.length || 2 * awaited.length >= rows.length) return [...keys, "No rank in particular is waited for."];
  const names = awaited.map((row) => row.rank).sort((a, b) => a - b);
  const few = names.slice(0, 8).join(", ") + (names.length > 8 ? ` and ${names.length - 8} more` : "");
  return [...keys, `The others wait for rank${names.length > 1 ? "s" : ""} ${few}: the median rank waits ${seconds(median)} in a step.`];
}

// -- what is chosen

const label = (run) => (run.run ? `${run.job} / ${run.run}` : run.job);

function showRuns(runs) {
  const list = runs.map(label);
  const select = $("run");
  if ([...select.options].map((option) => option.value).join("\n") !== list.join("\n")) {
    select.replaceChildren(...list.map((name) => new Option(name, name)));
  }
  const found = runs.find((run) => label(run) === choice.run) ?? runs[0];
  if (found) select.value = label(found);
  return found;
}

function showChoices() {
  const range = $("range");
  if (![...range.options].some((option) => Number(option.value) === choice.range)) {
    range.querySelector("[data-own]")?.remove();
    const name = choice.range < 120 ? `${choice.range} seconds` : `${Math.round(choice.range / 60)} minutes`;
    const option = new Option(name, choice.range);
    option.dataset.own = "";
    range.append(option);
  }
  range.value = choice.range;
  $("window").value = choice.window;
  $("measure").value = choice.measure;
  $("live").classList.toggle("on", choice.end === null);
  if (document.activeElement !== $("end")) {
    const local = choice.end === null ? null : new Date(1000 * choice.end - 60000 * new Date(1000 * choice.end).getTimezoneOffset());
    $("end").value = local ? local.toISOString().slice(0, 19) : "";
  }
}

function choose(some) {
  Object.assign(choice, some);
  const kept = { run: choice.run, range: choice.range, window: choice.window, end: choice.end, measure: choice.measure };
  history.replaceState(null, "", "?" + new URLSearchParams(Object.entries(kept).filter(([, value]) => value !== null)));
  showChoices();
  refresh();
}

// -- again and again

function spanNow() {
  const step = Math.max(SCRAPE_S, Math.ceil(choice.range / COLUMNS));
  const end = Math.floor((choice.end ?? Date.now() / 1000) / step) * step;
  const columns = Math.ceil(choice.range / step);
  const start = end - columns * step;
  return { start, end, step, range: choice.range, at: Array.from({ length: columns + 1 }, (_, i) => start + i * step) };
}

async function load() {
  const span = spanNow();
  const at = choice.end ?? Date.now() / 1000;
  const found = await instant(`max by (job, run) (timestamp(last_over_time(straggle_steps_total[${choice.range}s])))`, at);
  const runs = found.map(({ labels }) => labels).sort((a, b) => label(a).localeCompare(label(b), undefined, { numeric: true }));
  const run = showRuns(runs);
  if (!run) throw new Error("No rank of any run has been scraped in this time.");
  const window = Math.max(choice.window, span.step);
  const ask_ = expressions(run, window);
  const lately = ["step", "all", "deadline", "droppedOfAll", "loss", "steps", "applied", "samples", "work", "waits", "late", "dropped", "lagNow", "since", "stages", "positions", "info"];
  const timely = { heat: ask_[choice.measure], step: ask_.step, all: ask_.all, deadline: ask_.deadline, causes: ask_.causes, droppedOfAll: ask_.droppedOfAll, loss: ask_.loss, alerts: ask_.alerts };
  const [now, over, alerts, rules] = await Promise.all([
    together(lately, (name) => instant(ask_[name], at)),
    together(Object.keys(timely), (name) => course(timely[name], span)),
    choice.end === null ? ask("alerts", {}) : { alerts: [] },
    ask("rules", { type: "alert" }),
  ]);
  const mine = alerts.alerts.filter(({ labels }) => labels.job === run.job && labels.run === run.run);
  const loaded = rules.groups.some((group) => group.name === "straggle-alerts");
  return () => show(span, now, over, mine, loaded);
}

async function together(names, get) {
  return Object.fromEntries(await Promise.all(names.map(async (name) => [name, await get(name)])));
}

function show(span, now, over, alerts, loaded) {
  const only = (name) => over[name][0]?.values ?? span.at.map(() => null);
  showAbout(now.info);
  showTiles(now, now.lagNow.length);
  showAlerts(span, over.alerts, alerts, loaded);
  showHeat(span, over.heat);
  curves("time", span, [
    { name: "step", values: only("step"), color: "--step" },
    { name: "waiting for all ranks", values: only("all"), color: "--all" },
    { name: "deadline", values: only("deadline"), color: "--deadline", dash: [6, 4] },
  ], seconds);
  const cause = (name) => over.causes.find(({ labels }) => labels.cause === name)?.values ?? span.at.map(() => null);
  curves("causes", span, CAUSES.map((name) => ({ name, values: cause(name), color: `--${name}` })), percent);
  showRanks(now);
  showStages(now.stages, now.positions);
  curves("dropped", span, [{ name: "dropped", values: only("droppedOfAll"), color: "--backward" }], percent);
  curves("loss", span, [{ name: "loss", values: only("loss"), color: "--step" }], plain);
}

let wanted = 0; // a newer choice makes an older answer void

async function refresh() {
  const mine = ++wanted;
  let again = choice.end === null;
  try {
    const shown = await load();
    if (mine !== wanted) return;
    shown();
    last = shown;
    $("problem").hidden = true;
    $("status").textContent = choice.end === null ? `as of ${clock(Date.now() / 1000)}` : `until ${day(choice.end)} ${clock(choice.end)}`;
    document.body.dataset.shown = Number(document.body.dataset.shown ?? 0) + 1;
  } catch (error) {
    if (mine !== wanted) return;
    $("problem").textContent = error.message;
    $("problem").hidden = false;
    again = true;
  }
  clearTimeout(timer);
  if (again) timer = setTimeout(() => (document.hidden ? undefined : refresh()), 1000 * REFRESH_S);
}

let timer;
let last = () => {};

function begin() {
  $("measure").replaceChildren(...Object.entries(MEASURES).map(([key, { name }]) => new Option(name, key)));
  if (!(choice.measure in MEASURES)) choice.measure = "late";
  for (const id of ["range", "window"]) $(id).onchange = () => choose({ [id]: Number($(id).value) });
  for (const id of ["run", "measure"]) $(id).onchange = () => choose({ [id]: $(id).value });
  $("end").onchange = () => choose({ end: $("end").value ? Math.floor(new Date($("end").value).getTime() / 1000) : null });
  $("live").onclick = () => {
    choose({ end: null, range: before ?? choice.range });
    before = null;
  };
  $("choices").onsubmit = (event) => event.preventDefault();
  $("ranks").onclick = ({ target: { dataset: { sort } } }) => {
    if (!sort) return;
    Object.assign(choice, { down: sort === choice.sort ? !choice.down : sort !== "rank", sort });
    last();
  };
  document.onvisibilitychange = () => document.hidden || refresh();
  document.addEventListener("mouseover", ({ target }) => { if (!target.closest(".u-over")) $("tip").hidden = true; });
  matchMedia("(prefers-color-scheme: dark)").onchange = () => {
    palette = null;
    [...charts.keys()].forEach((id) => clear(id));
    last();
  };
  new ResizeObserver(() => {
    for (const [id, { plot }] of charts) {
      const width = $(id).clientWidth;
      if (plot.width !== width) plot.setSize({ width, height: plot.height });
    }
    last();
  }).observe($("time"));
  showChoices();
  refresh();
}

begin();
