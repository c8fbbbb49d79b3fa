// Tables that sort by their cells' numbers, and the start.

const COLLAPSED_ROWS = 12;

function sortable(table) {
  const body = table.tBodies[0];
  const original = [...body.rows].filter((row) => !row.classList.contains("total"));
  const heads = [...table.tHead.rows[0].cells];
  for (const [place, head] of heads.entries()) {
    if (!head.textContent.trim()) continue;
    const button = element("button", { type: "button" }, head.textContent);
    head.replaceChildren(button);
    head.setAttribute("aria-sort", "none");
    head.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const isNumeric = original.some((row) => row.cells[place].dataset.v !== undefined);
      const order = isNumeric ? ["none", "descending", "ascending"] : ["none", "ascending", "descending"];
      const next = order[(order.indexOf(now) + 1) % 3];
      for (const other of heads) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", next);
      const value = (row) => (isNumeric ? Number(row.cells[place].dataset.v ?? 0) : row.cells[place].textContent);
      const compare = (a, b) => (isNumeric ? value(a) - value(b) : value(a).localeCompare(value(b), undefined, { numeric: true }));
      const sign = next === "descending" ? -1 : 1;
      const rows = next === "none" ? original : [...original].sort((a, b) => sign * compare(a, b));
      body.prepend(...rows);
    });
  }
}

/** Long tables show their first rows, whatever those are after sorting, until they are opened. */
function fold(table) {
  const body = table.tBodies[0];
  if (body.rows.length <= COLLAPSED_ROWS + 3) return;
  const button = element("button", { type: "button" });
  let isOpen = false;
  const apply = () => {
    [...body.rows].forEach((row, place) => { row.hidden = !isOpen && place >= COLLAPSED_ROWS; });
    button.textContent = isOpen ? "show fewer" : `show all ${body.rows.length}`;
  };
  button.addEventListener("click", () => { isOpen = !isOpen; apply(); });
  new MutationObserver(apply).observe(body, { childList: true });
  table.after(button);
  apply();
}

function start() {
  const drawings = [];
  for (const host of document.querySelectorAll("[data-draw]")) {
    const section = data[Number(host.dataset.section)];
    const what = host.dataset.draw;
    if (what === "layers") layerTable(host, section.layers);
    if (what === "memory") drawings.push(() => drawMemory(host, section.memory));
    if (what === "measured") drawings.push(() => drawMeasured(host, section.measured));
    if (what === "frontier") {
      const choice = host.parentElement.querySelector("select");
      choice.value = section.frontier.objective === "time" ? "overhead_s" : "overhead_flops";
      const draw = () => drawFrontier(host, section.frontier, choice.value);
      choice.addEventListener("change", draw);
      drawings.push(draw);
    }
  }
  for (const draw of drawings) draw();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar changes the height alone
    width = innerWidth;
    hideTip();
    for (const draw of drawings) draw();
  });
  for (const table of document.querySelectorAll("table.sortable")) {
    sortable(table);
    fold(table);
  }
  document.documentElement.dataset.ready = "true";
}
start();
