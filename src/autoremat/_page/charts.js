// Memory over the step, measured memory, and the frontier: SVG drawn at the width that there is.

const MARGIN = { left: 62, right: 14, top: 22, bottom: 26 };

/** An empty picture with a vertical axis of bytes (or percent) and a horizontal one. */
function frame(host, { height, xTop, yTop, xText, yText, xName, xFrom = 0, xBase = 10, yBase = 1024, label }) {
  const width = Math.max(280, host.clientWidth);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: "0", "aria-label": label });
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
  const x = (value) => MARGIN.left + ((value - xFrom) / (xTop - xFrom || 1)) * inner.width;
  const y = (value) => MARGIN.top + inner.height * (1 - value / (yTop || 1));
  for (const value of ticks(yTop, height > 250 ? 5 : 4, yBase)) {
    picture.append(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }));
    picture.append(svg("text", { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, yText(value)));
  }
  for (const value of ticks(xTop, Math.max(3, Math.floor(inner.width / 110)), xBase).filter((v) => v >= xFrom)) {
    picture.append(svg("text", { x: x(value), y: height - 8, "text-anchor": "middle" }, xText(value)));
  }
  if (xName) picture.append(svg("text", { x: width - MARGIN.right, y: height - 8, "text-anchor": "end", class: "halo" }, xName));
  host.append(picture);
  return { picture, x, y, width, height, inner, xTop, xFrom, yTop };
}

function level(plot, bytes, text, role, { below = false, left = false } = {}) {
  const { picture, y, width } = plot;
  picture.append(svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y(bytes), y2: y(bytes), stroke: `var(--${role})`,
    "stroke-width": role === "budget" ? 1.6 : 1, "stroke-dasharray": role === "budget" ? "6 4" : "2 3" }));
  picture.append(svg("text", { class: role === "budget" ? "budget" : "halo", x: left ? MARGIN.left + 4 : width - MARGIN.right - 2,
    y: y(bytes) + (below ? 13 : -5), "text-anchor": left ? "start" : "end" }, text));
}

/** Follow pointer and arrow keys over `count` points; `show(index)` draws the cursor and returns what the box says. */
function follow(plot, count, { indexAt, show, home }) {
  const { picture } = plot;
  let now = home;
  const at = (index, clientX, clientY) => {
    now = Math.max(0, Math.min(count - 1, index));
    const told = show(now);
    const box = picture.getBoundingClientRect();
    const scale = box.width / plot.width;
    showTip(clientX ?? box.left + told.x * scale, clientY ?? box.top + told.y * scale, told.title, told.lines, told.rows);
  };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const scale = plot.width / box.width;
    at(indexAt((event.clientX - box.left) * scale, (event.clientY - box.top) * scale), event.clientX, event.clientY);
  });
  picture.addEventListener("pointerleave", () => { show(-1); hideTip(); });
  picture.addEventListener("blur", () => { show(-1); hideTip(); });
  picture.addEventListener("focus", () => { if (picture.matches(":focus-visible")) at(now); });
  picture.addEventListener("keydown", (event) => {
    const far = Math.max(1, Math.round(count / 20));
    const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: far, PageUp: -far }[event.key];
    const wanted = step !== undefined ? now + step : { Home: 0, End: count - 1, p: home }[event.key];
    if (wanted === undefined) return;
    event.preventDefault();
    at(wanted);
  });
}

function bands(profile, plot) {
  const { picture, x, y } = plot;
  const { seconds, causes, by_cause: byCause } = profile;
  let base = seconds.map(() => 0);
  for (const cause of causes) {
    const top = base.map((value, i) => value + byCause[cause][i]);
    let path = `M${x(seconds[0]).toFixed(1)},${y(top[0]).toFixed(1)}`;
    for (let i = 1; i < top.length; i++) path += `H${x(seconds[i]).toFixed(1)}V${y(top[i]).toFixed(1)}`;
    for (let i = top.length - 1; i >= 0; i--) path += i === top.length - 1 ? `V${y(base[i]).toFixed(1)}` : `H${x(seconds[i + 1]).toFixed(1)}V${y(base[i]).toFixed(1)}`;
    picture.append(svg("path", { d: `${path}H${x(seconds[0]).toFixed(1)}Z`, fill: colourOf(cause), stroke: "var(--page)",
      "stroke-width": 0.4, "data-cause": cause }));
    base = top;
  }
  return base;
}

