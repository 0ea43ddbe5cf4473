\ir _begin.sql
\ir _starts.sql
select plan(41);

create function baton_test.startup(function_name text)
returns text
language sql
stable
begin atomic
  select concat_ws(
    ' ', s.startup_state, s.healthy_workers, case when s.protected then 'protected' else 'unprotected' end,
    coalesce(trim_scale(s.seconds_until_next_attempt)::text, '-'), s.failed_starts
  )
  from baton.worker_startup as s
  where s.function_name = startup.function_name;
end;

select is_empty('select s.function_name from baton.worker_startup as s', 'worker_startup: no functions, no rows');
select baton.register_worker_function('orders', queue_name => 'work', url => 'http://w.test') \g /dev/null
select baton.register_worker_function('batch', start_mode => 'process') \g /dev/null
select results_eq(
  'select s.function_name, s.queue_name from baton.worker_startup as s order by 1',
  $$values ('batch', 'batch'), ('orders', 'work')$$, 'worker_startup: a row a function, with its queue'
);

-- The states
select is(baton_test.startup('orders'), 'retryable 0 protected 0 0', 'worker_startup: retryable, at once');
select baton_test.must_reserve('orders') as orders \gset
select is(baton_test.startup('orders'), 'pending 0 protected 60 0', 'worker_startup: pending, until the deadline');
select results_eq(
  $$select s.invocation_id, s.invocation_expires_at, s.last_invoked_at, s.invocation_error, s.invocation_detail
    from baton.worker_startup as s where s.function_name = 'orders'$$,
  format($$values (%L::uuid, baton._now() + interval '1 minute', baton._now(), null::text, null::text)$$, :'orders'),
  'worker_startup: the start that is under way'
);
select baton_test.advance('59.999999 seconds') \g /dev/null
select is(baton_test.startup('orders'), 'pending 0 protected 0.000001 0', 'worker_startup: pending a microsecond before the deadline');
select baton_test.advance('1 microsecond') \g /dev/null
select is(
  baton_test.startup('orders'), 'retryable 0 protected 0 1',
  'worker_startup: at the deadline retryable, and the lost start counts before anybody books it'
);
select is(baton_test.standing('orders'), 'pending', 'worker_startup: looking books nothing');
select baton_test.must_reserve('orders') as orders \gset
select baton.dismiss_worker_invocation('orders', :'orders', 'no memory') \g /dev/null
select is(baton_test.startup('orders'), 'throttled 0 protected 24 2', 'worker_startup: throttled');
select results_eq(
  $$select s.invocation_error, s.invocation_detail from baton.worker_startup as s where s.function_name = 'orders'$$,
  $$values ('dismissed', 'no memory')$$, 'worker_startup: why the last start failed'
);
select baton_test.advance('23.999999 seconds') \g /dev/null
select is(baton_test.startup('orders'), 'throttled 0 protected 0.000001 2', 'worker_startup: to the end of the throttle');
select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.startup('orders'), 'retryable 0 protected 0 2', 'worker_startup: then retryable');
select baton_test.start('orders', baton_test.worker(1)) \g /dev/null
select is(baton_test.startup('orders'), 'ready 1 protected - 2', 'worker_startup: ready; the failures count until its replacement');
select results_eq(
  $$select s.invocation_error, s.invocation_detail from baton.worker_startup as s where s.function_name = 'orders'$$,
  $$values (null::text, 'accept')$$, 'worker_startup: and how it got ready'
);
select baton_test.advance('14.999999 seconds') \g /dev/null
select is(baton_test.startup('orders'), 'ready 1 protected - 2', 'worker_startup: a microsecond before its heartbeat_timeout');
select baton_test.advance('1 microsecond') \g /dev/null
select is(
  baton_test.startup('orders'), 'throttled 0 protected 9 2', 'worker_startup: at it nobody is healthy, and the throttle shows again'
);
select baton.heartbeat(baton_test.worker(1)) \g /dev/null
select is(baton_test.startup('orders'), 'ready 1 protected - 2', 'worker_startup: until it is heard');

-- The order
select baton_test.advance('15 seconds') \g /dev/null
select baton_test.must_reserve('orders') \g /dev/null
select is(baton_test.state('orders'), 'pending', 'worker_startup: pending comes before throttled');
select is(baton_test.failed_starts('orders'), 0, 'worker_startup: (a good start has ended the row of failures)');
select baton.heartbeat(baton_test.worker(1)) \g /dev/null
select is(baton_test.state('orders'), 'ready', 'worker_startup: ready before pending');
select baton.register_worker_function('orders', start_mode => 'process') \g /dev/null
select is(baton_test.startup('orders'), 'process 1 protected - 0', 'worker_startup: process before ready');
select baton.disable_worker_function('orders') \g /dev/null
select is(baton_test.startup('orders'), 'disabled 1 protected - 0', 'worker_startup: disabled before process');
select baton.register_worker_function('orders', start_mode => 'http') \g /dev/null
select is(baton_test.state('orders'), 'disabled', 'worker_startup: and before ready');
select baton.enable_worker_function('orders') \g /dev/null

