/*
 * Every exception that the package raises, in one place. What races can bring is an outcome of a verb, never an
 * exception; these are for what a caller did wrong.
 */
create or replace function baton._errors()
returns table (condition text, code text, message text, hint text)
language sql
immutable
begin atomic
  select e.condition, e.code, e.message, e.hint
  from (
    values
    (
      'invalid_name', '22023', '%1$s must be 1 to 200 bytes without control characters, not %2$s',
      'For example orders, or order-7.'
    ),
    (
      'invalid_function_name', '22023', 'a function name has 1 to 200 characters of A-Z a-z 0-9 . _ ~ -, not %1$s',
      'Function names become a part of a URL.'
    ),
    (
      'invalid_key', '22023', 'a key must be 1 to 500 bytes without control characters, not %1$s',
      'Hash long keys.'
    ),
    (
      'reserved_queue', '22023', 'queue %1$s is reserved',
      'Names that begin with "baton." are the package''s own: choose another.'
    ),
    ('reserved_kind', '22023', 'kind %1$s is reserved', 'The kinds run and task are the package''s own.'),
    (
      'invalid_interval', '22023', '%1$s must be between 0 and 10 years, not %2$s',
      'For example 30 seconds, or 2 hours.'
    ),
    (
      'too_small', '22023', '%1$s must be at least %2$s, not %3$s',
      'Leave it out, or pass null, for the default.'
    ),
    ('invalid_time', '22023', '%1$s must be a finite time, not %2$s', 'Leave it out, or pass null, for none.'),
    ('invalid_limit', '22023', '%1$s must not be negative, not %2$s', 'Leave it out, or pass null, for the default.'),
    ('invalid_choice', '22023', '%1$s must be one of %2$s, not %3$s', 'Spell it exactly like one of these.'),
    ('missing_argument', '22023', '%1$s must not be null', 'Pass a value.'),
    ('invalid_headers', '22023', 'headers must be a JSON object, not %1$s', 'For example {"trace": "..."}'),
    ('invalid_url', '22023', 'not an http or https URL: %1$s', 'For example https://example.com/functions/v1/orders'),
    (
      'invalid_messages', '22023', 'messages: %1$s',
      'An array of objects with payload and, where wanted, delay, dedupe_key, kind and headers.'
    ),
    ('invalid_receipts', '22023', 'receipts: %1$s', 'An array of objects with message_id and delivery.'),
    (
      'invalid_schedule', '22023', 'tick_every must be 1 to 59 whole seconds or one minute, not %1$s',
      'Other intervals are beyond pg_cron. Leave it out for 5 seconds.'
    ),
    (
      'too_large', '54000', '%1$s has %2$s bytes, over the limit of %3$s',
      'Store large data elsewhere and send a reference, or raise settings.max_payload_bytes.'
    ),
    ('unknown_function', '42704', 'unknown function: %1$s', 'Register it: baton.register_worker_function(...)'),
    (
      'invalid_inputs', '22023', 'inputs must be a JSON array, one item a task, not %1$s',
      'For a step of one task: [input]'
    ),
    (
      'invalid_completions', '22023', 'completions: %1$s',
      'An array of objects with step_slug, task_index, attempt, output, message_id and delivery.'
    ),
    (
      'invalid_keys', '22023', 'keys: %1$s', 'An array of objects with run_id, step_slug, task_index and attempt.'
    ),
    ('invalid_event_type', '22023', 'a type of one''s own contains a dot, not %1$s', 'For example orders.checked'),
    (
      'invalid_position', '22023', 'seen_seq must be between 0 and last_seq (%1$s), not %2$s',
      'Pass the last position that you have read.'
    ),
    (
      'superseded', 'PB001', 'the replay of run %1$s was superseded: epoch %2$s is not current',
      'Nothing of this transaction stays. Begin anew with the receipt, or drop the message.'
    ),
    ('unknown_role', '42704', 'unknown role: %1$s', 'CREATE ROLE it first: the package makes no roles.'),
    (
      'wrong_isolation', '25001', 'this verb works in READ COMMITTED only, not in %1$s',
      'Call it in a transaction of its own: BEGIN ISOLATION LEVEL READ COMMITTED.'
    )
  ) as e (condition, code, message, hint);
end;

create or replace function baton._raise(condition text, variadic arguments text[])
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_error record;
begin
  select e.code, e.message, e.hint into strict v_error from baton._errors() as e where e.condition = _raise.condition;
  raise exception '%', format(v_error.message, variadic _raise.arguments)
    using errcode = v_error.code, hint = v_error.hint, constraint = _raise.condition;
end;
$$;
