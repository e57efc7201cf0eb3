"use strict";
// Sort the table of workloads by a column, filter it by name and verdict, and open all details before printing.
const table = document.querySelector("table.workloads");
if (table) {
  const body = table.tBodies[0];
  const rows = [...body.querySelectorAll("tr.workload")];
  const groups = [...body.querySelectorAll("tr.group")];
  const original = [...body.rows];
  const name = document.querySelector("#name");
  // A run without a baseline has no verdicts.
  const verdict = document.querySelector("#verdict") ?? { value: "", addEventListener: () => {} };
  const heads = [...table.tHead.querySelectorAll("th[data-key]")];

  const value = (row, key) => {
    const held = row.dataset[key];
    return held === "" ? null : isNaN(held) ? held : Number(held);
  };
  const sort = (head) => {
    const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", order);
    const key = head.dataset.key, sign = order === "ascending" ? 1 : -1;
    // Workloads without the value stay last.
    const compared = (a, b) => (a === null) - (b === null) || sign * (a > b ? 1 : a < b ? -1 : 0);
    body.replaceChildren(...rows.toSorted((a, b) => compared(value(a, key), value(b, key))));
    body.classList.add("sorted");
  };
  const filter = () => {
    const wanted = name.value.trim().toLowerCase();
    for (const row of rows)
      row.hidden =
        !row.dataset.name.toLowerCase().includes(wanted) || (verdict.value !== "" && row.dataset.verdict !== verdict.value);
    for (const group of groups)
      group.hidden = rows.every((row) => row.hidden || row.dataset.group !== group.dataset.group);
    const shown = rows.filter((row) => !row.hidden).length;
    document.querySelector("#shown").textContent = shown === rows.length ? "" : `${shown} of ${rows.length} workloads`;
  };
  for (const head of heads) head.querySelector("button").addEventListener("click", () => sort(head));
  document.querySelector("#reset").addEventListener("click", () => {
    name.value = verdict.value = "";
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    body.classList.remove("sorted");
    body.replaceChildren(...original);
    filter();
  });
  name.addEventListener("input", filter);
  verdict.addEventListener("change", filter);
  document.querySelector("#controls").hidden = false;
}
const details = [...document.querySelectorAll("details")];
addEventListener("beforeprint", () => details.forEach((one) => (one.open = true)));
// A link from the table opens the details that it leads to.
const opened = () => {
  const wanted = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (wanted && wanted.tagName === "DETAILS") {
    wanted.open = true;
    wanted.scrollIntoView();
  }
};
addEventListener("hashchange", opened);
opened();
