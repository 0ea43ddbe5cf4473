#!/usr/bin/env bash
# A worker for a queue, in bash and psql: each message's payload goes to a command's standard input.
#
#   DATABASE_URL=postgresql:///app QUEUE_NAME=orders docs/examples/worker.sh COMMAND [ARGUMENT...]
#
# Status 0 acknowledges the message; any other fails it, with what the command wrote to standard error. Run as many as
# you like. SIGTERM: the message in hand is finished, then the worker ends.
set -uo pipefail
: "${1:?say which COMMAND handles a message}"
: "${DATABASE_URL:?}" "${QUEUE_NAME:=default}" "${VISIBILITY_SECONDS:=30}" "${POLL_SECONDS:=1}"

sql() { # STATEMENT NAME=VALUE...: psql quotes the values where the statement says :'NAME'
  local statement=$1
  shift
  psql "$DATABASE_URL" -X -q -A -t -F $'\t' -v ON_ERROR_STOP=1 "${@/#/--set=}" <<<"$statement"
}
claim() {
  sql "select message_id, delivery, payload from baton.claim(queue_name => :'queue', visibility => :'visibility')" \
    queue="$QUEUE_NAME" visibility="$VISIBILITY_SECONDS s"
}
# The message in hand; each answers with an outcome.
ack() { sql "select outcome from baton.ack($message_id, $delivery)"; }
fail() { sql "select outcome from baton.fail($message_id, $delivery, error => :'error')" error="$1"; }
extend() {
  sql "select outcome from baton.extend($message_id, $delivery, visibility => :'visibility')" \
    visibility="$VISIBILITY_SECONDS s"
}
keep() { # in the background, as long as this process lives: the claim lasts while its message is handled
  while sleep "$((VISIBILITY_SECONDS * 1000 / 3))e-3" && kill -0 $$ 2>/dev/null; do
    extend
  done
}

errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
stopping=
trap 'stopping=yes' TERM INT # acted upon when the command that runs has ended

echo "ready" >&2
until [ "$stopping" ]; do
  IFS=$'\t' read -r message_id delivery payload < <(claim)
  if [ -z "$message_id" ]; then
    sleep "$POLL_SECONDS"
    continue
  fi
  keep >/dev/null &
  "$@" <<<"$payload" 2>"$errors"
  status=$?
  kill $!
  if [ $status = 0 ]; then
    outcome=$(ack)
  else
    outcome=$(fail "status $status: $(tail -c 1000 "$errors" | iconv -c -f utf-8 -t utf-8)")
  fi
  echo "$outcome $message_id" >&2 # lost: somebody else has it by now, and we came too late
done
echo "stopped" >&2
