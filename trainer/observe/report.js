const short = (v, p) =>
  p
    ? (100 * v).toFixed(1) + "%"
    : v === 0
      ? "0"
      : Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6
        ? v.toExponential(2)
        : Math.abs(v) >= 1000
          ? Math.round(v).toLocaleString("en")
          : String(+v.toPrecision(4));
for (const svg of document.querySelectorAll("svg[data-x0]")) {
  const d = svg.dataset,
    w = svg.viewBox.baseVal.width,
    h = svg.viewBox.baseVal.height,
    L = 50,
    R = 14,
    T = 10,
    B = 28;
  const at = +d.x0,
    to = +d.x1,
    log = d.log === "1",
    lo = log ? Math.log10(+d.y0) : +d.y0,
    hi = log ? Math.log10(+d.y1) : +d.y1;
  const step = (x) => at + ((x - L) / (w - L - R)) * (to - at),
    value = (y) => {
      const v = lo + ((h - B - y) / (h - T - B)) * (hi - lo);
      return log ? 10 ** v : v;
    };
  const lines = [...svg.querySelectorAll("g[data-name]")].map((g) => ({
    g,
    name: g.dataset.name,
    points: (g.querySelector(".raw") || g.querySelector(".main"))
      .getAttribute("d")
      .slice(1)
      .split("L")
      .map((p) => p.split(" ").map(Number)),
  }));
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  svg.parentNode.append(tip);
  const layer = document.createElementNS(svg.namespaceURI, "g");
  svg.append(layer);
  const make = (tag, attributes, parent) => {
    const e = document.createElementNS(svg.namespaceURI, tag);
    for (const k in attributes) e.setAttribute(k, attributes[k]);
    parent.append(e);
  };
  svg.addEventListener("pointermove", (e) => {
    const box = svg.getBoundingClientRect(),
      pad = parseFloat(getComputedStyle(svg).paddingTop);
    const scale = w / box.width,
      x = (e.clientX - box.left) * scale;
    const near = lines.map((l) => l.points.reduce((a, p) => (Math.abs(p[0] - x) < Math.abs(a[0] - x) ? p : a)));
    if (!near.length) return;
    const px = near.reduce((a, p) => (Math.abs(p[0] - x) < Math.abs(a[0] - x) ? p : a))[0];
    layer.replaceChildren();
    make("path", { class: "hair", d: `M${px} ${T}V${h - B}` }, layer);
    tip.replaceChildren();
    const row = (t) => {
      const r = document.createElement("div");
      r.textContent = t;
      tip.append(r);
    };
    row("step " + Math.round(step(px)).toLocaleString("en"));
    lines.forEach((l, i) => {
      if (Math.abs(near[i][0] - px) > (w - L - R) / 20) return;
      make("circle", { class: "spot " + l.g.classList[0], cx: near[i][0], cy: near[i][1], r: 4 }, layer);
      row((l.name ? l.name + "  " : "") + short(value(near[i][1]), d.percent === "1"));
    });
    tip.hidden = false;
    const left = svg.offsetLeft === undefined ? 18 : 0,
      figure = svg.parentNode.getBoundingClientRect();
    const tx = box.left - figure.left + px / scale,
      flip = tx > figure.width * 0.62;
    tip.style.left = flip ? "" : tx + 12 + "px";
    tip.style.right = flip ? figure.width - tx + 12 + "px" : "";
    tip.style.top = box.top - figure.top + pad + 8 + "px";
  });
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    layer.replaceChildren();
  });
}
const buttons = [...document.querySelectorAll(".filter button")];
for (const b of buttons)
  b.addEventListener("click", () => {
    buttons.forEach((o) => o.classList.toggle("on", o === b));
    for (const a of document.querySelectorAll("article"))
      a.hidden = b.dataset.verdict !== "" && a.dataset.verdict !== b.dataset.verdict;
  });
