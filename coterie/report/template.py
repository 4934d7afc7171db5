"""Template of the report page."""

# ruff: noqa: E501

#: The beginning of a page: the style of all pages. Its variables are ``title`` and ``theme``.
HEAD = r"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>
:root {
  color-scheme: light dark;
  --page: #f5f6f8; --line: #e1e5ea; --accent: #00629b;
  --good: #04664a; --good-back: #daf3e9; --bad: #8a4300; --bad-back: #fdebd6;
  {% for name, light, _ in theme %}--{{ name }}: {{ light }}; {% endfor %}
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #12161d; --line: #2d3542; --accent: #67b7e6;
    --good: #7fe0bc; --good-back: #12392d; --bad: #ffc387; --bad-back: #432a11;
    {% for name, _, dark in theme %}--{{ name }}: {{ dark }}; {% endfor %}
  }
}
@media print { :root { color-scheme: light; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
a { color: var(--accent); }
a:focus-visible, summary:focus-visible, .scroll:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }
h1, h2, h3, h4 { line-height: 1.2; margin: 0; text-wrap: balance; overflow-wrap: anywhere; break-after: avoid; break-inside: avoid; }
h1, .title { font-size: 2rem; letter-spacing: -.02em; }
.head { font-size: 1.15rem; margin: 2.25rem 0 .75rem; }
.sub { font-size: .95rem; margin: 1.4rem 0 .4rem; }
p { margin: .5rem 0; overflow-wrap: anywhere; }
.brand { color: var(--accent); font-weight: 700; font-size: .8rem; letter-spacing: .12em; text-transform: uppercase; margin: 0 0 .5rem; }
.dot { color: var(--muted); font-weight: 400; }
.summary { color: var(--muted); font-size: 1.05rem; margin: .5rem 0 1.5rem; }
.run { border-top: 1px solid var(--line); margin-top: 3.5rem; padding-top: 2.5rem; }
.notice { background: var(--bad-back); color: var(--bad); border-radius: 10px; padding: .7rem 1rem; margin: 1rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(175px, 1fr)); gap: .8rem; margin: .8rem 0; }
.four { grid-template-columns: repeat(4, 1fr); }
.tile, .card, figure { background: var(--card); border: 1px solid var(--line); border-radius: 14px; }
.tile { padding: 1rem 1.1rem; overflow-wrap: anywhere; }
.question { color: var(--accent); font-size: .8rem; font-weight: 700; margin-bottom: .3rem; }
.label { color: var(--muted); font-size: .85rem; font-weight: 600; }
.value { font-size: 1.9rem; font-weight: 700; line-height: 1.25; letter-spacing: -.02em; font-variant-numeric: tabular-nums; }
.value.long { font-size: 1.5rem; line-height: 1.6; }
.note { color: var(--muted); font-size: .85rem; line-height: 1.4; margin-top: .25rem; }
.badge { display: inline-block; border-radius: 99px; padding: .08rem .6rem; font-size: .8rem; font-weight: 700; }
.part { margin-top: 2.25rem; }
.part + .part { border-top: 1px solid var(--line); padding-top: 1.6rem; }
.kind { font-weight: 700; font-size: .95rem; margin: 0 0 .9rem; padding-left: .7rem; border-left: 4px solid; break-after: avoid; }
.kind + .head, .kind + .notice + .head { margin-top: 1.2rem; }
.kind.good { color: var(--good); }
.kind.bad { color: var(--bad); }
.badge.good { color: var(--good); background: var(--good-back); }
.badge.bad { color: var(--bad); background: var(--bad-back); }
.card { padding: 1.2rem 1.4rem; overflow-wrap: anywhere; }
.lead { font-size: 1.08rem; font-weight: 600; margin-top: .7rem; }
.card ul { margin: .3rem 0; padding-left: 1.2rem; }
figure { margin: 0; padding: 1rem 1.1rem .3rem; }
figure + figure, .card + figure, .card + .card { margin-top: .8rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 1rem; }
.panels.many { grid-template-columns: repeat(auto-fill, minmax(min(100%, 290px), 1fr)); }
.panel { max-width: 540px; break-inside: avoid; }
.panel-head { font-size: .88rem; font-weight: 600; margin: 0 0 .3rem; }
.panel svg { display: block; width: 100%; height: auto; stroke-linejoin: round; }
.panel svg text { font-family: system-ui, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif !important; }
figcaption { color: var(--muted); font-size: .88rem; padding: .7rem 0 .5rem; }
summary { cursor: pointer; font-size: .88rem; font-weight: 600; color: var(--accent); padding: .3rem 0; }
.data { border-top: 1px solid var(--line); padding: .2rem 0; font-size: .88rem; }
.scroll { overflow: auto; max-height: 26rem; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); gap: 0 2.5rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .4rem .75rem .4rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child > * { border-bottom: 0; }
tr > :last-child { padding-right: 0; }
thead th { color: var(--muted); font-size: .82rem; vertical-align: bottom; overflow-wrap: normal; }
.pairs th { font-weight: 400; color: var(--muted); overflow-wrap: normal; }
.numbers td, .numbers th + th, .number { text-align: right; overflow-wrap: normal; }
.heat td { padding-right: .5rem; background: color-mix(in srgb, var(--accent) calc(.45 * var(--share)), transparent); }
.stack { overflow-wrap: break-word; }
.stack [data-head="run"] { overflow-wrap: anywhere; min-width: 5rem; }
.stack .badge { white-space: nowrap; }
.swatch { border-left: .5em solid; border-radius: 3px; padding-left: .4em; }
.swatch span { color: var(--ink); font-weight: 700; }
.flow dl { margin: .6rem 0 0; columns: 3 240px; column-gap: 2.5rem; font-size: .88rem; }
.flow dl div { display: flex; justify-content: space-between; gap: 1rem; padding: .28rem 0; border-bottom: 1px solid var(--line); break-inside: avoid; }
dt { color: var(--muted); overflow-wrap: normal; }
dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; }
pre { margin: .6rem 0; font-size: .88rem; white-space: pre-wrap; }
code { font-size: .92em; }
.words li { font-size: .88rem; }
footer { color: var(--muted); font-size: .85rem; margin-top: 3rem; }
@media screen and (max-width: 960px) {
  .four { grid-template-columns: 1fr 1fr; }
  .stack thead { display: none; }
  .stack tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line); }
  .stack td { display: flex; justify-content: space-between; gap: 1rem; padding: .15rem 0; border: 0; text-align: right; }
  .stack td::before { content: attr(data-head); color: var(--muted); text-align: left; }
}
@media screen and (max-width: 640px) {
  .sentences td { display: block; text-align: left; }
  .sentences td::before { display: block; }
  .flow dl div { flex-wrap: wrap; gap: 0 1rem; }
  .flow dd { margin-left: auto; overflow-wrap: break-word; }
  main { padding: 1.5rem 1rem 3rem; }
  .card, figure { padding-left: .9rem; padding-right: .9rem; }
  .tiles { grid-template-columns: 1fr 1fr; gap: .6rem; }
  .tile { padding: .75rem .8rem; }
  .value { font-size: 1.4rem; }
  .label, .note, .badge { font-size: .78rem; }
  .heat, .heat th { font-size: .66rem; }
  .heat th, .heat td { padding: .4rem .12rem .4rem 0; }
  .heat .spare { position: absolute; clip-path: inset(50%); }
  .value.long { font-size: 1.05rem; }
}
@media print {
  body { background: none; font-size: 13px; }
  main { max-width: none; padding: 0; }
  .tile, .panel, .card, tr, .notice { break-inside: avoid; }
  .four { grid-template-columns: 1fr 1fr; }
  .brand, .summary { break-after: avoid; }
  .run { break-before: page; border: 0; margin: 0; padding: 0; }
  .panels { display: block; orphans: 1; widows: 1; }
  .scroll { overflow: visible; max-height: none; }
  .stack { font-size: .78rem; }
  .stack th, .stack td { padding-right: .4rem; }
  .panel { display: inline-block; width: 48%; vertical-align: top; }
  figcaption { break-before: avoid; }
  .data { display: none; }
  details.flow::details-content { content-visibility: visible; block-size: auto; }
}
</style>
</head>
"""

_MACROS = r"""{% macro badge(text, good) %}
<span class="badge {{ 'good' if good else 'bad' }}"><span aria-hidden="true">{{ '✓' if good else '!' }}</span> {{ text }}</span>
{%- endmacro %}

