"""The self-contained HTML page: inline style, embedded figures, nothing fetched from anywhere."""

from __future__ import annotations

import base64
from html import escape

from octavo_cli.train.config import BASELINE
from octavo_cli.train.report.results import SEED_SPREAD, Gap, Results

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --text: #1b1f24; --muted: #59636e; --line: #dde1e6;
  --accent: #0072b2; --good: #00694e; --bad: #a8350b; }
@media (prefers-color-scheme: dark) { :root { --page: #0e1013; --card: #15181d; --text: #e8eaed; --muted: #9aa4af;
  --line: #2b3138; --accent: #56b4e9; --good: #2bc49a; --bad: #f0883e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.25; margin: 0 0 .5rem; letter-spacing: -.01em; text-wrap: balance; }
h2 { font-size: 1.15rem; margin: 0 0 .75rem; }
p { margin: 0 0 .75rem; max-width: 46rem; }
p.lead { max-width: 52rem; color: var(--muted); font-size: 1.05rem; margin-bottom: 1.5rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1.25rem 1.5rem;
  margin: 0 0 1.25rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--muted); padding-bottom: .5rem; }
th, td { text-align: left; padding: .5rem 1rem .5rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { color: var(--muted); font-weight: 600; font-size: .875rem; white-space: nowrap; }
tbody tr:last-child > * { border-bottom: 0; }
tbody th { white-space: nowrap; }
td.n, th.n { text-align: right; white-space: nowrap; }
td.n:has(+ td:not(.n)), th.n:has(+ th:not(.n)) { padding-right: 1.75rem; }
.good { color: var(--good); } .bad { color: var(--bad); }
img { width: 100%; height: auto; display: block; border-radius: 6px; }
.narrow img { max-width: 44rem; }
figure { margin: 0; } figcaption { color: var(--muted); margin-top: .75rem; max-width: 46rem; }
code { font: .875em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
pre { background: var(--page); border: 1px solid var(--line); border-radius: 6px; padding: .75rem 1rem;
  overflow-x: auto; margin: 0 0 .75rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.5rem; margin: 0; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
"""

_LOAD_CAPTION = "A load-balancing loss keeps the experts busy; the dashed line is an even share."


def render_page(results: Results, command: str, loss: tuple[bytes, bytes], load: tuple[bytes, bytes]) -> str:
    """The page; each figure is its (light, dark) PNG."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Octavo: training experts in low precision</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<header>
<h1>Training experts in low precision</h1>
<p class="lead">{escape(_lead(results))}</p>
</header>
<section aria-labelledby="losses"><h2 id="losses">Held-out loss</h2>{_loss_table(results)}</section>
<section aria-labelledby="curves"><h2 id="curves">Curves</h2>
{_figure(loss, _curves_text(results), "Left, loss against optimizer steps; right, the gap to bf16 on held-out text.")}
</section>
<section aria-labelledby="bits"><h2 id="bits">Quantized bits</h2>{_bits(results)}</section>
<section aria-labelledby="load"><h2 id="load">Expert load</h2>
{_figure(load, _load_text(results), _LOAD_CAPTION, "wide" if results.config.layers > 1 else "narrow")}
</section>
<section aria-labelledby="run"><h2 id="run">This run</h2>
<pre><code>{escape(command)}</code></pre>
{_facts(results)}
</section>
</main>
</body>
</html>
"""


def _lead(results: Results) -> str:
    config = results.config
    seeds = f"{config.seeds} seeds" if config.seeds > 1 else f"seed {config.seed}"
    return (
        f"A small Mixture-of-Experts language model ({config.experts} experts, {config.top_k} a token, width "
        f"{config.width}) learned {results.text['source']} for {config.steps} steps, once for each recipe, in "
        f"{results.framework} on {results.device} ({seeds}). Every run saw the same bytes and began from the same "
        "parameters; only the number format of the expert layers differs."
    )


def _loss_table(results: Results) -> str:
    gaps = results.gaps
    rows = "".join(_loss_row(results, name, gaps.get(name)) for name in results.recipes)
    over = next(iter(gaps.values())).spread_over if gaps else ""
    if not gaps:
        note = ""
    elif "seeds" in over:
        note = f"<p>The spread is one standard deviation of the gap over {over}.</p>"
    else:
        note = (
            f"<p>The spread is one standard error of the gap over {over}. It says how well this text measures the gap "
            f"of this seed. Other seeds moved the gap by {SEED_SPREAD[0]} to {SEED_SPREAD[1]} % (one standard "
            "deviation over 3 paired seeds of 200 steps); <code>--seeds 3</code> measures that here.</p>"
        )
    return (
        '<div class="scroll"><table><caption>Cross entropy on text that no step saw, in nats per byte; lower is '
        f"better. Knowing byte frequencies alone gives {results.unigram_loss:.3f}.</caption>"
        '<thead><tr><th scope="col">recipe</th><th scope="col" class="n">held-out loss</th>'
        '<th scope="col" class="n">gap to bf16</th><th scope="col" class="n">spread</th>'
        f'<th scope="col" class="n">seconds</th></tr></thead><tbody>{rows}</tbody></table></div>{note}'
    )


def _loss_row(results: Results, name: str, gap: Gap | None) -> str:
    seconds = sum(run.seconds for run in results.of(name))
    percent = f"{gap.percent:+.2f} %" if gap else "baseline"
    spread = f"± {gap.spread:.2f} %" if gap else ""
    return (
        f'<tr><th scope="row">{escape(name)}</th><td class="n">{results.held_out(name):.4f}</td>'
        f'<td class="n">{percent}</td><td class="n">{spread}</td><td class="n">{seconds:.1f}</td></tr>'
    )


def _bits(results: Results) -> str:
    bits = results.bits
    others = " and ".join(bits.frameworks)
    rows = "".join(
        f'<tr><th scope="row">{escape(item.recipe)}</th>'
        f'<td class="{"" if item.skipped else "good" if item.agree else "bad"}">'
        f"{'not compared' if item.skipped else 'equal' if item.agree else 'different'}</td>"
        f"<td>{escape(item.sentence)}</td></tr>"
        for item in bits.recipes
    )
    alone = "" if len(bits.frameworks) > 1 else " The other framework is not installed here."
    return (
        f"<p>The trained expert weights of each recipe, quantized by {escape(others)} and by the definition in "
        f"<code>octavo_numerics</code>: payload and scales, byte for byte.{alone}</p>"
        '<div class="scroll"><table><thead><tr><th scope="col">recipe</th><th scope="col">bytes</th>'
        f'<th scope="col">detail</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _curves_text(results: Results) -> str:
    ends = ", ".join(f"{name} {results.held_out(name):.3f}" for name in results.recipes)
    return f"Training and held-out loss fall together for every recipe; final held-out loss: {ends} nats per byte."


def _load_text(results: Results) -> str:
    loads = [run.load for run in results.of(BASELINE)]
    low, high = 100 * min(load.min() for load in loads), 100 * max(load.max() for load in loads)
    return f"Share of routed rows of each expert; with bf16 between {low:.1f} and {high:.1f} per cent."


def _figure(images: tuple[bytes, bytes], alternative: str, caption: str, kind: str = "wide") -> str:
    light, dark = ("data:image/png;base64," + base64.b64encode(image).decode() for image in images)
    return (
        f'<figure class="{kind}"><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(alternative)}"></picture><figcaption>{escape(caption)}</figcaption></figure>'
    )


def _facts(results: Results) -> str:
    text, config = results.text, results.config
    facts = {
        "text": f"{text['source']}, {text['bytes']:,} bytes, sha256 {text['sha256'][:16]}",
        "model": f"{config.layers} layer(s), width {config.width}, hidden {config.hidden}, {config.experts} experts, "
        f"top {config.top_k}",
        "batch": f"{config.batch} sequences of {config.context} bytes",
        "versions": ", ".join(f"{name} {version}" for name, version in results.versions.items()),
        "time": f"{results.seconds:.0f} s in all",
        "recipes": ", ".join(f"{name} ({content['fingerprint']})" for name, content in results.recipes.items()),
    }
    items = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f"<p>The numbers behind this page are in <code>curves.json</code> in the same folder.</p><dl>{items}</dl>"
