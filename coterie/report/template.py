"""Template of the report page; a Python module, because Flower app bundles include no template files."""

# ruff: noqa: E501

PAGE = r"""{% macro badge(text, good) %}
<span class="badge {{ 'good' if good else 'bad' }}"><span aria-hidden="true">{{ '✓' if good else '!' }}</span> {{ text }}</span>
{%- endmacro %}

{% macro table(rows) %}
<table class="pairs">
  {% for key, value in rows %}
  <tr><th scope="row">{{ key }}</th><td>{{ value }}</td></tr>
  {% endfor %}
</table>
{% endmacro %}

{% macro tiles(shown, by_four) %}
<div class="tiles{{ ' by-four' if by_four }}">
  {% for tile in shown %}
  <div class="tile">
    <div class="label">{{ tile.label }}</div>
    <div class="value">{{ tile.value }}</div>
    {% if tile.badge %}{{ badge(tile.badge, tile.good) }}{% endif %}
    {% if tile.note %}<div class="note">{{ tile.note }}</div>{% endif %}
  </div>
  {% endfor %}
</div>
{% endmacro %}

{% macro accuracy(section) %}
{% set run = section.run %}
<h3>Accuracy</h3>
{% if section.accuracy %}
<figure>
  <div class="canvas">{{ section.accuracy }}</div>
  <figcaption>Held-out accuracy: {{ 'the private noisy mean over all clients.' if run.noisy else 'the mean over clients (bold) and per hidden group.' }}
  {%- if run.accounted %} Lower panel: cumulative privacy loss ε.
  {%- else %} The privacy loss is infinite (ε = ∞) and not plotted.{% endif %}</figcaption>
</figure>
{% else %}
<p>No round was evaluated, so no accuracy is available.</p>
{% endif %}
{% endmacro %}

{% macro clusters(section) %}
{% set run = section.run %}
<h3>Clusters</h3>
{% if section.clusters %}
<figure>
  <div class="canvas">{{ section.clusters }}</div>
  <figcaption>Released noisy size of each cluster in each round's cohort (dots; can be negative because of noise) and its mean over the last ten
  rounds (lines).
  {%- if section.reseeded %} An arrow marks a re-seeding, from the copied model to the model that its perturbed copy replaced.
  {%- endif %}</figcaption>
</figure>
{% else %}
<p>This run released no cluster sizes.</p>
{% endif %}
{% if fmt.mixture(run.outcome.get("notes")) %}
<p>{{ fmt.mixture(run.outcome.get("notes")) }}.</p>
{% endif %}
{% endmacro %}

{% macro confusion(run) %}
{% if run.outcome.confusion and not run.clusters_records %}
<h4>Confusion matrix: clients by cluster and hidden group, at the end of the run</h4>
<div class="card wide">
<table>
  <thead><tr><th>cluster</th>{% for _ in run.outcome.confusion[0] %}<th class="number">group {{ loop.index0 }}</th>{% endfor %}</tr></thead>
  <tbody>
  {% for row in run.outcome.confusion %}
  {% set cluster = loop.index0 %}
  <tr><th scope="row">{{ cluster }}</th>
    {%- for count in row %}<td class="number">{% if count and count == row | max %}<strong>{{ count }}</strong>{% else %}{{ count }}{% endif %}</td>{% endfor %}</tr>
  {% endfor %}
  </tbody>
</table>
</div>
{% endif %}
{% if run.outcome.confusion and run.clusters_records %}
<h4>Confusion matrix: records by cluster and class, shaded by the share of the class</h4>
<div class="card wide">
<table class="heat">
  <thead><tr><th>cluster</th>{% for _ in run.outcome.confusion[0] %}<th class="number">class {{ loop.index0 }}</th>{% endfor %}</tr></thead>
  <tbody>
  {% for cluster, cells in records.confusion_rows(run) %}
  <tr><th scope="row">{{ cluster }}</th>
    {%- for count, share in cells %}<td class="number" style="--share: {{ share }}%">{{ count }}</td>{% endfor %}</tr>
  {% endfor %}
  </tbody>
</table>
</div>
{% endif %}
{% endmacro %}

{% macro scored(run) %}
{% for sentence in records.describe_scores(run) %}
<p>{{ sentence }}</p>
{% else %}
<p>No scores are available, because labels stay with the clients.</p>
{% endfor %}
{% endmacro %}

{% macro sent(run) %}
{% for sentence in records.describe_points(run) %}
<p>{{ sentence }}</p>
{% endfor %}
{% endmacro %}

{% macro evidence(section) %}
{% if section.evidence or section.unreadable %}
<h3>{{ 'Uploaded points' if section.run.clusters_records else 'Clustering evidence' }}</h3>
{% if section.unreadable %}
<p class="notice">Unreadable files, omitted: evidence/{{ section.unreadable | join(', evidence/') }}.</p>
{% endif %}
{% for figure, caption in section.evidence %}
<figure>
  <div class="canvas">{{ figure }}</div>
  <figcaption>{{ caption }}</figcaption>
</figure>
{% endfor %}
{% endif %}
{% endmacro %}

{% macro missing(left_out, remarks) %}
{% for run, reason in left_out %}
<p class="notice"><strong>Left out:</strong> {{ run }}: {{ reason }}</p>
{% endfor %}
{% for run, remark in remarks %}
<p class="note">{{ run }}: {{ remark }}.</p>
{% endfor %}
{% endmacro %}

{% macro body(section) %}
{% set run = section.run %}
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
<p class="kind good">Released and charged</p>
{{ tiles(section.privacy, run.clusters_records) }}
{{ '' if run.clusters_records else clusters(section) }}
{{ evidence(section) }}
</section>
<section class="part">
<p class="kind bad">Exact diagnostics: outside the guarantee</p>
<p class="notice">These values are computed without noise and are not covered by ε: do not publish them with the models.</p>
{{ tiles(section.scores + section.resources, run.clusters_records) }}
{% if run.clusters_records %}
<h3>Clusters of records</h3>
{{ scored(run) }}
{{ sent(run) }}
{% else %}
{{ accuracy(section) }}
{% endif %}
{{ confusion(run) }}
</section>
{% else %}
{{ tiles(section.scores + section.privacy + section.resources, run.clusters_records) }}
{% if run.clusters_records %}
<h3>Clusters of records</h3>
{{ scored(run) }}
{{ sent(run) }}
{% else %}
{{ accuracy(section) }}
{{ clusters(section) }}
{% endif %}
{{ confusion(run) }}
{{ evidence(section) }}
{% endif %}

{% if section.traffic %}
<h3>Communication</h3>
<div class="card wide">
<table>
  <thead><tr><th></th><th class="number">messages</th><th class="number">bytes</th></tr></thead>
  <tbody>
  {% for direction, messages, bytes in section.traffic %}
  <tr><th scope="row">{{ direction }}</th><td class="number">{{ messages }}</td><td class="number">{{ bytes }}</td></tr>
  {% endfor %}
  </tbody>
</table>
</div>
{% endif %}

<h3>Privacy</h3>
<div class="card">
  {{ badge(section.status, run.certified) }}
  {% for paragraph in section.guarantee %}
  <p{% if loop.first %} class="lead"{% endif %}>{{ paragraph }}</p>
  {% endfor %}
  {% if run.certificate.get('reasons') and run.finished and not run.certified %}
  <h4>Why this run is not certified</h4>
  <ul>{% for reason in run.certificate.reasons %}<li>{{ reason }}</li>{% endfor %}</ul>
  {% endif %}
  {% if run.certificate.get('covers') and run.unit != 'none' %}
  <h4>Covered by the guarantee</h4>
  <ul>{% for item in run.certificate.covers %}<li>{{ item }}</li>{% endfor %}</ul>
  {% endif %}
  {% if run.certificate.get('outside') and run.unit != 'none' %}
  <h4>Outside the guarantee</h4>
  <ul>{% for item in run.certificate.outside %}<li>{{ item }}</li>{% endfor %}</ul>
  {% endif %}
  {% if section.facts and run.unit != 'none' %}
  <div class="columns">
    <div>
      <h4>Mechanism</h4>{{ table(section.facts) }}
      {% if section.tuned %}<h4>Tuned outside the guarantee</h4>{{ table(section.tuned) }}{% endif %}
    </div>
    {% if section.public_inputs %}
    <div><h4>Public inputs, not protected</h4>{{ table(section.public_inputs) }}</div>
    {% endif %}
  </div>
  {% endif %}
</div>

<h3>Configuration</h3>
<div class="card flow">
  <dl>{% for key, value in run.config.items() %}<div><dt>{{ key }}</dt><dd>{{ fmt.setting(value) }}</dd></div>{% endfor %}</dl>
</div>
{% if run.versions or run.machine %}
<h3>Versions and machine</h3>
<div class="card flow">
  <dl>
    {%- for key, value in run.versions.items() %}<div><dt>{{ key }}</dt><dd>{{ fmt.setting(value) }}</dd></div>{% endfor %}
    {%- for key, value in run.machine.items() %}<div><dt>{{ key }}</dt><dd>{{ fmt.setting(value) }}</dd></div>{% endfor -%}
  </dl>
</div>
{% endif %}
{% endmacro %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>
:root {
  color-scheme: light dark;
  --page: #f5f6f8; --card: #ffffff; --ink: #1b2330; --muted: #5c6675; --line: #e1e5ea; --accent: #0072b2;
  --good: #04664a; --good-back: #daf3e9; --bad: #8a4300; --bad-back: #fdebd6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161d; --card: #1b212b; --ink: #e8ebf0; --muted: #9aa5b5; --line: #2d3542; --accent: #67b7e6;
    --good: #7fe0bc; --good-back: #12392d; --bad: #ffc387; --bad-back: #432a11;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
a { color: var(--accent); }
h1, h2, h3, h4 { line-height: 1.2; margin: 0; text-wrap: balance; overflow-wrap: anywhere; }
h1, h2 { font-size: 2rem; letter-spacing: -.02em; }
h3 { font-size: 1.15rem; margin: 2.25rem 0 .75rem; }
h4 { font-size: .95rem; margin: 1.4rem 0 .4rem; }
p { margin: .5rem 0; }
.brand { color: var(--accent); font-weight: 700; font-size: .8rem; letter-spacing: .12em; text-transform: uppercase; margin: 0 0 .5rem; }
.dot { color: var(--muted); font-weight: 400; }
.summary { color: var(--muted); font-size: 1.05rem; margin: .5rem 0 1.5rem; }
.run { border-top: 1px solid var(--line); margin-top: 3.5rem; padding-top: 2.5rem; }
.notice { background: var(--bad-back); color: var(--bad); border-radius: 10px; padding: .7rem 1rem; margin: 0 0 1rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(175px, 1fr)); gap: .8rem; }
.by-four { grid-template-columns: repeat(auto-fit, minmax(215px, 1fr)); }
.tile, .card, figure { background: var(--card); border: 1px solid var(--line); border-radius: 14px; }
.tile { padding: 1rem 1.1rem; overflow-wrap: anywhere; }
.label { color: var(--muted); font-size: .85rem; font-weight: 600; }
.value { font-size: 1.9rem; font-weight: 700; line-height: 1.25; letter-spacing: -.02em; font-variant-numeric: tabular-nums; }
.note { color: var(--muted); font-size: .85rem; line-height: 1.4; margin-top: .25rem; }
.badge { display: inline-block; border-radius: 99px; padding: .08rem .6rem; font-size: .8rem; font-weight: 700; white-space: nowrap; }
.part + .part { border-top: 1px solid var(--line); margin-top: 2.5rem; padding-top: 1.6rem; }
.kind { font-weight: 700; font-size: .95rem; margin: 0 0 .9rem; padding-left: .7rem; border-left: 4px solid; }
.kind.good { color: var(--good); }
.kind.bad { color: var(--bad); }
.badge.good { color: var(--good); background: var(--good-back); }
.badge.bad { color: var(--bad); background: var(--bad-back); }
.card { padding: 1.2rem 1.4rem; overflow-x: auto; overflow-wrap: anywhere; }
.lead { font-size: 1.08rem; font-weight: 600; margin-top: .7rem; }
.card ul { margin: .3rem 0; padding-left: 1.2rem; }
figure { margin: 0; overflow: hidden; }
figure + figure { margin-top: .8rem; }
.canvas { background: #fff; padding: 1.1rem .9rem .6rem; overflow-x: auto; }
.canvas svg { display: block; width: 100%; min-width: 620px; height: auto; stroke-linejoin: round; }
.canvas svg text { font-family: system-ui, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif !important; }
figcaption { color: var(--muted); font-size: .88rem; border-top: 1px solid var(--line); padding: .7rem 1.4rem .8rem; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 0 2.5rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .4rem .75rem .4rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child > * { border-bottom: 0; }
tr > :last-child { padding-right: 0; }
.pairs th { font-weight: 400; color: var(--muted); overflow-wrap: normal; }
.wide { overflow-wrap: normal; }
.wide thead th { color: var(--muted); font-size: .82rem; white-space: nowrap; vertical-align: bottom; }
.wide td { white-space: nowrap; }
.number { text-align: right; }
.heat td { padding-right: .5rem; background: color-mix(in srgb, var(--accent) calc(.6 * var(--share)), transparent); }
.swatch { border-left: .5em solid; border-radius: 3px; padding-left: .4em; }
.swatch span { color: var(--ink); font-weight: 700; }
.flow dl { margin: 0; columns: 3 240px; column-gap: 2.5rem; font-size: .88rem; }
.flow dl div { display: flex; justify-content: space-between; gap: 1rem; padding: .28rem 0; border-bottom: 1px solid var(--line); break-inside: avoid; }
dt { color: var(--muted); overflow-wrap: normal; }
dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; }
footer { color: var(--muted); font-size: .85rem; margin-top: 3rem; }
@media print { body { background: none; } .tile, figure, .card { break-inside: avoid; } }
</style>
</head>
<body>
<main>
<header>
  <p class="brand">Coterie run report</p>
{% if sections | length == 1 %}
  <h1>{{ sections[0].run.strategy }} <span class="dot">·</span> {{ sections[0].run.dataset }}</h1>
  <p class="summary">{{ sections[0].summary }}</p>
</header>
{{ missing(left_out if sections[0].run.finished else left_out[1:], []) }}
{{ body(sections[0]) }}
{% else %}
  <h1>{{ title }}</h1>
  <p class="summary">Runs are numbered in the order of the sections below.</p>
</header>
{% if curves %}
<figure>
  <div class="canvas">{{ curves }}</div>
  <figcaption>Held-out accuracy, mean over clients. Each line ends at the last round of its run.</figcaption>
</figure>
{% elif not clusters_records %}
<p>No run was evaluated, so no accuracy is available.</p>
{% endif %}
<h3>Comparison</h3>
<p>Mean ± sample standard deviation over runs that are equal but for the seed.</p>
<div class="card wide">
<table>
  <thead><tr>{% for head in heads %}<th{% if loop.index > settings + 1 %} class="number"{% endif %}>{{ head }}</th>{% endfor %}</tr></thead>
  <tbody>
  {% for row in rows %}
  <tr>{% for cell in row %}<td{% if loop.index > settings + 1 %} class="number"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
  {% endfor %}
  </tbody>
</table>
{% if outside %}<p class="note">{{ outside }}.</p>{% endif %}
</div>
{{ missing(left_out, remarks) }}
<h3>Runs</h3>
<div class="card wide">
<table>
  <thead><tr>
    <th></th><th>run</th><th>strategy</th><th>dataset</th><th class="number">accuracy</th>
    {% if clusters_records %}
    <th class="number">NMI</th><th class="number">kappa</th><th class="number">adjusted<br>Rand</th>
    {% else %}
    <th class="number">worst<br>group</th><th class="number">clusters<br>found</th><th class="number">clustering<br>accuracy</th>
    {% endif %}
    <th class="number">ε</th><th class="number">δ</th>
    <th>certified</th><th class="number">rounds</th><th class="number">training</th>
  </tr></thead>
  <tbody>
  {% for section in sections %}
  {% set run = section.run %}
  {% set outcome = run.outcome %}
  <tr>
    <td><span class="swatch" style="color: {{ colours[loop.index0] }}"><span>{{ loop.index }}</span></span></td>
    <td><a href="#{{ section.anchor }}">{{ run.name }}</a></td>
    <td>{{ run.strategy }}</td>
    <td>{{ run.dataset }}</td>
    <td class="number"><strong>{{ fmt.percent(outcome.accuracy) }}</strong>{{ ' (noisy)' if run.noisy }}</td>
    {% if clusters_records %}
    {% for score in (outcome.nmi, outcome.kappa, outcome.ari) %}<td class="number">{{ fmt.index(score) }}</td>{% endfor %}
    {% else %}
    <td class="number">{{ fmt.percent(outcome.worst_group_accuracy) }}</td>
    <td class="number">{{ fmt.of_total(outcome.groups_found, outcome.groups) }}</td>
    <td class="number">{{ fmt.percent(outcome.clustering_accuracy) }}</td>
    {% endif %}
    <td class="number">{{ fmt.epsilon(run.epsilon) }}</td>
    <td class="number">{{ fmt.number(run.delta) if run.unit != 'none' else fmt.MISSING }}</td>
    <td>{{ badge('yes', true) if run.certified else badge('no', false) if run.finished else badge('unfinished', false) }}</td>
    <td class="number">{{ fmt.number(outcome.rounds) }}</td>
    <td class="number">{{ fmt.duration(outcome.seconds_training) }}</td>
  </tr>
  {% endfor %}
  </tbody>
</table>
{% if sections | selectattr('run.exact') | list %}
<p class="note">For runs with privacy, accuracies{{ ' and scores' if clusters_records else ' and clusters' }} not marked as noisy are exact diagnostics outside the guarantee.</p>
{% endif %}
</div>
{% for section in sections %}
<section class="run" id="{{ section.anchor }}">
  <p class="brand">Run {{ loop.index }}: {{ section.run.name }}</p>
  <h2>{{ section.run.strategy }} <span class="dot">·</span> {{ section.run.dataset }}</h2>
  <p class="summary">{{ section.summary }}</p>
{{ body(section) }}
</section>
{% endfor %}
{% endif %}
<footer>Hidden groups and held-out data of all clients are available in experiments only. The section Privacy lists what ε covers.</footer>
</main>
</body>
</html>
"""