function stairs(seconds, values, plot, attributes) {
  const { x, y, picture } = plot;
  let path = `M${x(seconds[0]).toFixed(1)},${y(values[0]).toFixed(1)}`;
  for (let i = 1; i < values.length; i++) path += `H${x(seconds[i]).toFixed(1)}V${y(values[i]).toFixed(1)}`;
  picture.append(svg("path", { d: path, fill: "none", ...attributes }));
}

function drawProfile(host, memory, profile, xTop, yTop) {
  host.append(element("h4", {}, `${profile.name}: peak ${formatBytes(profile.peak_bytes)} `, element("small", {}, `at ${profile.peak_at}`)));
  const plot = frame(host, { height: innerWidth < 640 ? 190 : 230, xTop, yTop, xText: onAxis(formatSeconds), yText: onAxis(formatBytes),
    label: `${profile.name} step: bytes by cause over time, peak ${formatBytes(profile.peak_bytes)}. Arrow keys read points, p goes to the peak.` });
  const { picture, x, y } = plot;
  const totals = bands(profile, plot);
  const plain = memory.profiles[0];
  if (plain !== profile) stairs(plain.seconds, plain.totals, plot, { stroke: "var(--plain)", "stroke-width": 1, "stroke-dasharray": "1 2" });
  for (const [i, [name, second]] of profile.phases.entries()) {
    if (i) picture.append(svg("line", { x1: x(second), x2: x(second), y1: MARGIN.top - 8, y2: y(0), stroke: "var(--muted)", "stroke-dasharray": "1 3" }));
    const end = i + 1 < profile.phases.length ? profile.phases[i + 1][1] : profile.seconds.at(-1);
    if (x(end) - x(second) > 58) picture.append(svg("text", { x: x(second) + 4, y: MARGIN.top - 10 }, name));
  }
  const budget = memory.budget_bytes;
  const reserved = profile.reserved_bytes;
  if (reserved !== null) {
    const crowded = budget !== null && Math.abs(budget - reserved) < 0.08 * yTop;
    level(plot, reserved, `reserved ${formatBytes(reserved)}`, "muted", { left: true, below: crowded && reserved < budget });
  }
  if (budget !== null) level(plot, budget, `budget ${formatBytes(budget)}${memory.budget_is === "reserved" ? " reserved" : ""}`, "budget");
  picture.append(svg("circle", { cx: x(profile.seconds[profile.peak]), cy: y(profile.peak_bytes), r: 4, fill: "var(--text)", stroke: "var(--page)" }));
  const cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: y(0), visibility: "hidden" });
  const dot = svg("circle", { r: 3.5, fill: "var(--text)", visibility: "hidden" });
  picture.append(cursor, dot);
  follow(plot, totals.length, {
    home: profile.peak,
    indexAt: (px) => stepAt(profile.seconds, ((px - MARGIN.left) / plot.inner.width) * xTop),
    show: (i) => {
      for (const mark of [cursor, dot]) mark.setAttribute("visibility", i < 0 ? "hidden" : "visible");
      if (i < 0) return null;
      const at = { x: x(profile.seconds[i]), y: y(totals[i]) };
      cursor.setAttribute("x1", at.x);
      cursor.setAttribute("x2", at.x);
      dot.setAttribute("cx", at.x);
      dot.setAttribute("cy", at.y);
      const [action, module, op] = profile.events.length ? profile.events[i].map((name) => profile.names[name]) : ["", "", ""];
      const shown = profile.causes.filter((cause) => profile.by_cause[cause][i]).reverse();
      return { ...at, title: `${formatBytes(totals[i])} at ${formatSeconds(profile.seconds[i])}`,
        lines: [action && `${action}: ${op}`, action && (module || "the model itself, or the loss")],
        rows: shown.map((cause) => [spoken(cause), formatBytes(profile.by_cause[cause][i]), colourOf(cause)]) };
    },
  });
}

