
"use strict";
// Hover for values, drag to zoom along x, double click or Escape for all of it, keys hide and show a series.
for (const figure of document.querySelectorAll("figure.chart")) {
  const source = figure.querySelector("script");
  if (!source) continue;
  const data = JSON.parse(source.textContent);
  const find = (name) => figure.querySelector(name);
  const box = find(".box"), drawing = box.querySelector("svg"), cursor = find(".cursor"), tip = find(".tip");
  const reset = find(".reset"), below = find(".xticks");
  const hidden = new Set();
  let view = data.x.slice(), start = null, at = null;

  const text = (v) => (v === 0 ? "0" : Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3 ? v.toExponential(2) : String(+v.toPrecision(4)));
  const toX = (share) => view[0] + share * (view[1] - view[0]);
  const toShare = (x) => (x - view[0]) / (view[1] - view[0]);
  const shares = (event) => {
    const r = box.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - r.left) / r.width));
  };

  function ticks(low, high) {
    const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= rough * 0.999);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
    return data.whole ? found.filter((v) => Math.abs(v - Math.round(v)) < 1e-9) : found;
  }

  function show() {
    const all = data.x[1] - data.x[0];
    const left = (1000 * (view[0] - data.x[0])) / all, width = (1000 * (view[1] - view[0])) / all;
    drawing.setAttribute("viewBox", `${left} 0 ${width} 1000`);
    below.replaceChildren(...ticks(view[0], view[1]).map((v) => {
      const label = document.createElement("span");
      label.style.left = `${100 * toShare(v)}%`;
      label.textContent = text(v);
      return label;
    }));
    reset.hidden = view[0] === data.x[0] && view[1] === data.x[1];
    drawing.classList.toggle("zoomed", !reset.hidden);
  }

  function clear() { cursor.hidden = tip.hidden = true; at = null; }

  function point(x) {
    let nearest = null;
    data.series.forEach((series, number) => {
      if (hidden.has(number)) return;
      for (const [px] of series.points)
        if (px >= view[0] && px <= view[1] && (nearest === null || Math.abs(px - x) < Math.abs(nearest - x))) nearest = px;
    });
    if (nearest === null) return clear();
    at = nearest;
    const place = toShare(nearest);
    cursor.className = "cursor";
    cursor.style.left = `${100 * place}%`;
    cursor.style.width = "";
    const title = document.createElement("b");
    title.textContent = `${data.xLabel} ${text(nearest)}`;
    const lines = data.series.flatMap((series, number) => {
      if (hidden.has(number)) return [];
      const own = series.points.find((p) => p[0] === nearest);
      if (!own) return [];
      const line = document.createElement("div");
      line.textContent = `${series.name}  ${text(own[1])}`;
      return [line];
    });
    tip.replaceChildren(title, ...lines);
    tip.style.left = place < 0.5 ? `calc(${100 * place}% + 8px)` : "";
    tip.style.right = place < 0.5 ? "" : `calc(${100 * (1 - place)}% + 8px)`;
    cursor.hidden = tip.hidden = false;
  }

  box.addEventListener("pointermove", (event) => {
    if (start === null) return point(toX(shares(event)));
    const [a, b] = [start, shares(event)].sort((p, q) => p - q);
    tip.hidden = true;
    cursor.hidden = false;
    cursor.className = "cursor band";
    cursor.style.left = `${100 * a}%`;
    cursor.style.width = `${100 * (b - a)}%`;
  });
  box.addEventListener("pointerdown", (event) => { start = shares(event); });
  addEventListener("pointerup", (event) => {
    if (start === null) return;
    const [a, b] = [start, shares(event)].sort((p, q) => p - q);
    start = null;
    clear();
    if (b - a > 0.03) { view = [toX(a), toX(b)]; show(); }
  });
  box.addEventListener("pointerleave", () => { if (start === null) clear(); });
  const all = () => { view = data.x.slice(); clear(); show(); };
  box.addEventListener("dblclick", all);
  reset.addEventListener("click", all);
  box.addEventListener("keydown", (event) => {
    const places = [...new Set(data.series.flatMap((s, n) => (hidden.has(n) ? [] : s.points.map((p) => p[0]))))]
      .filter((x) => x >= view[0] && x <= view[1]).sort((p, q) => p - q);
    const here = at === null ? -1 : places.indexOf(at);
    if (event.key === "ArrowRight") point(places[Math.min(places.length - 1, here + 1)]);
    else if (event.key === "ArrowLeft") point(places[Math.max(0, here - 1)]);
    else if (event.key === "Escape") all();
    else return;
    event.preventDefault();
  });
  for (const key of figure.querySelectorAll(".keys [data-series]"))
    key.addEventListener("click", () => {
      const number = Number(key.dataset.series), on = hidden.has(number);
      if (on) hidden.delete(number); else hidden.add(number);
      key.setAttribute("aria-pressed", String(on));
      drawing.querySelector(`[data-series="${number}"]`)?.classList.toggle("off", !on);
      clear();
    });
}
addEventListener("beforeprint", () => { for (const part of document.querySelectorAll("details")) part.open = true; });
