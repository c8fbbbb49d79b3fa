// The map of layers: a tree in order of execution, or one list; sorted by any column; bars beside the bytes.

const COLUMNS = [
  { key: "plain_bytes", title: "left for backward", format: formatBytes },
  { key: "planned_bytes", title: "planned", format: formatBytes, planned: true },
  { key: "flops", title: "FLOPs", format: formatFlops },
  { key: "recomputed_flops", title: "recomputed", format: formatFlops, planned: true },
  { key: "seconds", title: "time", format: formatSeconds },
  { key: "recomputed_s", title: "recomputing", format: formatSeconds, planned: true },
  { key: "parameter_bytes", title: "parameters", format: formatBytes },
];
const COST_KEYS = ["parameter_bytes", "plain_bytes", "planned_bytes", "flops", "recomputed_flops", "seconds", "recomputed_s"];
const LONGEST_LIST = 400;

/** Rows as the page stores them, [path, class, parent, calls, treatment, note, own costs, total costs], with names. */
function readLayers(map) {
  const named = (costs) => Object.fromEntries(COST_KEYS.map((key, i) => [key, costs[i]]));
  const rows = map.rows.map(([path, className, parent, calls, treatment, note, own, total], index) => (
    { index, path, className, parent, calls, treatment, note, own: named(own), total: named(total), children: [] }));
  for (const row of rows) if (row.parent >= 0) rows[row.parent].children.push(row);
  for (const row of rows) row.depth = row.parent < 0 ? 0 : rows[row.parent].depth + 1;
  return rows;
}