function drawMemory(host, memory) {
  host.replaceChildren();
  const tops = memory.profiles.flatMap((p) => [p.peak_bytes, p.reserved_bytes ?? 0]);
  const xTop = Math.max(...memory.profiles.map((p) => p.seconds.at(-1)));
  for (const profile of memory.profiles) drawProfile(host, memory, profile, xTop, 1.06 * Math.max(...tops, memory.budget_bytes ?? 0));
}

function drawMeasured(host, measured) {
  host.replaceChildren();
  const xTop = Math.max(...measured.curves.map((c) => c.seconds.at(-1)));
  const yTop = 1.08 * Math.max(...measured.curves.map((c) => c.peak_bytes), measured.budget_bytes ?? 0);
  const plot = frame(host, { height: 240, xTop, yTop, xText: onAxis(formatSeconds), yText: onAxis(formatBytes),
    label: `Measured bytes over time: ${measured.curves.map((c) => `${c.name} peak ${formatBytes(c.peak_bytes)}`).join(", ")}` });
  const { picture, x, y } = plot;
  for (const curve of measured.curves) {
    stairs(curve.seconds, curve.bytes, plot, { stroke: `var(--${curve.name})`, "stroke-width": 1.6 });
    picture.append(svg("circle", { cx: x(curve.seconds[curve.peak]), cy: y(curve.bytes[curve.peak]), r: 3.5, fill: `var(--${curve.name})` }));
  }
  if (measured.budget_bytes !== null) level(plot, measured.budget_bytes, `budget ${formatBytes(measured.budget_bytes)}`, "budget");
  const cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: y(0), visibility: "hidden" });
  picture.append(cursor);
  const count = 400;
  follow(plot, count, {
    home: 0,
    indexAt: (px) => Math.round(((px - MARGIN.left) / plot.inner.width) * (count - 1)),
    show: (i) => {
      cursor.setAttribute("visibility", i < 0 ? "hidden" : "visible");
      if (i < 0) return null;
      const second = (xTop * i) / (count - 1);
      cursor.setAttribute("x1", x(second));
      cursor.setAttribute("x2", x(second));
      return { x: x(second), y: MARGIN.top, title: `at ${formatSeconds(second)}`, lines: [],
        rows: measured.curves.filter((c) => second <= c.seconds.at(-1))
          .map((c) => [c.name, formatBytes(c.bytes[stepAt(c.seconds, second)]), `var(--${c.name})`]) };
    },
  });
}

const MARKS = {
  plan: (x, y) => svg("path", { d: `M${x},${y - 8}l2.4,5 5.4,.7 -4,3.7 1,5.4 -4.8,-2.7 -4.8,2.7 1,-5.4 -4,-3.7 5.4,-.7z`, fill: "var(--planned)", stroke: "var(--page)" }),
  ours: (x, y) => svg("circle", { cx: x, cy: y, r: 3, fill: "var(--planned)" }),
  classic: (x, y) => svg("path", { d: `M${x},${y - 5.5}l5.5,5.5 -5.5,5.5 -5.5,-5.5z`, fill: "var(--cause-activation)", stroke: "var(--page)" }),
};

function frontierPoints(frontier, measure) {
  const told = (p, kind, name) => ({ kind, name, x: p.peak_bytes, y: p[measure], rows: [
    ["peak", formatBytes(p.peak_bytes)], ["of plain", formatPercent(p.share)], ["extra FLOPs", `+${formatPercent(p.overhead_flops)}`],
    ["extra time", `+${formatPercent(p.overhead_s)}`], ...(p.bound === undefined ? [] : [[`least ${frontier.objective}`, `+${formatPercent(p.bound)}, proved`]]),
    ...(p.num_regions === undefined ? [] : [["regions", `${p.num_regions}`]])] });
  return [...frontier.points.map((p) => told(p, "ours", "a plan")), ...frontier.classics.map((p) => told(p, "classic", p.name)),
    ...(frontier.plan ? [told(frontier.plan, "plan", "the plan")] : [])].sort((a, b) => a.x - b.x);
}

