#!/bin/sh
# `make deploy-demo`: a SuperLink, a ServerApp and three clients with their own data, each in its container; three
# rounds with record-level privacy; the result is left in docker/demo/out. Everything is taken down in the end; the keys
# that were made for it are kept (--keep-keys), deleted (--delete-keys), or a terminal is asked. KEYS=keep|delete is the same.
set -eu
umask 077
keys=${KEYS:-ask}
for option in "$@"; do
  case $option in
    --keep-keys) keys=keep ;;
    --delete-keys) keys=delete ;;
    *) echo "$option: the options are --keep-keys and --delete-keys" >&2; exit 2 ;;
  esac
done
case $keys in ask|keep|delete) ;; *) echo "KEYS=$keys: must be keep or delete" >&2; exit 2 ;; esac
cd "$(dirname "$0")"
out=$PWD/demo/out
if [ -e "$out/runs/demo/result.json" ]; then
  echo "$out is there: move it away, or remove it with its secrets" >&2
  exit 1
fi
docker compose version > /dev/null || { echo "this needs Docker with its compose plugin" >&2; exit 1; }
[ "$(id -u)" = 0 ] && COTERIE_USER=10001:10001 || COTERIE_USER=$(id -u):$(id -g)
# Everything runs on this machine, and the run sets the budget of its clients.
export CLIENT_CONFIG='guarantee="trusted-server"'
export COTERIE_USER SECRETS="$out/secrets" DATA="$out/data" BUDGETS="$out/budgets" RUNS="$out/runs"
rm -rf "$out"  # of a demo that failed
mkdir -p "$out/runs" "$out/data" && chown -R "$COTERIE_USER" "$out"
say() { printf '\n== %s\n' "$*"; }
compose() { docker compose -p coterie-demo "$@"; }
coterie() { docker run --rm --user "$COTERIE_USER" --volume "$out:/out" --volume "$PWD/demo:/demo:ro" --network none coterie "$@"; }
ended() {
  status=$?
  if [ "$status" != 0 ]; then
    say "failed: containers and their last lines"
    compose ps --all >&2 || true
    compose logs --no-color --tail 40 >&2 || true
  fi
  say "down"
  compose down --volumes --timeout 5 > /dev/null 2>&1
}
trap ended EXIT

say "image"
compose build --quiet superlink
say "certificates, keys and data"
coterie coterie certs /out/secrets --nodes 3 --host superlink
coterie python3 /demo/data.py /out/data
say "up"
compose up --detach --wait superlink serverapp
for i in 0 1 2; do
  compose run --rm --no-deps --volume "$SECRETS/nodes/node-$i.pub:/node.pub:ro" cli \
    flwr supernode register /node.pub coterie --name "client-$i"
done
compose up --detach --wait
say "run"
compose run --rm --volume "$PWD/demo/run.toml:/run.toml:ro" cli flwr run /app coterie --stream --run-config /run.toml
say "result"
[ -s "$out/runs/demo/result.json" ] || { echo "the run left no result; see the log above" >&2; exit 1; }
coterie coterie report /out/runs/demo
echo "models, certificate and page are in docker/demo/out/runs/demo"
say "keys"
echo "certificates and private keys of this demo are in $SECRETS"
if [ "$keys" = ask ] && [ -t 0 ] && [ -t 1 ]; then
  printf 'delete them? [y/N] '
  read -r answer || answer=
  case $answer in [yY]*) keys=delete ;; esac
fi
if [ "$keys" = delete ]; then
  rm -rf "$SECRETS"
  echo "they are deleted"
else
  echo "nothing uses them any more; delete them with: rm -rf '$SECRETS'"
fi
