#!/usr/bin/env bash
# A workflow in bash and psql: it decides in SQL, and its bodies are shell functions. Its queue holds its runs alone.
#
#   DATABASE_URL=postgresql:///app QUEUE_NAME=orders docs/examples/workflow.sh
#   select * from baton.start_run('order', '{"amount": 7}', queue_name => 'orders');
#
# Run as many as you like. SIGTERM: what is in hand is finished, then the worker ends.
set -uo pipefail
: "${DATABASE_URL:?}" "${QUEUE_NAME:=orders}" "${VISIBILITY_SECONDS:=30}" "${POLL_SECONDS:=1}"

# The bodies: a JSON value on standard input, one on standard output, and a key that is the same at each attempt. Any
# status but 0 is a failure, which is tried again.
charge() { echo "{\"order\": $(cat), \"payment\": \"$1\"}"; }
ship() { echo "{\"shipped\": $(cat)}"; }

# The workflow: charge, then ship what was charged. A replay is one transaction: begin_replay locks the run, so nothing
# comes between what is read and the end. A step that is there already is not made again.
replay=$(
  cat <<'SQL'
begin;
select outcome, outcome = 'granted' as granted, run_id, replay_epoch
from baton.begin_replay(message_id => :message_id, delivery => :delivery) \gset
\if :granted
  select
    max(seq) as seen,
    max(payload::text) filter (where type = 'run_created') as input,
    bool_or(type = 'step_completed' and payload ->> 'step_slug' = 'charge') as is_charged,
    coalesce(max(payload ->> 'output') filter (where payload ->> 'step_slug' = 'charge'), 'null') as charged,
    bool_or(type = 'step_completed' and payload ->> 'step_slug' = 'ship') as is_shipped,
    coalesce(max(payload ->> 'output') filter (where payload ->> 'step_slug' = 'ship'), 'null') as shipped,
    bool_or(type = 'step_failed') as is_failed,
    coalesce(max(payload::text) filter (where type = 'step_failed'), 'null') as failed
  from baton.read_events(run_id => :'run_id') \gset
  select from baton.create_step(:'run_id', :replay_epoch, 'charge', jsonb_build_array(:'input'::jsonb));
  select from baton.create_step(:'run_id', :replay_epoch, 'ship', jsonb_build_array(:'charged'::jsonb))
  where :'is_charged';
  select from baton.dispatch_tasks(:'run_id', :replay_epoch, inline_limit => 0);
  select from baton.complete_run(:'run_id', :replay_epoch, output => :'shipped') where :'is_shipped';
  select from baton.fail_run(:'run_id', :replay_epoch, error => :'failed') where :'is_failed';
  select outcome from baton.end_replay(:'run_id', :replay_epoch, seen_seq => :seen) \gset
\endif
commit;
\echo :outcome
SQL
)

sql() { # SCRIPT NAME=VALUE...: psql quotes the values where the script says :'NAME'
  local script=$1
  shift
  psql "$DATABASE_URL" -X -q -A -t -F $'\t' -v ON_ERROR_STOP=1 "${@/#/--set=}" <<<"$script"
}
verb() { # VERB ARGUMENTS [NAME=VALUE...]: the verb under the receipt in hand; its outcome
  sql "select outcome from baton.$1($2, message_id => $message_id, delivery => $delivery)" "${@:3}"
}
keep() { # in the background, as long as this process lives: the claim lasts while a body runs
  while sleep "$((VISIBILITY_SECONDS * 1000 / 3))e-3" && kill -0 $$ 2>/dev/null; do
    verb extend "visibility => :'visibility'" visibility="$VISIBILITY_SECONDS s"
  done
}
run_task() {
  local outcome run_id step index attempt input output task
  IFS=$'\t' read -r outcome run_id step index attempt input < <(
    sql "select outcome, run_id, step_slug, task_index, attempt, input
         from baton.start_task(message_id => $message_id, delivery => $delivery)"
  )
  if [ "$outcome" != execute ]; then # await, skip, lost: nothing is left to do
    echo "$outcome"
    return
  fi
  task="run_id => :'run_id', step_slug => :'step', task_index => $index, attempt => $attempt"
  keep >/dev/null &
  if output=$("$step" "$run_id/$step/$index" <<<"$input"); then
    verb complete_task "$task, output => :'output'" run_id="$run_id" step="$step" output="$output"
  else
    verb fail_task "$task, error => :'error'" run_id="$run_id" step="$step" error="\"status $?\""
  fi
  kill $!
}

stopping=
trap 'stopping=yes' TERM INT # acted upon when the command that runs has ended

echo "ready" >&2
until [ "$stopping" ]; do
  IFS=$'\t' read -r message_id delivery kind < <(
    sql "select message_id, delivery, kind from baton.claim(queue_name => :'queue', visibility => :'visibility')" \
      queue="$QUEUE_NAME" visibility="$VISIBILITY_SECONDS s"
  )
  if [ -z "$message_id" ]; then
    sleep "$POLL_SECONDS"
  elif [ "$kind" = run ]; then
    echo "$(sql "$replay" message_id="$message_id" delivery="$delivery") run" >&2
  else
    echo "$(run_task) task" >&2
  fi
done
echo "stopped" >&2