-- Seconds where pending and the throttle meet
select baton.register_worker_function('short', url => 'http://w.test', pending_timeout => '1 second') \g /dev/null
select baton_test.must_reserve('short') \g /dev/null
select is(
  baton_test.startup('short'), 'pending 0 protected 12 0', 'worker_startup: a start that is lost makes the next one wait for the doubled throttle'
);
select baton_test.advance('1 second') \g /dev/null
select is(baton_test.startup('short'), 'throttled 0 protected 11 1', 'worker_startup: as it then does');
select baton_test.reserve('short') \g /dev/null
select is(baton_test.startup('short'), 'throttled 0 protected 11 1', 'worker_startup: booked or not');
select baton.register_worker_function('slow', url => 'http://w.test', debounce => '50 seconds') \g /dev/null
select baton_test.must_reserve('slow') \g /dev/null
select is(baton_test.startup('slow'), 'pending 0 protected 100 0', 'worker_startup: the throttle may reach beyond the deadline');
update baton.worker_functions set failed_starts = 50 where function_name = 'slow';
select is(baton_test.startup('slow'), 'pending 0 protected 300 50', 'worker_startup: up to five minutes');

-- Workers
select is(baton_test.startup('batch'), 'process 0 protected - 0', 'worker_startup: no workers');
select baton.register_worker(baton_test.worker(n.number), 'batch') from generate_series(11, 15) as n (number) \g /dev/null
select is(baton_test.startup('batch'), 'process 5 unprotected - 0', 'worker_startup: workers without the handshake are unprotected');
select baton.stop_worker(baton_test.worker(11), draining => true) \g /dev/null
select baton.stop_worker(baton_test.worker(12)) \g /dev/null
select is(baton_test.startup('batch'), 'process 3 unprotected - 0', 'worker_startup: stopping and stopped ones don''t count');
select baton.deprecate_workers('batch') \g /dev/null
select baton.enable_worker_function('batch') \g /dev/null
select is(baton_test.startup('batch'), 'process 0 protected - 0', 'worker_startup: nor do deprecated ones; with them it is protected again');
select baton.register_worker(baton_test.worker(16), 'batch') \g /dev/null
select baton_test.advance('15 seconds') \g /dev/null
select is(baton_test.startup('batch'), 'process 0 protected - 0', 'worker_startup: nor do silent ones');
select baton.heartbeat(baton_test.worker(1)) \g /dev/null
select baton.register_worker(baton_test.worker(2), 'orders') \g /dev/null
select is(baton_test.startup('orders'), 'ready 2 unprotected - 0', 'worker_startup: one old runtime beside a protected worker');
select baton.stop_worker(baton_test.worker(2)) \g /dev/null
select is(baton_test.startup('orders'), 'ready 1 protected - 0', 'worker_startup: without it, protected');

-- The verbs and the view tell one story
create function baton_test.disagreements()
returns setof text
language plpgsql
as $$
declare
  v_view text;
  v_verb text;
  v_seconds numeric;
  v_retry_after interval;
begin
  perform baton.register_worker_function('same', pending_timeout => '20 seconds');
  for i in 1..400 loop
    perform baton_test.advance('1.7 seconds');
    select s.startup_state, s.seconds_until_next_attempt into v_view, v_seconds
    from baton.worker_startup as s where s.function_name = 'same';
    select case r.outcome when 'reserved' then 'retryable' else r.outcome end, r.retry_after into v_verb, v_retry_after
    from baton.reserve_worker_invocation('same') as r;
    if v_view <> v_verb or v_verb = 'throttled' and v_seconds <> extract(epoch from v_retry_after) then
      return next concat_ws(' ', i, v_view, v_seconds, v_verb, v_retry_after);
    end if;
    if v_verb = 'retryable' and i % 5 = 0 then
      perform baton_test.accept('same', baton_test.invocation('same'), gen_random_uuid());
    end if;
  end loop;
end;
$$;
select is_empty('select d.* from baton_test.disagreements() as d', 'worker_startup: at 400 moments it says what reserve then does');
select cmp_ok(baton_test.failed_starts('same'), '>', 3, 'worker_startup: throttles of all sizes among them');

-- Incidents
select results_eq(
  $$select i.kind, i.at, i.invocation_id, i.worker_id, i.detail from baton.incident_log as i
    where i.function_name = 'orders' and i.kind = 'invocation_dismissed'$$,
  format($$values ('invocation_dismissed', timestamptz '2026-01-01 00:01:00+00', %L::uuid, null::uuid,
    '{"reason": "no memory", "failed_starts": 2}'::jsonb)$$, :'orders'), 'incident_log: a failed start'
);

-- Workers, one by one

create function baton_test.workers()
returns text
language sql
stable
begin atomic
  select string_agg(format('%s %s %s', w.version, w.state, w.queue_name), ', ' order by w.version)
  from baton.worker_overview as w
  where w.function_name = 'crew';
end;

select baton.register_worker_function('crew', queue_name => 'ship', start_mode => 'process', heartbeat_timeout => '15 seconds') \g /dev/null
select gen_random_uuid() as wa, gen_random_uuid() as wb, gen_random_uuid() as wc \gset
select baton.register_worker(:'wa', 'crew', 'a'), baton.register_worker(:'wb', 'crew', 'b'), baton.register_worker(:'wc', 'crew', 'c') \g /dev/null
select baton.stop_worker(:'wb', true), baton.stop_worker(:'wc') \g /dev/null
select is(baton_test.workers(), 'a healthy ship, b stopping ship, c stopped ship', 'worker_overview: a row a worker');
select baton_test.advance('15 seconds') \g /dev/null
select is(baton_test.workers(), 'a silent ship, b stopping ship, c stopped ship', 'worker_overview: silent at the end of its time');
select baton.deprecate_workers('crew') \g /dev/null
select is(baton_test.workers(), 'a deprecated ship, b deprecated ship, c stopped ship', 'worker_overview: deprecated');

select * from finish();
rollback;
