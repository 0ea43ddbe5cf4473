/*
 * What fail does with a user's message, or with a delivery.
 *
 * The final failure of a delivery also dismisses the invocation. It locks the function before the message; that it is
 * final is known beforehand: only the receipt's holder counts failures, and the limit is read once.
 */

-- Doubled with each failure, from backoff_base up to backoff_max, give or take a fifth. In seconds: an interval doubled
-- that often is out of range.
create or replace function baton._backoff(failures integer)
returns interval
language sql
volatile
begin atomic
  select
    make_interval(
      secs => least(
        extract(epoch from s.backoff_base)::double precision * 2 ^ least(greatest(_backoff.failures - 1, 0), 60),
        extract(epoch from s.backoff_max)::double precision
      ) * (0.8 + 0.4 * random())
    )
  from baton.settings as s
  where s.singleton;
end;

create or replace function baton._fail_message(
  message_id bigint,
  delivery bigint,
  error text,
  delay interval,
  final boolean,
  out outcome text,
  out visible_at timestamptz
)
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_max_failures integer := (select s.max_failures from baton.settings as s where s.singleton);
  v_function baton.worker_functions;
  v_message baton.messages;
  v_reason text;
  v_now timestamptz;
begin
  select f.*
  into v_function
  from baton.worker_functions as f
  where f.function_name = (
    select m.payload ->> 'function_name'
    from baton.messages as m
    where m.message_id = _fail_message.message_id
      and m.delivery = _fail_message.delivery
      and m.claimed_at is not null
      and m.queue_name = 'baton.deliveries'
      and (_fail_message.final or m.failures + 1 >= v_max_failures)
  )
  for no key update of f;
  if found then
    perform baton._require_read_committed();
  end if;
  v_message := baton._lock_receipt(_fail_message.message_id, _fail_message.delivery);
  if v_message.message_id is null then
    outcome := 'lost';
    perform baton._note_lost(_fail_message.message_id, _fail_message.delivery, 'fail');
    return;
  end if;

  v_now := baton._now();
  v_message.failures := v_message.failures + 1;
  v_message.last_error := _fail_message.error;
  v_reason := case
    when _fail_message.final then 'final'
    when v_message.failures >= v_max_failures then 'failures'
  end;
  if v_reason is null then
    update baton.messages as m
    set failures = v_message.failures,
      last_error = v_message.last_error,
      visible_at = v_now + coalesce(_fail_message.delay, baton._backoff(v_message.failures)),
      claimed_at = null
    where m.message_id = v_message.message_id
    returning 'failed', m.visible_at into _fail_message.outcome, _fail_message.visible_at;
    return;
  end if;

  outcome := 'dead';
  if v_message.queue_name = 'baton.deliveries' then
    delete from baton.messages as m where m.message_id = v_message.message_id;
    perform baton._dismiss(
      v_function, (v_message.payload -> 'body' ->> 'invocation_id')::uuid, v_message.last_error, v_now
    );
  else
    perform baton._bury_message(v_message, v_reason, v_now);
  end if;
end;
$$;