function layerTable(host, map) {
  const rows = readLayers(map);
  const columns = COLUMNS.filter((column) => map.planned || !column.planned);
  let lastNote = ""; // the calls of a span share their note: the first of them says it
  const state = { open: new Set(), sort: null, falling: true, flat: false, wanted: "" };
  // Open the model, and below it whatever is the only large thing at its level.
  for (let row = rows[0]; row; row = row.children.find((child) => child.total.plain_bytes > 0.6 * rows[0].total.plain_bytes)) state.open.add(row.index);

  const search = element("input", { type: "search", placeholder: "find a path or class", "aria-label": "find a layer" });
  const flat = element("input", { type: "checkbox" });
  const all = element("button", { type: "button" }, "open all");
  const none = element("button", { type: "button" }, "close all");
  const body = element("tbody");
  const note = element("p", { class: "hint" });
  const heads = columns.map((column) => {
    const head = element("th", { scope: "col", "aria-sort": "none", "data-key": column.key }, element("button", { type: "button" }, column.title));
    head.addEventListener("click", () => {
      if (state.sort === column.key && !state.falling) state.sort = null;
      else {
        state.falling = state.sort !== column.key;
        state.sort = column.key;
      }
      draw();
    });
    return head;
  });
  const table = element("table", {}, element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "layer"), element("th", { scope: "col" }, ""), ...heads)), body);
  host.replaceChildren(
    element("div", { class: "bar" }, search, element("label", {}, flat, "one list, each layer by itself"), all, none),
    element("div", { class: "scroll layers" }, table), note);

  const sorted = (list, which) => (state.sort === null ? list
    : [...list].sort((a, b) => (state.falling ? -1 : 1) * (a[which][state.sort] - b[which][state.sort]) || a.index - b.index));

  function* visible(row) {
    yield row;
    if (state.open.has(row.index)) for (const child of sorted(row.children, "total")) yield* visible(child);
  }

  function largest(list, which) {
    return Math.max(1, ...list.flatMap((row) => [row[which].plain_bytes, row[which].planned_bytes]));
  }

  /** Bytes as bars, beside those of the largest layer of the same parent (of the list). */
  function bar(costs, top) {
    const track = element("span", { class: "track" });
    const widths = map.planned ? [["plain", costs.plain_bytes], ["planned", costs.planned_bytes]] : [["planned", costs.plain_bytes]];
    for (const [name, value] of widths) track.append(element("b", { class: name, style: `width:${((100 * value) / top).toFixed(2)}%` }));
    return element("td", { class: "shown" }, track);
  }

  function line(row, which, top) {
    const costs = row[which];
    const name = element("span", { class: "tree" });
    if (!state.flat) {
      name.style.paddingLeft = `${row.depth * 0.9}rem`;
      const isOpen = state.open.has(row.index);
      const toggle = row.children.length
        ? element("button", { type: "button", "aria-expanded": `${isOpen}`, "aria-label": `${isOpen ? "close" : "open"} ${row.path || map.model}` }, isOpen ? "▾" : "▸")
        : element("i");
      if (row.children.length) toggle.addEventListener("click", () => { flip(row); });
      name.append(toggle);
    }
    const parent = row.parent < 0 ? "" : rows[row.parent].path;
    const short = state.flat || !parent ? row.path || map.model : row.path.startsWith(`${parent}.`) ? row.path.slice(parent.length + 1) : row.path;
    const text = element("span", { title: row.path || map.model }, short, " ", element("small", {}, row.calls > 1 ? `${row.className} × ${row.calls}` : row.className));
    if (row.treatment === "region") text.append(" ", element("span", { class: "tag", title: row.note }, "region"), row.note === lastNote ? "" : element("small", {}, ` ${row.note}`));
    lastNote = row.treatment === "region" ? row.note : row.parent < 0 ? "" : lastNote;
    if (row.treatment === "inside" && rows[row.parent]?.treatment !== "inside" && rows[row.parent]?.treatment !== "region") text.append(" ", element("span", { class: "tag inside" }, "recomputed"));
    name.append(text);
    const cells = columns.map((column) => element("td", { class: costs[column.key] ? "num" : "num none", "data-key": column.key }, costs[column.key] ? column.format(costs[column.key]) : "0"));
    return element("tr", { "data-path": row.path }, element("th", { scope: "row" }, name), bar(costs, top), ...cells);
  }

  function flip(row) {
    if (!state.open.delete(row.index)) state.open.add(row.index);
    draw();
    body.querySelector(`tr[data-path="${CSS.escape(row.path)}"] .tree button`)?.focus();
  }

  function draw() {
    for (const head of heads) head.setAttribute("aria-sort", head.dataset.key === state.sort ? (state.falling ? "descending" : "ascending") : "none");
    const wanted = state.wanted.toLowerCase();
    const isList = state.flat || wanted;
    const which = state.flat ? "own" : "total";
    let shown = isList ? sorted(rows.filter((row) => `${row.path} ${row.className}`.toLowerCase().includes(wanted)), which) : [...visible(rows[0])];
    const hidden = shown.length - LONGEST_LIST;
    shown = shown.slice(0, LONGEST_LIST);
    const tops = new Map();
    const topOf = (row) => {
      const key = isList ? "list" : row.parent;
      if (!tops.has(key)) tops.set(key, largest(isList ? shown : row.parent < 0 ? [row] : rows[row.parent].children, which));
      return tops.get(key);
    };
    body.replaceChildren(...shown.map((row) => line(row, which, topOf(row))));
    all.hidden = none.hidden = Boolean(isList);
    note.textContent = `${state.flat ? "Each layer without those that it calls." : "Each layer with those that it calls."} `
      + `Bytes: alive when backward begins, each storage once, for the layer that saved it first.${map.planned ? " Bars: plain (light) and planned," : " Bars:"} of the largest at the same level.`
      + `${hidden > 0 ? ` ${hidden} more rows: search for them.` : ""}`;
  }

  search.addEventListener("input", () => { state.wanted = search.value.trim(); draw(); });
  flat.addEventListener("change", () => {
    state.flat = flat.checked;
    if (state.flat && state.sort === null) state.sort = "plain_bytes";
    draw();
  });
  all.addEventListener("click", () => { rows.forEach((row) => state.open.add(row.index)); draw(); });
  none.addEventListener("click", () => { state.open = new Set([0]); draw(); });
  body.addEventListener("keydown", (event) => {
    const toggles = [...body.querySelectorAll(".tree button")];
    const place = toggles.indexOf(document.activeElement);
    if (place < 0) return;
    const isOpen = document.activeElement.getAttribute("aria-expanded") === "true";
    if (event.key === "ArrowDown") toggles[place + 1]?.focus();
    else if (event.key === "ArrowUp") toggles[place - 1]?.focus();
    else if ((event.key === "ArrowRight" && !isOpen) || (event.key === "ArrowLeft" && isOpen)) document.activeElement.click();
    else return;
    event.preventDefault();
  });
  draw();
}
