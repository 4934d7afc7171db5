"""Verify what a run of Coterie released, without Coterie: python verify.py FOLDER [--public-key operator.pub]

Checked are signature, files, the ledger's chain, and numbers, by dp-accounting; sentences by the signature alone.
"""

import argparse
import hashlib
import json
import logging
import math
import re
from collections import Counter
from pathlib import Path

try:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, rdp
    from dp_accounting.pld import privacy_loss_distribution as pld
except ImportError as error:
    raise SystemExit(print(f"{error}: pip install cryptography dp-accounting") or 2) from None

parse = json.JSONDecoder(parse_constant=int).decode  # refuses NaN and Infinity
LISTED = re.compile(r"([0-9a-f]{64})  (privacy\.json|ledger\.jsonl|models/[A-Za-z0-9_-][A-Za-z0-9_.-]{0,200})")


def _need(good, problem):
    if not good:
        raise ValueError(problem)


def _read(path):
    _need(path.is_file() and not path.is_symlink(), f"{path.name} is missing, or not a regular file")
    return path.read_bytes()


def files(folder, key, models):
    """Check signature, hashes, cards of models, and chain; return certificate, plan and charges."""
    listed, digests = _read(folder / "SHA256SUMS"), {}
    if key:
        key.verify(_read(folder / "SHA256SUMS.sig"), listed)
    for line in listed.decode("latin-1").removesuffix("\n").split("\n"):
        entry = LISTED.fullmatch(line)
        _need(entry and entry[2] not in digests, f"SHA256SUMS must not have the line {line[:80]!r}")
        digests[entry[2]] = entry[1]
    _need({"privacy.json", "ledger.jsonl"} < digests.keys(), "SHA256SUMS must list certificate, ledger and models")
    _need(not (folder / "models").is_symlink(), "models is a symbolic link")
    for file in (folder / "models").glob("*") if models else ():
        _need(file.suffix == ".tmp" or f"models/{file.name}" in digests, f"models/{file.name} is not in SHA256SUMS")
    texts = {name: _read(folder / name) for name in ("privacy.json", "ledger.jsonl")}
    for name in digests if models else texts:
        data = texts.get(name) or _read(folder / name)
        _need(hashlib.sha256(data).hexdigest() == digests[name], f"{name} has another SHA-256 than in SHA256SUMS")
        if number := re.fullmatch(r"models/cluster-(\d+)\.safetensors", name):
            about = parse(data[8 : 8 + int.from_bytes(data[:8], "little")].decode())["__metadata__"]["about"]
            card = {"certificate": digests["privacy.json"], "cluster": int(number[1])}
            _need({**card, **parse(about)}.items() >= card.items(), f"{name} is a model of another run, or another one")
    first, *lines = texts["ledger.jsonl"].removesuffix(b"\n").split(b"\n")
    chain, charges = hashlib.sha256(first + b"\n").hexdigest()[:16], []
    for number, line in enumerate(lines, 1):
        chain = hashlib.sha256(chain.encode() + line[:-30] + b"}").hexdigest()[:16]
        _need(line[-30:] == f', "chain": "{chain}"}}'.encode(), f"charge {number} of the ledger does not follow")
        charges.append(parse(line[:-30].decode() + "}"))
        _need(charges[-1]["charge"] == number, f"charge {number} of the ledger has another number")
    return parse(texts["privacy.json"].decode()), parse(first.decode()), charges


def releases(lines, name="charges"):
    """Count releases by (sampler, rate, noise): all, and those of the client with most, in its group (slot)."""
    groups, everything, client = {}, Counter(), Counter()
    for line in (line for line in lines if "held_out_epsilon" not in line):
        kind, many = (line["sampler"], line["sampling_rate"], line["noise_multiplier"]), line.get(name, 1)
        _need(type(many) is int and 0 < many < 10**8 and 0 < kind[1] <= 1 and 0 <= kind[2] < 1e9, f"impossible: {line}")
        everything[kind] += many
        groups.setdefault((*kind, line.get("slots", 0)), Counter())[line.get("slot")] += many
    for (*kind, _), slots in groups.items():
        client[tuple(kind)] += max(slots.values())
    return everything, client


def losses(events, seen):
    """Return the distribution of all privacy losses; seen: the attacker observes who takes part."""
    kinds = [((1 if seen else rate) ** 2, noise**-2, many) for (_, rate, noise), many in events.items()]
    variance = sum(many * min(m, r * math.expm1(min(m, 700))) for r, m, many in kinds) / events.total()
    grid = 1e-3 * 2.0 ** max(-11, min(0, math.floor(math.log2(math.sqrt(variance) / 4e-3))))
    nothing = whole = pld.identity(value_discretization_interval=grid)
    for (_, rate, noise), many in events.items():
        one = pld.from_gaussian_mechanism(noise, 1, True, grid, sampling_prob=1 if seen else rate)
        whole = whole.compose((one.compute_mixture(nothing, rate) if seen else one).self_compose(many))
    return whole


