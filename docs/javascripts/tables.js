// Sorts and searches the tables of a page. Without it they are plain tables.
// A click on a heading sorts; so does an address that ends in #sort=2,3 or #sort=2,3,down: the second table of the
// page by its third column.
"use strict";

const FEWEST_TO_SORT = 3, FEWEST_TO_SEARCH = 8;
const SUFFIX = { K: 1024, M: 1024 ** 2, G: 1024 ** 3 };

// The first number of a cell ("1.6M (114x)" is 1.6 x 1024 x 1024), or null.
function number(text) {
  const found = /^[^\d.−-]*([−-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)([KMG]\b)?/i.exec(text.trim());
  return found ? Number(found[1].replace("−", "-").replaceAll(",", "")) * (SUFFIX[found[2]] ?? 1) : null;
}

function sort(table, column, down) {
  const body = table.tBodies[0], rows = [...body.rows];
  const texts = new Map(rows.map((row) => [row, row.cells[column].textContent.trim()]));
  const given = [...texts.values()].filter((text) => text !== "—" && text !== "");
  const numeric = given.every((text) => number(text) !== null);
  const compare = (a, b) => {
    const [x, y] = [texts.get(a), texts.get(b)];
    // What is not available stays below.
    const missing = (x === "—" || x === "") - (y === "—" || y === "");
    const order = numeric ? number(x) - number(y) : x.localeCompare(y, "en");
    return missing || (down ? -order : order);
  };
  body.append(...rows.sort(compare));
  [...table.tHead.rows[0].cells].forEach((cell, at) => {
    cell.ariaSort = at === column ? (down ? "descending" : "ascending") : null;
  });
}

function addSearch(table) {
  const field = document.createElement("input");
  Object.assign(field, { type: "search", placeholder: "Show rows with …", className: "form-control rows-with" });
  field.ariaLabel = "Show only rows with this text";
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  table.before(field);
}

const tables = [...document.querySelectorAll('[role="main"] table')].filter((table) => table.tHead && table.tBodies[0]);
for (const table of tables) {
  const count = table.tBodies[0].rows.length;
  if (count >= FEWEST_TO_SEARCH) addSearch(table);
  if (count < FEWEST_TO_SORT) continue;
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", className: "sort", title: "Sort by this column" });
    button.append(...cell.childNodes);
    button.addEventListener("click", () => sort(table, column, cell.ariaSort === "ascending"));
    cell.append(button);
  });
}

function sortByAddress() {
  const found = /^#sort=(\d+),(\d+)(,down)?$/.exec(location.hash);
  const table = found && tables[found[1] - 1];
  if (table && found[2] <= table.tHead.rows[0].cells.length) sort(table, found[2] - 1, Boolean(found[3]));
}
window.addEventListener("hashchange", sortByAddress);
sortByAddress();
