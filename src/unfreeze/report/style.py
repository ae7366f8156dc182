"""The style sheet of report.html: system fonts, two papers (light and dark), one column on a phone. Colours are named here and only here.

--ink text, --muted labels, --line hairlines and grids, --accent the measured line, --second evaluations and what to look at, --bad what went wrong,
--hue-0 to --hue-5 the lines of a picture with several. Contrast on paper: ink ≥ 14 : 1, muted ≥ 5.5 : 1, all others ≥ 4.5 : 1 in both.
"""

CSS = """
:root { color-scheme: light dark;
  --paper: #fcfcfa; --panel: #f4f4f0; --ink: #1b1d21; --muted: #5f636b; --line: #e2e2dc;
  --accent: #1d6cab; --second: #b4541a; --bad: #b3261e; --good: #23703f;
  --hue-0: #1d6cab; --hue-1: #b4541a; --hue-2: #23703f; --hue-3: #8a3fa0; --hue-4: #7a5a00; --hue-5: #00707a; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #15171a; --panel: #1c1f23; --ink: #e8e8e4; --muted: #9da1a8; --line: #2d3136;
  --accent: #6fb3ea; --second: #e9955c; --bad: #f28b82; --good: #7cc695;
  --hue-0: #6fb3ea; --hue-1: #e9955c; --hue-2: #7cc695; --hue-3: #cf9be0; --hue-4: #d9bb55; --hue-5: #5cc8d0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 56px 24px 96px; }
h1 { font-size: 34px; line-height: 1.15; letter-spacing: -0.02em; font-weight: 650; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 20px; line-height: 1.3; letter-spacing: -0.01em; font-weight: 620; margin: 64px 0 6px; }
p { margin: 0 0 12px; max-width: 72ch; }
.note, figcaption span, .when { color: var(--muted); }
.note { font-size: 15px; margin-bottom: 20px; overflow-wrap: anywhere; }
.verdict { font-size: 21px; line-height: 1.4; margin: 14px 0 0; max-width: 62ch;
  text-wrap: balance; overflow-wrap: anywhere; }
header .bad { margin: 10px 0 0; overflow-wrap: anywhere; }
.source { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 2px 14px; margin: 14px 0 0; font-size: 15px; }
.source dt { color: var(--muted); } .source dd { margin: 0; overflow-wrap: anywhere; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(190px, 44%), 1fr)); gap: 0 28px; margin: 16px 0 0; padding: 0; }
.facts div { border-top: 1px solid var(--line); padding: 14px 0 18px; }
.facts dt { font-size: 13px; color: var(--muted); }
.facts dd { margin: 2px 0 0; font-size: 19px; font-weight: 600; font-variant-numeric: tabular-nums; }
.small.facts { grid-template-columns: repeat(auto-fill, minmax(min(150px, 44%), 1fr)); }
.small.facts div { padding: 8px 0 10px; } .small.facts dd { font-size: 15px; }
.strip { display: flex; flex-wrap: wrap; gap: 6px 22px; list-style: none; margin: 0 0 18px; padding: 0; font-size: 14px; }
.strip i { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 8px; background: var(--good); }
.strip .look { color: var(--second); font-weight: 600; } .strip .look i { background: var(--second); }
.strip .fault { color: var(--bad); font-weight: 600; } .strip .fault i { background: var(--bad); border-radius: 0; }
.row { display: grid; gap: 0 28px; grid-template-columns: repeat(auto-fit, minmax(min(240px, 100%), 1fr));
  margin-top: 0; }
figure { margin: 0; min-width: 0; }
.row.three { grid-template-columns: repeat(auto-fill, minmax(min(300px, 100%), 1fr)); }
.aligned figure { display: grid; grid-template-rows: subgrid; grid-row: span 2; gap: 0; }
figcaption { font-size: 14px; line-height: 1.45; margin-bottom: 10px; padding-top: 24px; }
figcaption strong { display: block; font-size: 15px; font-weight: 600; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums; }
.narrow { display: none; }
input[type=radio] { accent-color: var(--accent); margin: 0 6px 10px 0; vertical-align: middle; }
label { font-size: 14px; margin-right: 20px; cursor: pointer; vertical-align: 4px; }
#even:checked ~ .log, #log:checked ~ .even { display: none; }
svg[data-axes] { touch-action: pan-y; } svg[data-axes]:focus-visible { outline: 2px solid var(--accent); outline-offset: 4px; }
svg .at { visibility: hidden; stroke: var(--muted); stroke-width: 1; fill: var(--ink); } svg.told .at { visibility: visible; }
output { display: block; min-height: 1.45em; font-variant-numeric: tabular-nums; }
button { font: inherit; font-size: 14px; margin-top: 8px; padding: 3px 12px; color: var(--accent); background: none; cursor: pointer;
  border: 1px solid var(--line); border-radius: 6px; }
.scale { display: flex; flex-wrap: wrap; align-items: center; gap: 6px 10px; font-size: 13px; color: var(--muted); margin: 0 0 12px; }
.scale i { display: inline-block; width: 120px; height: 12px; border-radius: 2px; border: 1px solid var(--line);
  background: linear-gradient(to right, rgb(63 143 208 / 0), rgb(63 143 208)); }
.scale span { white-space: nowrap; } .scale i.dead { width: 12px; background: rgb(208 73 63); margin: 0 10px; vertical-align: middle; }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; color: var(--muted); margin: 0 0 12px; max-width: none; }
.key span { overflow-wrap: anywhere; min-width: 0; }
.key i { display: inline-block; width: 22px; border-top: 3px solid; vertical-align: middle; margin-right: 7px; }
.key i.dashed { border-top-style: dashed; }
.hue-0 { color: var(--hue-0); } .hue-1 { color: var(--hue-1); } .hue-2 { color: var(--hue-2); }
.hue-3 { color: var(--hue-3); } .hue-4 { color: var(--hue-4); } .hue-5 { color: var(--hue-5); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; line-height: 1.4; font-variant-numeric: tabular-nums; }
.scroll > table { min-width: min(100%, 640px); }
th, td { text-align: right; padding: 7px 0 7px 24px; border-bottom: 1px solid var(--line); white-space: nowrap; vertical-align: top; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { font-weight: 500; color: var(--muted); } tbody th { font-weight: 500; }
tr.bad th, tr.bad td, .bad { color: var(--bad); } tr.look th, tr.look td { color: var(--second); }
table.words td, table.words th { text-align: left; } table.words td { white-space: normal; overflow-wrap: anywhere; min-width: 12ch; }
.sample { border-top: 1px solid var(--line); padding: 18px 0 20px; }
.sample h3 { font-size: 16px; font-weight: 600; margin: 0 0 10px; overflow-wrap: anywhere; white-space: pre-wrap; }
.pair { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 12px 40px; }
.pair div { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 2px solid var(--line); padding-left: 14px; }
.pair div.after { border-color: var(--accent); }
.when { display: block; font-size: 13px; }
details { margin-top: 20px; } summary { cursor: pointer; color: var(--accent); font-size: 15px; }
details > :not(summary) { margin-top: 14px; }
pre { font: 13px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  background: var(--panel); padding: 14px 16px;
  border-radius: 6px; overflow-x: auto; margin: 0; }
pre.command { white-space: pre-wrap; overflow-wrap: anywhere; }
footer { margin-top: 72px; padding-top: 16px; border-top: 1px solid var(--line);
  font-size: 13px; color: var(--muted); overflow-wrap: anywhere; }
@media (max-width: 760px) {
  main { padding: 32px 20px 64px; } h1 { font-size: 27px; } h2 { margin-top: 48px; }
  .facts { grid-template-columns: repeat(2, minmax(0, 1fr)); } .facts dd { font-size: 17px; }
  .pair { grid-template-columns: minmax(0, 1fr); } .wide { display: none; } .narrow { display: block; }
  th, td { padding-left: 16px; }
  .stack, .stack tbody, .stack tr, .stack th, .stack td { display: block; } .stack thead { display: none; }
  .stack tr { padding: 10px 0; border-bottom: 1px solid var(--line); } .stack th, .stack td { border: 0; padding: 2px 0; }
  .stack th { font-weight: 600; } .stack td { display: inline-block; margin-right: 14px; text-align: left; white-space: normal; }
  .stack td::before { content: attr(data-head) " "; color: var(--muted); } }
@media print { main { padding: 0; max-width: none; } }
"""
