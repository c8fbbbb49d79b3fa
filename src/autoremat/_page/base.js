// Numbers in words, elements, colours and the box that shows numbers. The formats are those of _units.py.

const data = JSON.parse(document.getElementById("data").textContent);

function formatBytes(bytes) {
  const sign = bytes < 0 ? "-" : "";
  let size = Math.abs(bytes);
  if (size < 1024) return `${sign}${size.toFixed(0)} B`;
  let unit = "";
  for (unit of ["KiB", "MiB", "GiB", "TiB"]) {
    size /= 1024;
    if (size < 1023.95) break;
  }
  return `${sign}${size.toFixed(size < 10 ? 2 : size < 100 ? 1 : 0)} ${unit}`;
}

function formatFlops(flops) {
  for (const unit of ["", "K", "M", "G", "T", "P"]) {
    if (Math.abs(flops) < 1000 || unit === "P") {
      return unit === "" ? `${Number(flops.toPrecision(3))} FLOP` : `${flops.toFixed(2)} ${unit}FLOP`;
    }
    flops /= 1000;
  }
}

function formatSeconds(seconds) {
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(1)} us`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(1)} ms`;
  return seconds < 600 ? `${seconds.toFixed(1)} s` : `${(seconds / 60).toFixed(1)} min`;
}

const formatPercent = (fraction) => `${(100 * fraction).toFixed(1)} %`;
/** As an axis writes it: no unit at zero, no digits that say nothing. */
const onAxis = (format) => (value) => (value === 0 ? "0" : format(value).replace(/\.0+(?= )/, ""));
const spoken = (cause) => cause.replaceAll("_", " ");
const colourOf = (cause) => `var(--cause-${cause.replaceAll("_", "-")})`;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function svg(name, attributes = {}, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

/** The first place in rising `values` whose value is above `wanted`, less one: the step that is on at that moment. */
function stepAt(values, wanted) {
  let low = 0;
  let high = values.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (values[middle] <= wanted) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Round steps for an axis up to `top`, in binary units where `base` is 1024. */
function ticks(top, count, base = 10) {
  const scale = base === 1024 ? 1024 ** Math.max(0, Math.min(4, Math.floor(Math.log(top / 2) / Math.log(1024)))) : 1;
  const raw = top / scale / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) * scale;
  const found = [];
  for (let value = 0; value <= top * 1.0001; value += step) found.push(value);
  return found;
}

const tip = document.getElementById("tip");
const hideTip = () => { tip.hidden = true; };

/** Show lines beside a point of the window. `rows` are [name, text, colour or null]. */
function showTip(x, y, title, lines, rows) {
  tip.replaceChildren(element("b", {}, title), ...lines.filter(Boolean).map((line) => element("span", {}, line)));
  const table = element("table");
  for (const [name, text, colour] of rows) {
    const head = element("th", {}, name);
    if (colour) head.prepend(element("i", { style: `background:${colour}` }));
    table.append(element("tr", {}, head, element("td", { class: "num" }, text)));
  }
  tip.append(table);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth - 8 ? x - 16 - box.width : x + 16;
  const top = Math.min(y + 12, innerHeight - box.height - 8);
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - box.width - 8))}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}
addEventListener("scroll", hideTip, { passive: true });
addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

// Colours: as the system, light, dark; kept for the next report where the browser lets a file keep something.
const THEMES = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" };
function setTheme(name) {
  const button = document.getElementById("theme");
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  button.textContent = THEMES[name];
  button.dataset.now = name;
  button.setAttribute("aria-label", `Colours: ${name === "auto" ? "as the system" : name}`);
}
function kept(name) {
  try {
    if (name !== undefined) localStorage.setItem("autoremat-theme", name);
    return localStorage.getItem("autoremat-theme");
  } catch {
    return null;
  }
}
setTheme(kept() in THEMES ? kept() : "auto");
document.getElementById("theme").addEventListener("click", (event) => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(event.currentTarget.dataset.now) + 1) % names.length];
  setTheme(next);
  kept(next);
});
