const rgb = (c) => { const d = document.createElement("i"); d.style.color = c; document.body.append(d);
  const v = getComputedStyle(d).color.match(/[\d.]+/g).map(Number); d.remove(); return v; };
const light = (c) => rgb(c).slice(0, 3).map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
const card = "var(--card)";
return {text: ["--text", "--muted", "--good", "--bad", "--accent"].map((n) => ratio(`var(${n})`, card)),
  lines: [0, 1, 2, 3, 4, 5, 6].map((n) => ratio(`var(--s${n})`, card)), dark: light(card) < 0.1};