def verify(folder, key=None, models=True):
    """Return the index of the verdict; raise an error that names what is bad."""
    stated, header, charges = files(folder, key, models)
    plan, start, (everything, client) = header["plan"], header.get("start", {}), releases(charges, "count")
    for name, value in (pair for charge in charges for pair in charge.get("extended", {}).items()):
        plan[name] = max(plan.get(name, value), value)
    client += releases(start.get("events", ()), "count")[1]
    profiles = [profile["plan"] for profile in header.get("profiles") or [{"plan": plan}]]
    for name, value in {**plan, **header.get("public", {})}.items():
        _need(stated["public_inputs"][name] == value, f"the certificate has another {name} than the ledger")
    _need(releases(stated["charged"])[0] == everything, "the certificate has other charges than the ledger")
    _need((stated["charges"], stated["rounds"]) == (len(charges), plan["rounds"]), "it counts other charges or rounds")
    if stated["certified"] is not True:
        return _need(stated["certified"] is False and stated["reasons"], "the certificate contradicts itself") or 3
    sound = header["seed"] is None and not start.get("reasons") and plan["accountant"] in ("pld", "rdp")
    unit = "client" if "clients" in plan else "record"
    apart = sum(abs(each["held_out_epsilon"]) or math.inf for each in charges if "held_out_epsilon" in each)
    named = (stated["mechanism"], stated["unit"], stated["reasons"]) == (plan["mechanism"], unit, [])
    _need(sound and named and apart <= plan.get("held_out_epsilon", 0) * 1.000001, "the run cannot be certified")
    delta, costs, grid = min(each["delta"] for each in profiles), {}, 0.0
    small = all(each["delta"] * each.get("clients", each.get("num_examples")) < 1.000001 for each in profiles)
    _need(stated["delta"] == delta and small, "delta is too large, or another one than in the ledger")
    if "composed" not in stated or any(sampler == "fixed" for sampler, *_ in everything):
        return 2
    for own, composed in zip(profiles, stated["composed"], strict=True):
        events, renyi = releases(composed)[1], rdp.RdpAccountant()  # of a run that ended early: may lack the rest
        _need(all(noise >= 0.05 for *_, noise in events) and (own != plan or events >= client), "charges or noise lack")
        size, batch, held = own.get("num_examples", 0), own.get("batch_size", 1), own.get("held_out_epsilon", 0)
        steps = (own["rounds"] - 1) * own.get("local_epochs", 0) * (size // batch)
        if size and events["poisson", batch / size, own["noise_multiplier"]] < steps:
            return 2  # the budget ends it early
        for (_, rate, noise), many in events.items():
            renyi.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), many)
        curve = losses(events, seen=False)
        found = {"pld": max(held, curve.get_epsilon_for_delta(delta)), "rdp": max(held, renyi.get_epsilon(delta))}
        if unit == "client":  # whose participation the server's network shows
            curve = losses(events, seen=True)
            found["epsilon_participation_visible"] = curve.get_epsilon_for_delta(delta)
        found["attacker_right"] = max((1 + curve.get_delta_for_epsilon(0)) / 2, 1 / (1 + math.exp(-held)))
        grid += sum(many / noise**2 for (kind, _, noise), many in events.items() if kind == "discrete") / 24576
        costs = {name: max(cost, costs.get(name, 0)) for name, cost in found.items()}
    told, costs["epsilon"] = {**stated, **stated["accountants"]}, costs[plan["accountant"]]
    for name, cost in costs.items():
        same = abs(told[name] - cost) <= (1e-4 + 4 * grid) * cost or math.isclose(told[name], told["rdp"])
        _need(same and cost < math.inf, f"{name} is {cost:.6g}, not {told[name]}")
    return _need(stated["epsilon"] <= plan["epsilon"] * 1.000001, "epsilon exceeds the budget") or 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--public-key", type=Path)
    parser.add_argument("--without-models", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # dp-accounting names every order that it leaves out
    try:
        public = options.public_key and load_pem_public_key(options.public_key.read_bytes())
        verdict = verify(options.folder, public, not options.without_models)
    except Exception as error:  # whatever a forger has made of a file
        verdict = print(f"{type(error).__name__}: {error}") or 1
    print("verdict:", ("good", "bad", "cannot be recomputed", "not certified")[verdict])
    raise SystemExit(verdict)
