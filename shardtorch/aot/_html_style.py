"""The page's style and script: no library, no network."""

STYLE = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#1b2330;--soft:#5b6675;--line:#e0e4ea;--hair:#eceff3;--good:#13795b;--bad:#c62f3b;
--warn:#9a6700;--accent:#2f5fd0;--goodbg:#e4f4ee;--badbg:#fdebec;--warnbg:#fff6df;--boxink:#fff;
--parameter:#3566c8;--gradient:#0f7f96;--optimizer:#7a4cc0;--batch:#a2710c;--activation:#2e8156;--code:#66707f;
--compute:#3566c8;--memory:#2e8156;--communication:#cf4a3c;--hidden:#e3a79f;--matmul:#3566c8;--kernel:#7a4cc0;
--elementwise:#2e8156;--copy:#a2710c;--root:#3c4657}
@media (prefers-color-scheme:dark){:root{--bg:#12161d;--card:#1a2029;--ink:#e4e9f0;--soft:#98a4b3;--line:#2d3642;
--hair:#242c37;--good:#4cc79d;--bad:#ff7b80;--warn:#e8b64a;--accent:#82a8ff;--goodbg:#15322a;--badbg:#3b1f24;
--warnbg:#352b14;--parameter:#4a7be0;--gradient:#1f92a8;--optimizer:#8f63d6;--batch:#a97a1d;--activation:#3b9468;
--code:#6c7788;--compute:#4a7be0;--memory:#3b9468;--communication:#e0604f;--hidden:#7d4640;--matmul:#5b8af0;
--kernel:#a87bf0;--elementwise:#4db383;--copy:#c79632;--root:#465264}}
*{box-sizing:border-box}
html{color-scheme:light dark}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue","DejaVu Sans",sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:27px;margin:0;letter-spacing:-.02em;line-height:1.25}
h2{font-size:18px;margin:0 0 2px;letter-spacing:-.01em}
h3{font-size:13px;margin:20px 0 6px;color:var(--soft);font-weight:600}
p{margin:6px 0}
.mono,td.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:12.5px}
.sub,.note,.state{color:var(--soft)}
.note{font-size:13px;max-width:96ch}
.bad{color:var(--bad)}.good{color:var(--good)}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:20px 22px;margin-top:18px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:14px;margin-top:20px}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:14px 18px}
.card small{display:block;color:var(--soft);font-size:13px}
.card strong{display:block;font-size:27px;letter-spacing:-.02em;line-height:1.35;font-weight:650}
.card.good{background:var(--goodbg);color:inherit}.card.good strong{color:var(--good)}
.card.bad{background:var(--badbg);color:inherit}.card.bad strong{color:var(--bad)}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;color:var(--soft);margin:6px 0 8px}
.legend i,td i[class^=k-],td i[class^=c-]{
display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.legend b{color:var(--ink);font-weight:600}
.gauge{position:relative;height:22px;background:var(--hair);border-radius:5px;overflow:hidden}
.gauge i{position:absolute;top:0;bottom:0}
.free{position:absolute;padding-left:10px;font-size:12.5px;line-height:22px;color:var(--soft);white-space:nowrap}
.funnel{display:block;width:100%;height:16px}.funnel polygon{fill:var(--hair)}
.over{background:repeating-linear-gradient(45deg,transparent 0 7px,
color-mix(in srgb,var(--bad) 38%,transparent) 7px 10px)}
.gauge .over{background-color:color-mix(in srgb,var(--bad) 30%,transparent)}
.wall{position:absolute;top:0;bottom:0;width:0;border-left:3px solid var(--bad)}
.icicle{position:relative;overflow:hidden;border-radius:5px;--x:0;--z:1}
.icicle .over{position:absolute;top:0;bottom:0;right:0;pointer-events:none}
.icicle .wall{pointer-events:none}
.wall b{position:absolute;top:5px;left:5px;line-height:1.5;
background:var(--bad);color:#fff;font-size:12px;padding:0 7px;border-radius:4px;
white-space:nowrap;font-weight:600}
.icicle.zoomed .over,.icicle.zoomed .wall{display:none}
.box{position:absolute;height:29px;top:calc(var(--d)*30px);left:calc((var(--l) - var(--x))*var(--z)*100%);
width:calc(var(--w)*var(--z)*100%);padding-left:max(0px,calc((var(--x) - var(--l))*var(--z)*100%));
color:var(--boxink);font-size:12.5px;line-height:29px;overflow:hidden;white-space:nowrap;
cursor:pointer;box-shadow:inset -1px 0 0 var(--card);transition:left .25s,width .25s;
background:color-mix(in oklab,var(--c),#000 calc(var(--d)*4.5%))}
.box span{margin-left:7px}.box em{font-style:normal;opacity:.78}
.box.short em,.box.tiny span{display:none}.box.sliver{box-shadow:none}
.box:hover{filter:brightness(1.15)}
.k-root{--c:var(--root)}.k-parameter{--c:var(--parameter)}.k-gradient{--c:var(--gradient)}.k-code{--c:var(--code)}
.k-optimizer{--c:var(--optimizer)}.k-batch{--c:var(--batch)}.k-activation{--c:var(--activation)}
i[class^=k-]{background:var(--c)}
.t-compute{background:var(--compute)}.t-memory{background:var(--memory)}.t-communication{background:var(--communication)}
.t-hidden{background:var(--hidden)}
.c-matmul{background:var(--matmul);fill:var(--matmul)}.c-kernel{background:var(--kernel);fill:var(--kernel)}
.c-elementwise{background:var(--elementwise);fill:var(--elementwise)}.c-copy{background:var(--copy);fill:var(--copy)}
.bar{display:flex;height:30px;border-radius:5px;overflow:hidden;background:var(--hair)}
.bar i{height:100%;min-width:1px;color:#fff;font-style:normal;font-weight:600;font-size:12.5px;line-height:30px;
text-align:center;overflow:hidden;white-space:nowrap}
.bars{display:grid;grid-template-columns:fit-content(45%) minmax(40px,1fr) max-content;gap:5px 12px;align-items:center;
font-size:13px}
.bars .bar{height:16px;background:none;border-radius:3px}.bars .name{text-align:right;overflow-wrap:anywhere}
.two{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,1fr);gap:0 40px}
svg{display:block;width:100%;height:auto}
svg text{font-family:inherit}
.roofline{max-width:980px;margin:8px auto 0}
.grid{stroke:var(--line);stroke-width:1}
.tick{fill:var(--soft);font-size:11.5px}.axis{fill:var(--soft);font-size:12.5px}
.roof{fill:none;stroke:var(--ink);stroke-width:2;stroke-linejoin:round}
.rooflabel{fill:var(--ink);font-size:12px;font-weight:600}
.dotlabel{fill:var(--ink);font-size:11.5px}.dotlabel tspan{fill:var(--soft)}
.number{fill:var(--ink);font-size:12px;font-weight:700;paint-order:stroke;stroke:var(--card);stroke-width:3.5px;
pointer-events:none}
.roofline circle{fill-opacity:.62;stroke:var(--card);stroke-width:1}
.roofline circle:hover{fill-opacity:1}
.mesh{display:grid;grid-template-columns:minmax(0,3fr) minmax(0,2fr);gap:32px;align-items:start}
#tile{shape-rendering:crispEdges;max-width:400px;margin:0 auto}
.mesh figure{margin:8px 0}
.meshhead{display:flex;flex-wrap:wrap;gap:6px 16px;align-items:center;margin:8px 0}
select{font:inherit;font-size:14px;padding:3px 8px;border:1px solid var(--line);border-radius:6px;
background:var(--card);color:inherit;max-width:100%}
.device{cursor:pointer;stroke:transparent;stroke-width:2}
.device.on{stroke:var(--ink)}.device.off{opacity:.4}
.holds{font-size:14px;min-height:3em}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px;margin-top:8px}
th{text-align:left;font-weight:600;color:var(--soft);border-bottom:1px solid var(--line);padding:5px 14px 5px 0;
white-space:nowrap;cursor:pointer;user-select:none}
th:hover{color:var(--ink)}
th[aria-sort=ascending]::after{content:" ▲";font-size:9px}th[aria-sort=descending]::after{content:" ▼";font-size:9px}
td{border-bottom:1px solid var(--hair);padding:5px 14px 5px 0;vertical-align:top}
td.path{overflow-wrap:anywhere;min-width:120px}
td.num,th.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td .tag{color:var(--soft);white-space:nowrap}
.warning{color:var(--warn);background:var(--warnbg);border-radius:5px;padding:3px 8px;margin-top:4px;max-width:70ch}
.pair{display:flex;width:130px;height:11px;border-radius:3px;overflow:hidden;margin-top:5px}
.pair i{height:100%}
ol,ul{margin:8px 0 0;padding-left:22px}li{margin:4px 0;max-width:96ch}
footer{color:var(--soft);font-size:13px;margin-top:22px}
@media (max-width:820px){.two,.mesh{grid-template-columns:1fr}main{padding:18px 12px 40px}section{padding:16px 14px}}
@media print{.box,.bar i,.gauge i,.legend i,.pair i{print-color-adjust:exact}}
"""

SCRIPT = """
"use strict";
const all = (query, within = document) => [...within.querySelectorAll(query)];

// The icicle: a box shows as much text as fits; a click makes a box as wide as the picture.
const icicle = document.getElementById("icicle");
function fitText() {
  const boxes = all(".box", icicle);
  for (const box of boxes) box.classList.remove("short", "tiny");
  const wide = boxes.map(box => [box, box.clientWidth, box.firstChild.offsetWidth, box.lastChild.offsetWidth]);
  for (const [box, width, label, size] of wide) {
    box.classList.toggle("sliver", width < 4);
    box.classList.toggle("short", width < label + size + 16);
    box.classList.toggle("tiny", width < Math.min(label + 7, 44));
  }
}
function zoom(box) {
  const style = box.style, width = +style.getPropertyValue("--w");
  icicle.style.setProperty("--x", width < 1 ? style.getPropertyValue("--l") : 0);
  icicle.style.setProperty("--z", width ? 1 / width : 1);
  icicle.classList.toggle("zoomed", width < 1);
  setTimeout(fitText, 300);
}
icicle.addEventListener("click", event => { const box = event.target.closest(".box"); if (box) zoom(box); });
addEventListener("resize", fitText);
fitText();

// Tables: a click on a heading sorts by it, largest first, and the other way around on the next click.
for (const head of all("th")) head.addEventListener("click", () => {
  const table = head.closest("table"), column = [...head.parentNode.children].indexOf(head);
  const down = head.getAttribute("aria-sort") !== "descending", body = table.tBodies[0];
  const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const order = (a, b) => isNaN(key(a)) || isNaN(key(b)) ? key(a).localeCompare(key(b)) : key(a) - key(b);
  for (const row of [...body.rows].sort((a, b) => down ? order(b, a) : order(a, b))) body.append(row);
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
});

// The mesh: devices in the colour of the tile that they hold, and the tensor cut into tiles.
const source = document.getElementById("meshdata");
if (source) {
  const data = JSON.parse(source.textContent), picture = document.getElementById("tile");
  const cells = all("#mesh .device"), choice = document.getElementById("tensor");
  const linear = (tensor, tile) => tile.reduce((sum, place, dim) => sum * tensor.tiles[dim] + place, 0);
  const colour = (tensor, tile) => {
    const number = tensor.tiles.reduce((product, tiles) => product * tiles, 1);
    return `oklch(0.68 0.125 ${255 + 300 * linear(tensor, tile) / number})`;
  };
  let selected = 0;
  function drawTensor(tensor, mine) {
    // Two dims fit on paper: those that are cut, then the last ones.
    const dims = tensor.shape.map((_, dim) => dim);
    const drawn = [...dims].sort((a, b) => (tensor.tiles[b] > 1) - (tensor.tiles[a] > 1) || b - a).slice(0, 2).sort();
    const [down, across] = drawn.length === 2 ? drawn : [undefined, drawn[0]];
    const rows = tensor.tiles[down] ?? 1, columns = tensor.tiles[across] ?? 1;
    const left = 54, top = 26, width = 300, height = down === undefined ? 60 : 230;
    const many = 128, tall = Math.min(rows, many), wide = Math.min(columns, many);
    let parts = "";
    for (let row = 0; row < tall; row++) for (let column = 0; column < wide; column++) {
      const tile = [...mine];
      if (down !== undefined) tile[down] = Math.floor(row * rows / tall);
      if (across !== undefined) tile[across] = Math.floor(column * columns / wide);
      const line = tall > 40 || wide > 40 ? 0 : 1;
      parts += `<rect x="${left + column * width / wide}" y="${top + row * height / tall}" opacity="0.5"
        width="${width / wide - line}" height="${height / tall - line}" fill="${colour(tensor, tile)}"/>`;
    }
    const y = top + (mine[down] ?? 0) * height / rows, x = left + (mine[across] ?? 0) * width / columns;
    parts += `<rect x="${x}" y="${y}" width="${Math.max(width / columns, 2)}" height="${Math.max(height / rows, 2)}"
      fill="${colour(tensor, mine)}" stroke="currentColor" stroke-width="2"/>`;
    const text = dim => `dim ${dim}: ${tensor.shape[dim]}` + (tensor.tiles[dim] > 1 ? ` ÷ ${tensor.tiles[dim]}` : "");
    if (across !== undefined)
      parts += `<text class="tick" text-anchor="middle" x="${left + width / 2}" y="16">${text(across)}</text>`;
    if (down !== undefined) parts += `<text class="tick" text-anchor="middle"
      transform="translate(40 ${top + height / 2}) rotate(-90)">${text(down)}</text>`;
    const rest = dims.filter(dim => !drawn.includes(dim)).map(text);
    parts += `<text class="tick" x="${left}" y="${top + height + 20}">${rest.join("; ")}</text>`;
    picture.innerHTML = parts;
  }
  function draw() {
    const tensor = data.tensors[choice.value], layout = data.layouts[tensor.layout], mine = layout[selected];
    const [id, place, slice] = data.devices[selected], same = String(mine);
    for (const cell of cells) {
      const tile = layout[cell.dataset.n];
      cell.style.fill = colour(tensor, tile);
      cell.classList.toggle("on", +cell.dataset.n === selected);
      cell.classList.toggle("off", String(tile) !== same);
    }
    const range = tensor.shape.map((size, dim) => {
      const piece = size / tensor.tiles[dim];
      return tensor.tiles[dim] > 1 ? `${mine[dim] * piece}:${(mine[dim] + 1) * piece}` : ":";
    });
    const shard = tensor.shape.map((size, dim) => size / tensor.tiles[dim]);
    const pieces = tensor.tiles.reduce((product, tiles) => product * tiles, 1);
    document.getElementById("spec").textContent = `[${tensor.shape.join(", ")}]  ${tensor.spec}`;
    document.getElementById("holds").textContent =
      `Device ${id}${data.slices > 1 ? ` of slice ${slice}` : ""}${place ? ` (${place})` : ""} holds `
      + (pieces > 1 ? `[${range.join(", ")}], shape [${shard.join(", ")}]: 1/${pieces} of it. ` : "all of it. ")
      + (tensor.replicas > 1 ? `${tensor.replicas} devices hold this part.` : "No other device holds it.");
    drawTensor(tensor, mine);
  }
  choice.addEventListener("change", draw);
  for (const cell of cells)
    for (const kind of ["pointerenter", "click"])
      cell.addEventListener(kind, () => { selected = +cell.dataset.n; draw(); });
  draw();
}
"""