{% macro table(rows) %}
<table class="pairs">
  {% for key, value in rows %}
  <tr><th scope="row">{{ key }}</th><td>{{ value }}</td></tr>
  {% endfor %}
</table>
{% endmacro %}

{% macro tiles(shown, four) %}
<div class="tiles{{ ' four' if four }}">
  {% for tile in shown %}
  <div class="tile">
    {% if tile.question %}<div class="question">{{ tile.question }}</div>{% endif %}
    <div class="label">{{ tile.label }}</div>
    <div class="value{{ ' long' if tile.value | length > 10 }}">{{ tile.value }}</div>
    {% if tile.badge %}{{ badge(tile.badge, tile.good) }}{% endif %}
    {% if tile.note %}<div class="note">{{ tile.note }}</div>{% endif %}
  </div>
  {% endfor %}
</div>
{% endmacro %}

{% macro scroll(label) %}
<div class="scroll" tabindex="0" role="region" aria-label="{{ label }}">
{{ caller() }}
</div>
{% endmacro %}

{% macro download(data) %}<a download="{{ data.name }}.csv" href="{{ data.uri }}">Download {{ data.name }}.csv</a>{% endmacro %}

{% macro graphic(each, name) %}
<figure>
  <div class="panels{{ ' many' if each.panels | length > 2 }}">
  {% for heading, svg in each.svgs(name) %}
  <div class="panel">{% if heading %}<p class="panel-head">{{ heading }}</p>{% endif %}{{ svg | safe }}</div>
  {% endfor %}
  </div>
  <figcaption>{{ each.caption }}</figcaption>
  <details class="data">
    <summary>Data of this figure</summary>
    <p>{{ download(each.data) }}{% if each.data.hidden %}, which has {{ each.data.hidden }} more rows{% endif %}</p>
    {% call scroll('Data: ' ~ each.title ~ ' (' ~ name ~ ')') %}
    <table class="numbers">
      <thead><tr>{% for head in each.data.heads %}<th scope="col">{{ head }}</th>{% endfor %}</tr></thead>
      <tbody>{% for row in each.data.shown %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</tbody>
    </table>
    {% endcall %}
  </details>
</figure>
{% endmacro %}

{% macro accuracy(section, h) %}
<h{{ h }} class="head">{{ fmt.capitalised(section.run.score_name) }}</h{{ h }}>
{% if section.accuracy %}
{{ graphic(section.accuracy, section.anchor ~ '-accuracy') }}
{% else %}
<p>No round was evaluated, so no {{ section.run.score_name }} is available.</p>
{% endif %}
{% endmacro %}

{% macro clusters(section, h) %}
{% set run = section.run %}
{% if run.clustered %}
<h{{ h }} class="head">Clusters</h{{ h }}>
{% if section.clusters %}
{{ graphic(section.clusters, section.anchor ~ '-clusters') }}
{% else %}
<p>This run released no cluster sizes.</p>
{% endif %}
{% if fmt.mixture(run.notes) %}
<p>{{ fmt.mixture(run.notes) }}.</p>
{% endif %}
{% endif %}
{% endmacro %}

{% macro site_table(section, rows) %}
<table class="sites">
  <thead><tr><th scope="col">site</th>{% if section.clustered %}<th scope="col">cluster</th>{% endif %}{% if section.scored %}<th scope="col" class="number">{{ section.run.score_name }}</th>{% endif %}{% if section.personal %}<th scope="col" class="number">personalised</th>{% endif %}</tr></thead>
  <tbody>
  {% for site in rows %}
  <tr><th scope="row">{{ site.label }}</th>
    {%- if section.clustered %}<td>{{ fmt.MISSING if site.cluster is none else site.cluster }}</td>{% endif %}
    {%- if section.scored %}<td class="number">{{ fmt.percent(site.accuracy) }}</td>{% endif %}
    {%- if section.personal %}<td class="number">{{ fmt.percent(site.personal) }}</td>{% endif %}</tr>
  {% endfor %}
  </tbody>
</table>
{% endmacro %}

{% macro sites(section, h) %}
{% if section.sites %}
<h{{ h }} class="head">Sites</h{{ h }}>
<div class="card">
<p>{{ section.site_sentence }}</p>
{{ site_table(section, section.worst) }}
{% if section.sites | length > section.worst | length %}
<details class="data">
  <summary>All {{ section.sites | length }} sites</summary>
  {% call scroll('All sites of ' ~ section.anchor) %}
  {{ site_table(section, section.sites) }}
  {% endcall %}
</details>
{% endif %}
<p>{{ download(section.site_data) }}</p>
</div>
{% endif %}
{% endmacro %}

{% macro confusion(section, h) %}
{% set run = section.run %}
{% set heat = run.clusters_records %}
{% if run.scores.confusion %}
<h{{ h + 1 }} class="sub">Confusion matrix: {{ 'records by cluster and class, shaded by the share of the class' if heat else 'clients by cluster and hidden group, at the end of the run' }}</h{{ h + 1 }}>
<div class="card">
{% call scroll('Confusion matrix of ' ~ section.anchor) %}
<table class="numbers{{ ' heat' if heat }}">
  <thead><tr><th scope="col">cluster</th>{% for _ in run.scores.confusion[0] %}<th scope="col">{% if heat %}<span class="spare">class</span>{% else %}group{% endif %} {{ loop.index0 }}</th>{% endfor %}</tr></thead>
  <tbody>
  {% for cluster, cells in records.confusion_rows(run) %}
  <tr><th scope="row">{{ cluster }}</th>
    {%- for count, share in cells %}<td{% if heat %} style="--share: {{ share }}%"{% endif %}>{% if not heat and count and count == cells | map('first') | max %}<strong>{{ count }}</strong>{% else %}{{ count }}{% endif %}</td>{% endfor %}</tr>
  {% endfor %}
  </tbody>
</table>
{% endcall %}
</div>
{% endif %}
{% endmacro %}

{% macro record_clusters(section, h) %}
<h{{ h }} class="head">Clusters of records</h{{ h }}>
{% for sentence in records.describe_scores(section.run) %}
<p>{{ sentence }}</p>
{% else %}
<p>No scores are available, because labels stay with the clients.</p>
{% endfor %}
{% for sentence in records.describe_points(section.run) %}
<p>{{ sentence }}</p>
{% endfor %}
{% endmacro %}

{% macro missing(left_out, remarks) %}
{% for run, reason in left_out %}
<p class="notice"><strong>Left out:</strong> {{ run }}: {{ reason }}</p>
{% endfor %}
{% for run, remark in remarks %}
<p class="note">{{ run }}: {{ remark }}.</p>
{% endfor %}
{% endmacro %}

{% macro privacy(section, h) %}
{% set run = section.run %}
<h{{ h }} class="head">Privacy</h{{ h }}>
<div class="card">
  {{ badge(section.status, run.certified) }}
  {% for paragraph in section.guarantee %}
  <p{% if loop.first %} class="lead"{% endif %}>{{ paragraph }}</p>
  {% endfor %}
  {% if run.certificate.get('reasons') and run.finished and not run.certified %}
  <h{{ h + 1 }} class="sub">Why this run is not certified</h{{ h + 1 }}>
  <ul>{% for reason in run.certificate.reasons %}<li>{{ reason }}</li>{% endfor %}</ul>
  {% endif %}
  {% if run.certificate.get('covers') and run.unit != 'none' %}
  <h{{ h + 1 }} class="sub">Covered by the guarantee</h{{ h + 1 }}>
  <ul>{% for item in run.certificate.covers %}<li>{{ item }}</li>{% endfor %}</ul>
  {% endif %}
  {% if run.certificate.get('outside') and run.unit != 'none' %}
  <h{{ h + 1 }} class="sub">Outside the guarantee</h{{ h + 1 }}>
  <ul>{% for item in run.certificate.outside %}<li>{{ item }}</li>{% endfor %}</ul>
  {% endif %}
  {% if section.facts and run.unit != 'none' %}
  <div class="columns">
    <div>
      <h{{ h + 1 }} class="sub">Mechanism</h{{ h + 1 }}>{{ table(section.facts) }}
      {% if section.tuned %}<h{{ h + 1 }} class="sub">Tuned outside the guarantee</h{{ h + 1 }}>{{ table(section.tuned) }}{% endif %}
    </div>
    {% if section.public_inputs %}
    <div><h{{ h + 1 }} class="sub">Public inputs, not protected</h{{ h + 1 }}>{{ table(section.public_inputs) }}</div>
    {% endif %}
  </div>
  {% endif %}
</div>
{% if section.privacy %}{{ graphic(section.privacy, section.anchor ~ '-epsilon') }}{% endif %}
{% endmacro %}

{% macro facts(values) %}
<dl>{% for key, value in values.items() %}<div><dt>{{ key }}</dt><dd>{{ fmt.setting(value) }}</dd></div>{% endfor %}</dl>
{% endmacro %}

{% macro body(section, h) %}
{% set run = section.run %}
{{ tiles(section.glance, true) }}
{% if not run.finished %}
<p class="notice"><strong>This run is unfinished:</strong> {{ run.rounds | length }}
  {%- if run.config.rounds is defined %} of {{ run.config.rounds }}{% endif %} rounds. The report shows its current state.</p>
{% endif %}
{% if run.unreadable_lines %}
<p class="notice">{{ run.unreadable_lines }} unreadable line{{ 's' if run.unreadable_lines > 1 }} of metrics.jsonl or diagnostics.jsonl
  {{- ' were' if run.unreadable_lines > 1 else ' was' }} skipped.</p>
{% endif %}
{% if run.exact %}
<section class="part">
<p class="kind bad">Exact diagnostics: outside the guarantee</p>
<p class="notice">These values are computed without noise and are not covered by ε: do not publish them with the models.</p>
{{ record_clusters(section, h) if run.clusters_records else accuracy(section, h) }}
{{ sites(section, h) if section.scored }}
{{ tiles(section.details, false) }}
{{ confusion(section, h) }}
</section>
<section class="part">
<p class="kind good">Released and charged</p>
{{ '' if run.clusters_records else clusters(section, h) }}
{{ sites(section, h) if not section.scored }}
{{ privacy(section, h) }}
</section>
{% else %}
{{ record_clusters(section, h) if run.clusters_records else accuracy(section, h) }}
{{ sites(section, h) }}
{{ '' if run.clusters_records else clusters(section, h) }}
{{ tiles(section.details, false) }}
{{ confusion(section, h) }}
{{ privacy(section, h) }}
{% endif %}

{% if section.traffic %}
<h{{ h }} class="head">Communication</h{{ h }}>
<div class="card">
<table class="numbers">
  <thead><tr><th scope="col">direction</th><th scope="col">messages</th><th scope="col">bytes</th></tr></thead>
  <tbody>
  {% for direction, messages, bytes in section.traffic %}
  <tr><th scope="row">{{ direction }}</th><td>{{ messages }}</td><td>{{ bytes }}</td></tr>
  {% endfor %}
  </tbody>
</table>
</div>
{% endif %}

<h{{ h }} class="head">Configuration</h{{ h }}>
<details class="card flow">
  <summary>{{ section.settings | length }} settings that this run uses; config.toml has all</summary>
  {{ facts(section.settings) }}
</details>
{% if run.versions or run.machine %}
<details class="card flow">
  <summary>Versions and machine</summary>
  {{ facts(dict(run.versions, **run.machine)) }}
</details>
{% endif %}
{% endmacro %}
"""

_BODY = r"""<body>
<main>
<header>
  <p class="brand">Coterie run report</p>
{% if sections | length == 1 %}
  <h1>{{ sections[0].run.strategy }} <span class="dot">·</span> {{ sections[0].run.dataset }}</h1>
  <p class="summary">{{ sections[0].summary }}</p>
</header>
{{ missing(left_out if sections[0].run.finished else left_out[1:], []) }}
{{ body(sections[0], 2) }}
{% else %}
  <h1>{{ title }}</h1>
  <p class="summary">Mean ± sample standard deviation over runs that are equal but for the seed.</p>
</header>
<h2 class="head">Comparison</h2>
<div class="card">
<table class="stack">
  <thead><tr>{% for head in heads %}<th scope="col"{% if loop.index > settings + 1 %} class="number"{% endif %}>{{ head or 'row' }}</th>{% endfor %}</tr></thead>
  <tbody>
  {% for row in rows %}
  {% set colour = loop.index0 % 6 %}
  <tr>{% for cell in row %}<td data-head="{{ heads[loop.index0] or 'row' }}"{% if loop.index > settings + 1 %} class="number"{% endif %}>
    {%- if loop.first %}<span class="swatch" style="color: var(--group-{{ colour }})"><span>{{ cell }}</span></span>{% else %}{{ cell }}{% endif %}</td>{% endfor %}</tr>
  {% endfor %}
  </tbody>
</table>
{% if outside %}<p class="note">{{ outside }}.</p>{% endif %}
</div>
{{ missing(left_out, remarks) }}
{% if curves %}
<h2 class="head">{{ fmt.capitalised(score) }} by round</h2>
{{ graphic(curves, 'comparison') }}
{% elif not clusters_records %}
<p>No run was evaluated, so no accuracy is available.</p>
{% endif %}
<h2 class="head">Runs</h2>
<div class="card">
<table class="stack">
  <thead><tr>
    <th scope="col">row</th><th scope="col">run</th><th scope="col">strategy</th><th scope="col">dataset</th><th scope="col">seed</th>
    <th scope="col" class="number">{{ score }}</th><th scope="col" class="number">ε</th><th scope="col" class="number">δ</th>
    <th scope="col">certified</th><th scope="col" class="number">rounds</th><th scope="col" class="number">training</th>
  </tr></thead>
  <tbody>
  {% for section in sections %}
  {% set run = section.run %}
  {% set outcome = run.outcome %}
  <tr>
    <td data-head="row">{{ row_of[run.path] + 1 if run.path in row_of else fmt.MISSING }}</td>
    <td data-head="run"><a href="#{{ section.anchor }}">{{ run.name }}</a></td>
    <td data-head="strategy">{{ run.strategy }}</td>
    <td data-head="dataset">{{ run.dataset }}</td>
    <td data-head="seed">{{ run.config.get('seed', 'auto') }}</td>
    <td data-head="{{ score }}" class="number"><span><strong>{{ fmt.percent(run.scores.accuracy) }}</strong>{{ ' (noisy)' if run.noisy else '*' if run.exact }}</span></td>
    <td data-head="ε" class="number">{{ fmt.epsilon(run.epsilon) }}</td>
    <td data-head="δ" class="number">{{ fmt.number(run.delta) if run.unit != 'none' else fmt.MISSING }}</td>
    <td data-head="certified">{{ badge('yes', true) if run.certified else badge('no', false) if run.finished else badge('unfinished', false) }}</td>
    <td data-head="rounds" class="number">{{ fmt.number(outcome.rounds) }}</td>
    <td data-head="training" class="number">{{ fmt.duration(outcome.seconds_training) }}</td>
  </tr>
  {% endfor %}
  </tbody>
</table>
</div>
{% for section in sections %}
<section class="run" id="{{ section.anchor }}">
  <p class="brand">Run {{ loop.index }}: {{ section.run.name }}</p>
  <h2 class="title">{{ section.run.strategy }} <span class="dot">·</span> {{ section.run.dataset }}</h2>
  <p class="summary">{{ section.summary }}</p>
{{ body(section, 3) }}
</section>
{% endfor %}
{% endif %}
<footer>Hidden groups and held-out data of all clients are available in experiments only. The section Privacy lists what ε covers.</footer>
</main>
</body>
</html>
"""

#: The report of one or several runs.
PAGE = _MACROS + HEAD + _BODY