function drawFrontier(host, frontier, measure) {
  host.replaceChildren();
  const points = frontierPoints(frontier, measure);
  const xTop = 1.02 * Math.max(...points.map((p) => p.x), frontier.budget_bytes ?? 0);
  const xFrom = 0.94 * Math.min(...points.map((p) => p.x));
  // The cheapest plans matter; one classic schedule that costs a multiple must not flatten them.
  const yTop = 1.1 * Math.max(0.01, ...points.filter((p) => p.kind !== "classic").map((p) => p.y), ...points.filter((p) => p.kind === "classic").map((p) => Math.min(p.y, 0.6)));
  const plot = frame(host, { height: innerWidth < 640 ? 260 : 320, xTop, xFrom, yTop, xBase: 1024, yBase: 10, xText: onAxis(formatBytes),
    yText: (v) => (v ? `+${Math.round(v * 1000) / 10} %` : "0"), label: `Frontier: extra ${measure === "overhead_s" ? "time" : "FLOPs"} against peak memory. Arrow keys read points.` });
  const { picture, x, y } = plot;
  const ours = frontier.points;
  const stair = (of) => ours.map((p, i) => `${i ? `H${x(p.peak_bytes).toFixed(1)}V` : `M${x(p.peak_bytes).toFixed(1)},`}${y(of(p)).toFixed(1)}`).join("");
  picture.append(svg("path", { d: stair((p) => p[measure]), fill: "none", stroke: "var(--planned)", "stroke-width": 1.8 }));
  if ((measure === "overhead_s") === (frontier.objective === "time")) {
    picture.append(svg("path", { d: stair((p) => p.bound), fill: "none", stroke: "var(--muted)", "stroke-dasharray": "2 3" }));
  }
  if (frontier.budget_bytes !== null) {
    const at = x(frontier.budget_bytes);
    picture.append(svg("line", { x1: at, x2: at, y1: MARGIN.top, y2: y(0), stroke: "var(--budget)", "stroke-width": 1.6, "stroke-dasharray": "6 4" }));
    picture.append(svg("text", { class: "budget", x: at + (at > plot.width / 2 ? -5 : 5), y: MARGIN.top + 4, "text-anchor": at > plot.width / 2 ? "end" : "start" }, `budget ${formatBytes(frontier.budget_bytes)}`));
  }
  for (const p of points) picture.append(MARKS[p.kind](x(p.x), y(Math.min(p.y, yTop))));
  let taken = [];
  for (const p of points.filter((q) => q.kind === "classic" && plot.width > 560)) {
    const place = { x: x(p.x) + 9, y: y(Math.min(p.y, yTop)) + 4, width: 6.2 * p.name.length };
    if (taken.some((t) => Math.abs(t.y - place.y) < 12 && place.x < t.x + t.width && t.x < place.x + place.width)) continue;
    if (place.x + place.width > plot.width) continue;
    taken.push(place);
    picture.append(svg("text", { x: place.x, y: place.y, class: "halo" }, p.name));
  }
  const ring = svg("circle", { r: 9, fill: "none", stroke: "var(--text)", "stroke-width": 1.5, visibility: "hidden" });
  picture.append(ring);
  follow(plot, points.length, {
    home: Math.max(0, points.findIndex((p) => p.kind === "plan")),
    indexAt: (px, py) => {
      const far = points.map((p) => Math.hypot(x(p.x) - px, y(Math.min(p.y, yTop)) - py) - (p.kind === "ours" ? 0 : 3));
      return far.indexOf(Math.min(...far));
    },
    show: (i) => {
      ring.setAttribute("visibility", i < 0 ? "hidden" : "visible");
      if (i < 0) return null;
      const p = points[i];
      const at = { x: x(p.x), y: y(Math.min(p.y, yTop)) };
      ring.setAttribute("cx", at.x);
      ring.setAttribute("cy", at.y);
      return { ...at, title: p.name, lines: [p.y > yTop ? "above the picture" : ""], rows: p.rows };
    },
  });
}
