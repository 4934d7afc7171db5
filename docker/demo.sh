#!/bin/sh
# `make deploy-demo`: a server and three clients with their own data, each in its container; three
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
export CLIENT_ARGS="--guarantee trusted-server"
export COTERIE_USER SERVER_DIR="$out" DATA="$out/data" BUDGETS="$out/budgets"
rm -rf "$out"  # of a demo that failed
mkdir -p "$out/data" && chown -R "$COTERIE_USER" "$out"
say() { printf '\n== %s\n' "$*"; }
compose() { docker compose -p coterie-demo "$@"; }
coterie() { docker run --rm --user "$COTERIE_USER" --volume "$out:/server" --volume "$PWD/demo:/demo:ro" --network none coterie "$@"; }
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
compose build --quiet server
say "certificates, keys and data"
coterie coterie certs /server/pki --nodes 3 --host server
export $(coterie coterie certs /server/pki --bundle all | sed -n 's/.*node-\(.*\)\.coterie  passphrase /PASSPHRASE_\1=/p')
coterie sh -c "python3 /demo/data.py /server/data && cp /demo/run.toml /server"
say "up"
compose up --detach --wait
say "run"
compose exec -T server flwr run /app coterie --stream --run-config /server/run.toml
say "result"
[ -s "$out/runs/demo/result.json" ] || { echo "the run left no result; see the log above" >&2; exit 1; }
coterie coterie report /server/runs/demo
echo "models, certificate and page are in docker/demo/out/runs/demo"
say "keys"
echo "certificates and private keys of this demo are in $out/pki"
if [ "$keys" = ask ] && [ -t 0 ] && [ -t 1 ]; then
  printf 'delete them? [y/N] '
  read -r answer || answer=
  case $answer in [yY]*) keys=delete ;; esac
fi
if [ "$keys" = delete ]; then
  rm -rf "$out/pki"
  echo "they are deleted"
else
  echo "nothing uses them any more; delete them with: rm -rf '$out/pki'"
fi
