"""Template of the hand-over page."""

# ruff: noqa: E501

from coterie.report.template import HEAD

HANDOVER_PAGE = (
    HEAD
    + r"""{% macro badge(text, good) %}
<span class="badge {{ 'good' if good else 'bad' }}"><span aria-hidden="true">{{ '✓' if good else '!' }}</span> {{ text }}</span>
{%- endmacro %}
{% macro full(label, items) %}
<details class="card flow words">
  <summary>{{ label }}</summary>
  <ul>{% for item in items %}<li>{{ item }}</li>{% endfor %}</ul>
</details>
{% endmacro %}
<body>
<main class="handover">
<header>
  <p class="brand">Hand-over of a run</p>
  <h1>{{ 'What this run guarantees' if certified else 'This run guarantees nothing' }}</h1>
  <p class="summary">Run {{ name }}, method {{ method }}, {{ finished }}. {{ badge('certified', true) if certified else badge('not certified', false) }} {{ badge('signed', true) if fingerprint else badge('not signed', false) }}</p>
</header>
{% if not certified %}
<p class="notice"><strong>No guarantee:</strong> handle these models like the data on which they were trained. The reason:</p>
<ul>{% for reason in reasons %}<li>{{ reason }}</li>{% endfor %}</ul>
{% endif %}

{% if certified %}
<div class="card">
<p class="lead">Whoever sees the models, and all else that this run published, {{ tells }} whether {{ one }} was used in training. A guess is right in at most {{ in_100 }} of 100 cases; a coin is right in 50.</p>
</div>

<h2 class="head">1. What is protected</h2>
<p>{{ unit }}. Learning that this data was used, or what it says, is what the run makes hard. What is true of many people at once, such as that a drug lowers blood pressure, the models may show, and should.</p>

<h2 class="head">2. Who sees what, and against whom it holds</h2>
<div class="card">
<table class="stack sentences">
  <thead><tr><th scope="col">who</th><th scope="col">sees</th><th scope="col">protected against them?</th></tr></thead>
  <tbody>
  {% for who, sees, held, how in people %}
  <tr><td data-head="who"><span>{{ who }}</span></td><td data-head="sees"><span>{{ sees }}</span></td><td data-head="protected"><span>{{ badge('yes' if held else 'no', held) }} {{ how }}</span></td></tr>
  {% endfor %}
  </tbody>
</table>
</div>

<h2 class="head">3. What an attacker can gain</h2>
<p>Take the strongest attacker: one who knows all data but that in question{{ ', who takes part,' if seen }} and everything published. How often the guess whether it was used is right depends on what the attacker believes before:</p>
<div class="card">
<table class="numbers">
  <thead><tr><th scope="col">believed before</th><th scope="col">right without the run</th><th scope="col">right with it, at most</th></tr></thead>
  <tbody>{% for before, without, most in odds %}<tr><th scope="row">{{ before }}</th><td>{{ without }}&nbsp;of&nbsp;100</td><td><strong>{{ most }}&nbsp;of&nbsp;100</strong></td></tr>{% endfor %}</tbody>
</table>
</div>
<p>These numbers are proved for this run: every release had random noise added, and the noise is known.{% if drawn %} They are averages over which clients were drawn by chance.{% endif %} Experts call the measure differential privacy: ε&nbsp;=&nbsp;{{ epsilon }} at δ&nbsp;=&nbsp;{{ delta }}{% if secret %}, and ε&nbsp;=&nbsp;{{ secret }} against those who do not see who takes part{% endif %}. A smaller ε protects more, and δ is the probability with which ε may fail.</p>

<h2 class="head">4. What is outside the guarantee</h2>
<ul>{% for sentence in outside %}<li>{{ sentence }}</li>{% endfor %}</ul>
{{ full('All ' ~ stated | length ~ ' items, as the certificate states them', stated) }}

<h2 class="head">5. Which decisions were tuned</h2>
<p>The guarantee counts this run alone. Whoever tried other settings on the same data and kept the best has run several times, and the losses add up. The certificate cannot know how its {{ tuned | length }} usual settings were chosen: ask whoever started the run. Chosen on public or made-up data, they cost nothing.</p>
{{ full('The ' ~ tuned | length ~ ' settings', tuned) }}
{% endif %}

<h2 class="head">{{ '6. ' if certified }}How to check it without us</h2>
<p>{% if fingerprint %}The operator signed the list <code>SHA256SUMS</code> of certificate, charges and models. Ask the operator by telephone for the fingerprint of the key; it must be</p>
<p class="digest"><code>{{ fingerprint }}</code></p>
<p>Then, with Python, in this folder:{% else %}Nobody signed this run: the check shows that its files fit together, not who made them. With Python, in this folder:{% endif %}</p>
<pre class="card" tabindex="0">pip install dp-accounting cryptography
python verify.py .{{ ' --public-key operator.pub' if fingerprint }} --without-models</pre>
<p>The last line must be <code>verdict: {{ verdict }}</code>. <code>verify.py</code> has 150 lines, uses none of our software{% if certified %}, and computes the numbers above again from the list of charges{% endif %}. To check the models as well, copy their folder <code>models</code> here and leave out the last option. {% if trusted and certified %}No check of files can show that the server added the noise: trust in its operator remains.{% endif %}</p>
<footer>Made from the certificate of Coterie {{ version }}, <code>privacy.json</code>, which decides where this page is shorter.</footer>
</main>
</body>
</html>
"""
)
