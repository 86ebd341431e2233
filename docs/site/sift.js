// Tables that can be sorted, and those of the class sift filtered and plotted; without JavaScript they are plain tables.
// In a head cell, data-filter asks for a menu of the column's values, data-plot offers it as bars, and data-label puts it
// beside them.

const make = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};
// Of what begins with one: "1,396", "1.20–1.47", "35 min".
const number = (text) =>
  /^[−-]?[\d.]/.test(text) ? parseFloat(text.replace("−", "-").replace(/(?<=\d),(?=\d{3})/g, "")) : NaN;
const text = (row, column) => row.cells[column].textContent.trim();

function sortable(table, then = () => {}) {
  const heads = [...table.tHead.rows[0].cells];
  const rows = [...table.tBodies[0].rows];
  heads.forEach((head, column) => {
    const button = make("button", { type: "button", textContent: head.textContent, title: "Sort" });
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const compared = (a, b) =>
        number(text(a, column)) - number(text(b, column)) || text(a, column).localeCompare(text(b, column));
      table.tBodies[0].append(...rows.sort((a, b) => (down ? compared(b, a) : compared(a, b))));
      then();
    });
  });
  return { heads, rows };
}

function sift(table) {
  const { heads, rows } = sortable(table, update);
  const listed = (row, column) => text(row, column).split(", ");
  const columns = (kind) => heads.flatMap((head, column) => (kind in head.dataset ? [column] : []));
  const controls = make("p", { className: "sift-controls" });
  const count = make("span", { className: "sift-count" });
  count.setAttribute("role", "status");
  table.before(controls);

  const menu = (label, options) => {
    const select = make("select", {}, ...options.map(([value, shown]) => make("option", { value, textContent: shown })));
    select.addEventListener("change", update);
    controls.append(make("label", {}, `${label} `, select), " ");
    return select;
  };
  const filters = columns("filter").map((column) => {
    const values = [...new Set(rows.flatMap((row) => listed(row, column)))].filter((value) => value !== "any");
    values.sort((a, b) => number(a) - number(b) || a.localeCompare(b));
    return [column, menu(heads[column].textContent, [["", "all"], ...values.map((value) => [value, value])])];
  });
  const plottable = columns("plot");
  const plotted = plottable.length && menu("Plot", plottable.map((column) => [column, heads[column].textContent]));
  const plot = make("figure", { className: "sift-plot" });
  if (plotted) table.before(plot);
  controls.append(count);

  function update() {
    for (const row of rows) {
      const fits = (column, value) => !value || listed(row, column).some((one) => one === value || one === "any");
      row.hidden = !filters.every(([column, { value }]) => fits(column, value));
    }
    const shown = rows.filter((row) => !row.hidden);
    count.textContent = `${shown.length} of ${rows.length}`;
    if (plotted) draw(shown, Number(plotted.value));
  }

  function draw(shown, column) {
    const bars = shown.filter((row) => !Number.isNaN(number(text(row, column))));
    const largest = Math.max(...bars.map((row) => number(text(row, column))));
    const label = (row) => columns("label").map((one) => text(row, one)).join(", ");
    plot.replaceChildren(
      make("figcaption", { textContent: heads[column].textContent }),
      ...bars.map((row) => {
        const bar = make("span", { className: "sift-bar", textContent: text(row, column) });
        bar.style.setProperty("--part", number(text(row, column)) / largest);
        return make("div", {}, make("span", { className: "sift-name", textContent: label(row) }), bar);
      }),
    );
  }
  update();
}

document.querySelectorAll("table.sift").forEach(sift);
// Markdown's own, but for a plan of the day, which has no heads, and a few rows, which a reader sees at once.
document.querySelectorAll("article table.docutils").forEach((table) => {
  if (table.tBodies[0].rows.length > 3 && table.tHead?.textContent.trim()) sortable(table);
});
