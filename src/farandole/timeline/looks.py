"""Style sheet and script of a report's page."""

__all__ = ["SCRIPT", "STYLE"]

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b2026; --quiet: #626c78; --line: #dfe3e8; --none: #edf0f3;
  --busy: #2f6fd6; --waiting: #f0a431; --warn: #fdf1dc; }
@media (prefers-color-scheme: dark) { :root { --page: #15181c; --text: #e4e8ec; --quiet: #98a2ad; --line: #31373e;
  --none: #262b31; --busy: #5d97f5; --waiting: #d98f1f; --warn: #3a2e17; } }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1.5rem; background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; }
p { margin: .3rem 0 .8rem; max-width: 56rem; color: var(--quiet); }
p.verdict { color: var(--text); font-weight: 600; } p.warning { background: var(--warn); color: var(--text);
  padding: .4rem .7rem; border-left: 4px solid var(--waiting); max-width: none; }
details { color: var(--quiet); }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }
.tile { flex: 1 1 12rem; border: 1px solid var(--line); border-top: 4px solid var(--quiet); border-radius: 4px;
  padding: .6rem .8rem; color: var(--quiet); }
.tile.busy { border-top-color: var(--busy); } .tile.waiting { border-top-color: var(--waiting); }
.tile b { display: block; color: var(--text); font-size: 1.5rem; }
.key::before { content: ""; display: inline-block; width: .8em; height: .8em; margin-right: .3em; }
.key.busy::before, i.busy { background: var(--busy); } .key.waiting::before, i.waiting { background: var(--waiting); }
path.busy { fill: var(--busy); } path.waiting { fill: var(--waiting); }
.strips { display: grid; grid-template-columns: max-content 1fr; gap: 4px .8rem; align-items: center; }
.strips svg { width: 100%; height: 28px; background: var(--none); display: block; }
.ticks { display: flex; justify-content: space-between; color: var(--quiet); font-size: .85rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--quiet); white-space: normal; font-weight: 600; font-size: .85rem; cursor: pointer;
  vertical-align: bottom; }
th.up::after { content: " \\25B2"; } th.down::after { content: " \\25BC"; }
td.text, th.text { text-align: left; } #tensors td.text:first-child { white-space: normal; overflow-wrap: anywhere; }
tr.slowest td { font-weight: 600; }
td.bar { width: 7rem; }
td.bar div, .fills div { display: flex; height: .9rem; background: var(--none); min-width: 6rem; }
.fills { display: grid; grid-template-columns: max-content 1fr max-content; gap: .3rem .8rem; align-items: center;
  margin-top: 1rem; max-width: 46rem; }
"""

# A click on the head of a column sorts the table by it.
SCRIPT = """
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    const first = body.rows[0].cells[column];
    if (first.className === "text") head.className = "text";
    head.onclick = () => {
      const down = !head.classList.contains("down");
      for (const each of heads) each.classList.remove("up", "down");
      head.classList.add(down ? "down" : "up");
      const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const rows = [...body.rows].sort((a, b) =>
        first.dataset.value ? value(a) - value(b) : value(b).localeCompare(value(a)));
      body.append(...(down ? rows.reverse() : rows));
    };
  });
}
"""
